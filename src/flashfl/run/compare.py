"""Several methods, several seeds, one table."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError, FlashError
from ..core.rng import fold
from ..core.state import State
from ..data.tasks import build_task
from . import checkpoint as checkpoints
from .code import code_of
from .config import RunConfig
from .progress import Display, amount
from .results import read_run
from .simulate import simulate
from .track import check_installed


class OutOfTime(Exception):
    """A run was stopped because its time is up; what it had earned is in its last checkpoint."""


def run_config(
    config: RunConfig,
    folder: Path | None,
    resume: bool = False,
    quiet: bool = False,
    label: str | None = None,
    until: float = math.inf,
    ready: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Carry out one configuration and give back what its results file says; OutOfTime at time.monotonic() `until`.

    ready: called when all that the run needs has been found, before it begins.
    """
    task = build_task(config.task, fold(config.train.seed, "task"))
    check_installed(config.train.track)
    if ready is not None:
        ready()
    display = Display(label or config.method.name, config.train.rounds, quiet=quiet)

    def watch(state: State, line: dict[str, Any]) -> None:
        display(state, line)
        if time.monotonic() > until and not state.done:
            raise OutOfTime

    try:
        run = simulate(
            config.method, task, train=config.train, folder=folder, resume=resume, watch=watch,
            header=config.to_json(),
        )  # fmt: skip
    finally:
        display.close()
    lines = run.results.lines
    return {"folder": str(folder), "header": lines[0], "rounds": run.results.rounds, "end": lines[-1], "run": run}


def held(folder: Path) -> dict[str, Any] | None:
    """The run in this folder, if there is one that can be read."""
    try:
        return read_run(folder)
    except FlashError:
        return None


def run_or_continue(
    config: RunConfig, folder: Path, label: str, quiet: bool = False, until: float = math.inf
) -> dict[str, Any]:
    """Carry out a configuration, from the checkpoint on if one of this very run and its whole record are there."""
    if points := checkpoints.found_in(folder / "checkpoints"):
        try:
            _check_record(folder, points)
            return run_config(config, folder, resume=True, quiet=quiet, label=label, until=until)
        except CheckpointError as error:
            print(f"{label}: cannot go on ({error}); starting anew", file=sys.stderr)
    return run_config(config, folder, quiet=quiet, label=label, until=until)


def _check_record(folder: Path, points: Sequence[Path]) -> None:
    """Whoever sums up a run needs the record of all its rounds, which a checkpoint does not hold."""
    try:
        recorded = len(read_run(folder)["rounds"])
    except FlashError as error:
        raise CheckpointError(str(error)) from None
    done = 0
    for point in points:
        with suppress(checkpoints.Unusable, KeyError, TypeError):
            done = max(done, int(checkpoints.read_record(point)["progress"]["rounds"]))
    if recorded < done:
        raise CheckpointError(f"of the {done} rounds before its checkpoint {done - recorded} are not in its record")


