"""A run's results file: JSON lines, one for the run's settings, one for each round, one for the end."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import torch

from .. import __version__
from ..core.errors import ConfigError, DataError, FlashError, warn
from ..core.files import put
from ..core.record import RoundRecord
from .config import Settings, Tables

RESULTS = "results.jsonl"
OLD = f"{RESULTS}.old"  # the results of the run that was in the folder before


def versions() -> dict[str, str]:
    """What a result may depend on beside its settings."""
    return {
        "flashfl": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


class Header(TypedDict, total=False):
    """The first line of a results file."""

    config: Tables  # empty: the run was started from Python
    identity: Settings  # see `identity_of`; records of older versions lack some of it
    task: Settings  # what `drive` says of it
    code: dict[str, str] | None
    extended: list[int]  # what `rounds` was before each extension
    versions: dict[str, str]


@dataclass
class Results:
    """The contents of a results file, and the file itself if there is one."""

    path: Path | None = None
    header: Header = field(default_factory=Header)
    rounds: list[RoundRecord] = field(default_factory=list)
    end: Settings | None = None  # the last line, if the run has ended
    _behind: bool = False  # the file lacks lines that could not be written

    @staticmethod
    def read(folder: Path) -> Results:
        """The results in a run's folder, or an error that names what is wrong with it."""
        path = folder / RESULTS
        if path.exists() and not path.is_file():  # reading a pipe or a device might never end
            raise FlashError(f"{folder} is not a run: its {path.name} is a folder or something else, expected a file")
        if not path.exists():
            lacks = f"{folder} has no {path.name}, so it is not the folder of a run"
            raise FlashError(lacks if folder.exists() else f"there is no folder {folder}")
        try:
            return Results(path, *_parse(path))
        except OSError as error:
            raise FlashError(f"{folder} is not a run: {path.name} cannot be read ({error.strerror})") from None

    @staticmethod
    def held(folder: Path) -> Results | None:
        """The results in a folder, if it holds a run that can be read."""
        try:
            return Results.read(folder)
        except FlashError:
            return None

    def begin(self, header: Mapping[str, object]) -> None:
        """Start a new file. The results of an earlier run in the folder are kept beside it."""
        if self.path is not None and self.earned:
            if b'"type": "end"' not in (before := self._content()):
                rounds = before.count(b'"counts": true')  # as `rounds` counts: without a first phase
                warn(
                    f"starting again in {self.path.parent}, where a run had stopped after {rounds} training rounds: "
                    f"its results are now in {OLD}"
                )
            self.path.replace(self.path.with_name(OLD))
        self.header = cast(Header, {"type": "run", **header, "versions": versions(), "argv": sys.argv})
        self.rounds, self.end = [], None
        self.rewrite()

    @property
    def earned(self) -> bool:
        """Whether the file, damaged or not, holds a finished round."""
        return b'"type": "round"' in self._content()

    def _content(self) -> bytes:
        """What the file holds; nothing if there is none. A link is an error: it may lead to any file of this user."""
        if self.path is None:
            return b""
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise ConfigError(
                f"{self.path} is a link or not a file, and flashfl writes results only to a file in the run's own "
                "folder. Replace it by a copy of the file, or move it away."
            )
        return self.path.read_bytes() if self.path.exists() else b""

    def resume(self, rounds: int, sent: float = math.inf) -> None:
        """Read the file and keep its first `rounds` rounds: later ones were lost with the state they came from.

        sent: the bytes of the run so far. They tell which rounds are later ones if a line was removed.
        """
        if self.path is None:
            return
        if not self._content():
            warn(f"{self.path} is missing or empty: the records of earlier rounds are lost")
            return
        self.header, found, _ = _parse(self.path)
        self.rounds = [record for record in found if record.total.total <= sent][:rounds]
        if missing := rounds - len(self.rounds):
            warn(
                f"{self.path} lacks {missing} of the {rounds} rounds before this one (rounds of a first phase count "
                "too). Tables and plots will lack them."
            )
        self.rewrite()

    def append(self, record: RoundRecord) -> None:
        self.rounds.append(record)
        if self.path is not None:
            self._write(record.to_json())

    def finish(self, end: Settings) -> None:
        self.end = {"type": "end", **end}
        self._write(self.end)

    def _write(self, line: Mapping[str, object]) -> None:
        """Add a line to the file. If that fails, for instance because the disk is full, warn and retry next time."""
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
            warn(f"could not write results to {self.path} ({error}); retrying after the next round")

    def sync(self) -> None:
        """Flush the file to disk: a checkpoint is about to rely on it."""
        if self.path is not None and self.path.exists():
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def rewrite(self) -> None:
        """Write the whole file again."""
        if self.path is None:
            return
        lines: list[Mapping[str, object]] = [self.header]
        lines += [*(record.to_json() for record in self.rounds), *([self.end] if self.end else [])]
        put(self.path, "".join(map(_text, lines)).encode(), sync=True)


def _text(line: Mapping[str, object]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in line.items()}
    return json.dumps(finite) + "\n"  # JSON has no NaN and no Infinity


def _parse(path: Path) -> tuple[Header, list[RoundRecord], Settings | None]:
    rounds: list[RoundRecord] = []
    end: Settings | None = None
    (_, first), *lines = _lines(path) or [(1, {})]
    if first.get("type") != "run":
        raise FlashError(f"{path.parent} is not a run: {path.name} does not begin with a run's settings")
    for number, line in lines:
        kind = line.get("type")
        if kind == "round":
            try:
                rounds.append(RoundRecord.from_json(line))
            except DataError as error:
                raise FlashError(f"{path}, line {number}: {error}. Repair or remove the line.") from None
        elif kind == "end":
            end = {**line, **{name: math.nan for name in ("metric", "best") if line.get(name) is None}}
        else:
            raise FlashError(
                f"{path}, line {number}: its type is {kind!s:.20}, expected round or end. Repair or remove the line."
            )
    return _checked_header(path, first), rounds, end


def _checked_header(path: Path, line: Mapping[str, Any]) -> Header:
    """A run's settings, if what must be a table is one."""
    for name, inner in (("config", "train"), ("identity", "settings"), ("task", "info")):
        table = line.get(name, {})
        wrong = name if not isinstance(table, dict) else inner
        if wrong == name or not isinstance(table.get(inner, {}), dict):
            raise FlashError(f"{path.parent} is damaged: the first line of its {path.name} has no table {wrong!r}")
    return cast(Header, line)


def _lines(path: Path) -> list[tuple[int, dict[str, object]]]:
    """The numbered lines of a file. A last line cut short by a crash is skipped; damage elsewhere is an error."""
    found, lines = [], path.read_text(errors="replace").splitlines()
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            if number < len(lines):
                advice = "Repair that line, or remove it: its round is then missing in tables."
                if number == 1:
                    advice = "Its first line holds the run's settings: repair it, or start the run again."
                raise FlashError(f"{path} is damaged in line {number}, and more lines follow. {advice}") from None
        else:
            found += [(number, line)] if isinstance(line, dict) else []
    return found
