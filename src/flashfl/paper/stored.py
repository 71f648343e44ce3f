"""Results of cells: JSON lines, one file for each data set, one line for each cell and seed.

A line is written when a run has ended, and nothing in it is typed by hand. Lines are sorted by their place. If a place
has several lines, the last one counts, so results of another machine can simply be appended to a file.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.files import put
from ..run.config import OUTSIDE
from ..run.lock import claim
from ..run.track import flat
from .cells import Cell
from .result import Record, numbers_of, stale

_OUTSIDE = (*OUTSIDE, "threads", "lanes")  # they change the last bits of a result at most


class Stored:
    """The results in a folder. Files are read again when they have changed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, tuple[object, dict[str, Record]]] = {}

    def get(self, cell: Cell, seed: int) -> Record | None:
        """The result of a cell and a seed, if there is one that can be read and belongs to them."""
        path, place = self._path(cell), cell.place(seed)
        record = self._records(path).get(place)
        if record is not None and (wrong := _wrong(record, cell, seed)):
            warnings.warn(f"{path}: {place} counts as not run: {wrong}", RuntimeWarning)
            return None
        return record

    def all(self, cell: Cell, seeds: int | None) -> list[Record]:
        """The results of a cell's first seeds, or of all seeds. Stale ones count only if there are no others."""
        stem = cell.place(0).removesuffix("0")
        there = [p.removeprefix(stem) for p in self._records(self._path(cell)) if p.startswith(stem)]
        wanted = range(seeds) if seeds else sorted(int(s) for s in there if s.isdecimal() and s == f"{int(s)}")
        found = [record for seed in wanted if (record := self.get(cell, seed))]
        return [record for record in found if not stale(record, cell)] or found

    def missing(self, cell: Cell, seed: int) -> bool:
        """Whether there is no result of this recipe."""
        found = self.get(cell, seed)
        return found is None or stale(found, cell)

    def pending(self, cells: Sequence[Cell], seeds: int) -> Iterator[tuple[Cell, int]]:
        """What is still to be run, in the table's order, first seeds first. Cells that are alike come once."""
        seen = set()
        for seed in range(seeds):
            for cell in cells:
                place = cell.place(seed)
                if place not in seen and self.missing(cell, seed):
                    seen.add(place)
                    yield cell, seed

    def add(self, cell: Cell, record: Record) -> Path:
        """Write a result, beside what other processes have written meanwhile."""
        path = self._path(cell)
        line = json.dumps(record)
        with _alone(path.with_name(f".{path.name}.lock")):
            lines = {_parse(text)["place"]: text for text in _lines(path)} | {record["place"]: line}
            put(path, "".join(f"{lines[place]}\n" for place in sorted(lines)).encode())
        return path

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.dataset}.jsonl"

    def _records(self, path: Path) -> dict[str, Record]:
        try:
            stat = path.stat()
        except OSError:
            return {}
        stamp = (stat.st_mtime_ns, stat.st_size)
        if path not in self._read or self._read[path][0] != stamp:
            found = [_parse(text) for text in _lines(path)]
            if lost := [number for number, record in enumerate(found, 1) if len(record) == 1]:
                warnings.warn(f"{path}: lines {lost} are not results and are skipped", RuntimeWarning)
            self._read[path] = (stamp, {record["place"]: record for record in found})
        return self._read[path][1]


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _parse(text: str) -> Record:
    """A line's record. A line that cannot be read becomes a record without numbers, at a place nobody asks for."""
    try:
        record = json.loads(text)
        return {**record, "place": str(record["place"])}
    except (ValueError, LookupError, TypeError, RecursionError):
        return {"place": text}


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until this process alone holds a lock file."""
    while True:
        with claim(path) as ours:
            if ours:
                yield
                return
        time.sleep(0.05)


def _wrong(record: Record, cell: Cell, seed: int) -> str:
    """Why this is not a result of the cell and the seed. Empty if it is."""
    try:
        numbers = {name: value for name, value in asdict(numbers_of(record)).items() if value is not None}
        numbers |= {name: record[name] for name in ("recipe", "seed")}
        curve = all(len(row) == 4 and all(map(_is_number, row)) for row in record.get("curve", []))
    except (LookupError, TypeError, AttributeError) as error:
        return f"it lacks a number ({type(error).__name__}: {error})"
    above = ("up", "down", "rounds", "orders", "dense")
    odd = [name for name, value in numbers.items() if not _is_number(value) or (name in above and value <= 0)]
    odd += [name for name in ("accuracy", "best") if name not in numbers]
    if odd or not curve:
        return f"its {', '.join(odd) or 'curve'} cannot be used"
    if record["seed"] != seed:
        return f"it has seed {record['seed']}"
    return "" if stale(record, cell) else _other_settings(record.get("config"), cell, seed)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _other_settings(config: Any, cell: Cell, seed: int) -> str:
    """Which setting of a stored configuration differs from the cell's. A setting that only one knows does not count."""
    mine = json.loads(json.dumps(cell.config(seed).to_json()))
    if not isinstance(config, dict) or not all(isinstance(config.get(table), dict) for table in mine):
        return f"it lacks its {', '.join(mine)} settings"
    stored = flat(config)
    for name, value in flat(mine).items():
        short = name.partition(".")[2]
        if short not in _OUTSIDE and name in stored and stored[name] != value:
            return f"its {short} is {str(stored[name])[:40]} and the cell's is {str(value)[:40]}"
    return ""
