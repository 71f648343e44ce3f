"""Resuming on the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flashfl as fl
from flashfl.cli import main
from flashfl.report.groups import groups_of
from flashfl.report.load import load
from flashfl.run.results import Results
from tests.conftest import make_task

TINY = ["--clients", "6", "--per-round", "2", "--limit", "120", "--max-steps", "1", "--device", "cpu", "--quiet"]


def test_resume_needs_no_settings_and_extends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["run", "--method", "pdst", "--density", "0.1", "--rounds", "3", *TINY, "--out", out]) == 0
    first = capsys.readouterr().out
    assert main(["run", "--out", out, "--resume", "--quiet"]) == 0
    assert capsys.readouterr().out.split("checksum")[1] == first.split("checksum")[1]
    assert main(["export", out]) == 0
    with pytest.warns(RuntimeWarning, match="rounds changed from 3 to 5"):
        assert main(["run", "--out", out, "--resume", "--rounds", "5", "--quiet"]) == 0
    assert "model.safetensors in this folder comes from an earlier export" in capsys.readouterr().out
    found = Results.read(Path(out))
    assert len(found.rounds) == 5
    assert found.header["config"]["train"]["rounds"] == 5
    assert found.header["extended"] == [3]


def test_refused_resume_leaves_a_finished_run_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert main(["run", "--method", "pdst", "--rounds", "3", *TINY, "--out", str(out)]) == 0
    before = (out / "results.jsonl").read_bytes()
    assert main(["run", "--out", str(out), "--resume", "--rounds", "2", "--quiet"]) == 1
    assert "rounds = 2: the run in" in capsys.readouterr().err
    assert (out / "results.jsonl").read_bytes() == before


def test_report_keeps_an_extended_run_apart_from_one_that_had_all_rounds(tmp_path: Path) -> None:
    for name, rounds in (("whole", "3"), ("longer", "2")):
        assert main(["run", "--method", "pdst", "--rounds", rounds, *TINY, "--out", str(tmp_path / name)]) == 0
    with pytest.warns(RuntimeWarning, match="rounds changed from 2 to 3"):
        assert main(["run", "--out", str(tmp_path / "longer"), "--resume", "--rounds", "3", "--quiet"]) == 0
    whole, longer = load([tmp_path / "whole", tmp_path / "longer"]).runs
    assert whole.key != longer.key
    assert list(groups_of([whole, longer])) == ["pdst", "pdst · extended from 2 to 3 rounds"]
    assert list(groups_of([longer])) == ["pdst · extended from 2 to 3 rounds"], "also without another run of its method"


def test_resume_in_an_empty_folder_starts_a_run(tmp_path: Path) -> None:
    """A script may always pass --resume."""
    (tmp_path / "empty").mkdir()
    for name, method in (("new", ["--method", "pdst"]), ("other", ["--dataset", "digits"]), ("empty", [])):
        out = str(tmp_path / name)
        assert main(["run", *method, "--rounds", "1", *TINY, "--out", out, "--resume"]) == 0
        assert Results.read(Path(out)).end


def test_resume_in_a_mistyped_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It trained a whole default run."""
    out = tmp_path / "nome"
    assert main(["run", "--out", str(out), "--resume", "--rounds", "1", *TINY]) == 1
    assert capsys.readouterr().err == (
        f"flashfl: --resume: {out} does not exist, so it holds no run to continue. Check --out. To start a new run "
        "there, give --method, --dataset or a configuration file.\n"
    )
    assert not out.exists()


