"""Checkpoints: whatever happens to a run or its disk, the last good state is kept and used."""

from __future__ import annotations

import errno
import json
import re
import resource
import shutil
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from run_support import After, Killed, killed
from safetensors.torch import load_file

import flashfl as fl
from flashfl.core.engine import FixedPopulation
from flashfl.core.errors import CheckpointError, ConfigError, FlashError, RunStopped
from flashfl.core.exchange import Traffic
from flashfl.core.state import State
from flashfl.data.sources import Arrays, Subset
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.memory import ClientMemory
from flashfl.run import checkpoint
from flashfl.run.config import TrainConfig, plan_of
from flashfl.run.observe import Observer
from flashfl.run.results import Results
from tests.conftest import DropoutNet, blobs, make_task

SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "eval_every": 2, "workers": 1, "checkpoint_every": 1}
SPDST = fl.SPDST(density=0.3, warmup_clients=2, warmup_epochs=2)
NST = fl.NST(density=0.3)


def go(folder: Path | None, rounds: int = 4, method: fl.Method = SPDST, **more: Any) -> fl.Run:
    task = more.pop("task", None) or make_task("dropout")
    return fl.simulate(method, task, rounds, folder=folder, **{**SETTINGS, **more})


def found(folder: Path) -> list[str]:
    return sorted(p.name for p in (folder / "checkpoints").iterdir())


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    """A folder of a run of four rounds (and one of stage 1) that was killed after three."""
    with killed():
        go(tmp_path, watch=After(4, Killed()))
    return tmp_path


def test_two_are_kept_and_nothing_partial(cut: Path) -> None:
    names = [f"checkpoint-0000000{i}" for i in (2, 3)]
    assert found(cut) == sorted(f"{n}.{ext}" for n in names for ext in ("json", "safetensors"))


def test_nothing_is_pickled(cut: Path) -> None:
    for path in cut.rglob("*"):
        known = path.suffix in (".json", ".jsonl", ".safetensors", ".mask", ".bits") or path.name == "lock"
        assert path.is_dir() or known, path
        assert path.is_dir() or not path.read_bytes().startswith(b"\x80\x04"), path


def test_a_resumed_run_ends_like_an_undisturbed_one(cut: Path) -> None:
    resumed, whole = go(cut, resume=True), go(None)
    assert resumed.checksum == whole.checksum
    assert resumed.traffic == whole.traffic
    assert [r.loss for r in Results.read(cut).rounds] == [r.loss for r in whole.history]


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) // 2])
    elif how == "flip":
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["cut", "flip", "empty", "gone"])
def test_damaged_tensors_are_warned_of_and_the_checkpoint_before_is_used(cut: Path, how: str) -> None:
    damage(cut / "checkpoints" / "checkpoint-00000003.safetensors", how)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000003\.safetensors .*Continuing from checkpoint-00000002"):
        resumed = go(cut, resume=True)
    assert resumed.checksum == go(None).checksum


@pytest.mark.parametrize("how", ["cut", "empty"])
def test_a_cut_record_is_warned_of_and_the_checkpoint_before_is_used(cut: Path, how: str) -> None:
    damage(cut / "checkpoints" / "checkpoint-00000003.json", how)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000003\.json cannot be read"):
        resumed = go(cut, resume=True)
    assert resumed.checksum == go(None).checksum


def only_in(number: int, folder: Path) -> Path:
    """A mask that one of the two checkpoints alone needs."""
    engines = [checkpoint.read_record(p)["memory"] for p in checkpoint.found_in(folder / "checkpoints")]
    this, other = engines if number == 3 else engines[::-1]
    used = {place for _, *both in this["clients"].values() for place in both if place is not None}
    digest = min({this["masks"][place] for place in used} - {*other["masks"]})
    return folder / "masks" / f"{digest}.mask"