def compare(
    base: Callable[[str, int], RunConfig],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    quiet: bool = False,
    overwrite: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Every method with every seed.

    A run that has ended is taken as it is and one that was interrupted goes on, if settings and code are the same. One
    of other settings or code, or of which the code is not known, is in the way, unless it may be overwritten.
    """
    wanted = {(name, seed): base(name, seed) for name in methods for seed in seeds}
    places = {(name, seed): folder / f"{name}-seed{seed}" for name, seed in wanted}
    before = {which: held(place) for which, place in places.items()}
    for which, run in before.items():
        if run is not None and (what := _other(run, wanted[which])) and not overwrite:
            raise ConfigError(
                f"{places[which]} holds a run with other {what}: choose another folder with --out, "
                "or replace it with --overwrite"
            )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for at, (which, config) in enumerate(wanted.items(), 1):
        found, (name, seed) = before[which], which
        label = f"[{at}/{len(wanted)}] {name} seed {seed}"
        if found is not None and _other(found, config):
            run = run_config(config, places[which], quiet=quiet, label=label)
        elif found is not None and found["end"]:
            if not quiet:
                print(f"{label}: taken from the run in {places[which]}", file=sys.stderr)
            run = found
        else:
            run = run_or_continue(config, places[which], label, quiet)
        runs[name].append(run)
    return runs


def _other(run: Mapping[str, Any], config: RunConfig) -> str:
    """In what a run is not of this configuration and this code; code that is not known is other code."""
    header, code = run["header"], code_of(config.method)
    if header.get("config") != config.to_json():
        return "settings"
    return "code" if code is None or header.get("code") != code else ""


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a table says of one method's runs: means over seeds, and the accuracy's spread where there are several."""
    mean = statistics.fmean
    ends = [run["end"] for run in runs]
    rounds = [[r for r in run["rounds"] if r["stage"] == 2] for run in runs]
    counts = [max(1, len(r)) for r in rounds]  # a run may end early, at its limit of bytes
    late = [r[-max(1, count // 6) :] or [{}] for r, count in zip(rounds, counts, strict=True)]
    accuracy = [end["accuracy"] for end in ends]
    return {
        "accuracy": mean(accuracy),
        "std": statistics.stdev(accuracy) if len(accuracy) > 1 else None,
        "best": mean(end["best"] for end in ends),
        "density": mean(run["rounds"][-1]["density"] for run in runs),
        "up": mean(end["bytes"]["up"] / count for end, count in zip(ends, counts, strict=True)),
        "down": mean(end["bytes"]["down"] / count for end, count in zip(ends, counts, strict=True)),
        "mismatch": mean(mean(x.get("mismatch", 0.0) for x in r) for r in late),
        "seconds": mean(end["seconds"] for end in ends),
        "seeds": len(runs),
    }


COLUMNS = ("method", "accuracy %", "best %", "density", "up / round", "down / round", "mask mismatch", "seconds")


def rows(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, ...]]:
    """The table's rows as text."""
    out: list[tuple[str, ...]] = []
    for name, group in runs.items():
        s = summary(group)
        out.append(
            (
                name,
                f"{100 * s['accuracy']:.2f}" + ("" if s["std"] is None else f" ± {100 * s['std']:.2f}"),
                f"{100 * s['best']:.2f}",
                f"{s['density']:.3f}",
                amount(s["up"]),
                amount(s["down"]),
                f"{s['mismatch']:.3f}",
                f"{s['seconds']:.1f}",
            )
        )
    return out


_SAID = {  # of each way two methods can stand: how the sentence begins, and what joins their names
    "above": ("As in the paper,", "is above"),
    "below": ("Unlike in the paper, on this task and these seeds", "is not above"),
    "spread": ("Within the spread over seeds, so neither as in the paper nor unlike:", "against"),
    "seed": ("One seed cannot tell whether this is as in the paper:", "against"),
}


def _standing(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """How two summaries stand: one is above the other where their ranges, mean ± spread, do not meet."""
    if a["std"] is None or b["std"] is None:
        return "seed"
    apart = a["accuracy"] - b["accuracy"]
    return "spread" if abs(apart) <= a["std"] + b["std"] else "above" if apart > 0 else "below"


def verdict(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Whether these runs show the paper's story, said truthfully: consensus (spdst, jmwst) above pdst and nst. Only
    methods that were run are named."""
    found = {name: summary(group) for name, group in runs.items()}
    ours = [n for n in ("spdst", "jmwst") if n in found]
    theirs = [n for n in ("pdst", "nst") if n in found]
    pairs: dict[str, list[str]] = {}
    for a, b in ((a, b) for a in ours for b in theirs):
        how = _standing(found[a], found[b])
        values = [f"{n} ({100 * found[n]['accuracy']:.2f})" for n in (a, b)]
        pairs.setdefault(how, []).append(f" {_SAID[how][1]} ".join(values))
    if list(pairs) == ["above"]:
        which = "methods that agree" if len(ours) > 1 else "a method that agrees"
        end = "end" if len(ours) > 1 else "ends"
        agreed = f"{which} on a sensitivity-aware mask ({', '.join(ours)})"
        return f"As in the paper, {agreed} {end} above {' and '.join(theirs)}."
    return " ".join(f"{_SAID[how][0]} {'; '.join(said)}." for how, said in pairs.items())


def replace_seed(config: RunConfig, seed: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=seed))
