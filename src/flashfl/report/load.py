"""Runs from folders; what cannot be read is named and left out."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ..core.errors import FlashError
from ..measure.mismatch import pairwise
from ..methods import METHODS
from ..run.observe import SNAPSHOTS, snapshots
from ..run.results import RESULTS, read_run

# Settings that say where or for how long something is done, not what: runs that differ in these alone are one group.
ELSEWHERE = {"train.seed", "train.workers", "train.device", "train.checkpoint_every", "train.track", "task.data_root"}
_LEFT = {"checkpoints", SNAPSHOTS, "masks"}  # what a run leaves in its folder beside its results
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
    written: float = 0.0  # when the results file was last written to, in seconds

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Every setting by its full name; of a run started from Python, what it recorded of its task and method."""
        beside = flat({"flower": self.header.get("flower", {})})  # where clients are Flower's
        if config := self.header.get("config"):
            return {**flat(config), **beside}
        identity = self.header.get("identity", {})
        described = str(identity.get("method", "?"))
        return {
            **_method(described),
            "task.dataset": self.header["task"]["name"],
            **{f"task.{k}": v for k, v in _split(self.info).items()},
            **{f"train.{k}": v for k, v in identity.get("settings", {}).items()},
            # Digests: of the model's layers, and of how much data (and which density) each client has.
            "task.layout": identity.get("layout"),
            "task.holdings": identity.get("clients"),
            **beside,
        }

    @property
    def info(self) -> Mapping[str, Any]:
        """What the task says of itself, if it is one made by name."""
        return self.header["task"].get("info") or {}

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

    @property
    def ended(self) -> bool:
        """Whether the run did all that its settings ask for: every round, or all that a recorded limit allows."""
        return self.state == "finished" or (self.state == "stopped" and bool(self.settings.get("train.max_bytes")))

    def heat(self) -> tuple[list[int], Any]:
        """Rounds with a kept mask, and SM of every pair of them; damaged snapshots are passed over."""
        store, rounds, masks = snapshots(self.folder, self.header["task"]["layers"]), [], []
        known: dict[str, Any] = {}
        kept = [line for line in self.stage2 if line.get("snapshot")]
        for line in kept[:: -(-len(kept) // MOST_MASKS) or 1]:
            name = line["snapshot"]
            try:
                known[name] = known[name] if name in known else store[name].bits.numpy()
            except (KeyError, FlashError):
                continue
            rounds.append(line["round"] + 1)
            masks.append(known[name])
        return rounds, pairwise(masks, store.layout.sizes)[0] if len(masks) > 1 else None


@dataclass
class Found:
    """The runs under some paths, and what was not one."""

    runs: list[RunData] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def load(paths: Iterable[Path]) -> Found:
    """Every run in these folders; a folder may be a run or hold runs, and is named if it is neither.

    Of runs with the same settings and seed one counts, and the others are named too.
    """
    found = Found()
    for folder in folders(paths):
        try:
            found.runs.append(_read(folder))
        except FlashError as error:
            found.problems.append(Problem(str(folder), str(error)))
        except Exception as error:  # damage can make anything of a number, and must cost no other run
            why = f"{folder} is damaged: its results do not read as a run's ({type(error).__name__}: {error})"
            found.problems.append(Problem(str(folder), why))
    _once(found)
    return found


def folders(paths: Iterable[Path]) -> list[Path]:
    """The folders of runs at any depth below these paths, each once; a path without any stands for itself."""
    first: dict[str, Path] = {}
    for path in paths:
        for folder in list(_below(path, {os.path.realpath(path)})) or [path]:
            first.setdefault(os.path.realpath(folder), folder)
    return list(first.values())


def _below(folder: Path, seen: set[str], depth: int = 0) -> Iterator[Path]:
    """The runs in a folder, by name, or the folder itself if it is one; nothing inside a run is taken for a run."""
    try:
        inside = sorted(folder.iterdir())
    except OSError:  # not a folder, gone by now, or not ours to read: reading it as a run will say which
        yield folder
        return
    names = {path.name for path in inside}
    if RESULTS in names or (depth and names & _LEFT) or (depth == 1 and not names):
        yield folder
        return
    for path in sorted(inside, key=lambda path: path.is_symlink()):  # last, as a link may be another name of a run here
        if path.is_dir() and not path.name.startswith(".") and (real := os.path.realpath(path)) not in seen:
            seen.add(real)
            yield from _below(path, seen, depth + 1)


def _once(found: Found) -> None:
    """Of several runs of one seed, copies for example, keep the one last written to: it may be going on."""
    same: dict[tuple[object, ...], list[RunData]] = {}
    for run in found.runs:
        # A task made in Python may have been split by a seed of its own: then it is no copy.
        split = json.dumps(run.info.get("histogram"))
        same.setdefault((run.key, run.seed, run.ended, split), []).append(run)
    for runs in same.values():
        kept = max(runs, key=lambda run: run.written)
        for run in runs:
            if run is not kept:
                found.runs = [other for other in found.runs if other is not run]
                how = "is a copy of" if run.rounds == kept.rounds else "has the settings and the seed of"
                why = f"{run.folder} {how} {kept.folder}, which alone is counted"
                found.problems.append(Problem(str(run.folder), why))


def _read(folder: Path) -> RunData:
    """A run that can be reported on, or the error that says what is missing."""
    raw = read_run(folder)
    run = RunData(folder, raw["header"], raw["rounds"], raw["end"], (folder / RESULTS).stat().st_mtime)
    if not run.rounds:
        raise FlashError(f"{folder} has no finished round yet")
    _try(run)
    return run


def _try(run: RunData) -> None:
    """Report on a run alone: whatever it lacks for that is an error here, and not on a page beside others."""
    from . import gather, html, tables  # which are made of runs

    alone = Found([run])
    html.script_json(gather.page_data(alone, heat=lambda run: ([], None)))
    tables.markdown(alone)
    tables.rounds_csv(alone)
    # What seeds are averaged by, and what masks are found by: not needed of a run alone.
    width, _ = len(run.layers), sum(_size(shape) for _, shape in run.header["task"]["layers"])
    for line in run.rounds:
        rows = [line[k] for k in ("layer_densities", "layer_mismatch", "cohort_densities") if line.get(k)]
        if any(len(row) != width or sum(row) < 0 for row in rows) or not isinstance(line.get("snapshot", ""), str):
            raise ValueError(f"its layers or its mask in round {line['round'] + 1}")


def _method(described: str) -> dict[str, Any]:
    """A method's name and settings from how it prints, called as in a configuration."""
    kind = described.partition("(")[0]
    name = next((name for name, cls in METHODS.items() if cls.__name__ == kind), kind.lower())
    try:
        found = _fields(ast.parse(described, mode="eval").body)
        del found["is"]
        return flat({"method": {"name": name, **found}})
    except (SyntaxError, ValueError, TypeError):  # a method of somebody's own may print itself as it likes
        return {"method.name": name, "method.settings": described}


def _fields(node: ast.AST) -> Any:
    """What stands in the text of an object: a part with its class and fields, a value, or else the text itself."""
    if isinstance(node, ast.Call) and not node.args:
        return {"is": ast.unparse(node.func), **{str(field.arg): _fields(field.value) for field in node.keywords}}
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("np.") and len(node.args) == 1:
        return _fields(node.args[0])  # a number of numpy's
    if isinstance(node, ast.Tuple | ast.List):
        return [_fields(item) for item in node.elts]
    try:
        value = ast.literal_eval(node)  # type: ignore[arg-type]
    except ValueError:
        return ast.unparse(node)
    return value if isinstance(value, str | int | float | None) else ast.unparse(node)


def _split(info: Mapping[str, Any]) -> dict[str, Any]:
    """What a task says of its data and how they are split, whatever the seed that split them."""
    said = {k: v for k, v in info.items() if k != "histogram"}
    if said.get("partition") not in ("lda", "dirichlet"):
        said.pop("alpha", None)
    if said.get("partition") == "shards" and info.get("histogram"):
        said["classes_per_client"] = max(sum(n > 0 for n in row) for row in info["histogram"])
    return said


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out


def _size(shape: Iterable[int]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
