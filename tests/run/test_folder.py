"""A run's folder: one process at a time, and what was earned in it is not lost unasked."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_support import After, Killed, killed

import flashfl as fl
from flashfl.cli import main
from flashfl.core.errors import ConfigError
from flashfl.run.compare import compare
from flashfl.run.config import RunConfig, make_config
from flashfl.run.results import OLD, RESULTS, Results
from tests.conftest import make_task

SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "workers": 1, "checkpoint_every": 0}
TINY = {"rounds": "3", "per_round": "2", "clients": "4", "limit": "80", "max_steps": "1", "workers": "1",
        "device": "cpu", "checkpoint_every": "0"}  # fmt: skip
WORDS = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", value)]


def go(folder: Path | None, **more: Any) -> fl.Run:
    return fl.simulate(fl.NST(density=0.3), make_task("dropout"), 4, folder=folder, **{**SETTINGS, **more})


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["type"] for line in path.read_text().splitlines()]


# -- interrupted before the first checkpoint ----------------------------------------------------------------------


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """Two finished rounds and no checkpoint."""
    with killed():
        go(tmp_path, watch=After(2, Killed))
    assert kinds(tmp_path / RESULTS) == ["run", "round", "round"]
    return tmp_path


def test_resume_without_a_checkpoint_starts_again_and_keeps_the_old_rounds(lost: Path) -> None:
    with pytest.warns(RuntimeWarning, match=r"after 2 training rounds: its results are now in results\.jsonl\.old"):
        again = go(lost, resume=True)
    assert again.checksum == go(None).checksum
    assert kinds(lost / OLD) == ["run", "round", "round"]
    assert len(Results.read(lost).rounds) == 4


def test_rounds_that_are_set_aside_are_counted_without_the_first_phase(tmp_path: Path) -> None:
    method, task = fl.SPDST(density=0.3, warmup_clients=2, warmup_epochs=1), make_task("dropout")
    with killed():
        fl.simulate(method, task, 4, folder=tmp_path, **SETTINGS, watch=After(3, Killed))
    assert len(Results.read(tmp_path).rounds) == 3
    with pytest.warns(RuntimeWarning, match="had stopped after 2 training rounds"):
        fl.simulate(method, task, 4, folder=tmp_path, overwrite=True, **SETTINGS)


@pytest.mark.parametrize("inside", ["", "deeper/still"])
def test_folder_that_is_a_file_is_one_clear_sentence(tmp_path: Path, inside: str) -> None:
    (tmp_path / "taken").write_text("mine")
    folder = tmp_path / "taken" / inside
    said = f"{folder} cannot be a folder, because {tmp_path / 'taken'} is a file: choose another folder"
    with pytest.raises(ConfigError, match=re.escape(said)):
        go(folder)
    with pytest.raises(ConfigError, match=re.escape(said)):
        go(None).save(folder)
    assert (tmp_path / "taken").read_text() == "mine"


def test_resumed_run_says_from_which_round_it_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method, task = fl.SPDST(density=0.3, warmup_clients=2, warmup_epochs=1), make_task("dropout")

    def said(rounds: int, folder: Path = tmp_path, **more: Any) -> list[str]:
        capsys.readouterr()
        with warnings.catch_warnings(action="ignore"):
            fl.simulate(method, task, rounds, folder=folder, progress=True, **SETTINGS, **more)
        return [line for line in capsys.readouterr().err.splitlines() if re.search("round 1$|going|nothing", line)]

    assert said(2) == []
    assert said(4, resume=True) == ["spdst: going on after round 2 of 4"]
    assert said(4, resume=True) == ["spdst: nothing left to train, as all 4 rounds are done"]
    assert said(2, tmp_path / "new", resume=True) == ["spdst: no checkpoint found, starting at round 1"]


def test_a_run_without_a_finished_round_simply_starts(tmp_path: Path, lost: Path) -> None:
    lines = (lost / RESULTS).read_text().splitlines()
    (lost / RESULTS).write_text(lines[0] + "\n")
    assert go(lost, resume=True).checksum == go(None).checksum
    assert not (lost / OLD).exists()


def test_one_that_had_ended_is_set_aside_silently_and_one_without_rounds_does_not_replace_it(tmp_path: Path) -> None:
    go(tmp_path)
    go(tmp_path, overwrite=True)
    assert kinds(tmp_path / OLD) == ["run", *["round"] * 4, "end"]
    before = (tmp_path / OLD).read_bytes()
    (tmp_path / RESULTS).write_text('{"type": "run"}\n')
    go(tmp_path)
    assert (tmp_path / OLD).read_bytes() == before


def test_command_line_resume_without_a_checkpoint_starts_again(tmp_path: Path) -> None:
    words = ["run", *WORDS, "--method", "nst", "--quiet", "--out", str(tmp_path)]
    with killed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashfl.run.progress.Display.__call__", After(2, Killed))
        main(words)
    with pytest.warns(RuntimeWarning, match=OLD):
        assert main([*words, "--resume"]) == 0
    assert kinds(tmp_path / OLD) == ["run", "round", "round"]


def test_a_comparison_starts_such_a_run_anew(tmp_path: Path) -> None:
    def base(name: str, seed: int) -> RunConfig:
        return make_config({}, {**TINY, "method": name, "seed": str(seed)})

    with killed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("flashfl.run.progress.Display.__call__", After(2, Killed))
        compare(base, ["nst"], [0], tmp_path, quiet=True)
    with pytest.warns(RuntimeWarning, match=rf"nst-seed0, where a run had stopped after 2 training .* {OLD}"):
        runs = compare(base, ["nst"], [0], tmp_path, quiet=True)
    assert runs["nst"][0].end["stopped"] is None
    assert kinds(tmp_path / "nst-seed0" / OLD) == ["run", "round", "round"]


@pytest.mark.parametrize("what", [SystemExit, GeneratorExit, Killed])
def test_whatever_ends_a_run_leaves_a_checkpoint(what: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(what):
        go(tmp_path, watch=After(2, what))
    assert go(tmp_path, resume=True).checksum == go(None).checksum


# -- one process at a time ----------------------------------------------------------------------------------------


@contextmanager
def another(folder: Path) -> Iterator[None]:
    """Another process that uses the folder."""
    holds = "import sys; from pathlib import Path; from flashfl.run.lock import alone\n"
    holds += "with alone(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holds, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_that_another_process_uses_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = go(tmp_path)
    with another(tmp_path):
        before = everything(tmp_path)
        for resume in (False, True):
            with pytest.raises(ConfigError, match="is being used by another process"):
                go(tmp_path, resume=resume)
        assert main(["run", *WORDS, "--out", str(tmp_path), "--overwrite"]) == 1
        used = f"{tmp_path} is being used by another process: wait for it to end, or choose another folder"
        assert capsys.readouterr().err == f"flashfl: {used}\n"
        assert everything(tmp_path) == before
    assert go(tmp_path, resume=True).checksum == whole.checksum, "and it is free once the other is gone"


def test_a_folder_is_held_while_a_run_goes(tmp_path: Path) -> None:
    asks = "import sys; from pathlib import Path; from flashfl.run.lock import claim\n"
    asks += "with claim(Path(sys.argv[1]) / 'lock') as ours: print(ours)"
    said = []

    def ask(*given: Any) -> None:
        done = subprocess.run([sys.executable, "-c", asks, str(tmp_path)], capture_output=True, text=True, check=True)
        said.append(done.stdout.strip())

    go(tmp_path, watch=ask)
    ask()
    assert said == ["False"] * 4 + ["True"]
    (tmp_path / "cli").mkdir()
    with pytest.MonkeyPatch.context() as patch:  # where the command line has claimed it before
        patch.setattr("flashfl.run.progress.Display.__call__", lambda self, *given: ask())
        asks = asks.replace("sys.argv[1]", "sys.argv[1], 'cli'")
        assert main(["run", *WORDS, "--method", "nst", "--out", str(tmp_path / "cli"), "--quiet"]) == 0
    assert said[5:] == ["False"] * 3


# -- a full disk --------------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_with_the_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["run", *WORDS, "--method", "nst", "--out", str(tmp_path / "x"), "--quiet"]) == 1
    path = tmp_path / "x" / RESULTS
    assert capsys.readouterr().err == f"flashfl: [Errno 28] No space left on device: '{path}'\n"
