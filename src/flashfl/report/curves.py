"""Series over rounds, of one run and of several seeds as mean and spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..core.record import RoundRecord
from .load import RunData

MOST_POINTS = 240
Series = dict[int, float]  # round (counted from 1) -> value
Value = Callable[[RoundRecord], float | None]
Band = dict[str, list[float]]  # round, mean and std: a value for each round


def accuracy(runs: Sequence[RunData]) -> Band:
    return band(_over_rounds(runs, lambda record: None if record.score is None else record.score.metric))


def mismatch(runs: Sequence[RunData]) -> Band:
    return band(_over_rounds(runs, lambda record: record.mismatch))


def mean_at(runs: Sequence[RunData], value: Value, rounds: Iterable[float]) -> list[float]:
    """The mean over seeds at these rounds."""
    series = _over_rounds(runs, value)
    return [statistics.fmean([one[int(r)] for one in series if int(r) in one] or [math.nan]) for r in rounds]


def _over_rounds(runs: Sequence[RunData], value: Value) -> list[Series]:
    """For each run, a number for each counted round that has one."""
    every = [{record.round + 1: value(record) for record in run.counted} for run in runs]
    return [{r: float(v) for r, v in found.items() if v is not None and math.isfinite(v)} for found in every]


def band(series: Sequence[Series]) -> Band:
    """Mean and standard deviation over seeds, at all rounds that any seed has, thinned to what a screen can show."""
    rounds = thin(sorted({r for one in series for r in one}))
    columns = [[one[r] for one in series if r in one] for r in rounds]
    return {
        "round": [float(r) for r in rounds],
        "mean": [digits(statistics.fmean(c)) for c in columns],
        "std": [digits(statistics.stdev(c)) if len(c) > 1 else 0.0 for c in columns],
    }


def thin(items: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """An even choice of at most `most` items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    places = np.unique(np.linspace(0, len(items) - 1, most).round().astype(int))
    return [items[i] for i in places]


def layer_mismatch(runs: Sequence[RunData]) -> tuple[list[int], list[list[float]]]:
    """Mean mismatch of each layer between consecutive rounds: the rounds, and for each layer a value a round."""
    width = len(runs[0].layers)
    rows: dict[int, list[tuple[float, ...]]] = {}
    for run in runs:
        for record in run.counted:
            if record.mismatch is not None:
                rows.setdefault(record.round + 1, []).append(record.layer_mismatch or (0.0,) * width)
    rounds = thin(sorted(rows), 120)
    table = np.array([np.mean(rows[r], axis=0) for r in rounds]).reshape(len(rounds), width)
    return rounds, [[digits(v) for v in column] for column in table.T.tolist()]


def moving_layers(runs: Sequence[RunData]) -> tuple[list[int], list[list[float]]]:
    """The same, or nothing if no mask ever moves."""
    rounds, layers = layer_mismatch(runs)
    return rounds, layers if any(v > 0 for row in layers for v in row) else []


def heat(runs: Sequence[RunData]) -> tuple[list[int], list[list[float]]]:
    """Mean mismatch over seeds between every two rounds whose masks all seeds have stored, and these rounds."""
    found = [(rounds, table) for rounds, table in map(RunData.heat, runs) if table is not None]
    common = sorted(set.intersection(*(set(rounds) for rounds, _ in found))) if found else []
    if len(common) < 2:
        return [], []
    tables = [table[np.ix_(where, where)] for r, table in found for where in [[r.index(c) for c in common]]]
    return common, np.mean(tables, axis=0).round(4).tolist()


def final_densities(runs: Sequence[RunData]) -> list[float]:
    """Layer densities after the last round, mean over seeds."""
    rows = [run.counted[-1].layer_densities for run in runs if run.counted]
    return [digits(v) for v in np.mean(rows, axis=0).tolist()] if rows else []


def digits(value: float) -> float:
    """A number rounded to what a screen can show."""
    return float(f"{value:.6g}") if math.isfinite(value) else 0.0
