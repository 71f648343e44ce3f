"""Results of cells: JSON lines, one file for each data set, one line for each cell and seed.

A line is written when a run has ended, and nothing in it is typed by hand. Lines are sorted by their place. If a place
has several lines, the last one counts, so results of another machine can simply be appended to a file.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..core.errors import warn
from ..core.files import put
from ..run.code import PACKAGE, digest
from ..run.config import Tables, make_config
from ..run.lock import claim
from ..run.results import Results, versions
from ..run.summary import Numbers, plain_of
from ..run.track import flat
from .cells import SETTINGS, Cell, derived, load_table, short

Record = dict[str, Any]  # a line of a results file

# Raised when the code changes in a way that changes results: older ones are then marked stale.
RECIPE = 1
# Changes of these methods only. Counts never fall.
CHANGED = {"hetero-spdst": 1, "hetero-jmwst": 1, "zerofl": 1, "sparsyfed": 1}


def recipe_of(method: str) -> int:
    return RECIPE + CHANGED.get(method, 0)


def stale(record: Record, cell: Cell) -> bool:
    return record.get("recipe") != recipe_of(cell.method["name"])


class Stored:
    """The results in a folder, as they are whenever one is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, cell: Cell, seed: int) -> Record | None:
        """The result of a cell and a seed, if there is one that can be read."""
        return self._records(cell).get(cell.place(seed))

    def all(self, cell: Cell, seeds: int | None) -> list[Record]:
        """The results of a cell's first seeds, or of all seeds. Stale ones count only if there are no others.

        A cell whose learning rate is not chosen yet has none.
        """
        if cell.tuned:
            return []
        mine = [r for place, r in self._records(cell).items() if place == cell.place(r["seed"])]
        found = sorted((r for r in mine if seeds is None or r["seed"] < seeds), key=lambda r: r["seed"])
        found = [record for record in found if not stale(record, cell)] or found
        return [early for record in found if (early := _until(record, cell.up))] if cell.up else found

    def missing(self, cell: Cell, seed: int) -> bool:
        """Whether there is no result of this recipe."""
        found = self.get(cell, seed)
        return found is None or stale(found, cell)

    def pending(self, cells: Sequence[Cell], seeds: int) -> list[tuple[Cell, int]]:
        """What is still to be run, in the table's order, first seeds first. Cells that are alike come once."""
        cells = [settled(cell, self) or cell for cell in cells]
        every = {cell.place(seed): (cell, seed) for seed in range(seeds) for cell in cells}
        return [(cell, seed) for cell, seed in every.values() if cell.tuned or self.missing(cell, seed)]

    def add(self, cell: Cell, record: Record) -> None:
        """Write a result, beside what other processes have written meanwhile."""
        path = self._path(cell)
        with claim(path.with_name(f".{path.name}.lock"), wait=True):
            lines = {_parse(text)["place"]: text for text in _lines(path)} | {record["place"]: json.dumps(record)}
            put(path, "".join(f"{lines[place]}\n" for place in sorted(lines)).encode())

    def _path(self, cell: Cell) -> Path:
        return self.folder / f"{cell.dataset}.jsonl"

    def _records(self, cell: Cell) -> Mapping[str, Record]:
        path = self._path(cell)
        if not path.exists():
            return {}
        stat = path.stat()
        return _read(path, stat.st_mtime_ns, stat.st_size)


def settled(cell: Cell, stored: Stored) -> Cell | None:
    """The cell with its learning rate. None if it must be chosen and a rate has not been tried yet.

    Chosen is the rate whose runs in the cell's table `tuned` end with the highest mean accuracy: the same task, method
    and settings, in fewer rounds and on held-out training samples. Of equal rates the one listed first is taken.
    """
    if not cell.tuned:
        return cell

    def same(other: Cell) -> bool:
        train = {k: v for k, v in other.train.items() if k not in ("rounds", "lr")}
        task = {k: v for k, v in other.task.items() if k != "held_out"}
        return (task, other.method, train) == (cell.task, cell.method, cell.train)

    tried = {other.train["lr"]: stored.all(other, None) for other in load_table(cell.tuned).cells if same(other)}
    if not tried or not all(tried.values()):
        return None
    best = max(tried, key=lambda lr: fmean(record["accuracy"] for record in tried[lr]))
    usual = SETTINGS[cell.dataset]["train"]["lr"]  # then the result may stand in other tables too
    train = {**cell.train, **({} if best == usual else {"lr": best})}
    return replace(cell, train=train, column=f"{cell.column} lr {best:g}", tuned="")


