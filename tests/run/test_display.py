"""What a person sees while a run goes on."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest
from flashfl.run.display import Display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("columns", [40, 60, 200])
def test_a_live_line_stays_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = Terminal()
    display = Display("[4/15] jmwst seed 0", 60, out)
    state: Any = SimpleNamespace(round=12)
    line = {"stage": 2, "round": 11, "metrics": {}, "failures": {}, "density": 0.02, "total": {"up": 1e7, "down": 2e7}}
    display(state, line)
    display(state, line)
    shown = out.getvalue().split("\r")[1:]
    assert len(shown) == 2
    assert all(len(text) < columns for text in shown)
    assert shown[0].startswith("[4/15] jmwst seed 0: round 12/60"[: columns - 1])
