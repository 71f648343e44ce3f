"""Trimmed means: the weighted mean of numbers without the smallest and the largest of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.exchange import Sums, Update

TRIM = 0.2  # share of the samples whose statistics, counts and losses are dropped at either end
FEW = 3  # fewer values than this cannot be trimmed
_STRETCH = 32 << 20  # numbers that are ranked at a time, over all clients


class Told(NamedTuple):
    """The statistics of a model."""

    n: int
    active: int
    statistics: Tensor


def write(row: Tensor, update: Update) -> None:
    """Unpack the weights of an update; NaN where it holds none."""
    assert update.mask is not None
    assert update.values is not None
    active, k = update.mask.active, update.mask.layout.prunable_size
    row[:k] = torch.nan
    row[update.mask.places] = update.values[:active]
    row[k:] = update.values[active : active + len(row) - k]


def add_trimmed(sums: Sums, rows: Tensor, shares: Tensor, trim: float) -> None:
    """Replace the sums of weights by those of trimmed means.

    A sum is the mean times its holders' samples. So an average over holders (`wfa`) is the trimmed mean itself, and
    `fedavg` still counts clients that do not hold a weight as holding zero.
    """
    most = max(1, _STRETCH // len(rows))
    for at in range(0, rows.shape[1], most):
        values = rows[:, at : at + most]
        held = (~values.isnan() * shares[:, None]).sum(0)
        sums.flat()[0][at : at + values.shape[1]] = trimmed_mean(values, shares, trim) * held


def bound_statistics(sums: Sums, told: Sequence[Told]) -> None:
    """Replace the sums of statistics by those of trimmed means: of all models, and of those of each density."""
    every = torch.stack([one.statistics for one in told])
    shares = weights_of([one.n for one in told], every)
    ranked, kept = _ranked(every, shares, cut_of(shares))
    low = torch.where(kept > 0, ranked, torch.inf).amin(0)
    high = torch.where(kept > 0, ranked, -torch.inf).amax(0)
    sums.flat()[0][sums.layout.trained_size :] = trimmed_mean(every, shares, cut_of(shares)) * shares.sum()
    for active in sums.statistics:
        mine = torch.tensor([one.active == active for one in told], device=every.device)
        some, n = every[mine], shares[mine]
        mean = trimmed_mean(some.double().clamp(low, high) if len(some) < FEW else some, n, cut_of(n))
        sums.statistics[active] = torch.cat([mean * n.sum(), n.sum()[None]])


def weights_of(counts: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64, device=like.device)


def cut_of(shares: Tensor) -> float:
    """How much to trim at either end: enough to drop the client with the most samples; nothing of one or two."""
    return max(TRIM, float(shares.max() / shares.sum())) if len(shares) >= FEW else 0.0


def trimmed_mean(values: Tensor, shares: Tensor, trim: float) -> Tensor:
    """The weighted mean of each column without NaN, and without the share `trim` of the weight at either end."""
    ranked, kept = _ranked(values, shares, trim)
    total = kept.sum(0)
    return torch.where(total > 0, (ranked * kept).sum(0) / total, 0.0)


def _ranked(values: Tensor, shares: Tensor, trim: float) -> tuple[Tensor, Tensor]:
    """Each column in ascending order, NaN as 0, and the weight that trimming leaves to each of its values."""
    ranked, order = values.double().sort(0)  # NaN comes last
    weight = ~ranked.isnan() * shares.double()[:, None].expand_as(ranked).gather(0, order)
    below = weight.cumsum(0)
    # A little more than asked for: a rounding error times a huge number would be a large one. Half or more: the median.
    cut = min(trim + 1e-9 if trim else 0.0, 0.5 - 1e-6) * below[-1]
    kept = torch.minimum(below, below[-1] - cut) - torch.maximum(below - weight, cut)
    return ranked.nan_to_num(0.0), kept.clamp(min=0)