@pytest.mark.parametrize("how", ["cut", "flip", "empty", "gone"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_mask_is_warned_of_and_the_checkpoint_before_is_used(tmp_path: Path, how: str, workers: int) -> None:
    """A client would start afresh from the common mask, and the run end elsewhere."""
    with killed():
        go(tmp_path, method=NST, watch=After(4, Killed()))
    lost = only_in(3, tmp_path)
    before = lost.read_bytes()
    damage(lost, how)
    with pytest.warns(RuntimeWarning, match=r"checkpoint-00000003.json .* mask.*Continuing from .*00000002"):
        resumed = go(tmp_path, method=NST, resume=True, workers=workers)
    assert not lost.exists() or lost.read_bytes() == before, "it came again, or nobody needs it"
    assert (tmp_path / "checkpoints" / "checkpoint-00000003.json.unused").exists(), "it must not come back"
    whole = go(None, method=NST)
    assert (resumed.checksum, resumed.traffic) == (whole.checksum, whole.traffic)


def test_if_the_masks_of_all_are_lost_that_is_an_error(tmp_path: Path) -> None:
    with killed():
        go(tmp_path, method=NST, watch=After(4, Killed()))
    for path in (tmp_path / "masks").iterdir():
        path.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"no checkpoint in .* can be used: checkpoint-00000003.json .*the stored mask of a client",
    ):
        go(tmp_path, method=NST, resume=True)


def test_if_all_are_damaged_that_is_an_error_that_names_them(cut: Path) -> None:
    for number in (2, 3):
        damage(cut / "checkpoints" / f"checkpoint-0000000{number}.safetensors", "cut")
    with pytest.raises(CheckpointError, match=r"can be used: checkpoint-00000003.*-00000002.*Start the run again"):
        go(cut, resume=True)


def test_a_file_of_another_make_is_not_a_checkpoint(cut: Path) -> None:
    for number in (2, 3):
        (cut / "checkpoints" / f"checkpoint-0000000{number}.json").write_text('{"epoch": 3}')
    with pytest.raises(CheckpointError, match="is not a flashfl checkpoint"):
        go(cut, resume=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": replace(SPDST, density=0.2)}, "density: 0.3 there, 0.2 here"),
        ({"method": NST}, "name: spdst there, nst here; .*; and [0-9]+ more"),
        ({"seed": 1}, "seed: 0 there, 1 here"),
        ({"threads": 2, "batch": 5}, "batch: 4 there, 5 here; threads: 1 there, 2 here"),
        ({"task": make_task("norm")}, "another model"),
        ({"task": make_task("dropout", samples=12)}, "other clients"),
    ],
)
def test_a_foreign_checkpoint_is_refused(cut: Path, change: dict[str, Any], named: str) -> None:
    before = found(cut), (cut / "results.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=rf"belongs to another run \({named}.*\)\. Resume with"):
        go(cut, resume=True, **change)
    assert (found(cut), (cut / "results.jsonl").read_bytes()) == before, "and what is there is left alone"


@pytest.mark.parametrize("wrap", ["tensors", "shares", "held back"])
def test_other_samples_are_another_run(wrap: str, tmp_path: Path) -> None:
    """Of the same number and shape. Floats may be computed, and differ in their last bits elsewhere."""

    def task(change: str) -> fl.Task:
        data = [blobs(9 + i, (6,), i) for i in range(8)]
        if change == "targets":
            data = [(x, y.flip(0)) for x, y in data]
        elif change == "last bits":
            data = [(x * (1 + 1e-7), y) for x, y in data]
        if wrap == "shares":
            whole = Arrays((torch.cat([x for x, _ in data]),), torch.cat([y for _, y in data]))
            parts: list[Any] = [Subset(whole, torch.arange(9 * i, 9 * i + 9)) for i in range(8)]
            return fl.Task(DropoutNet, parts, data[0])
        return fl.Task(DropoutNet, data, None if wrap == "held back" else data[0])

    go(tmp_path, task=task(""), rounds=2)
    go(tmp_path, task=task("last bits"), rounds=2, resume=True)
    with pytest.raises(CheckpointError, match=r"belongs to another run \(other samples\)\. Res"):
        go(tmp_path, task=task("targets"), rounds=2, resume=True)


@pytest.mark.parametrize("kind", [torch.from_numpy, lambda x: x], ids=["tensor", "numpy"])
def test_other_pixels_are_another_run(kind: Any, tmp_path: Path) -> None:
    def task(change: int) -> fl.Task:
        pixels = [np.arange(54 + 6 * i, dtype=np.uint8).reshape(-1, 6) + change for i in range(8)]
        data = [Arrays((kind(x),), torch.arange(len(x)) % 3, _floats) for x in pixels]
        return fl.Task(DropoutNet, data, data[0])

    go(tmp_path, task=task(0), rounds=2)
    with pytest.raises(CheckpointError, match="other samples"):
        go(tmp_path, task=task(1), rounds=2, resume=True)


def _floats(inputs: Any) -> Any:
    return tuple(torch.as_tensor(x).float() / 255 for x in inputs)


def test_checkpoints_of_another_run_among_ours_are_passed_over(cut: Path, tmp_path_factory: Any) -> None:
    """And they do not push ours out."""
    other = tmp_path_factory.mktemp("other")
    go(other, seed=1)
    for number in (98, 99):
        for end in (".json", ".safetensors"):
            theirs = other / "checkpoints" / f"checkpoint-00000005{end}"
            shutil.copy(theirs, cut / "checkpoints" / f"checkpoint-000000{number}{end}")
    with pytest.warns(RuntimeWarning, match=r"00000099.json belongs to another run \(seed: 1 there.*from .*00000003"):
        resumed = go(cut, resume=True)
    assert resumed.checksum == go(None).checksum
    assert [name[-7:-5] for name in found(cut) if name.endswith("json")] == ["04", "05", "98", "99"]


def test_what_does_not_decide_the_result_may_change(cut: Path) -> None:
    assert go(cut, resume=True, workers=2, checkpoint_every=3).checksum == go(None).checksum


def test_resume_in_an_empty_folder_starts_from_the_beginning(tmp_path: Path) -> None:
    assert go(tmp_path, resume=True).checksum == go(None).checksum
    with pytest.raises(ConfigError, match="resume needs the folder"):
        go(None, resume=True)


def test_resume_with_more_rounds_extends_a_finished_run(tmp_path: Path) -> None:
    short = go(tmp_path, rounds=3)
    with pytest.warns(RuntimeWarning, match=r"rounds changed from 3 to 5: from round 4 on, .* continues at 0\.0063"):
        longer = go(tmp_path, rounds=5, resume=True)
    assert [r.round for r in longer.history if r.counts] == [0, 1, 2, 3, 4]
    assert [r.loss for r in longer.history][: len(short.history)] == [r.loss for r in short.history]
    with pytest.raises(ConfigError, match=r"rounds = 4: the run in .* already has 5 rounds"):
        go(tmp_path, rounds=4, resume=True)


def test_finished_run_is_not_replaced_unasked(tmp_path: Path) -> None:
    first = go(tmp_path)
    with pytest.raises(ConfigError, match=r"already holds a run: .*resume=True.*overwrite=True"):
        go(tmp_path)
    assert go(tmp_path, overwrite=True).checksum == first.checksum


def test_a_new_run_in_an_old_folder_forgets_the_old_checkpoints(tmp_path: Path) -> None:
    """The old ones count further: they must neither push out the new ones nor be resumed from."""
    go(tmp_path, rounds=6)
    with killed():
        go(tmp_path, watch=After(3, Killed()), overwrite=True)
    assert [name for name in found(tmp_path) if name.endswith("json")] == [
        "checkpoint-00000001.json",
        "checkpoint-00000002.json",
    ]
    assert go(tmp_path, resume=True).checksum == go(None).checksum


def test_a_run_that_cannot_begin_leaves_the_old_one_alone(cut: Path) -> None:
    before = found(cut), (cut / "results.jsonl").read_bytes()
    with pytest.raises(ConfigError, match="keeps none"):
        go(cut, method=fl.PDST(density=1e-6), overwrite=True)
    assert (found(cut), (cut / "results.jsonl").read_bytes()) == before


def test_a_lost_results_file_does_not_stop_a_resume(cut: Path) -> None:
    (cut / "results.jsonl").unlink()
    with pytest.warns(RuntimeWarning, match="the records of earlier rounds are lost"):
        resumed = go(cut, resume=True)
    assert resumed.checksum == go(None).checksum
    assert [r.round for r in Results.read(cut).rounds] == [2, 3]
    assert found(cut)[-2] == "checkpoint-00000005.json", "checkpoints count rounds, not lines"


def test_a_results_file_damaged_in_the_middle_is_not_cut(cut: Path) -> None:
    """What comes after the damage was earned."""
    lines = (cut / "results.jsonl").read_text().splitlines()
    damaged = "\n".join([lines[0], lines[1][:20], *lines[2:]]) + "\n"
    (cut / "results.jsonl").write_text(damaged)
    with pytest.raises(FlashError, match=r"results.jsonl is damaged in line 2, and more lines follow. Repair"):
        go(cut, resume=True)
    assert (cut / "results.jsonl").read_text() == damaged
    (cut / "results.jsonl").write_text("\n".join(lines) + "\n")
    assert go(cut, resume=True).checksum == go(None).checksum


def test_empty_setting_of_another_run_is_named(tmp_path: Path) -> None:
    go(tmp_path, rounds=1)
    with pytest.raises(CheckpointError, match=r"\(values_up: \(empty\) there, int8 here\)"):
        go(tmp_path, rounds=1, resume=True, values_up="int8")


def test_resume_after_a_line_was_removed_records_no_round_twice(cut: Path) -> None:
    """The file goes on after the last checkpoint. One of those rounds moved up."""
    lines = (cut / "results.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 5
    (cut / "results.jsonl").write_text("".join([lines[0], *lines[2:]]))
    with pytest.warns(RuntimeWarning, match="lacks 1 of the 3 rounds before this one"):
        go(cut, resume=True)
    assert [r.round for r in Results.read(cut).rounds if r.counts] == [0, 1, 2, 3]


# -- a full disk --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["save", "masks"])
def test_a_full_disk_is_warned_of_and_the_run_goes_on(tmp_path: Path, monkeypatch: Any, where: str) -> None:
    real_save, real_memory, calls = checkpoint.save, ClientMemory.save, iter(range(99))

    def full(real: Any) -> Any:
        def fails(*given: Any, **named: Any) -> Any:
            if next(calls) in (2, 3, 4, 5):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*given, **named)

        return fails

    if where == "save":
        monkeypatch.setattr(checkpoint, "save", full(real_save))
    else:
        monkeypatch.setattr(ClientMemory, "save", full(real_memory))
    with (
        pytest.warns(
            RuntimeWarning, match=r"could not write a checkpoint to .*No space left.*the last good one is kept"
        ),
        pytest.warns(
            RuntimeWarning, match=r"the final model could not be written to .*: it is in (.*) instead"
        ) as said,
    ):
        run = go(tmp_path)
    assert not run.kept
    place = Path(re.search(r"it is in (.*) instead", str([w.message for w in said]))[1])  # type: ignore[index]
    module = make_task("dropout").build()
    module.load_state_dict(load_file(place))
    shutil.rmtree(place.parent)
    assert run.checksum == go(None).checksum
    assert "checkpoint-00000002.json" in found(tmp_path)
    monkeypatch.undo()
    assert go(tmp_path, resume=True).checksum == run.checksum


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow above a few kilobytes: what a full disk does, from the kernel itself. Only around the call under
    test: the limit holds for the whole process, and the tests' own output may be going to a long file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_real_write_error_leaves_the_checkpoint_before_and_no_halves(tmp_path: Path) -> None:
    task = make_task("dropout")
    plan = plan_of(TrainConfig(rounds=2, per_round=2), task, len(task.clients))
    point = checkpoint.Checkpoint(fl.Dense().init(plan), {}, {}, 1, Traffic())
    checkpoint.save(tmp_path, point, {})
    with pytest.raises(OSError, match="File too large"), small_files():
        checkpoint.save(tmp_path, replace(point, rounds=2), {})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-00000001.json", "checkpoint-00000001.safetensors"]
    assert torch.equal(checkpoint.load(tmp_path, plan, {}).state.weights.vector, point.state.weights.vector)


def test_first_checkpoint_that_cannot_be_written_has_no_earlier_one(tmp_path: Path, monkeypatch: Any) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = go(tmp_path, rounds=1)
    said = [str(one.message) for one in caught if "could not write a checkpoint" in str(one.message)]
    assert said
    assert all(text.endswith("; there is no earlier one") for text in said)
    [place] = [re.search("it is in (.*) instead", str(one.message)) for one in caught if "instead" in str(one.message)]
    assert place is not None
    assert run.kept is False
    shutil.rmtree(Path(place[1]).parent)


# -- interruptions ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [SPDST, NST, fl.JMWST(density=0.3, warmup_clients=2)], ids=lambda m: m.name)
def test_ctrl_c_leaves_a_checkpoint(method: fl.Method, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="interrupted after . of 4 rounds: continue with resume=True"):
        go(tmp_path, method=method, checkpoint_every=0, watch=After(2, KeyboardInterrupt()))
    assert [name for name in found(tmp_path) if name.endswith("json")] == ["checkpoint-00000002.json"]
    resumed, whole = go(tmp_path, method=method, resume=True), go(None, method=method)
    assert resumed.checksum == whole.checksum
    assert resumed.traffic == whole.traffic


@pytest.mark.parametrize("moment", ["training", "accepting", "evaluating", "repeating"])
@pytest.mark.parametrize("method", [NST, fl.JMWST(density=0.3, warmup_clients=2)], ids=lambda m: m.name)
def test_ctrl_c_in_the_middle_of_a_round_loses_that_round_alone(
    method: fl.Method, moment: str, tmp_path: Path, monkeypatch: Any
) -> None:
    """What clients were heard to hold in a round that never ended must not be in the checkpoint."""
    from flashfl.engine import encoding
    from flashfl.engine.train import Trainer

    settings = {"dropout": 0.6, "min_replies": 3, "retries": 50} if moment == "repeating" else {}
    whole = go(None, method=method, **settings)
    real_add, real_evaluate, real_train, real_again = encoding.add, CPUEngine.evaluate, Trainer.train, State.again
    calls = iter(range(10_000))

    def interrupted(real: Any, at: int) -> Any:
        def fails(*given: Any, **named: Any) -> Any:
            if next(calls) == at:
                raise KeyboardInterrupt
            return real(*given, **named)

        return fails

    first = 0 if method is NST else 8  # all eight clients train in the first phase
    if moment == "training":
        monkeypatch.setattr(Trainer, "train", interrupted(real_train, first + 6))
    elif moment == "accepting":
        monkeypatch.setattr(encoding, "add", interrupted(real_add, first + 6))
    elif moment == "evaluating":
        monkeypatch.setattr(CPUEngine, "evaluate", interrupted(real_evaluate, 0))
    else:
        monkeypatch.setattr(State, "again", interrupted(real_again, 2))
    with pytest.warns(RuntimeWarning, match="interrupted after"):
        go(tmp_path, method=method, checkpoint_every=0, **settings)
    monkeypatch.undo()
    resumed = go(tmp_path, method=method, resume=True, **settings)
    assert resumed.checksum == whole.checksum
    assert resumed.traffic == whole.traffic


def test_the_lane_engine_forgets_an_unfinished_round_too(tmp_path: Path, monkeypatch: Any) -> None:
    from flashfl.engine.gpu import GPUEngine
    from flashfl.run.simulate import drive

    task, train = make_task("dropout"), TrainConfig(rounds=4, **{**SETTINGS, "checkpoint_every": 0}, device="cpu")

    def lanes(folder: Path | None, resume: bool = False) -> fl.Run:
        engine = GPUEngine(task, train, "cpu", folder / "masks" if folder else None)
        return drive(NST, task, train, engine, FixedPopulation(task.clients), folder, resume)

    def interrupted(*given: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    whole = lanes(None)
    monkeypatch.setattr(GPUEngine, "evaluate", interrupted)
    with pytest.warns(RuntimeWarning, match="interrupted after"):
        lanes(tmp_path)
    monkeypatch.undo()
    resumed = lanes(tmp_path, resume=True)
    assert resumed.checksum == whole.checksum
    assert resumed.traffic == whole.traffic


def test_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    whole = go(tmp_path)
    again = go(tmp_path, resume=True)
    assert again.checksum == whole.checksum
    assert again.accuracy == whole.accuracy
    assert [x["type"] for x in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())].count("end") == 1


def test_a_run_stopped_by_its_clients_keeps_its_last_good_state(tmp_path: Path) -> None:
    """All clients diverge from the third round on."""
    task = make_task("dropout")

    def explode(state: State, line: Any) -> None:
        if state.counted == 2:
            for source in task.train:
                source.inputs[0].fill_(float("nan"))  # type: ignore[attr-defined]

    with pytest.raises(
        RunStopped,
        match=r"round 3 failed 3 times.*not finite.*resume the run.*finished rounds are kept",
    ):
        go(tmp_path, task=task, watch=explode, checkpoint_every=0)
    config = TrainConfig(rounds=4, **SETTINGS)
    identity = Results.read(tmp_path).header["identity"]
    point = checkpoint.load(tmp_path / "checkpoints", plan_of(config, task, len(task.clients)), identity)
    assert point.state.tag == (2, 2, 0)
    assert torch.isfinite(point.state.weights.vector).all()
    assert go(tmp_path, resume=True).checksum == go(None).checksum, "with sound clients it goes on"


def test_masks_that_nobody_needs_are_dropped_from_disk(tmp_path: Path) -> None:
    run = go(tmp_path, rounds=8, method=NST)
    names = {p.stem for p in (tmp_path / "masks").glob("*.mask")}
    assert run.state is not None
    needed = checkpoint.referenced(tmp_path / "checkpoints")
    assert needed <= names
    # Each of eight clients holds two rounds at most, of an order's mask and its own; checkpoints hold as much again.
    assert len(names) <= 2 * 8 * 4


def test_states_with_extras_come_back(tmp_path: Path) -> None:
    task = make_task("norm")
    plan = plan_of(TrainConfig(rounds=3, per_round=4), task, len(task.clients))
    method = fl.HeteroSPDST(densities=(0.2, 0.4), shares=(0.5, 0.5), warmup_clients=0)
    state = replace(method.init(plan), round=2, attempt=1)
    state = replace(state, extra={**state.extra, "momentum": torch.arange(5.0)})
    checkpoint.save(tmp_path, checkpoint.Checkpoint(state, {"masks": ["ab"]}, {}, 7, Traffic(up=3)), {"a": 1})
    back = checkpoint.load(tmp_path, plan, {"a": 1})
    assert (back.state.tag, back.rounds, back.traffic) == ((2, 2, 1), 7, Traffic(up=3))
    assert torch.equal(back.state.weights.vector, state.weights.vector)
    assert back.state.mask.recipe == state.mask.recipe
    for name, value in state.extra.items():
        other = back.state.extra[name]
        if isinstance(value, fl.Mask):
            assert isinstance(other, fl.Mask)
            assert value.equal(other)
            assert value.recipe == other.recipe
        else:
            assert torch.equal(value, other)  # type: ignore[arg-type]
    assert checkpoint.referenced(tmp_path) == {"ab"}


def test_resuming_is_silent(cut: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(cut, resume=True)


def test_two_kills_long_after_a_checkpoint_change_nothing(tmp_path: Path) -> None:
    """After a resume, too, the masks that a checkpoint names must outlive the rounds that follow it."""
    whole = go(None, rounds=24, method=NST)
    for checkpoint_every, rounds in ((5, 6), (100, 14)):
        with killed():
            go(
                tmp_path, rounds=24, method=NST, checkpoint_every=checkpoint_every, resume=rounds > 6,
                watch=After(rounds, Killed()),
            )  # fmt: skip
    resumed = go(tmp_path, rounds=24, method=NST, resume=True)
    assert (resumed.checksum, resumed.traffic) == (whole.checksum, whole.traffic)


def test_ctrl_c_while_a_round_is_written_down_loses_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    real, calls = Observer.complete, iter(range(99))

    def complete(self: Any, *given: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *given)

    whole = go(None, eval_every=1)
    monkeypatch.setattr(Observer, "complete", complete)
    with pytest.warns(RuntimeWarning, match="interrupted after"):
        go(tmp_path, eval_every=1, checkpoint_every=0)
    resumed = go(tmp_path, eval_every=1, resume=True)
    assert [r.round for r in resumed.history] == [r.round for r in whole.history]
    assert (resumed.checksum, resumed.accuracy) == (whole.checksum, whole.accuracy)


def test_any_error_leaves_a_checkpoint_of_the_rounds_before_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        go(tmp_path, checkpoint_every=0, watch=After(3, ZeroDivisionError()))
    assert [name for name in found(tmp_path) if name.endswith("json")] == ["checkpoint-00000003.json"]
    assert go(tmp_path, resume=True).checksum == go(None).checksum


def test_results_that_cannot_be_written_are_made_up_for(tmp_path: Path, monkeypatch: Any) -> None:
    real, calls = Path.open, iter(range(99))

    def full(self: Path, mode: str = "r", *given: Any, **named: Any) -> Any:
        if self.name == "results.jsonl" and mode == "a" and next(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, mode, *given, **named)

    monkeypatch.setattr(Path, "open", full)
    with pytest.warns(RuntimeWarning, match=r"could not write results to .*results\.jsonl .*No space left"):
        done = go(tmp_path)
    assert [r.round for r in Results.read(tmp_path).rounds] == [r.round for r in done.history]


@pytest.mark.parametrize("density", [0.3, 0.6])
def test_resuming_a_finished_run_gives_the_same_bits(density: float, tmp_path: Path) -> None:
    """Dropped weights are plain zeros, as they are once they have been read back."""
    method = fl.JMWST(density=density, warmup_clients=0)
    assert go(tmp_path, method=method).checksum == go(tmp_path, method=method, resume=True).checksum


def test_checkpoints_that_take_long_come_less_often() -> None:
    """Residuals of a hundred clients are gigabytes: writing them every few rounds would be most of the run."""
    run: Any = SimpleNamespace(folder=None, rounds=50, train=TrainConfig(checkpoint_every=25))
    keeper = checkpoint.Keeper(run, *[None] * 3)  # type: ignore[arg-type]

    def due(cost: float, waited: float, every: int = 25) -> bool:
        run.train = TrainConfig(checkpoint_every=every)
        keeper._cost, keeper._kept = cost, time.monotonic() - waited
        return keeper.due()

    assert due(0.1, 0.5), "a quick one comes every 25 rounds"
    assert not due(8.0, 4.0), "one of eight seconds waits"
    assert due(8.0, 81.0), "until it takes a tenth of the time"
    assert due(8.0, 4.0, every=1), "unless each round is asked for"
    assert not due(8.0, 1e6, every=0)
