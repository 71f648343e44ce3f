"""A run's results as JSON lines: readable after any crash, and never ahead of the state they belong to."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from flashfl.core.errors import FlashError
from flashfl.run.results import RESULTS, Results, read_lines, read_run


def line(round: int) -> dict[str, Any]:
    return {"type": "round", "round": round, "stage": 2}


@pytest.fixture
def results(tmp_path: Path) -> Results:
    made = Results(tmp_path)
    made.begin({"config": {"a": 1}})
    for i in range(4):
        made.append(line(i))
    made.append({"type": "end", "accuracy": 0.5})
    return made


def test_a_run_reads_back(results: Results, tmp_path: Path) -> None:
    run = read_run(tmp_path)
    assert run["header"]["config"] == {"a": 1}
    assert set(run["header"]["versions"]) == {"flashfl", "torch", "numpy", "python", "machine"}
    assert run["rounds"] == results.rounds == [line(i) for i in range(4)]
    assert run["end"]["accuracy"] == 0.5
    for text in (tmp_path / RESULTS).read_text().splitlines():
        json.loads(text)


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_no_number_is_null_in_the_file_and_nan_when_read(odd: float, tmp_path: Path) -> None:
    made = Results(tmp_path)
    made.begin({"config": {"a": None}})
    made.append({**line(0), "loss": odd, "metrics": {"before": {"loss": odd, "metric": 0.5}}})
    made.append({"type": "end", "accuracy": odd, "best": odd, "stopped": None})
    for ended in (True, False):
        for text in (tmp_path / RESULTS).read_text().splitlines():
            json.loads(text, parse_constant=pytest.fail)
        run = read_run(tmp_path)
        [found] = run["rounds"]
        judged = found["metrics"]["before"]
        assert (math.isnan(found["loss"]), math.isnan(judged["loss"]), judged["metric"]) == (True, True, 0.5)
        assert run["header"]["config"] == {"a": None}
        if ended:
            assert math.isnan(run["end"]["accuracy"])
            assert run["end"]["stopped"] is None
        Results(tmp_path).resume(1)


@pytest.mark.parametrize("torn", ['{"type": "round", "rou', "\x00\x00", "{", '"'])
def test_a_torn_last_line_is_passed_over(results: Results, tmp_path: Path, torn: str) -> None:
    path = tmp_path / RESULTS
    whole = list(read_lines(path))
    with path.open("a") as file:
        file.write(torn)
    assert list(read_lines(path)) == whole


@pytest.mark.parametrize("rounds", [0, 2, 4])
def test_resuming_forgets_what_came_after_the_checkpoint(results: Results, tmp_path: Path, rounds: int) -> None:
    path = tmp_path / RESULTS
    path.write_text(path.read_text()[:-20])  # the end is torn too
    again = Results(tmp_path)
    again.resume(rounds)
    assert again.rounds == [line(i) for i in range(rounds)]
    assert [x["type"] for x in read_lines(path)] == ["run"] + ["round"] * rounds
    again.append(line(rounds))
    assert [x.get("round") for x in read_lines(path)] == [None, *range(rounds + 1)]


def test_rounds_that_are_not_in_the_record_are_said(results: Results, tmp_path: Path) -> None:
    again = Results(tmp_path)
    with pytest.warns(RuntimeWarning, match="lacks 5 of the 9 rounds"):
        again.resume(9)
    assert again.rounds == [line(i) for i in range(4)]


def test_an_end_is_forgotten_when_a_run_goes_on(results: Results, tmp_path: Path) -> None:
    again = Results(tmp_path)
    again.resume(4)
    assert read_run(tmp_path)["end"] is None


def test_beginning_anew_replaces_what_was_there(results: Results, tmp_path: Path) -> None:
    again = Results(tmp_path)
    again.begin({"config": {}})
    assert [x["type"] for x in read_lines(tmp_path / RESULTS)] == ["run"]


def test_without_a_folder_lines_are_only_kept() -> None:
    made = Results(None)
    made.begin({})
    made.append(line(0))
    made.resume(0)
    assert len(made.lines) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "results.jsonl cannot be read \\(No such file"),
        ("", "does not begin with a run's settings"),
        ('{"type": "round"}\n', "does not begin with a run's settings"),
        ("[1]\n", "does not begin with a run's settings"),
    ],
)
def test_what_is_not_a_run_is_said_to_be_none(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / RESULTS).write_text(content)
    with pytest.raises(FlashError, match=f"is not a run: .*{said}"):
        read_run(tmp_path)