def _until(record: Record, up: int) -> Record | None:
    """A result as it was when `up` bytes had been sent up: its last evaluation before. None if it ended before."""
    curve = [point for point in record["curve"] if point[2] <= up]
    if not curve or record["bytes"]["up"] < up:
        return None
    last, best = curve[-1], max(point[1] for point in curve)
    sent = {**record["bytes"], "up": last[2], "down": last[3]}
    return {**record, "curve": curve, "accuracy": last[1], "best": best, "views": {}, "bytes": sent, "rounds": last[0]}


@lru_cache(maxsize=8)
def _read(path: Path, changed: int, size: int) -> Mapping[str, Record]:
    """The results in a file by their place. It is read again when it has changed."""
    found = [_parse(text) for text in _lines(path)]
    if lost := [number for number, record in enumerate(found, 1) if len(record) == 1]:
        warn(f"{path}: lines {lost} are not results and are skipped")
    return {record["place"]: record for record in found if len(record) > 1}


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _parse(text: str) -> Record:
    """A line's record. A line that is not a result becomes a record without numbers, at a place nobody asks for."""
    try:
        record = json.loads(text)
        numbers_of(record)
        return {**record, "place": str(record["place"]), "seed": int(record["seed"])}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {"place": text}


def numbers_of(record: Record) -> Numbers:
    """A stored result as a report's numbers."""
    orders = record["rounds"] * record["clients_per_round"]
    return Numbers(
        accuracy=record["accuracy"],
        best=record["best"],
        before=record.get("views", {}).get("before"),
        density=record.get("density"),
        up=record["bytes"]["up"],
        down=record["bytes"]["down"],
        rounds=record["rounds"],
        orders=orders,
        dense=2 * 4 * record["values"] * orders,
        seconds=record["seconds"],
        dropped=record.get("dropped", 0),
        plain=plain_of(record.get("views", {})),
    )


def record_of(cell: Cell, seed: int, results: Results) -> Record:
    """A finished run as a line: its figures, its curve, and everything that says where they came from."""
    assert results.end is not None
    end, rounds = results.end, results.rounds
    counted = [r for r in rounds if r.counts]
    scores = [(r, r.score) for r in rounds if r.score is not None]
    config, source = results.header["config"], digest(PACKAGE)
    begun = (results.header.get("code") or {}).get(PACKAGE.name, source)
    last, score = scores[-1]
    return {
        "place": cell.place(seed),
        "recipe": recipe_of(cell.method["name"]),
        "command": command_of(config),
        "commit": commit() + ("" if begun == source else f", begun by source {begun.partition('+')[0]}"),
        "seed": seed,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}",
        "versions": versions(),
        "accuracy": end["metric"],
        "best": end["best"],
        "views": {name: view.metric for name, view in last.metrics.items()},
        "density": score.density,
        "curve": [[r.round + 1, round(s.metric, 5), r.total.up, r.total.down] for r, s in scores],
        "mismatch": [round(r.mismatch or 0.0, 4) for r in counted][:: max(1, len(rounds) // 60)],
        "layer_densities": list(rounds[-1].layer_densities),
        "bytes": end["bytes"],
        "rounds": len(counted),
        "dropped": sum(len(r.failures) for r in rounds),
        "clients_per_round": config["train"]["per_round"],
        "values": results.header["task"]["values"],
        "seconds": round(end["seconds"], 1),
        "checksum": end["checksum"],
        "config": config,
    }  # fmt: skip


def command_of(config: Tables) -> str:
    """The command line that gives this configuration."""
    method = config["method"]["name"]
    default = flat(make_config({"method": {"name": method}}).to_json())
    unsaid = {"method.name", "train.device", "train.workers", "task.data_root", *derived(method)}
    words = [f"flashfl run --method {method}"]
    for name, value in flat({table: config[table] for table in ("method", "task", "train")}).items():
        always = name == "method.density"  # its default depends on the data set
        if name not in unsaid and (always or value != default.get(name)):
            words.append(f"--{name.partition('.')[2].replace('_', '-')} {short(value)}")
    return " ".join(words)


@cache
def commit() -> str:
    """The commit of the code when first asked for, if it is a checkout, or else a digest of its content.

    Set FLASHFL_COMMIT to name it for a copy without history.
    """
    if said := os.environ.get("FLASHFL_COMMIT"):
        return said

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=PACKAGE, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # the code may be a copy inside another checkout
        return git("describe", "--always", "--dirty")
    except (OSError, subprocess.SubprocessError):
        return "source " + digest(PACKAGE)
