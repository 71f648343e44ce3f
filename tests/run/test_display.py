"""Progress of a run on the terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from flashfl.core.exchange import Traffic
from flashfl.core.record import RoundRecord, Score
from flashfl.run.progress import Display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_live_line_stays_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    display = Display("[4/15] jmwst seed 0", 60, out)
    state: Any = SimpleNamespace(counted=12)
    record = RoundRecord("training", True, 11, 0, (), {}, 0.5, Traffic(), density=0.02, total=Traffic(10**7, 2 * 10**7))
    display(state, record)
    display(state, record)
    shown = out.getvalue().split("\r")[1:]
    assert len(shown) == 2
    assert all(len(text) < columns for text in shown)
    assert shown[0].startswith("[4/15] jmwst seed 0: round 12/60"[: columns - 1])


def test_time_left_is_visible_in_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = Terminal()
    display = Display("jmwst", 600, out)
    state: Any = SimpleNamespace(counted=600)  # no time is left then
    score = {"after": Score(0.1, 0.9722, 0.02)}
    record = RoundRecord(
        "training", True, 11, 0, (), {}, 0.5, Traffic(), metrics=score, density=0.02, total=Traffic(10**7, 10**8)
    )
    display(state, record)
    display.ticked -= 1
    display.tick("training", 7)
    line, ticking = (text.rstrip() for text in out.getvalue().split("\r")[1:])
    assert line == "jmwst: round 600/600  accuracy 97.22 %  left 0:00  up 100.0 MB down 10.0 MB"
    assert ticking == "jmwst: round 600/600  accuracy 97.22 %  left 0:00  [client 7]"


def test_metric_between_evaluations_names_its_round() -> None:
    out = Terminal()
    display = Display("jmwst", 600, out)
    for counted, metrics in ((10, {"after": Score(0.1, 0.9722, 0.02)}), (13, {})):
        state: Any = SimpleNamespace(counted=counted)
        record = RoundRecord(
            "training", True, counted - 1, 0, (), {}, 0.5, Traffic(), metrics=metrics, density=0.02, total=Traffic(1, 1)
        )
        display(state, record)
    evaluated, later = out.getvalue().split("\r")[1:]
    assert "round  10/600  accuracy 97.22 %  left" in evaluated
    assert "round  13/600  accuracy 97.22 % (round 10)  left" in later
