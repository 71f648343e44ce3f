"""The parts of a client's work: hand-computed tables, memory, bytes, and what engines refuse."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import flashfl as fl
from flashfl.core.client import Clients, Field, Part, Place, Rows, draw, draw_one
from flashfl.core.engine import FixedPopulation
from flashfl.core.errors import ConfigError, FlashError
from flashfl.core.exchange import Extra, Local
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights
from flashfl.core.state import ServerStep
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.gpu.batched import Batched
from flashfl.engine.gpu.lanes import Lanes
from flashfl.engine.gpu.stack import Stack
from flashfl.engine.pipeline import close_clients, open_clients
from flashfl.engine.replica import PrunedInputs, largest
from flashfl.engine.step import MaskedStep
from flashfl.engine.store import Folder
from flashfl.methods.topk import LargestChanges
from flashfl.run.code import load_file
from flashfl.run.config import TrainConfig
from flashfl.run.simulate import drive
from flashfl.sparsity.steps import Multiply
from flashfl.wire import Message, decode, encode, size_with
from tests.conftest import blobs, make_task
from tests.engine.test_lanes import Plain, agree, run_lanes
from tests.run.run_support import After, Killed, killed
from tests.test_every_method import SETTINGS, small


def opened(layout: Layout, parts: tuple[Part, ...], start: list[float], **more: Any) -> tuple[Local, Clients]:
    """One client of the eight-weight model before training."""
    local = Local(lr=0.1, parts=parts)
    masks = torch.ones(1, layout.prunable_size, dtype=torch.bool)
    given, notes = more.get("given", {}), more.get("notes", {})
    asked = (lambda row: 0.5, lambda key: torch.full((layout.size,), float(key)), lambda row: None)
    return local, open_clients(layout, local, [1], [4], torch.tensor([start]), masks, [given], [notes], *asked)


def test_top_k_sends_the_largest_changes_and_remembers_the_rest(eight: Layout) -> None:
    local, c = opened(eight, (LargestChanges(0.25),), [0.0] * 9)
    c.vectors = torch.tensor([[1.0, -3.0, 0.5, 0.0, 2.0, 0.0, -0.5, 0.25, 7.0]])
    done = close_clients(local, c)
    assert done.counts == [(2,)]
    assert c.masks.tolist() == [[False, True, False, False, True, False, False, False]]
    assert c.vectors.tolist() == [[0, -3.0, 0, 0, 2.0, 0, 0, 0, 7.0]]
    assert done.notes[0]["residual"].value.tolist() == [1.0, 0, 0.5, 0, 0, 0, -0.5, 0.25]
    local, again = opened(eight, (LargestChanges(0.25),), [0.0] * 9, notes=done.notes[0])
    again.vectors = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 1.0, 0]])
    done = close_clients(local, again)
    assert again.vectors.tolist() == [[2.0, 0, 0, 0, 0, 0, 0, 1.25, 0]]
    assert done.notes[0]["residual"].value.tolist() == [0, 0, 0.5, 0, 0, 0, -0.5, 0]


def stepped(parts: tuple[Part, ...] = (), steps: int = 4, **local: Any) -> MaskedStep:
    layout = Layout.build({"prunable": [("w", (3,))], "dense": [("b", (1,))]})
    step = MaskedStep(torch.tensor([[1.0, -2.0, 0.0, 1.0]]), 3, place=Place.logical(layout))
    step.begin(Local(lr=0.5, parts=parts, **local), [1], [steps])
    return step


def test_learning_rate_falls_linearly_within_the_round() -> None:
    step, seen = stepped(lr_last=0.0), []
    for _ in range(4):
        before = step.weights.clone()
        step(torch.ones(1, 3), torch.ones(1, 1))
        seen.append(float((before - step.weights)[0, 0]))
    assert seen == pytest.approx([0.5, 0.375, 0.25, 0.125])


def test_multiplicative_step_follows_the_sgd_step() -> None:
    step = stepped((Multiply(2.0, 0.1),))
    step(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1.0]]))
    after_sgd = torch.tensor([0.5, -2.5, 0.0])
    factor = torch.exp(0.5 * (-2.0 * after_sgd.sign() * torch.tensor([1.0, 1.0, 0.0]) - 0.1))
    assert step.weights[0, :3].tolist() == pytest.approx((after_sgd * factor).tolist())
    assert float(step.weights[0, 3]) == 0.5, "dense weights follow SGD alone"


@dataclass(frozen=True)
class Doubled(Part):
    """The forward pass sees twice the weights; the gradient of a weight is then doubled too."""

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        return 2 * weights

    def backward(self, r: Rows, gradient: Tensor) -> None:
        gradient.mul_(2)


def test_forward_pass_sees_the_view_and_the_step_changes_the_weights() -> None:
    step = stepped((Doubled(),))
    step.show()
    assert step.weights.tolist() == [[2.0, -4.0, 0.0, 2.0]]
    step(torch.ones(1, 3), torch.ones(1, 1))
    assert step.weights.tolist() == [[0.0, -3.0, -1.0, 0.0]]


def test_draws_depend_on_key_step_and_position_alone() -> None:
    layout = Layout.build({"prunable": [("w", (1000,))]})

    def rows(key: int, count: int, order: Tensor | None = None) -> Rows:
        place = Place.logical(layout)
        place = place if order is None else replace(place, index=order.int())
        one = torch.tensor([[count]])
        return Rows(place, torch.zeros(1, 1000), torch.tensor([[key, 5]], dtype=torch.int32), one, one, one.float())

    a = draw(rows(1, 0))
    order = torch.randperm(1000)
    assert torch.equal(draw(rows(1, 0, order))[0], a[0, order])
    assert not torch.equal(draw(rows(1, 1)), a)
    assert not torch.equal(draw(rows(2, 0)), a)
    assert 0.45 < float(a.mean()) < 0.55
    assert 0 <= float(draw_one(rows(1, 3))) < 1


def test_largest_entries_of_an_input_are_kept() -> None:
    x = torch.tensor([[1.0, -4.0, 2.0, 0.5]])
    assert largest(x, torch.tensor(0.5)).tolist() == [[0, -4.0, 2.0, 0]]
    assert largest(x, torch.tensor(1.0)).equal(x)


def test_large_inputs_are_sampled_in_all_columns() -> None:
    x = torch.rand(8, 16, 32, 32, generator=torch.Generator().manual_seed(0))
    x[..., 0] += 5  # the first column of every image, a thirty-second of all entries
    kept = largest(x, torch.tensor(0.5)) != 0
    assert abs(float(kept.float().mean()) - 0.5) < 0.02


@dataclass(frozen=True)
class Everything(Part):
    """Reports a tensor in every form and remembers three."""

    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        return {"a": Field("dense", 5), "b": Field("bits", 9), "c": Field("scalar")}

    def reports(self, layout: Layout) -> Mapping[str, Field]:
        k = layout.prunable_size
        return {
            "a": Field("dense", 5), "b": Field("bits", 9), "c": Field("scalar"), "d": Field("indices", k),
            "e": Field("masked"),
        }  # fmt: skip

    def finish(self, c: Clients) -> None:
        rows = len(c.keys)
        c.memory["a"] = c.memory["a"] + 1
        c.memory["b"] = ~c.memory["b"]
        c.memory["c"] = c.memory["c"] + 2
        c.report = {name: c.memory[name] for name in "abc"}
        top = c.vectors[:, : c.layout.prunable_size]
        c.report["d"] = torch.arange(top.shape[1]).expand(rows, -1) % 7 == 0
        c.report["e"] = top


@dataclass(frozen=True)
class Reporting(fl.PDST):
    def work(self, s: fl.State, client: fl.Client) -> Local:
        return self.local(s, parts=(Everything(),))

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        names = {name: value.float() for name, value in sums.extra.items()}
        return replace(super().aggregate(s, sums), extra=names)


@pytest.mark.parametrize("lanes", [False, True])
def test_reports_add_up_and_memory_lasts_from_round_to_round(lanes: bool) -> None:
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=3, per_round=8, batch=4, workers=1, eval_every=3)
    run = run_lanes(Reporting(0.3), task, "cpu", config) if lanes else fl.simulate(Reporting(0.3), task, train=config)
    assert run.state is not None
    extra, n = run.state.extra, sum(c.n for c in task.clients)
    assert extra["a"].tolist() == [3.0 * n] * 5, "each client has counted its three rounds"
    assert extra["b"].tolist() == [float(n)] * 9
    assert float(extra["c"]) == 6.0 * n
    assert extra["d"][::7].tolist() == [float(n)] * len(extra["d"][::7])
    k = task.layout.prunable_size
    torch.testing.assert_close(extra["e"] / n, run.weights.vector[:k], rtol=1e-4, atol=1e-6)


def test_lanes_count_the_bytes_of_reports_as_the_encoder_writes_them() -> None:
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1)
    ours, theirs = run_lanes(Reporting(0.3), task, "cpu", config), fl.simulate(Reporting(0.3), task, train=config)
    assert ours.traffic == theirs.traffic


def test_extras_of_every_form_have_their_closed_form_size(eight: Layout) -> None:
    mask = Mask(eight, torch.tensor([True, False] * 4))
    extra = {
        "a": Extra("dense", torch.rand(3, 4)), "b": Extra("bits", torch.rand(77) > 0.5),
        "c": Extra("scalar", torch.tensor(1.5)), "d": Extra("indices", torch.rand(900) > 0.95),
        "e": Extra("masked", torch.rand(4)), "f": Extra("indices", torch.rand(90) > 0.05),
    }  # fmt: skip
    message = Message("update", eight, (2, 0, 0), 1, mask=mask, values=Weights.masked(mask, torch.rand(9)).packed(),
                      extra=extra)  # fmt: skip
    sent = encode(message)
    counted = size_with(replace(message, mask=None, values=None), 4, sent.traffic.mask)
    assert counted.total == len(sent.data)
    found = decode(sent.data, eight).extra
    assert all(
        torch.equal(found[name].value, one.value) and found[name].form == one.form for name, one in extra.items()
    )


@dataclass(frozen=True)
class Lying(Part):
    """Declares a report that it does not make."""

    def reports(self, layout: Layout) -> Mapping[str, Field]:
        return {"x": Field("scalar")}


def test_part_that_does_not_report_what_it_declares_is_an_error(eight: Layout) -> None:
    local, c = opened(eight, (Lying(),), [0.0] * 9)
    with pytest.raises(FlashError, match="the parts declare \\['x'\\] in `reports`, but they set \\[\\]"):
        close_clients(local, c)


@pytest.mark.parametrize("lanes", [False, True])
def test_repeated_round_rolls_memory_back(lanes: bool) -> None:
    """With `min_replies` out of reach every attempt fails; what clients remember is what it was before."""
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=3, per_round=8, batch=4, workers=1, eval_every=3, dropout=0.3,
                         min_replies=6, retries=50)  # fmt: skip
    run = run_lanes(Reporting(0.3), task, "cpu", config) if lanes else fl.simulate(Reporting(0.3), task, train=config)
    lines = run.history
    took = {c.id: sum(c.id in line.cohort and c.id not in line.failures for line in lines) for c in task.clients}
    assert run.state is not None
    last = [c for c in task.clients if c.id not in lines[-1].failures]
    assert float(run.state.extra["c"]) == pytest.approx(sum(2.0 * took[c.id] * c.n for c in last))
    assert any(line.attempt for line in lines), "some round was repeated"


@pytest.mark.parametrize("lanes", [False, True])
def test_checkpoints_write_only_notes_that_changed(lanes: bool, tmp_path: Any, monkeypatch: Any) -> None:
    """Bytes are counted as they are written: each round those of its own two clients, though eight remember."""
    task, method, written = make_task("norm"), fl.METHODS["topk"](0.3), [0]
    config = TrainConfig(device="cpu", rounds=8, per_round=2, batch=4, workers=1, checkpoint_every=1)
    each = 4 * task.layout.prunable_size
    real = Folder.__setitem__

    def count(folder: Folder, digest: str, data: bytes) -> None:
        written[-1] += len(data) if len(data) > each else 0  # masks are smaller
        real(folder, digest, data)

    def watch(state: Any, line: Any) -> None:
        written.append(0)

    monkeypatch.setattr(Folder, "__setitem__", count)
    engine = GPUEngine(task, replace(config, precision="fp32", lanes=2), "cpu", tmp_path / "masks") if lanes else None
    if engine is None:
        run = fl.simulate(method, task, train=config, folder=tmp_path / "run", watch=watch)
    else:
        run = drive(method, task, config, engine, FixedPopulation(task.clients), tmp_path / "run", watch=watch)
        engine.close()
    assert len({client for line in run.history for client in line.cohort}) > 4, "many clients remember by the end"
    assert sum(written) < 1.1 * each * sum(len(line.cohort) for line in run.history)
    assert sum(written) >= each * sum(len(line.cohort) for line in run.history), "and none is forgotten"
    assert max(written) < 1.1 * each * 4, "a checkpoint of the GPU engine may come one round later"


@pytest.mark.parametrize("name", ["topk", "scaffold", "fedspa", "lotteryfl"])
def test_lanes_resume_with_what_clients_remember(name: str, tmp_path: Any) -> None:
    """On a GPU notes stay on the device until a checkpoint needs them; a resumed run reads them back."""
    task, method = make_task("norm"), small(name, moving=True)
    config = TrainConfig(device="cpu", rounds=4, per_round=4, batch=4, workers=1, checkpoint_every=1)
    settings = replace(config, precision="fp32", lanes=2)

    def run(folder: Any, masks: str, **more: Any) -> fl.Run:
        engine = GPUEngine(task, settings, "cpu", tmp_path / masks)
        try:
            return drive(method, task, config, engine, FixedPopulation(task.clients), folder, **more)
        finally:
            engine.close()

    whole = run(None, "a")
    with killed():
        run(tmp_path / "run", "b", watch=After(3, Killed))
    again = run(tmp_path / "run", "b", resume=True)
    assert again.checksum == whole.checksum
    assert again.traffic == whole.traffic


def tables(s: ServerStep, changes: list[float]) -> list[float]:
    """The one weight of a model that follows these changes."""
    layout = Layout.build({"prunable": [("w", (1,))]})
    plan = fl.Plan(layout, lambda key: torch.zeros(1), 1, 9, 1, 1)
    state, seen = fl.State(plan, Weights.dense(layout, torch.zeros(1))), []
    for change in changes:
        after = state.next(Weights.dense(layout, state.weights.vector + change))
        state = s.apply(state, after)
        seen.append(float(state.weights.vector))
    return seen


def test_server_step_follows_fedavgm_and_fedadam() -> None:
    assert tables(ServerStep(), [1.0, 1.0]) == [1.0, 2.0]
    assert tables(ServerStep(momentum=0.5), [1.0, 1.0, 0.0]) == pytest.approx([1.0, 2.5, 3.25])
    assert tables(ServerStep(lr=0.5), [1.0, 1.0]) == pytest.approx([0.5, 1.0])
    first = 0.1 * 0.1 / (0.1 + 0.01)  # m = 0.1, v = 0.01
    assert tables(ServerStep(lr=0.1, momentum=0.9, adam=0.99, tau=0.01), [1.0]) == pytest.approx([first])


@pytest.mark.parametrize("step", [ServerStep(momentum=0.9), ServerStep(0.1, 0.9, 0.99)])
@pytest.mark.parametrize("name", ["spdst", "jmwst"])
def test_server_step_works_with_any_mask_method(name: str, step: ServerStep) -> None:
    task = make_task("norm")
    run = fl.simulate(fl.METHODS[name](0.3, warmup_clients=2), task, 4, per_round=4, workers=1, server=step)
    plain = fl.simulate(fl.METHODS[name](0.3, warmup_clients=2), task, 4, per_round=4, workers=1)
    assert run.weights.is_masked()
    assert run.weights.mask.active == plain.weights.mask.active
    assert not torch.equal(run.weights.vector, plain.weights.vector)


def test_engines_agree_on_a_falling_learning_rate_and_a_multiplicative_step() -> None:
    @dataclass(frozen=True)
    class Ham(fl.SPDST):
        def work(self, s: fl.State, client: fl.Client) -> Local:
            return replace(super().work(s, client), lr_last=0.1, parts=(Multiply(),))

    task, method = make_task("norm"), Ham(0.3, warmup_clients=2)
    config = TrainConfig(device="cpu", rounds=3, per_round=4, batch=4, workers=1, momentum=0.5)
    a, b = run_lanes(method, task, "cpu", config).weights.vector, fl.simulate(method, task, train=config).weights.vector
    assert float((a - b).norm() / b.norm()) < 1e-4


def test_wrong_parts_are_refused_before_the_first_round() -> None:
    with pytest.raises(FlashError, match=r"parts\[0\] = .*: expected Part, got Local"):
        Local(parts=(Local(),))  # type: ignore[arg-type]
    with pytest.raises(FlashError, match="static_bn = true: not possible with this method"):
        Local(report="mask", statistics=False)


@dataclass(frozen=True)
class BadState(Part):
    def begin(self, c: Clients) -> None:
        c.state["a"] = torch.zeros(len(c.start), 3)

    def before(self, r: Rows, gradient: Tensor) -> None:
        gradient.add_(r.state["a"].sum())


@dataclass(frozen=True)
class BadReport(Part):
    def reports(self, layout: Layout) -> Mapping[str, Field]:
        return {"a": Field("dense", 4)}

    def finish(self, c: Clients) -> None:
        c.report["a"] = torch.zeros(len(c.start), 5)


@dataclass(frozen=True)
class BadMemory(Part):
    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        return {"a": Field("bits", 4)}

    def finish(self, c: Clients) -> None:
        c.memory["a"] = c.memory["a"].float()


@dataclass(frozen=True)
class BadMask(Part):
    def finish(self, c: Clients) -> None:
        c.masks = c.masks & (torch.arange(c.masks.shape[1]) < 3)


@dataclass(frozen=True)
class BadForm(Part):
    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        return {"a": Field("sparse", 4)}  # type: ignore[arg-type]


@dataclass(frozen=True)
class OddField(Part):
    value: Any = None


@pytest.mark.parametrize("lanes", [False, True])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (BadState(), "put 'a' of shape .* into `c.state`: it must be"),
        (BadReport(), "declares 'a' as dense of shape .* but it is torch.float32 of shape"),
        (BadMemory(), "declares 'a' as bits of shape .* but it is torch.float32"),
        (BadMask(), "are allowed. A part that changes the mask must define `active`"),
        (BadForm(), "the form must be one of masked, dense, bits, scalar, indices"),
        (OddField(torch.zeros(2)), "OddField has a field that cannot be sent to clients"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Part) else "",
)
def test_mistakes_in_a_custom_part_are_errors_on_every_engine(wrong: Part, said: str, lanes: bool) -> None:
    @dataclass(frozen=True)
    class Wrong(fl.PDST):
        def work(self, s: fl.State, client: fl.Client) -> Local:
            return self.local(s, parts=(wrong,))

    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1)
    task = make_task("norm")
    with pytest.raises(FlashError, match=said):
        run_lanes(Wrong(0.3), task, "cpu", config) if lanes else fl.simulate(Wrong(0.3), task, train=config)


@dataclass(frozen=True)
class HalfInputs(Part):
    def inputs(self, weight: Tensor) -> Tensor:
        return torch.full((), 0.5)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Linear(20, 5), (7, 20)),
        (nn.Linear(20, 5, bias=False), (3, 7, 20)),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (2, 4, 8, 8)),
        (nn.Conv1d(4, 6, 3, stride=2), (2, 4, 9)),
    ],
    ids=["linear", "linear of sequences", "conv2d", "conv1d"],
)
def test_pruned_inputs_change_the_weight_gradient_only(layer: nn.Module, shape: tuple[int, ...], half: bool) -> None:
    x, found = torch.randn(shape), {}
    pruned = PrunedInputs(nn.Sequential(layer), {"0.weight"})
    kept = largest(x.bfloat16() if half else x, torch.tensor(0.5)).float()
    for name, parts, inputs in (("whole", (), x), ("pruned", (HalfInputs(),), x), ("zeros in x", (), kept)):
        pruned.use(parts)
        inputs = inputs.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            output = layer(inputs)
        layer.zero_grad()
        output.float().sum().backward()
        assert inputs.grad is not None
        found[name] = output.detach(), inputs.grad, cast(Tensor, layer.weight.grad).clone()
    assert torch.equal(found["pruned"][0], found["whole"][0])
    assert torch.equal(found["pruned"][1], found["whole"][1])
    assert torch.equal(found["pruned"][2], found["zeros in x"][2])
    assert not torch.equal(found["pruned"][2], found["whole"][2])


@dataclass(frozen=True)
class LaterInputs(fl.PDST):
    """Prunes inputs from the second round on."""

    def work(self, s: fl.State, client: fl.Client) -> Local:
        return self.local(s, parts=(HalfInputs(),) if s.round else ())


def test_batched_clients_never_ignore_a_part_that_needs_lanes() -> None:
    """The crew is chosen in the first round; a part that comes later is obeyed, or refused if batched was asked for."""
    task = fl.Task(Plain, [blobs(11 + i, (1, 5, 5), 100 + i) for i in range(8)], blobs(30, (1, 5, 5), 7))
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1)
    with pytest.raises(ConfigError, match="the part HalfInputs needs the inputs of a whole batch"):
        run_lanes(LaterInputs(0.3), task, "cpu", config, crew="batched")
    settings = replace(config, precision="fp32", lanes=4)
    engine = GPUEngine(task, settings, "cpu")
    first = Batched(task, Stack(task.layout, 4, torch.device("cpu"), False), engine.train_data, engine.capacity)
    engine.stack, engine.crew = first.stack, first
    run = drive(LaterInputs(0.3), task, config, engine, FixedPopulation(task.clients))
    assert isinstance(engine.crew, Lanes)
    plain = fl.simulate(LaterInputs(0.3), task, train=config).weights.vector
    assert float((run.weights.vector - plain).norm() / plain.norm()) < 1e-4


CUSTOM = Path(__file__).with_name("custom_method.py")


def custom() -> fl.Method:
    """The method of a user's file, which is loaded as --load does. Other tests must not find it in the registry."""
    load_file(CUSTOM)
    fl.METHODS.pop("mine", None)
    found: fl.Method = sys.modules["custom_method"].Mine()
    return found


def test_custom_part_agrees_on_both_engines_and_resumes(tmp_path: Path) -> None:
    task, method = make_task("norm"), custom()
    agree(method, task, "cpu", crew="lanes")
    agree(method, task, "cpu", values="int8", robust="on")
    whole = fl.simulate(method, task, 4, **SETTINGS)
    with killed():
        fl.simulate(method, task, 4, folder=tmp_path, watch=After(3, Killed), **SETTINGS)
    again = fl.simulate(method, task, 4, folder=tmp_path, resume=True, **SETTINGS)
    assert (again.checksum, again.traffic) == (whole.checksum, whole.traffic)


def test_part_of_a_users_file_works_with_load(tmp_path: Path) -> None:
    """On the command line, with worker processes that import the file by themselves."""
    words = ["--method", "mine", "--rounds", "2", "--clients", "3", "--per-round", "3", "--max-steps", "1"]
    command = [sys.executable, "-m", "flashfl.cli", "run", "--load", str(CUSTOM), *words, "--workers", "2"]
    done = subprocess.run([*command, "--out", str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
