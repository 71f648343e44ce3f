"""Fewer bits in either direction: both engines round alike, count alike, and the server keeps its own precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.core.client import Clients
from flashfl.core.errors import ConfigError
from flashfl.core.exchange import Local, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Weights
from flashfl.core.precision import Form, Precision
from flashfl.engine.client import update_message
from flashfl.engine.gpu.rounded import decode, rounded
from flashfl.engine.trust import read_update
from flashfl.engine.work import Work
from flashfl.run.config import TrainConfig, make_config
from flashfl.wire import Feedback, encode
from flashfl.wire.errors import WrongContent
from flashfl.wire.values import values_chunks, values_size
from tests.conftest import make_task
from tests.engine.test_lanes import agree, devices, run_lanes
from tests.run.run_support import After, Killed, killed
from tests.test_every_method import SETTINGS, small
from tests.wire.wire_support import mask_of, order, small_layout, update

COMBINATIONS: list[dict[str, Any]] = [
    {"values": "int4"},
    {"values": "int4", "rest": "fp16", "rounding": "nearest"},
    {"values_up": "int4", "rest": "fp16", "upload": "changes"},
    {"values": "int8", "values_up": "int4", "upload": "changes", "rounding": "nearest"},
    {"values_down": "fp16", "upload": "changes"},
    {"values": "int4", "upload": "changes", "rounding": "nearest", "feedback": True},
    {"values_up": "int8", "rounding": "nearest", "feedback": True},
    {"values_down": "bf16", "values_up": "int8"},
    {"values": "int8", "upload": "changes", "static_bn": True},
    {"values": "int8", "robust": "on"},
]


@devices
@pytest.mark.parametrize("settings", COMBINATIONS, ids=lambda s: "-".join(f"{k}={v}" for k, v in s.items()))
@pytest.mark.parametrize("name", ["spdst", "jmwst", "nst", "dense"])
def test_engines_round_and_count_alike(name: str, settings: dict[str, Any], device: str) -> None:
    agree(small(name), make_task("norm"), device, **settings)


@devices
@pytest.mark.parametrize(
    "settings", [{"values": "int8"}, {"values_up": "fp16", "rest": "fp16", "upload": "changes"}], ids=str
)
@pytest.mark.parametrize("name", ["fedpm", "topk", "sparsyfed", "zerofl", "heterofl"])
def test_engines_round_and_count_reports_of_parts_alike(name: str, settings: dict[str, Any], device: str) -> None:
    """FedPM sends bits and the dense tensors: these are rounded too."""
    agree(small(name), make_task("norm"), device, **settings)


def test_rounding_feedback_works_beside_the_parts_of_a_method() -> None:
    settings = {**SETTINGS, "values_up": "int4", "rounding": "nearest"}
    plain, fed = (
        fl.simulate(small("ssfl"), make_task("norm"), 3, **settings, feedback=feedback) for feedback in (False, True)
    )
    other = fl.simulate(small("flashplus", multiply=1.0), make_task("norm"), 2, **settings, feedback=True)
    assert not torch.equal(plain.weights.vector, fed.weights.vector)
    assert other.state is not None
    assert len(other.method.work(other.state, other.task.clients[0]).parts) == 2
    with pytest.raises(ConfigError, match="feedback = true: not possible with topk"):
        fl.simulate(small("topk"), make_task("norm"), 2, **settings, feedback=True)


@pytest.mark.parametrize("name", ["spdst", "jmwst"])
def test_changes_without_rounding_lead_where_weights_lead(name: str) -> None:
    task, method = make_task("norm"), small(name)
    plain, changed = (fl.simulate(method, task, 3, **SETTINGS, upload=upload) for upload in ("weights", "changes"))
    assert torch.equal(plain.weights.mask.bits, changed.weights.mask.bits)
    torch.testing.assert_close(plain.weights.vector, changed.weights.vector, rtol=1e-5, atol=1e-6)
    assert plain.bytes_up == changed.bytes_up


@pytest.mark.parametrize("upload", ["weights", "changes"])
def test_server_keeps_its_own_weights_when_clients_send_changes(upload: str) -> None:
    """At a learning rate of 0 nothing changes. Weights come back rounded to 4 bits, changes leave them as they were."""
    run = fl.simulate(small("pdst"), make_task("norm"), 2, **SETTINGS, lr=0.0, values="int4", upload=upload)
    assert run.state is not None
    start = run.method.init(run.state.plan).weights.vector
    trained = slice(0, run.task.layout.trained_size)
    assert torch.equal(run.weights.vector[trained], start[trained]) == (upload == "changes")


def test_directions_are_set_separately() -> None:
    runs = {
        name: fl.simulate(small("pdst"), make_task("norm"), 2, **SETTINGS, **settings)
        for name, settings in {
            "plain": {},
            "up": {"values_up": "int4"},
            "down": {"values_down": "int4"},
            "both": {"values": "int4"},
        }.items()
    }
    up, down = ({name: getattr(run, f"bytes_{way}") for name, run in runs.items()} for way in ("up", "down"))
    assert up["up"] == up["both"] < up["plain"] == up["down"]
    settings = 8 * len(',"upload":{"is":"Precision","values":"int4"}')  # told to clients, where directions differ
    assert down["plain"] + settings == down["up"]
    assert down["both"] < down["down"] < down["plain"]


def test_updates_say_whether_they_are_changes() -> None:
    """A client that sends weights where changes were asked for, or the other way round, is refused."""
    layout = small_layout()
    mask = mask_of(layout, [0.2, 0.1, 0.0, 1.0], 1)
    for asked, sent in ((False, True), (True, False)):
        local = Local(upload=Precision(changes=asked))
        message = order(mask, local)
        data = encode(update(mask), (mask,), Precision(changes=sent)).data
        with pytest.raises(WrongContent, match=r"sent (changes|weights) and was asked for (weights|changes)"):
            read_update(data, message, None)


@pytest.mark.parametrize("more", [{}, {"rounding": "nearest", "feedback": True}])
def test_resume_with_few_bits_is_bit_identical(more: dict[str, Any], tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS, "values": "int4", "rest": "fp16", "upload": "changes", **more}
    method, task = small("jmwst"), make_task("dropout")
    whole = fl.simulate(method, task, 4, **settings)
    with killed():
        fl.simulate(method, task, 4, folder=tmp_path, watch=After(3, Killed()), **settings)
    assert fl.simulate(method, task, 4, folder=tmp_path, resume=True, **settings).checksum == whole.checksum


def test_feedback_by_hand() -> None:
    """One layer of four weights as int8: e = u - Q(u) is added in the next round; what leaves the mask is forgotten."""
    layout = Layout.build({"prunable": [("w", (4,))]})
    start, masks = torch.tensor([[1.0, 1.0, 1.0, 0.0]]), torch.tensor([[True, True, True, False]])
    trained = torch.tensor([[2.27, 1.0034, 0.9967, 0.0]])  # a scale of 1.27 / 127 = 0.01
    part = Feedback(Precision("int8", rounding="nearest", changes=True))
    c = Clients(
        layout, [1], [1], 0.1, start, trained.clone(), masks, {}, {"rounding residual": torch.zeros(1, 4)},
        validate=lambda row: 0.0, initial=lambda key: torch.zeros(4), classes=lambda row: None,
    )  # fmt: skip
    part.finish(c)
    torch.testing.assert_close(c.vectors, trained)
    expected = torch.tensor([[0.0, 0.0034, -0.0033, 0.0]])
    torch.testing.assert_close(c.memory["rounding residual"], expected, rtol=0, atol=1e-5)
    c.vectors, c.masks = trained.clone(), torch.tensor([[True, True, False, True]])
    c.vectors[0, 2:] = torch.tensor([0.0, 0.5])
    part.finish(c)
    torch.testing.assert_close(c.vectors, torch.tensor([[2.27, 1.0068, 0.0, 0.5]]), rtol=0, atol=1e-5)
    found = c.memory["rounding residual"]
    torch.testing.assert_close(found, torch.tensor([[0.0, -0.0032, 0.0, 0.0]]), rtol=0, atol=1e-5)


def test_feedback_needs_rounding_to_the_nearest() -> None:
    for settings in ({"values": "int4"}, {"rounding": "nearest"}):
        with pytest.raises(ConfigError, match="needs rounding = 'nearest' and values_up with fewer bits"):
            TrainConfig(feedback=True, **settings)  # type: ignore[arg-type]


def test_settings_from_the_command_line() -> None:
    config = make_config({}, {"values": "int8", "values_up": "int4", "upload": "changes", "rest": "fp16"}).train
    assert config.down == Precision("int8", "fp16")
    assert config.up == Precision("int4", "fp16", changes=True)
    assert TrainConfig(values="int8").local().upload is None  # so that default messages stay as they were


@devices
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_bytes_of_coded_changes_are_counted_as_they_are_written(form: Form, device: str) -> None:
    """Clients under one mask and under others, with changes of all spreads, some too wide to be coded."""
    layout, how = small_layout((400, 800)), Precision(form, changes=True)
    one, other = (mask_of(layout, [0.5, 0.3], seed) for seed in (1, 2))
    masks, keys = [one, one, other, one, other], [3, 4, 5, 6, 7]
    noise = torch.randn(5, layout.size, generator=torch.Generator().manual_seed(1))
    rows = noise.sign() * noise.abs() ** torch.tensor([[0.2], [1.0], [2.0], [3.0], [9.0]])
    moved = [mask.to(device) for mask in (one, other)]
    there = [moved[mask is other] for mask in masks]
    found, saved = rounded(rows.to(device), there, keys, "all", how)
    for row, mask, key, values, less in zip(rows, masks, keys, found.cpu(), saved.tolist(), strict=True):
        packed = Weights.masked(mask, row).packed()
        data = b"".join(values_chunks(packed, layout, mask.counts, "all", how, key))
        assert len(data) == values_size(layout, mask.active, "all", how) - less
        assert torch.equal(Weights.masked(mask, values).vector, values)
    assert saved[0] == 0
    assert bool((saved[2:] > 0).all())


@devices
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_lanes_count_coded_changes_of_flashplus_as_they_are_written(
    form: Form, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the digits. Every update that is counted is also written. Engines are not compared: their weights may differ
    in the last bit, and then so do levels and sizes.
    """
    task, written = fl.tasks.digits(clients=30), []
    trained = task.layout.trained_size

    def spy(works: Sequence[Work], values: torch.Tensor, how: Precision) -> tuple[torch.Tensor, torch.Tensor]:
        for work, row in zip(works, values.cpu(), strict=True):
            mask, base = work.mask.to("cpu"), work.order.weights.vector.cpu()
            change = torch.cat([row[:trained] - base[:trained], row[trained:]])
            done = Update.of(work.client.id, work.n, Weights.masked(mask, change), mask.counts, {"loss": 0.0})
            written.append(encode(update_message(done, work.order, task.layout), (mask,), how).traffic.total)
        return decode(works, values, how)

    monkeypatch.setattr("flashfl.engine.gpu.engine.decode", spy)
    method = small("flashplus", density=0.1, warmup_clients=1, warmup_epochs=1)
    config = TrainConfig(device="cpu", rounds=3, per_round=4, workers=1, values=form, rest="fp16", upload="changes")
    run = run_lanes(method, task, device, config)
    assert len(written) == 3 * 4
    assert sum(line.bytes.up for line in run.history if line.counts) == sum(written)
    plain = fl.simulate(method, task, train=replace(config, upload="weights"))
    assert run.bytes_up < 0.95 * plain.bytes_up
