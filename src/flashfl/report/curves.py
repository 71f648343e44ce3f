"""Series over rounds: of one run, and of several seeds as mean and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..run.results import reported
from .load import RunData

MOST_POINTS = 240
Series = dict[int, float]  # round (counted from 1) -> value


def over_rounds(run: RunData, value: Callable[[dict[str, Any]], Any]) -> Series:
    """A number of each round of stage 2 where there is one."""
    found = {line["round"] + 1: value(line) for line in run.stage2}
    return {r: float(v) for r, v in found.items() if v is not None and math.isfinite(v)}


def accuracy(run: RunData, view: str = "") -> Series:
    """Of one of a method's views; of the one reported unless it is named."""
    return over_rounds(run, lambda line: (line["metrics"].get(view, {}) if view else reported(line)).get("metric"))


def mismatch(run: RunData) -> Series:
    return over_rounds(run, lambda line: line.get("mismatch"))


def running_total(run: RunData, value: Callable[[dict[str, Any]], float]) -> Series:
    """A sum over all rounds so far, stage 1 included."""
    total, found = 0.0, {}
    for line in run.rounds:
        total += value(line)
        if line["stage"] == 2:
            found[line["round"] + 1] = total
    return found


def total_bytes(run: RunData, direction: str) -> Series:
    return over_rounds(run, lambda line: line["total"][direction])


def total_flops(run: RunData) -> Series:
    if not any("flops" in line for line in run.rounds):
        return {}
    return running_total(run, lambda line: line.get("flops", 0.0))


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def band(series: Sequence[Series]) -> dict[str, list[float]]:
    """Mean and standard deviation over seeds, at the rounds any of them has, thinned to what a screen can show."""
    rounds = thin(sorted({r for one in series for r in one}))
    columns = [[one[r] for one in series if r in one] for r in rounds]
    return {
        "round": [float(r) for r in rounds],
        "mean": [digits(statistics.fmean(c)) for c in columns],
        "std": [digits(spread(c)) for c in columns],
    }


def thin(items: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """An even choice of at most `most` items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    places = np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    return [items[i] for i in places]


def mean_at(series: Sequence[Series], rounds: Iterable[float]) -> list[float]:
    """The mean over seeds at these rounds; every round must be in one of them."""
    return [statistics.fmean([one[int(r)] for one in series if int(r) in one] or [math.nan]) for r in rounds]


def layer_mismatch(runs: Sequence[RunData]) -> dict[str, Any]:
    """Mean SM of each layer between consecutive rounds: {"round": [...], "layers": [layer][round]}."""
    width = len(runs[0].layers)
    sums: dict[int, list[np.ndarray[Any, Any]]] = {}
    for run in runs:
        for line in run.stage2:
            if "layer_mismatch" in line:
                row = np.array(line["layer_mismatch"] or [0.0] * width)
                sums.setdefault(line["round"] + 1, []).append(row)
    rounds = thin(sorted(sums), 120)
    table = np.array([np.mean(sums[r], axis=0) for r in rounds]).reshape(len(rounds), width)
    return {"round": rounds, "layers": [[digits(v) for v in column] for column in table.T.tolist()]}


def heat(runs: Sequence[RunData], of: Callable[[RunData], tuple[list[int], Any]] = RunData.heat) -> dict[str, Any]:
    """Mean SM over seeds between the rounds whose masks every seed has kept."""
    found = [(rounds, table) for rounds, table in map(of, runs) if table is not None]
    common = sorted(set.intersection(*(set(rounds) for rounds, _ in found))) if found else []
    if len(common) < 2:
        return {"round": [], "sm": []}
    tables = [table[np.ix_(where, where)] for r, table in found for where in [[r.index(c) for c in common]]]
    return {"round": common, "sm": np.mean(tables, axis=0).round(4).tolist()}


def digits(value: float, count: int = 6) -> float:
    """A number in as many significant digits as a screen can tell apart."""
    return float(f"{value:.{count}g}") if math.isfinite(value) else 0.0


def mean_densities(runs: Sequence[RunData], line: Callable[[RunData], Mapping[str, Any] | None]) -> list[float]:
    """Layer densities, mean over seeds, of the line chosen of each run."""
    rows = [chosen["layer_densities"] for run in runs if (chosen := line(run)) is not None]
    return [digits(v) for v in np.mean(rows, axis=0).tolist()] if rows else []
