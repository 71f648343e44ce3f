"""A comparison: which runs it reuses, which it runs again, and what it says about them."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flashfl.core.errors import ConfigError
from flashfl.methods import METHODS, Dense
from flashfl.paper.verdict import verdict
from flashfl.run import code
from flashfl.run import compare as comparing
from flashfl.run.code import code_of, joined
from flashfl.run.compare import check_settings, compare, settings_for
from flashfl.run.config import RunConfig, make_config
from flashfl.run.export import export_run
from flashfl.run.results import RESULTS, Results
from flashfl.run.summary import Numbers, Summary, numbers_of, summarise
from flashfl.run.table import summary_table

TINY = {
    "rounds": "3", "per_round": "2", "clients": "4", "limit": "80", "max_steps": "1", "eval_every": "1",
    "workers": "1", "device": "cpu",
}  # fmt: skip


def base(name: str, seed: int) -> RunConfig:
    return make_config({}, {**TINY, "method": name, "seed": str(seed)})


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """One entry for each run carried out: whether it went on from a checkpoint."""
    seen: list[bool] = []
    simulate = comparing.simulate

    def count(*given: Any, **named: Any) -> Any:
        seen.append(named["resume"])
        return simulate(*given, **named)

    monkeypatch.setattr(comparing, "simulate", count)
    yield seen
    code.digest.cache_clear()


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Stands for an edit of the package, and a new process that runs it."""

    def changed() -> None:
        monkeypatch.setattr(code, "digest", cache(lambda source: "other"))

    return changed


class Stopped(Exception):
    """Ends a run in the middle."""


