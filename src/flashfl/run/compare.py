"""Several methods, several seeds, one table."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError, FlashError
from ..core.rng import fold
from ..data.tasks import build_task
from .config import RunConfig
from .display import Display, amount
from .results import read_run
from .runner import simulate


def run_config(
    config: RunConfig, folder: Path | None, resume: bool = False, quiet: bool = False, label: str | None = None
) -> dict[str, Any]:
    """Carry out one configuration and give back what its results file says."""
    task = build_task(config.task, fold(config.train.seed, "task"))
    display = Display(label or config.method.name, config.train.rounds, quiet=quiet)
    try:
        run = simulate(
            config.method, task, train=config.train, folder=folder, resume=resume, watch=display,
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


def run_or_continue(config: RunConfig, folder: Path, label: str, quiet: bool = False) -> dict[str, Any]:
    """Carry out a configuration, from the checkpoint on if this very one had begun in the folder."""
    before = held(folder)
    begun = before is not None and before["header"].get("config") == config.to_json()
    if begun and any((folder / "checkpoints").glob("checkpoint-*.json")):
        try:
            return run_config(config, folder, resume=True, quiet=quiet, label=label)
        except CheckpointError as error:
            print(f"{label}: cannot go on ({error}); starting anew", file=sys.stderr)
    return run_config(config, folder, quiet=quiet, label=label)


def compare(
    base: Callable[[str, int], RunConfig],
    methods: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    quiet: bool = False,
    overwrite: bool = False,
) -> dict[str, list[dict[str, Any]]]:
    """Every method with every seed. Runs that have ended are taken as they are, one that was interrupted goes on; those
    of other settings are in the way unless they may be overwritten."""
    wanted = {(name, seed): base(name, seed) for name in methods for seed in seeds}
    places = {(name, seed): folder / f"{name}-seed{seed}" for name, seed in wanted}
    before = {which: held(place) for which, place in places.items()}
    for which, run in before.items():
        if run is not None and run["header"].get("config") != wanted[which].to_json() and not overwrite:
            raise ConfigError(
                f"{places[which]} holds a run with other settings: choose another folder with --out, "
                "or replace it with --overwrite"
            )
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in methods}
    for at, (which, config) in enumerate(wanted.items(), 1):
        found, (name, seed) = before[which], which
        done = found is not None and found["end"] and found["header"].get("config") == config.to_json()
        label = f"[{at}/{len(wanted)}] {name} seed {seed}"
        runs[name].append(found if done and found else run_or_continue(config, places[which], label, quiet))
    return runs


def mean_std(values: Sequence[float]) -> tuple[float, float]:
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def summary(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What a table says of one method's runs: means over seeds."""
    ends = [run["end"] for run in runs]
    rounds = [[r for r in run["rounds"] if r["stage"] == 2] for run in runs]
    count = max(1, len(rounds[0]))
    tail = max(1, count // 6)
    accuracy, spread = mean_std([end["accuracy"] for end in ends])
    return {
        "accuracy": accuracy,
        "std": spread,
        "best": mean_std([end["best"] for end in ends])[0],
        "density": mean_std([r[-1]["density"] for r in rounds])[0],
        "up": mean_std([end["bytes"]["up"] for end in ends])[0] / count,
        "down": mean_std([end["bytes"]["down"] for end in ends])[0] / count,
        "mismatch": mean_std([statistics.fmean(x.get("mismatch", 0.0) for x in r[-tail:]) for r in rounds])[0],
        "seconds": mean_std([end["seconds"] for end in ends])[0],
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
                f"{100 * s['accuracy']:.2f} ± {100 * s['std']:.2f}",
                f"{100 * s['best']:.2f}",
                f"{s['density']:.3f}",
                amount(s["up"]),
                amount(s["down"]),
                f"{s['mismatch']:.3f}",
                f"{s['seconds']:.1f}",
            )
        )
    return out


def verdict(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Whether these runs show the paper's story, said truthfully: consensus (spdst, jmwst) above pdst and nst."""
    means = {name: summary(group)["accuracy"] for name, group in runs.items()}
    ours = [n for n in ("spdst", "jmwst") if n in means]
    theirs = [n for n in ("pdst", "nst") if n in means]
    if not ours or not theirs:
        return ""
    against = [
        f"{a} ({100 * means[a]:.2f}) is not above {b} ({100 * means[b]:.2f})"
        for a in ours
        for b in theirs
        if means[a] <= means[b]
    ]
    if not against:
        return "As in the paper, methods that agree on a sensitivity-aware mask (spdst, jmwst) end above pdst and nst."
    return "Unlike in the paper, on this task and these seeds " + "; ".join(against) + "."


def replace_seed(config: RunConfig, seed: int) -> RunConfig:
    return replace(config, train=replace(config.train, seed=seed))