def test_resume_of_damaged_results_says_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It said that the checkpoint belonged to another run."""
    path = tmp_path / "results.jsonl"
    assert main(["run", "--method", "pdst", "--rounds", "3", *TINY, "--out", str(tmp_path)]) == 0
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:30] + "\n", *lines[2:]]))
    assert main(["run", "--out", str(tmp_path), "--resume", "--rounds", "4"]) == 1
    said = capsys.readouterr().err
    assert said == (
        f"flashfl: {path} is damaged in line 2, and more lines follow. Repair that line, or remove it: its round is "
        "then missing in tables.\n"
    )


def test_export_without_a_checkpoint_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--method", "pdst", "--rounds", "1", *TINY, "--out", str(tmp_path)]) == 0
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    assert main(["export", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"flashfl: {tmp_path} has no checkpoint to export. If the run is still going, wait for its first checkpoint. "
        "Otherwise continue it with --resume.\n"
    )
    assert main(["run", "--out", str(tmp_path), "--resume", "--quiet"]) == 0
    assert main(["export", str(tmp_path)]) == 0


def test_run_of_an_older_flower_app_is_exported(tmp_path: Path) -> None:
    """Its header has one more table."""
    assert main(["run", "--method", "pdst", "--rounds", "1", *TINY, "--out", str(tmp_path)]) == 0
    first, rest = (tmp_path / "results.jsonl").read_text().split("\n", 1)
    header = json.loads(first)
    header["config"]["flower"] = {"clients": 2}
    (tmp_path / "results.jsonl").write_text(json.dumps(header) + "\n" + rest)
    assert main(["export", str(tmp_path)]) == 0


@pytest.mark.parametrize("ended", [False, True])
def test_export_before_the_end_says_which_round_the_model_is_of(ended: bool, tmp_path: Path) -> None:
    """ended: the run ended, but its last checkpoint is lost."""
    words = ["run", "--method", "pdst", "--rounds", "3", *TINY, "--checkpoint-every", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    for path in (tmp_path / "checkpoints").glob("checkpoint-00000003.*"):
        path.unlink()
    if not ended:  # as `kill -9` leaves it
        lines = (tmp_path / "results.jsonl").read_text().splitlines(keepends=True)
        (tmp_path / "results.jsonl").write_text("".join(lines[:-1]))
    said = "the last checkpoint is of round 2 of 3, and the results go on to round 3; resume the run to its end"
    with pytest.warns(RuntimeWarning, match=said):
        assert main(["export", str(tmp_path)]) == 0
    assert (tmp_path / "model.safetensors").exists()
    assert main(["run", "--out", str(tmp_path), "--resume", "--quiet"]) == 0
    assert main(["export", str(tmp_path)]) == 0


def test_model_of_a_run_that_reached_a_limit_is_final(tmp_path: Path) -> None:
    words = ["run", "--method", "pdst", "--rounds", "3", *TINY, "--max-bytes", "1", "--out", str(tmp_path)]
    assert main(words) == 0
    assert main(["export", str(tmp_path)]) == 0


def test_resume_reads_the_settings_of_a_run_killed_in_its_first_round(tmp_path: Path) -> None:
    """Its folder has a header and nothing else. Without settings, another method was run for 60 rounds."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert main(["run", "--method", "pdst", "--density", "0.3", "--rounds", "2", *TINY, "--out", str(whole)]) == 0
    cut.mkdir()
    (cut / "results.jsonl").write_text((whole / "results.jsonl").read_text().splitlines(keepends=True)[0])
    assert main(["run", "--out", str(cut), "--resume"]) == 0
    found, wanted = Results.read(cut), Results.read(whole)
    assert found.header["config"] == wanted.header["config"]
    assert found.end is not None
    assert wanted.end is not None
    assert found.end["checksum"] == wanted.end["checksum"]


def test_run_killed_between_checkpoints_is_extended(tmp_path: Path) -> None:
    """Checkpoints are due after some time too: a run whose rounds are slow loses little when it is killed."""
    out, words = tmp_path / "run", ["run", "--method", "pdst", "--density", "0.1", "--rounds", "1000", *TINY]
    words += ["--checkpoint-every", "1000"]
    code = "import sys; from flashfl.run import checkpoint as c; c.SECONDS = 0.0; from flashfl.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *words, "--out", str(out)])
    try:
        until = time.monotonic() + 120
        while len(list((out / "checkpoints").glob("*.json"))) < 1 and time.monotonic() < until:
            assert process.poll() is None
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = (out / "results.jsonl").read_text().splitlines()[1]
    done = len(Results.read(out).rounds)
    assert 1 <= done < 1000
    with pytest.warns(RuntimeWarning, match=f"rounds changed from 1000 to {done + 3}"):
        assert main(["run", "--out", str(out), "--resume", "--rounds", str(done + 3), "--quiet"]) == 0
    assert len(Results.read(out).rounds) == done + 3
    assert (out / "results.jsonl").read_text().splitlines()[1] == before
    assert not (out / "results.jsonl.old").exists()
    assert load([out]).runs[0].settings["train.changed"] == f"from 1000 to {done + 3} rounds"


def test_warnings_on_the_command_line_are_one_plain_line(tmp_path: Path) -> None:
    words = ["run", "--method", "pdst", "--rounds", "2", *TINY, "--out", str(tmp_path / "run")]
    assert main(words) == 0
    words = [sys.executable, "-m", "flashfl.cli", "run", "--out", str(tmp_path / "run"), "--resume", "--rounds", "3"]
    done = subprocess.run([*words, "--quiet"], capture_output=True, text=True, timeout=200, check=True)
    assert done.stderr.startswith("flashfl: warning: rounds changed from 2 to 3")
    assert len(done.stderr.splitlines()) == 1


def test_run_from_python_is_continued_in_python_and_has_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fl.simulate(fl.PDST(density=0.3), make_task("norm"), 1, folder=tmp_path, per_round=2, batch=4, workers=1)
    assert main(["run", "--out", str(tmp_path), "--resume"]) == 1
    said = capsys.readouterr().err
    assert said == (
        f"flashfl: {tmp_path} was made in Python: continue it there, with fl.simulate(method, task, rounds, "
        f"folder={str(tmp_path)!r}, resume=True)\n"
    )
    assert main(["export", str(tmp_path)]) == 1
    assert f"Its model is in {tmp_path / 'model.safetensors'} already" in capsys.readouterr().err
