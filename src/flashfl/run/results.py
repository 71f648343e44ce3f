"""A run's folder: results as JSON lines, and what can be read from them."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import __version__
from ..core.errors import FlashError
from ..core.files import put

RESULTS = "results.jsonl"


def versions() -> dict[str, str]:
    """What a result may depend on beside its settings."""
    return {
        "flashfl": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def reported(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a judged round says of the model that counts: the first of a method's views, whatever it is called."""
    found: dict[str, Any] = next(iter(line["metrics"].values()), {})
    return found


OLD = f"{RESULTS}.old"  # the record of the run before, where one was begun anew


class Results:
    """An append-only file of JSON lines: one `run`, one `round` for each round, one `end`."""

    def __init__(self, folder: Path | None) -> None:
        self.path = folder / RESULTS if folder else None
        self.lines: list[dict[str, Any]] = []
        self._behind = False  # the file lacks lines that could not be written

    def begin(self, header: Mapping[str, Any]) -> None:
        self.lines = []
        self._set_aside()
        self.rewrite()
        self.append({"type": "run", **header, "versions": versions(), "argv": sys.argv})

    def earned(self) -> int | None:
        """How many finished rounds the file tells of, damaged or not; None if there is no file."""
        if self.path is None or not self.path.exists():
            return None
        return self.path.read_bytes().count(b'"type": "round"')

    def _set_aside(self) -> None:
        """What a run before this one had earned is kept in another file; one that had not ended is warned of."""
        if self.path is None or not (rounds := self.earned()):
            return
        if b'"type": "end"' not in self.path.read_bytes():
            warnings.warn(
                f"starting anew in {self.path.parent}, where a run had not ended: its {rounds} finished rounds are now "
                f"in {OLD}",
                RuntimeWarning,
            )
        self.path.replace(self.path.with_name(OLD))

    def resume(self, rounds: int) -> None:
        """Keep what was known after `rounds` rounds; anything later was lost with the state it came from."""
        if self.path is None:
            return
        if not self.path.exists() or not self.path.stat().st_size:
            warnings.warn(f"{self.path} is lost or empty: the record of the rounds so far is gone", RuntimeWarning)
            return
        kept, seen = [], 0
        for line in read_lines(self.path):
            if line.get("type") == "round":
                seen += 1
                if seen > rounds:
                    break
            if line.get("type") != "end":
                kept.append(line)
        if seen < rounds:
            warnings.warn(f"{self.path} lacks {rounds - seen} of the {rounds} rounds before this one", RuntimeWarning)
        self.lines = kept
        self.rewrite()

    def sync(self) -> None:
        """See to it that the lines so far survive a loss of power: a checkpoint is about to count on them."""
        if self.path is not None and self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line; where that fails (a full disk, say) warn, go on, and make up for it with the next one."""
        self.lines.append(dict(line))
        if self.path is None:
            return
        try:
            if self._behind:
                self.rewrite()
            else:
                with self.path.open("a") as file:
                    file.write(_text(line))
            self._behind = False
        except OSError as error:
            self._behind = True
            warnings.warn(
                f"could not write results to {self.path} ({error}); tried again after the next round", RuntimeWarning
            )

    def rewrite(self) -> None:
        if self.path is None:
            return
        put(self.path, "".join(map(_text, self.lines)).encode(), sync=True)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("type") == "round"]


def _text(line: Mapping[str, Any]) -> str:
    """A line of the file. JSON knows no NaN and no infinity: what a model that diverged is judged by is null."""
    finite = _measured(line, lambda x: None if isinstance(x, float) and not math.isfinite(x) else x)
    return json.dumps(finite) + "\n"


def _measured(line: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A line with its losses and metrics changed."""
    metrics = {
        view: {k: change(v) for k, v in values.items()} if isinstance(values, Mapping) else values
        for view, values in (line["metrics"].items() if isinstance(line.get("metrics"), Mapping) else ())
    }
    changed = {k: change(line[k]) for k in ("loss", "accuracy", "best") if k in line}
    return {**line, **changed, **({"metrics": metrics} if metrics else {})}


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a results file; a last one cut short by a crash is passed over, damage elsewhere is an error."""
    with path.open(errors="replace") as file:
        bad = 0
        for number, text in enumerate(file, 1):
            if bad:
                raise FlashError(
                    f"{path} is damaged in line {bad}, and more lines follow: mend or remove that line, "
                    "or move the file away (checkpoints do not need it)"
                )
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                bad = number
                continue
            if isinstance(line, dict):
                yield _measured(line, lambda x: math.nan if x is None else x)


def read_run(folder: Path) -> dict[str, Any]:
    """A run's header, rounds and end, or an error that names the folder."""
    path = folder / RESULTS
    try:
        lines = list(read_lines(path))
    except OSError as error:
        raise FlashError(f"{folder} is not a run: {path.name} cannot be read ({error.strerror})") from None
    if not lines or lines[0].get("type") != "run":
        raise FlashError(f"{folder} is not a run: {path.name} does not begin with a run's settings")
    return {
        "folder": str(folder),
        "header": lines[0],
        "rounds": [line for line in lines if line.get("type") == "round"],
        "end": next((line for line in reversed(lines) if line.get("type") == "end"), None),
    }
