"""Progress as a person wants to see it: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any, TextIO

from ..core.state import DROPPED, State
from .results import reported


def amount(count: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


def duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class Display:
    """Shows rounds, accuracy, density, bytes and the time left of one run."""

    def __init__(self, label: str, rounds: int, out: TextIO | None = None, quiet: bool = False) -> None:
        self.out = out or sys.stderr
        self.label, self.rounds, self.quiet = label, rounds, quiet
        self.live = self.out.isatty() and not quiet
        self.began = self.spoke = time.monotonic()
        self.done = 0
        self.metric: float | None = None
        self.width = 0

    def __call__(self, state: State, line: Mapping[str, Any]) -> None:
        if self.quiet:
            return
        self.done += line["stage"] == 2
        if line["metrics"]:
            self.metric = reported(line)["metric"]
        for client, why in line["failures"].items():
            self._say(f"{self.label}: client {client} was left out of round {line['round']}: {why}")
        text = self._text(state, line)
        now = time.monotonic()
        if self.live:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be written over
            self.out.write("\r" + text.ljust(self.width))
            self.out.flush()
            self.width = len(text)
        elif line["metrics"] or now - self.spoke > 10:
            self.spoke = now
            self._say(text)

    def _text(self, state: State, line: Mapping[str, Any]) -> str:
        if line["stage"] != 2:
            return f"{self.label}: stage {line['stage']} done"
        judged = f"accuracy {100 * self.metric:5.2f} %" if self.metric is not None else "accuracy   -    "
        rate = (time.monotonic() - self.began) / max(1, self.done)
        left = duration(rate * max(0, self.rounds - state.round))
        traffic = f"up {amount(line['total']['up'])} down {amount(line['total']['down'])}"
        return (
            f"{self.label}: round {state.round:>{len(str(self.rounds))}}/{self.rounds}  {judged}  "
            f"density {line['density']:.4f}  {traffic}  left {left}"
        )

    def _say(self, text: str) -> None:
        if self.live:
            self.out.write("\r" + " " * self.width + "\r")
        self.out.write(text + "\n")
        self.out.flush()

    def close(self) -> None:
        if self.live and self.width:
            self.out.write("\n")
            self.out.flush()


class LeftOut:
    """Warns of clients that are left out, once of each and its reason; simulated dropouts are as asked."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def __call__(self, state: State, line: Mapping[str, Any]) -> None:
        for client, why in [*line.get("missed", {}).items(), *line["failures"].items()]:
            if why != DROPPED and (client, why) not in self._said:
                self._said.add((client, why))
                warnings.warn(f"client {client} was left out of round {line['round']}: {why}", RuntimeWarning)
