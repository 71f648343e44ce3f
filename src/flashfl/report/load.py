"""Runs from folders; what cannot be read is named and left out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.errors import FlashError
from ..measure.mismatch import pairwise
from ..measure.snapshots import Snapshots
from ..run.record import SNAPSHOTS
from ..run.results import RESULTS, read_run

# Settings that say where or for how long something is done, not what: runs that differ in these alone are one group.
ELSEWHERE = {"train.seed", "train.workers", "train.device", "train.checkpoint_every", "train.track", "task.data_root"}
MOST_MASKS = 48  # more cells than these by these cannot be told apart on a screen


@dataclass(frozen=True)
class Problem:
    """A folder that is no run, and why."""

    folder: str
    why: str


@dataclass(frozen=True)
class RunData:
    """A run as its results file tells it."""

    folder: Path
    header: Mapping[str, Any]
    rounds: list[dict[str, Any]]
    end: Mapping[str, Any] | None

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its full name; of a run started from Python, those its checkpoints are known by."""
        if config := self.header.get("config"):
            return _flat(config)
        identity = self.header.get("identity", {})
        described = str(identity.get("method", "?"))
        return {
            "method.name": described.partition("(")[0].lower(),
            "method.settings": described,
            "task.dataset": self.header["task"]["name"],
            **{f"train.{k}": v for k, v in identity.get("settings", {}).items()},
        }

    @property
    def method(self) -> str:
        return str(self.settings.get("method.name", "?"))

    @property
    def seed(self) -> int:
        return int(self.settings.get("train.seed", 0))

    @cached_property
    def key(self) -> str:
        """Equal for runs that differ in their seed alone."""
        return json.dumps({k: v for k, v in self.settings.items() if k not in ELSEWHERE}, sort_keys=True)

    @property
    def layers(self) -> list[str]:
        return [name for name, _ in self.header["task"]["layers"]]

    @cached_property
    def stage2(self) -> list[dict[str, Any]]:
        return [line for line in self.rounds if line["stage"] == 2]

    @property
    def state(self) -> str:
        """finished, stopped (a limit was reached) or unfinished (still going, or interrupted)."""
        if self.end is None:
            return "unfinished"
        return "stopped" if self.end.get("stopped") else "finished"

    def heat(self) -> tuple[list[int], Any]:
        """Rounds with a kept mask, and SM of every pair of them; damaged snapshots are passed over."""
        sizes = [_size(shape) for _, shape in self.header["task"]["layers"]]
        store, rounds, masks = Snapshots(self.folder / SNAPSHOTS), [], []
        known: dict[str, Any] = {}
        kept = [line for line in self.stage2 if line.get("snapshot")]
        for line in kept[:: -(-len(kept) // MOST_MASKS) or 1]:
            name = line["snapshot"]
            try:
                known[name] = known[name] if name in known else store.get(name, sum(sizes))
            except FlashError:
                continue
            rounds.append(line["round"] + 1)
            masks.append(known[name])
        return rounds, pairwise(masks, sizes)[0] if len(masks) > 1 else None


@dataclass
class Found:
    """The runs under some paths, and what was not one."""

    runs: list[RunData] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def load(paths: Iterable[Path]) -> Found:
    """Every run in these folders; a folder may be a run or hold runs, and is named if it is neither."""
    found = Found()
    for folder in dict.fromkeys(_folders(paths)):
        try:
            found.runs.append(_read(folder))
        except FlashError as error:
            found.problems.append(Problem(str(folder), str(error)))
        except (OSError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            why = f"{folder} is damaged: its results do not read as a run's ({type(error).__name__}: {error})"
            found.problems.append(Problem(str(folder), why))
    return found


def _folders(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if (path / RESULTS).exists() or not path.is_dir():
            yield path
            continue
        inside = sorted(p for p in path.iterdir() if p.is_dir())
        runs = [p for p in inside if (p / RESULTS).exists() or _looks_like_a_run(p)]
        deeper = [p.parent for p in sorted(path.glob(f"*/*/{RESULTS}")) if p.parent.parent not in runs]
        yield from [*runs, *deeper] or [path]


def _looks_like_a_run(folder: Path) -> bool:
    """An empty folder, or one with what a run leaves, that has lost its results."""
    names = {p.name for p in folder.iterdir()}
    return not names or bool(names & {"checkpoints", SNAPSHOTS, "masks"})


def _read(folder: Path) -> RunData:
    """A run whose every line has what a report needs, or the error that says what is missing."""
    raw = read_run(folder)
    run = RunData(folder, raw["header"], raw["rounds"], raw["end"])
    _ = (run.key, run.layers, run.seed)
    if not run.rounds:
        raise FlashError(f"{folder} has no finished round yet")
    for line in run.rounds:
        _ = (line["round"] + line["stage"], line["loss"], line["density"], line["layer_densities"][0:])
        _ = (
            line["bytes"]["up"] + line["total"]["up"] + line["total"]["down"],
            len(line["cohort"]),
            len(line["failures"]),
            line["seconds"].get,
        )
        _ = [view["metric"] for view in line["metrics"].values()]
    return run


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def _size(shape: Iterable[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
