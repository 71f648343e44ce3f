"""Working with runs from Python and the command line: nothing is destroyed, lost or silent."""

from __future__ import annotations

import errno
import io
import json
import re
import shutil
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import flashfl as fl
from flashfl.cli import main
from flashfl.core.errors import ConfigError
from flashfl.run import checkpoint
from tests.conftest import make_task

QUICK: dict[str, Any] = {"per_round": 2, "batch": 4, "workers": 1, "device": "cpu"}
TINY = ["--clients", "6", "--per-round", "2", "--limit", "120", "--max-steps", "1", "--device", "cpu", "--quiet"]


def test_cell_run_twice_keeps_the_finished_run(tmp_path: Path) -> None:
    task = make_task("norm")
    fl.simulate(fl.PDST(density=0.3), task, 2, folder=tmp_path, **QUICK)
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"already holds a run: .*resume=True.*overwrite=True"):
        fl.simulate(fl.PDST(density=0.3), task, 2, folder=tmp_path, **QUICK)
    assert (tmp_path / "results.jsonl").read_bytes() == before
    again = fl.simulate(fl.PDST(density=0.3), task, 1, folder=tmp_path, overwrite=True, **QUICK)
    assert len(again.history) == 1


def test_ctrl_c_gives_back_the_run_so_far(tmp_path: Path) -> None:
    def press(state: fl.State, record: Any) -> None:
        if state.counted == 2:
            raise KeyboardInterrupt

    with pytest.warns(RuntimeWarning, match="interrupted after 2 of 5 rounds"):
        run = fl.simulate(fl.PDST(density=0.3), make_task("norm"), 5, watch=press, **QUICK)
    assert len(run.history) == 2
    assert run.stopped == "interrupted"
    assert run.model() is not None
    assert "accuracy not evaluated" in repr(run)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_the_first_phase_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """It trains every client of the warm-up before round 1 ends, which may take minutes."""
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    ticks = iter(range(0, 10_000, 1))
    clock = types.SimpleNamespace(monotonic=lambda: float(next(ticks)))
    monkeypatch.setattr("flashfl.run.progress.time", clock)
    fl.simulate(fl.SPDST(density=0.3, warmup_clients=3, warmup_epochs=1), make_task("norm"), 1, **QUICK)
    assert re.search(r"spdst: sensitivity  \[client \d\]", screen.getvalue())
    assert "round 1/1" in screen.getvalue()


def test_progress_shows_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    page = io.StringIO()
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))
    monkeypatch.setattr(sys, "stderr", page)
    fl.simulate(fl.Dense(), make_task("norm"), 1, **QUICK)
    assert "\rdense: round 1/1" in page.getvalue()
    fl.simulate(fl.Dense(), make_task("norm"), 1, progress=False, **QUICK)
    assert page.getvalue().count("round 1/1") == 1


def test_full_disk_at_the_end_fails_and_saves_the_model_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: Any, **named: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save", full)
    words = ["run", "--method", "pdst", "--rounds", "1", *TINY, "--out", str(tmp_path / "run")]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert main(words) != 0
    [text] = [str(w.message) for w in said if "the final model could not be written to" in str(w.message)]
    place = Path(text.split("it is in ")[1].removesuffix(" instead"))
    assert load_file(place)
    shutil.rmtree(place.parent)


@pytest.mark.parametrize("left", ["nothing", "a header"])
def test_resume_works_in_a_folder_without_a_finished_round(left: str, tmp_path: Path) -> None:
    out, task = tmp_path / "run", make_task("norm")
    out.mkdir()
    if left == "a header":
        fl.simulate(fl.PDST(density=0.3), task, 1, folder=tmp_path / "other", **QUICK)
        header = (tmp_path / "other" / "results.jsonl").read_text().splitlines()[0]
        (out / "results.jsonl").write_text(header + "\n")
    run = fl.simulate(fl.PDST(density=0.3), task, 1, folder=out, resume=True, **QUICK)
    assert len(run.history) == 1
    lines = [json.loads(line)["type"] for line in (out / "results.jsonl").read_text().splitlines()]
    assert lines == ["run", "round", "end"]


def test_extending_says_at_which_learning_rate_the_run_continues(tmp_path: Path) -> None:
    task, settings = make_task("norm"), {**QUICK, "lr": 0.1, "lr_end": 0.001}
    fl.simulate(fl.PDST(density=0.3), task, 2, folder=tmp_path, **settings)
    with pytest.warns(RuntimeWarning, match=r"rounds changed from 2 to 4: from round 3 on, the learning rate") as said:
        run = fl.simulate(fl.PDST(density=0.3), task, 4, folder=tmp_path, resume=True, **settings)
    assert len(run.history) == 4
    rate = float(str(said[0].message).rpartition(" ")[2])
    assert run.state is not None
    assert rate == pytest.approx(run.state.plan.lr(2), rel=1e-3)
