"""Progress of a run on the terminal."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

import flashfl as fl
from flashfl.core.exchange import Spent, Traffic
from flashfl.core.record import RoundRecord, Score
from flashfl.run.progress import Display, WarnOfDropped, epsilons
from flashfl.run.summary import numbers_of
from tests.conftest import make_task


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


SPENT = Spent(known=9.76, sampled=7.99, delta=1e-5)


@pytest.mark.parametrize(
    ("secure", "said"),
    [
        (False, "7.99 at delta 1e-05 (9.76 against somebody who knows the cohorts)"),
        (True, "9.76 at delta 1e-05 (7.99 against somebody who does not know the cohorts)"),
    ],
)
def test_epsilon_that_the_budget_limits_comes_first(secure: bool, said: str) -> None:
    assert epsilons(SPENT, secure) == said
    out = Terminal()
    display = Display("pdst", 5, out)
    display.secure = secure
    state: Any = SimpleNamespace(counted=2)
    display(state, RoundRecord("training", True, 1, 0, (), {}, 0.5, Traffic(), privacy=SPENT))
    assert f"  epsilon {said[:4]}  up" in out.getvalue()


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.filterwarnings("ignore:secure = true is only simulated")
def test_progress_and_tables_of_a_private_run_show_the_epsilon_that_the_budget_limits(secure: bool) -> None:
    pytest.importorskip("cryptography", reason="pip install 'flashfl[privacy]'")
    pytest.importorskip("dp_accounting", reason="pip install 'flashfl[privacy]'")
    out, method, task = io.StringIO(), fl.PDST(density=0.3), make_task("norm", clients=100)
    run = fl.simulate(
        method, task, 2, progress=Display("pdst", 2, out), secure=secure, dp_epsilon=8.0, per_round=10, workers=1
    )
    spent = run.privacy
    assert spent is not None
    limited = spent.known if secure else spent.sampled
    assert abs(spent.known - spent.sampled) > 0.1
    assert f"  epsilon {limited:.2f}  up" in out.getvalue().splitlines()[-1]
    assert f"epsilon {limited:.2f} at delta" in repr(run)
    assert f"epsilon {limited:.2f} at delta" in run.spent
    assert numbers_of(run.results.header, run.history).epsilon == limited <= 8.0


def test_dropped_client_is_named_with_the_round_that_progress_shows() -> None:
    """A repeated secure round has a new number: its record says round 9, and progress 6/6."""
    out = Terminal()
    state: Any = SimpleNamespace(counted=6)
    record = RoundRecord("training", True, 9, 0, (), {7: "too late"}, 0.5, Traffic())
    Display("pdst", 6, out)(state, record)
    assert "pdst: client 7 was dropped in round 6: too late" in out.getvalue()
    assert "round 6/6" in out.getvalue()
    with pytest.warns(RuntimeWarning, match="client 7 was dropped in round 6: too late"):
        WarnOfDropped()(state, record)
    first = RoundRecord("sensitivity", False, 0, 0, (), {7: "too late"}, 0.5, Traffic())
    with pytest.warns(RuntimeWarning, match="client 7 was dropped in round 1 of the phase 'sensitivity': too late"):
        WarnOfDropped()(SimpleNamespace(counted=0), first)  # type: ignore[arg-type]
