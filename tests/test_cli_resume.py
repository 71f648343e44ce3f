"""Resuming on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashfl.cli import main
from flashfl.run.results import Results

TINY = ["--clients", "6", "--per-round", "2", "--limit", "120", "--max-steps", "1", "--device", "cpu", "--quiet"]


def test_resume_needs_no_settings_and_extends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "--method", "pdst", "--density", "0.1", "--rounds", "3", *TINY, "--out", out]) == 0
    first = capsys.readouterr().out
    assert main(["run", "--out", out, "--resume", "--quiet"]) == 0
    assert capsys.readouterr().out.split("checksum")[1] == first.split("checksum")[1]
    with pytest.warns(RuntimeWarning, match="rounds was 3 and is 5 now"):
        assert main(["run", "--out", out, "--resume", "--rounds", "5", "--quiet"]) == 0
    found = Results.read(Path(out))
    assert len(found.rounds) == 5
    assert found.header["config"]["train"]["rounds"] == 5


def test_resume_in_an_empty_folder_starts_a_run(tmp_path: Path) -> None:
    out = str(tmp_path / "new")
    assert main(["run", "--method", "pdst", "--rounds", "1", *TINY, "--out", out, "--resume"]) == 0
    assert len(Results.read(Path(out)).rounds) == 1
