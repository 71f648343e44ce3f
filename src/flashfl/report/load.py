"""Find and read the runs in folders. Whatever cannot be read is reported and skipped."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..core.errors import FlashError
from ..core.record import RoundRecord
from ..data import registry
from ..measure.mismatch import pairwise
from ..paper.published import ELSEWHERE, Published, lookup
from ..run.config import Settings
from ..run.observe import SNAPSHOTS, snapshots
from ..run.results import RESULTS, Header, Results
from ..run.summary import Metric, Numbers, numbers_of
from ..run.track import flat

STARTED = "run.started"  # a run started from Python records fewer settings of its task than one started by a command
LONGER = ("train.extended", "train.changed")  # the rounds of a run that was resumed with more rounds, or with fewer
_PARTS = {"checkpoints", SNAPSHOTS, "masks"}  # folders of a run beside its results
Heat = NDArray[np.float64]  # mismatch of every pair of masks
MOST_MASKS = 48  # a heatmap with more rows cannot be read on a screen


@dataclass(frozen=True)
class RunData:
    """A run, as its results file describes it."""

    folder: Path
    header: Header
    rounds: list[RoundRecord]
    end: Settings | None
    written: float = 0.0  # when the results file last changed, in seconds

    @cached_property
    def settings(self) -> Settings:
        """Every setting by its full name. A run started from Python recorded what describes its task and method."""
        config, identity = self.header.get("config"), self.header["identity"]
        found = flat(config or {"method": identity["method"], "task": self._task(), "train": identity["settings"]})
        if before := self.header.get("extended"):
            steps = [*before, identity["settings"]["rounds"]]
            found[LONGER[steps != sorted(steps)]] = f"from {' to '.join(map(str, steps))} rounds"
        return found | {STARTED: "by command" if config else "from Python"}

    def _task(self) -> Settings:
        """What a run started from Python recorded about its task."""
        identity, task = self.header["identity"], self.header["task"]
        # Digests of the model's layers, of each client's number of samples and density, and of samples. A task made by
        # name says which data it has, and may be split again for each seed.
        digests = {name: identity.get(name) for name in ("layout", "clients")}
        if self.info:
            about = {name: value for name, value in self.info.items() if name != "histogram"}
            if registry.info(self.dataset).model == self.model:
                about["model"] = ""  # as the command line records it
        else:
            about = {"loss": identity.get("loss", ""), "metric": self.metric.name}
            digests |= {"samples": identity.get("samples"), "data": task.get("data")}
        return {"dataset": task["name"], **about, "digests": digests}

    @property
    def info(self) -> Settings:
        """How the task describes itself, if it was made by name."""
        return self.header["task"].get("info") or {}

    @property
    def method(self) -> str:
        return str(self.settings.get("method.name", "?"))

    @property
    def seed(self) -> int:
        return int(self.settings.get("train.seed", 0))

    @cached_property
    def key(self) -> str:
        """Equal for runs that differ only in their seed."""
        return json.dumps({k: v for k, v in self.settings.items() if k not in ELSEWHERE}, sort_keys=True)

    @property
    def dataset(self) -> str:
        return str(self.info.get("dataset") or self.header["task"]["name"])

    @property
    def model(self) -> str:
        return str(self.info.get("model") or self.header["task"].get("model", ""))

    @property
    def layers(self) -> list[str]:
        return [name for name, _ in self.header["task"]["layers"]]

    @cached_property
    def counted(self) -> list[RoundRecord]:
        """The rounds that count towards the run's length: all but those of a first stage."""
        return [record for record in self.rounds if record.counts]

    @cached_property
    def published(self) -> Published:
        return lookup(self.settings)

    @cached_property
    def metric(self) -> Metric:
        return Metric.of(self.header)

    @cached_property
    def numbers(self) -> Numbers:
        return numbers_of(self.header, self.rounds)

    @property
    def state(self) -> str:
        """finished, stopped (a limit was reached) or unfinished (still running, or interrupted)."""
        if self.end is None:
            return "unfinished"
        return "stopped" if self.end.get("stopped") else "finished"

    @property
    def ended(self) -> bool:
        """Whether the run did what its settings ask for: all rounds, or all that a recorded limit allows."""
        return self.state == "finished" or (self.state == "stopped" and bool(self.settings.get("train.max_bytes")))

    @property
    def mixed(self) -> list[str]:
        """The modules whose code changed before the run was resumed: its results mix two versions of them."""
        return [name for name, digest in (self.header.get("code") or {}).items() if "+" in digest]

    def heat(self) -> tuple[list[int], Heat | None]:
        """The rounds whose mask was stored, and the mismatch of every pair of them. Damaged masks are skipped."""
        stored = [(record.round + 1, record.snapshot) for record in self.counted if record.snapshot]
        layers = tuple((name, tuple(shape)) for name, shape in self.header["task"]["layers"])
        return _heat(self.folder, layers, tuple(stored[:: -(-len(stored) // MOST_MASKS) or 1]))


@lru_cache(maxsize=256)  # comparing masks is slow, and `watch` asks again after every round
def _heat(
    folder: Path, layers: tuple[tuple[str, tuple[int, ...]], ...], stored: tuple[tuple[int, str], ...]
) -> tuple[list[int], Heat | None]:
    store, masks = snapshots(folder, layers), dict[int, NDArray[np.bool_]]()
    for at, name in stored:
        with suppress(KeyError, FlashError):
            masks[at] = store[name].bits.numpy()
    return list(masks), pairwise(list(masks.values())) if len(masks) > 1 else None


@dataclass
class Found:
    """The runs below some paths, and the folders that cannot be shown with the reasons."""

    runs: list[RunData] = field(default_factory=list)
    problems: dict[Path, str] = field(default_factory=dict)


def load(paths: Iterable[Path]) -> Found:
    """Every run in these folders. A folder may be a run or hold runs; if it is neither, that is a problem.

    If several runs have the same settings and seed, one counts. The others are problems too.
    """
    found = Found()
    for folder in folders(paths):
        try:
            found.runs.append(_read(folder))
        except FlashError as error:
            found.problems[folder] = str(error)
        except Exception as error:  # a damaged file must not hide the other runs
            said = f"{type(error).__name__}: {error}"
            found.problems[folder] = f"{folder} is damaged: its results cannot be shown ({said})"
    _once(found)
    return found


def folders(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs at any depth below these paths, each once. A path without runs stands for itself."""
    first: dict[str, Path] = {}
    for path in paths:
        for folder in _below(path) or [path]:
            first.setdefault(os.path.realpath(folder), folder)
    return list(first.values())


def _below(top: Path) -> list[Path]:
    """The runs in a folder, by name, or the folder itself if it is a run. Nothing inside a run is a run."""
    found, seen = [], {os.path.realpath(top)}
    for name, inside, names in os.walk(top, followlinks=True):
        folder = Path(name)
        if RESULTS in names or (folder != top and _PARTS & set(inside)):
            found.append(folder)
            inside.clear()
        # Links come last: they may lead to a run here.
        links_last = sorted(inside, key=lambda one: ((folder / one).is_symlink(), one))
        real = {one: os.path.realpath(folder / one) for one in links_last if not one.startswith(".")}
        inside[:] = [one for one, path in real.items() if path not in seen]
        seen |= set(real.values())
    return found


def _once(found: Found) -> None:
    """Of several runs with one seed, for example copies, keep the one that changed last: it may still be running."""
    kept: dict[tuple[object, ...], RunData] = {}
    for run in sorted(found.runs, key=lambda run: -run.written):
        # A task made in Python may have been split with another seed. Then the run is not a copy.
        split = json.dumps(run.info.get("histogram"))
        first = kept.setdefault((run.key, run.seed, run.ended, split), run)
        if first is not run:
            how = "is a copy of" if run.rounds == first.rounds else "has the settings and the seed of"
            found.problems[run.folder] = f"{run.folder} {how} {first.folder}, so only {first.folder} is shown"
    found.runs = [run for run in found.runs if run.folder not in found.problems]


def _read(folder: Path) -> RunData:
    """A run that can be shown, or the error that says what is missing."""
    from . import groups, page

    found = Results.read(folder)
    run = RunData(folder, found.header, found.rounds, found.end, (folder / RESULTS).stat().st_mtime)
    if not run.rounds:
        raise FlashError(f"{folder} has no finished round yet")
    # What it lacks for a report on it alone is found here, and not on a page beside others.
    alone = Found([run])
    page.script_json(page.page_data(alone, heat=False))
    groups.rounds_csv(alone)
    # What averaging over seeds and comparing masks need.
    width = len(run.layers)
    if not all(type(n) is int and 0 <= n < 1 << 31 for _, shape in run.header["task"]["layers"] for n in shape):
        raise ValueError("a layer's shape is not made of whole numbers")
    for record in run.rounds:
        rows = [record.layer_densities, *filter(None, (record.layer_mismatch, record.cohort_densities))]
        if any(len(row) != width or not sum(row) >= 0 for row in rows):
            raise ValueError(f"round {record.round + 1} does not have a density for each of the {width} layers")
    return run
