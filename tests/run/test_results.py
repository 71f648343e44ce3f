"""A run's results file: it can be read after any crash, and is never ahead of the state it belongs to."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from flashfl.core.errors import FlashError
from flashfl.core.exchange import Traffic
from flashfl.core.record import RoundRecord, Score
from flashfl.run.results import RESULTS, Results


def record(round: int) -> RoundRecord:
    return RoundRecord("training", True, round, 0, (0, 1), {}, 0.5, Traffic(1, 2))


def kinds(path: Path) -> list[str]:
    return [json.loads(line)["type"] for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The results file of a finished run of four rounds."""
    made = Results(tmp_path / RESULTS)
    made.begin({"config": {"a": 1}})
    for i in range(4):
        made.append(record(i))
    made.finish({"metric": 0.5, "best": 0.5})
    return tmp_path / RESULTS


def test_results_read_back(path: Path) -> None:
    run = Results.read(path.parent)
    assert run.header["config"] == {"a": 1}
    assert set(run.header["versions"]) == {"flashfl", "torch", "numpy", "python", "machine"}
    assert run.rounds == [record(i) for i in range(4)]
    assert run.end is not None
    assert run.end["metric"] == 0.5
    assert kinds(path) == ["run", *["round"] * 4, "end"]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_become_null_and_are_read_as_nan(odd: float, tmp_path: Path) -> None:
    made = Results(tmp_path / RESULTS)
    made.begin({"config": {"a": None}})
    bad = RoundRecord("training", True, 0, 0, (0,), {}, odd, Traffic(), metrics={"before": Score(odd, 0.5, 1.0)})
    made.append(bad)
    made.finish({"metric": float("nan"), "best": float("nan"), "stopped": None})
    for ended in (True, False):
        for text in (tmp_path / RESULTS).read_text().splitlines():
            json.loads(text, parse_constant=pytest.fail)
        run = Results.read(tmp_path)
        [found] = run.rounds
        assert found.score is not None
        assert (math.isnan(found.loss), math.isnan(found.score.loss), found.score.metric) == (True, True, 0.5)
        assert run.header["config"] == {"a": None}
        if ended:
            assert run.end is not None
            assert math.isnan(run.end["metric"])
            assert run.end["stopped"] is None
        Results(tmp_path / RESULTS).resume(1)


@pytest.mark.parametrize("torn", ['{"type": "round", "rou', "\x00\x00", "{", '"'])
def test_torn_last_line_is_skipped(path: Path, torn: str) -> None:
    whole = Results.read(path.parent)
    with path.open("a") as file:
        file.write(torn)
    assert Results.read(path.parent) == whole


@pytest.mark.parametrize("rounds", [0, 2, 4])
def test_resume_drops_rounds_after_the_checkpoint(path: Path, rounds: int) -> None:
    path.write_text(path.read_text()[:-20])  # the end is torn too
    again = Results(path)
    again.resume(rounds)
    assert again.rounds == [record(i) for i in range(rounds)]
    assert kinds(path) == ["run"] + ["round"] * rounds
    again.append(record(rounds))
    assert [r.round for r in Results.read(path.parent).rounds] == list(range(rounds + 1))


def test_resume_warns_about_missing_rounds(path: Path) -> None:
    again = Results(path)
    with pytest.warns(RuntimeWarning, match="lacks 5 of the 9 rounds"):
        again.resume(9)
    assert again.rounds == [record(i) for i in range(4)]


def test_resume_drops_the_end(path: Path) -> None:
    Results(path).resume(4)
    assert Results.read(path.parent).end is None


def test_begin_replaces_an_earlier_run(path: Path) -> None:
    Results(path).begin({"config": {}})
    assert kinds(path) == ["run"]


def test_results_without_a_folder_stay_in_memory() -> None:
    made = Results()
    made.begin({})
    made.append(record(0))
    made.resume(0)
    assert made.header["type"] == "run"
    assert len(made.rounds) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "does not begin with a run's settings"),
        ('{"type": "round"}\n', "does not begin with a run's settings"),
        ("[1]\n", "does not begin with a run's settings"),
    ],
)
def test_folder_without_a_run_is_an_error(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / RESULTS).write_text(content)
    with pytest.raises(FlashError, match=f"is not a run: .*{said}"):
        Results.read(tmp_path)


def test_folder_without_results_and_missing_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(FlashError, match=rf"^{tmp_path} has no results\.jsonl, so it is not the folder of a run$"):
        Results.read(tmp_path)
    with pytest.raises(FlashError, match=rf"^there is no folder {tmp_path / 'none'}$"):
        Results.read(tmp_path / "none")


@pytest.mark.parametrize(
    ("number", "said"),
    [(1, "Its first line holds the run's settings: repair it"), (3, "Repair that line, or remove it: its round is")],
)
def test_advice_for_a_damaged_line_works(path: Path, number: int, said: str) -> None:
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[: number - 1], lines[number - 1][:20], *lines[number:]]) + "\n")
    with pytest.raises(FlashError, match=f"damaged in line {number}, and more lines follow. {said}"):
        Results.read(path.parent)
    if number > 1:
        path.write_text("\n".join([*lines[: number - 1], *lines[number:]]) + "\n")
        assert [r.round for r in Results.read(path.parent).rounds] == [0, 2, 3]
