"""Progress as a person wants to see it: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from ..core.errors import warn
from ..core.exchange import DROPPED, Spent
from ..core.record import RoundRecord
from ..core.state import State
from .summary import ACCURACY

Watch = Callable[[State, RoundRecord], None]


def amount(count: float) -> str:
    """Bytes in a readable unit."""
    unit = "B"
    for larger in ("kB", "MB", "GB"):
        if count >= 1000:
            count, unit = count / 1000, larger
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def epsilons(spent: Spent, secure: bool) -> str:
    """The privacy spent: the epsilon that `dp_epsilon` limits, and the other one."""
    limited, other = spent.limited(secure), spent.limited(not secure)
    who = "does not know" if secure else "knows"
    return f"{limited:.2f} at delta {spent.delta:g} ({other:.2f} against somebody who {who} the cohorts)"


class Display:
    """Shows rounds, the metric, density, bytes and the time left of one run.

    On a terminal and in a notebook it keeps one line up to date; elsewhere it writes a line now and then.
    """

    def __init__(
        self,
        label: str,
        rounds: int,
        out: TextIO | None = None,
        quiet: bool = False,
        then: Watch | None = None,
    ) -> None:
        """then: called after each round, once it is shown."""
        self.out, self.then = out or sys.stderr, then
        self.label, self.rounds, self.quiet = label, rounds, quiet
        # The task's metric, and whether the run is secure, which decides what `dp_epsilon` limits. `drive` sets both.
        self.shown, self.secure = ACCURACY, False
        self.live = not quiet and is_live(self.out)
        self.began = self.spoke = self.ticked = time.monotonic()
        self.done = 0
        self.metric: tuple[int, float] | None = None  # the last evaluation: after which round, and what it gave
        self.last = ""  # the line on screen, without what a tick adds
        self.width = 0

    def resumed(self, where: str) -> None:
        """A run was resumed: say where it goes on."""
        if not self.quiet:
            self._say(f"{self.label}: {where}")

    def tick(self, phase: str, orders: int) -> None:
        """An order has gone out: show how far a long round has got."""
        now = time.monotonic()
        if self.live and now - self.ticked > 0.5:
            self.ticked = now
            self._draw(self.last or f"{self.label}: {phase}", f"  [client {orders}]")

    def __call__(self, state: State, record: RoundRecord) -> None:
        if not self.quiet:
            self._show(state, record)
        if self.then is not None:
            self.then(state, record)

    def _show(self, state: State, record: RoundRecord) -> None:
        self.done += record.counts
        if record.score is not None:
            self.metric = state.counted, record.score.metric
        for client, why in record.failures.items():
            self._say(f"{self.label}: {_dropped(state, record, client, why)}")
        self.last = self._text(state, record)
        now = time.monotonic()
        if self.live:
            self._draw(self.last)
        elif record.metrics or now - self.spoke > 10:
            self.spoke = now
            self._say(self.last)

    def _text(self, state: State, record: RoundRecord) -> str:
        if not record.counts:
            return f"{self.label}: {record.phase} done"
        at, value = self.metric or (state.counted, None)
        metric = f"{self.shown.name} {'-' if value is None else self.shown.label(value):>7}"
        metric += f" (round {at})" if at != state.counted else ""
        rate = (time.monotonic() - self.began) / max(1, self.done)
        left = duration(rate * max(0, self.rounds - state.counted))
        traffic = f"up {amount(record.total.up)} down {amount(record.total.down)}"
        return (
            f"{self.label}: round {state.counted:>{len(str(self.rounds))}}/{self.rounds}  {metric}  left {left}"
            f"{self._private(record)}  {traffic}  density {record.density:.4f}"
        )

    def _private(self, record: RoundRecord) -> str:
        """The epsilon that `dp_epsilon` limits, and values that did not fit their declared range."""
        if (spent := record.privacy) is None:
            return ""
        said = f"  epsilon {spent.limited(self.secure):.2f}" if spent.delta else ""
        return said + (f"  {spent.clamped} values cut to ranges" if spent.clamped else "")

    def _draw(self, text: str, end: str = "") -> None:
        """Write over the line. A line that wraps could not be, so parts that do not fit before `end` are left out."""
        columns = shutil.get_terminal_size().columns - 1
        room = max(0, columns - len(end))
        if len(text) > room:
            text = text[: room + 2].rpartition("  ")[0] or text[:room]
        text = (text + end)[:columns]
        self.out.write("\r" + text.ljust(self.width))
        self.out.flush()
        self.width = len(text)

    def _say(self, text: str) -> None:
        if self.live:
            self.out.write("\r" + " " * self.width + "\r")
        self.out.write(text + "\n")
        self.out.flush()

    def close(self) -> None:
        if self.live and self.width:
            self.out.write("\n")
            self.out.flush()


def _dropped(state: State, record: RoundRecord, client: int, why: str) -> str:
    """The round is the one that progress shows: a repeated secure round has another number in its record."""
    place = f"{state.counted}" if record.counts else f"{record.round + 1} of the phase {record.phase!r}"
    return f"client {client} was dropped in round {place}: {why}"


def is_live(out: TextIO) -> bool:
    """Whether a line can be written over: on a terminal, or in a notebook."""
    return out.isatty() or "ipykernel" in sys.modules


class WarnOfDropped:
    """Warns about dropped clients, once for each client and reason. Simulated dropouts are as asked."""

    def __init__(self) -> None:
        self._said: set[tuple[int, str]] = set()

    def __call__(self, state: State, record: RoundRecord) -> None:
        for client, why in [*record.missed.items(), *record.failures.items()]:
            if why != DROPPED and (client, why) not in self._said:
                self._said.add((client, why))
                warn(_dropped(state, record, client, why))
