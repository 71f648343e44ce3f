"""A checkpoint's record damaged in any place: the one before it is used, or one line says that none can be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashfl as fl
from flashfl.cli import main
from flashfl.core.errors import CheckpointError
from flashfl.core.exchange import Traffic
from flashfl.core.state import Plan
from flashfl.run import checkpoint, sealed
from flashfl.run.config import TrainConfig, plan_of
from tests.conftest import make_task

SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "eval_every": 2, "workers": 1, "checkpoint_every": 1}
NST = fl.NST(density=0.3)
DEEP = "[" * 100_000


def go(folder: Path | None, **more: Any) -> fl.Run:
    return fl.simulate(NST, make_task("dropout"), 3, folder=folder, **SETTINGS, **more)


def put(**changes: Any) -> Callable[[Path], None]:
    """Damage that leaves JSON: `state__round=7` sets what is found at that place, None removes it."""

    def damage(path: Path) -> None:
        record = json.loads(path.read_text())
        for place, value in changes.items():
            *outer, last = place.split("__")
            table = record
            for name in outer:
                table = table[name]
            table.pop(last) if value is None else table.update({last: value})
        path.write_text(json.dumps(record))

    return damage


def forge(**changes: Any) -> Callable[[Path], None]:
    """The same by somebody who makes the digest right."""

    def damage(path: Path) -> None:
        put(**changes)(path)
        record = json.loads(path.read_text())
        record.pop("digest", None)
        path.write_text(json.dumps({**record, "digest": sealed.digest(record)}))

    return damage


DAMAGE = [
    lambda path: path.write_text(DEEP),
    *(put(**{name: value}) for name in ("identity", "memory", "clients", "state", "tensors") for value in (None, "x")),
    put(state__phase=7), put(state__round=99), put(state__round="a"), put(digest=None),
    put(rounds=1), put(rounds="x"), put(traffic={"a": 1}), put(memory__clients={"a": [[1]]}), put(memory__clients=None),
    *(forge(**{name: value}) for name in ("memory", "state", "tensors", "traffic") for value in (None, "x", 3)),
    forge(state__phase=7), forge(state__phase={"name": 3}), forge(state__round="a"), forge(state__round=-1),
    forge(state__counted=None), forge(state__masks=[]), forge(state__masks={}),
    forge(state={}), forge(rounds="x"), forge(rounds=True),
    forge(traffic={"a": 1}), forge(traffic={"up": "1"}), forge(memory__masks=3), forge(memory__masks=[[]]),
    forge(memory__masks=["../../victim"]), forge(memory__clients={"a": [[1]]}), forge(memory__clients=3),
]  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("done")
    return folder, go(folder).checksum


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_or_forged_record_falls_back_to_the_checkpoint_before(
    damage: Callable[[Path], None], done: tuple[Path, str], tmp_path: Path
) -> None:
    folder, checksum = done
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoints" / "checkpoint-00000003.json")
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000003\..*Continuing from checkpoint-00000002\.json"):
        resumed = go(tmp_path, resume=True)
    assert resumed.checksum == checksum
    assert len(resumed.history) == 3


def small() -> tuple[Plan, checkpoint.Checkpoint]:
    task = make_task("dropout")
    plan = plan_of(TrainConfig(rounds=2, per_round=2), task, len(task.clients))
    memory = {"clients": {"0": [[[2, 0, 0], "ab", None]]}, "masks": ["ab"]}
    return plan, checkpoint.Checkpoint(NST.init(plan), memory, {}, 1, Traffic())


@settings(max_examples=200, deadline=None)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_record_changes_what_is_read(
    at: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan, point = small()
    folder = tmp_path_factory.mktemp("flip")
    path = checkpoint.save(folder, point, {"a": 1})
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1 << bit
    path.write_bytes(data)
    try:
        record = checkpoint.read_record(path)
    except checkpoint.Unusable:
        assert checkpoint.referenced(folder) == set()
        with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
            checkpoint.load(folder, plan, {"a": 1})
    else:  # a blank that became another blank, say
        assert record["memory"] == point.memory
        assert torch.equal(checkpoint.load(folder, plan, {"a": 1}).state.weights.vector, point.state.weights.vector)


def test_tensors_of_another_model_fall_back_too(tmp_path: Path) -> None:
    """Whole by their digest, and not what the record speaks of."""
    plan, point = small()
    other = make_task("norm")
    strange = NST.init(plan_of(TrainConfig(rounds=2, per_round=2), other, len(other.clients)))
    checkpoint.save(tmp_path, point, {})
    checkpoint.save(tmp_path, checkpoint.Checkpoint(strange, {}, {}, 2, Traffic()), {})
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000002\.json does not hold a state .*Continuing from"):
        assert checkpoint.load(tmp_path, plan, {}).rounds == 1


def test_another_format_is_one_clear_line(done: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints").glob("*.json"):
        put(**{"flashfl checkpoint": 2})(path)
    said = r"can be used: checkpoint-00000003.json has format 2, and this version of flashfl reads format 3"
    with pytest.raises(CheckpointError, match=said):
        go(tmp_path, resume=True)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"type": "run", "config": {"train": {"rounds": 1}}}, "has no table 'identity'"),
        ({"type": "run", "config": {"train": {"rounds": 1}}, "identity": 3}, "has no table 'identity'"),
        ({"type": "run", "config": "x", "identity": {}}, "has no table 'config'"),
        ({"type": "run", "config": [1], "identity": {}}, "has no table 'config'"),
    ],
)
def test_an_export_of_a_damaged_header_is_one_line(
    header: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(header) + "\n")
    assert main(["export", str(tmp_path)]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"flashfl: {tmp_path} is damaged: the first line of its results.jsonl {said}"