def interrupt(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """A comparison of one run, cut off after its second round."""
    calls = iter(range(9))

    def stop(self: object, state: object, line: object) -> None:
        if next(calls) == 1:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr("flashfl.run.progress.Display.__call__", stop)
        with pytest.raises(Stopped):
            compare(base, ["pdst"], [0], folder)
    assert Results.read(folder / "pdst-seed0").end is None


# -- runs that are there ------------------------------------------------------------------------------------------


def test_budget_that_a_method_cannot_keep_is_refused_before_another_trains(begun: list[bool], tmp_path: Path) -> None:
    def with_budget(name: str, seed: int) -> RunConfig:
        return make_config({}, {**TINY, "method": name, "seed": str(seed), "budget": "20kB"})

    with pytest.raises(ConfigError, match="budget = 20000: topk sends clients a model of density 1"):
        compare(with_budget, ["spdst", "topk"], [0, 1], tmp_path, quiet=True)
    assert not begun


def test_runs_with_the_same_code_are_reused(
    tmp_path: Path, begun: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    first = compare(base, ["pdst"], [0, 1], tmp_path)
    capsys.readouterr()
    again = compare(base, ["pdst"], [0, 1], tmp_path)
    assert len(begun) == 2
    assert [run.end for run in again["pdst"]] == [run.end for run in first["pdst"]]
    said = [f"[{i + 1}/2] pdst seed {i}: reused from {tmp_path}/pdst-seed{i}" for i in (0, 1)]
    assert capsys.readouterr().err.splitlines() == said
    compare(base, ["pdst"], [0, 1], tmp_path, quiet=True)
    assert not capsys.readouterr().err


def test_runs_with_other_code_need_overwrite(tmp_path: Path, begun: list[bool], edit: Callable[[], None]) -> None:
    compare(base, ["pdst"], [0], tmp_path)
    edit()
    with pytest.raises(ConfigError, match="pdst-seed0 holds a run with other code"):
        compare(base, ["pdst"], [0], tmp_path)
    compare(base, ["pdst"], [0], tmp_path, overwrite=True)
    assert begun == [False, False]
    assert Results.read(tmp_path / "pdst-seed0").header["code"] == {"flashfl": "other"}
    compare(base, ["pdst"], [0], tmp_path)
    assert len(begun) == 2, "what ran then is known now"


def test_runs_with_unknown_code_need_overwrite(tmp_path: Path, begun: list[bool]) -> None:
    compare(base, ["pdst"], [0], tmp_path)
    path = tmp_path / "pdst-seed0" / RESULTS
    first, rest = path.read_text().split("\n", 1)
    header = json.loads(first)
    header.pop("code", None)
    path.write_text(json.dumps(header) + "\n" + rest)
    with pytest.raises(ConfigError, match="other code"):
        compare(base, ["pdst"], [0], tmp_path)
    assert begun == [False]


def test_overwrite_replaces_only_runs_with_other_settings(tmp_path: Path, begun: list[bool]) -> None:
    def other(method: str, seed: int) -> RunConfig:
        return base(method, seed + 1 if method == "pdst" else seed)

    compare(base, ["dense", "pdst"], [0], tmp_path)
    with pytest.raises(ConfigError, match=r"other settings \(seed: 0 there, 1 here\), so its results cannot be reused"):
        compare(other, ["dense", "pdst"], [0], tmp_path)
    compare(other, ["dense", "pdst"], [0], tmp_path, overwrite=True)
    assert begun == [False] * 3


def test_interrupted_run_continues_with_the_same_code(
    tmp_path: Path, begun: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compare(base, ["pdst"], [0], tmp_path / "whole")["pdst"][0].end
    interrupt(monkeypatch, tmp_path)
    found = compare(base, ["pdst"], [0], tmp_path)["pdst"][0].end
    assert begun == [False, False, True]
    assert found is not None
    assert whole is not None
    assert found["checksum"] == whole["checksum"]


def test_interrupted_run_does_not_continue_with_other_code(
    tmp_path: Path, begun: list[bool], edit: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, tmp_path)
    edit()
    with pytest.warns(RuntimeWarning, match="stopped after 2 training rounds: its results are now in"):
        found = compare(base, ["pdst"], [0], tmp_path, overwrite=True)["pdst"][0]
    assert begun == [False, False]
    assert len(found.rounds) == 3
    assert found.header["code"] == {"flashfl": "other"}


MINE = """
from dataclasses import dataclass
from typing import ClassVar
from flashfl.methods import PDST

@dataclass(frozen=True)
class Mine(PDST):
    name: ClassVar[str] = "mine"
"""


def test_file_of_a_custom_method_counts_as_code(
    tmp_path: Path, begun: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a_file_of_mine.py"
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(source: str) -> None:
        """As a new process would."""
        path.write_text(source)
        sys.modules.pop(path.stem, None)
        importlib.invalidate_caches()
        monkeypatch.setitem(METHODS, "mine", importlib.import_module(path.stem).Mine)
        code.digest.cache_clear()

    try:
        for source in (MINE, MINE, MINE + "# another thought\n"):
            load(source)
            compare(base, ["mine", "pdst"], [0], tmp_path / "c", overwrite=True)
    finally:
        sys.modules.pop(path.stem, None)
    assert len(begun) == 3, "both, none, and the changed one"
    found = [Results.read(tmp_path / "c" / f"{name}-seed0").header["code"] for name in ("mine", "pdst")]
    assert [list(one) for one in found] == [["flashfl", "a_file_of_mine"], ["flashfl"]]


def test_resume_with_other_code_warns_and_matches_neither(
    tmp_path: Path, begun: list[bool], edit: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, tmp_path)
    folder, old = tmp_path / "pdst-seed0", code_of(base("pdst", 0).method)
    assert old is not None
    edit()
    changed = pytest.warns(RuntimeWarning, match=r"the code of flashfl changed since this run began")

    with changed:
        comparing.run_config(base("pdst", 0), folder, resume=True, quiet=True)
    assert Results.read(folder).header["code"] == {"flashfl": f"{old['flashfl']}+other"}
    comparing.run_config(base("pdst", 0), folder, resume=True, quiet=True)  # it had ended: there is nothing to say
    with pytest.raises(ConfigError, match="other code"):
        compare(base, ["pdst"], [0], tmp_path)
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="other code"):
        compare(base, ["pdst"], [0], tmp_path)


def test_digests_are_joined_where_they_differ() -> None:
    assert joined({"a": "1", "b": "2"}, {"a": "1", "b": "3"}) == {"a": "1", "b": "2+3"}
    assert joined({"a": "1+2"}, {"a": "2", "c": "4"}) == {"a": "1+2", "c": "+4"}
    assert joined({"a": "1"}, None) is None


def test_code_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert code_of(Dense())
    typed = type("Typed", (Dense,), {"__module__": "__main__"})
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    assert code_of(typed()) is None


def test_code_is_recorded_beside_the_settings(tmp_path: Path) -> None:
    compare(base, ["pdst"], [0], tmp_path)
    header = Results.read(tmp_path / "pdst-seed0").header
    assert header["code"] == code_of(base("pdst", 0).method)
    assert header["config"] == base("pdst", 0).to_json()
    assert "code" not in header["identity"]
    assert export_run(tmp_path / "pdst-seed0").exists()


# -- the table and the verdict ------------------------------------------------------------------------------------


def some(*accuracies: float) -> Summary:
    """The summary of runs, one for each seed, that ended with these accuracies in percent."""
    return summarise([Numbers(a / 100, a / 100, None, 0.1, 1, 1, 1, 1, 8, 1.0, 0) for a in accuracies])


def test_runs_that_end_early_are_summarised(tmp_path: Path) -> None:
    def small(name: str, seed: int) -> RunConfig:
        asked = {**TINY, "method": name, "seed": str(seed), "max_bytes": "1"} | (
            {"warmup_clients": "1"} if name == "spdst" else {}
        )
        return make_config({}, asked)

    runs = compare(small, ["spdst", "pdst"], [0, 1], tmp_path, quiet=True)
    found = {name: summarise([numbers_of(r.header, r.rounds) for r in group]) for name, group in runs.items()}
    assert all(s.up > 0 for s in found.values())
    assert found["spdst"].rounds == 0


def test_one_seed_has_no_spread() -> None:
    table = summary_table({"pdst": some(7.81), "nst": some(7, 8, 9)}, ["accuracy %"])
    assert [row[1].text for row in table.rows] == ["7.81", "8.00 ± 1.00"]


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ({"spdst": [97, 97.5], "jmwst": [97, 98], "pdst": [93, 94], "nst": [90, 92]},
         "As in the paper, methods whose clients share a mask with measured layer densities (spdst, jmwst) end above "
         "pdst and nst."),
        ({"dense": [99, 99], "spdst": [97, 97.5], "pdst": [93, 94]},
         "As in the paper, a method whose clients share a mask with measured layer densities (spdst) ends above pdst."),
        ({"spdst": [90.01], "pdst": [90.00]},
         "One seed cannot tell whether this is as in the paper: spdst (90.01) against pdst (90.00)."),
        ({"spdst": [90.01, 90.61], "pdst": [90.00, 90.60]},
         "Too close to tell, as the difference is within the spread over seeds: spdst (90.31) against pdst (90.30)."),
        ({"spdst": [90.00, 90.60], "pdst": [90.01, 90.61]},
         "Too close to tell, as the difference is within the spread over seeds: spdst (90.30) against pdst (90.31)."),
        ({"spdst": [90, 91], "jmwst": [89, 90], "pdst": [93, 94]},
         "Unlike in the paper, on this task and these seeds spdst (90.50) is not above pdst (93.50); "
         "jmwst (89.50) is not above pdst (93.50)."),
        ({"spdst": [93, 94], "pdst": [93, 94], "nst": [90, 91]},
         "Too close to tell, as the difference is within the spread over seeds: spdst (93.50) against pdst (93.50). "
         "As in the paper, spdst (93.50) is above nst (90.50)."),
        ({"spdst": [93, 94], "jmwst": [93, 94]}, ""),
        ({"dense": [93, 94], "nst": [93, 94]}, ""),
    ],
)  # fmt: skip
def test_verdict_names_only_what_ran(runs: dict[str, Sequence[float]], said: str) -> None:
    assert verdict({name: some(*values) for name, values in runs.items()}) == said


def test_setting_of_one_method_reaches_that_method_only() -> None:
    words = {"density": "0.1", "spdst.density": "0.2", "hetero_spdst.lr": "0.3", "rounds": "7"}
    assert settings_for("spdst", words) == {"density": "0.2", "rounds": "7"}
    assert settings_for("jmwst", words) == {"density": "0.1", "rounds": "7"}
    assert settings_for("hetero-spdst", words)["lr"] == "0.3"
    check_settings(["spdst", "hetero-spdst"], words)
    with pytest.raises(ConfigError, match=r"--hetero-spdst\.lr: hetero-spdst is not among the methods spdst"):
        check_settings(["spdst"], words)
