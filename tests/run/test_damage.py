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
from flashfl.core.state import Plan
from flashfl.run import checkpoint
from flashfl.run.config import TrainConfig, plan_of
from tests.conftest import make_task

SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "eval_every": 2, "workers": 1, "checkpoint_every": 1}
NST = fl.NST(density=0.3)
DEEP = "[" * 100_000


def go(folder: Path | None, **more: Any) -> fl.Run:
    return fl.simulate(NST, make_task("dropout"), 3, folder=folder, **SETTINGS, **more)


def put(**changes: Any) -> Callable[[Path], None]:
    """Damage that leaves JSON: `state__stage=7` sets what is found at that place, None removes it."""

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


DAMAGE = [
    lambda path: path.write_text(DEEP),
    *(put(**{name: value}) for name in ("identity", "engine", "progress", "state", "tensors") for value in (None, "x")),
    put(state__stage=7), put(state__stage=1), put(state__round=99), put(state__round="a"),
    put(progress__rounds=1), put(progress__rounds="x"), put(progress__traffic={"a": 1}),
    put(engine__clients={"a": [[1]]}), put(engine__clients=None), put(engine__ledger="x"), put(digest=None),
]  # fmt: skip


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("done")
    return folder, go(folder).checksum


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_warned_of_and_the_checkpoint_before_is_used(
    damage: Callable[[Path], None], done: tuple[Path, str], tmp_path: Path
) -> None:
    folder, checksum = done
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "checkpoints" / "checkpoint-00000003.json")
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000003\.json .*Going on from checkpoint-00000002\.json"):
        resumed = go(tmp_path, resume=True)
    assert resumed.checksum == checksum
    assert len(resumed.history) == 3


def small() -> tuple[Plan, checkpoint.Checkpoint]:
    task = make_task("dropout")
    plan = plan_of(TrainConfig(rounds=2, per_round=2), task, task.clients)
    engine = {"clients": {"0": [[[2, 0, 0], "ab", None]]}, "masks": ["ab"]}
    return plan, checkpoint.Checkpoint(NST.init(plan), engine, {"rounds": 1})


@settings(max_examples=200)
@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_no_flipped_bit_of_a_record_changes_what_is_read(
    at: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plan, point = small()
    folder = tmp_path_factory.mktemp("flip")
    path = checkpoint.save(folder, 1, point, {"a": 1})
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
        assert record["engine"] == point.engine
        assert torch.equal(checkpoint.load(folder, plan, {"a": 1}).state.weights.vector, point.state.weights.vector)


def test_tensors_of_another_model_fall_back_too(tmp_path: Path) -> None:
    """Whole by their digest, and not what the record speaks of."""
    plan, point = small()
    other = make_task("norm")
    strange = NST.init(plan_of(TrainConfig(rounds=2, per_round=2), other, other.clients))
    checkpoint.save(tmp_path, 1, point, {})
    checkpoint.save(tmp_path, 2, checkpoint.Checkpoint(strange, {}, {"rounds": 2}), {})
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000002\.json does not hold the state .*Going on from"):
        assert checkpoint.load(tmp_path, plan, {}).progress == {"rounds": 1}


def test_the_older_format_had_no_digest_and_is_read(done: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints").glob("*.json"):
        put(**{"flashfl checkpoint": 1, "digest": None})(path)
    assert checkpoint.read_record(checkpoint.found_in(tmp_path / "checkpoints")[0])["progress"]
    go(tmp_path, resume=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text('{"flashfl checkpoint": 1}'),
        put(tensors=None), put(identity="x"), put(engine=3), put(engine__masks=3), put(engine__masks=[[]]),
        put(state__masks=[]), put(state={}), put(progress={}),
    ],
)  # fmt: skip
def test_the_older_format_with_things_missing_falls_back_too(
    damage: Callable[[Path], None], done: tuple[Path, str], tmp_path: Path
) -> None:
    """There is no digest that would tell."""
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    path = tmp_path / "checkpoints" / "checkpoint-00000003.json"
    put(**{"flashfl checkpoint": 1, "digest": None})(path)
    damage(path)
    checkpoint.referenced(tmp_path / "checkpoints")
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000003\..*Going on from checkpoint-00000002\.json"):
        assert go(tmp_path, resume=True).checksum == done[1]


def test_another_format_is_one_clear_line(done: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(done[0], tmp_path, dirs_exist_ok=True)
    for path in (tmp_path / "checkpoints").glob("*.json"):
        put(**{"flashfl checkpoint": 3})(path)
    said = r"can be used: checkpoint-00000003.json is of format 3 and this version of flashfl reads format 2"
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
