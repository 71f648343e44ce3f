"""From the updates of a round to one model: one pass that adds them up, and the averages made from the sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from .core.exchange import Sums, Update
from .core.mask import Mask, Weights

_PART = 1 << 20  # weights that are added or divided in double precision at a time


def add(sums: Sums, update: Update, mask: Mask | None = None) -> Sums:
    """Add one update, in place. Callers add in ascending client id, so that sums do not depend on timing.

    mask: that of the update, if its weights were added elsewhere.
    """
    sums.n += update.n
    sums.clients += 1
    sums.counts = [a + b for a, b in zip(sums.counts or [0] * len(update.counts), update.counts, strict=True)]
    sums.loss += update.n * update.metrics.get("loss", 0.0)
    if update.mask is not None and update.values is not None:
        _add_weights(sums, update.mask, update.values, update.n)
        if tail := sums.layout.size - sums.layout.trained_size:
            statistics = update.values[len(update.values) - tail :]
            add_statistics(sums, update.mask.active, statistics.double() * update.n, update.n)
    for name, extra in update.extra.items():
        value = extra.value.double() * update.n
        if extra.form == "masked" and (places := update.mask or mask) is not None:
            value = value.new_zeros(sums.layout.prunable_size).index_put((places.places,), value)
        sums.extra[name] = sums.extra[name] + value if name in sums.extra else value
    return sums


def _add_weights(sums: Sums, mask: Mask, values: Tensor, n: int) -> None:
    """Add n times the model that `values`, packed, describe under `mask`."""
    (weights, holders), active, k = sums.flat(values.device), mask.active, sums.layout.prunable_size
    if active == k:
        for total, more in zip(weights.split(_PART), values.split(_PART), strict=True):
            total.add_(more, alpha=n)  # in parts, as torch copies what it adds in another precision
        holders += n
        return
    weights.index_add_(0, mask.places, values[:active].double(), alpha=n)
    holders.index_add_(0, mask.places, holders.new_tensor(n).expand(active))
    weights[k:].add_(values[active:], alpha=n)


def add_statistics(sums: Sums, active: int, total: Tensor, n: Tensor | int) -> None:
    """Add BatchNorm statistics of models with `active` active weights: `total` is the sum of n * value."""
    more = torch.cat([total, torch.as_tensor(n, dtype=torch.float64, device=total.device).reshape(1)])
    sums.statistics[active] = sums.statistics[active] + more if active in sums.statistics else more


def fedavg(sums: Sums) -> Tensor:
    """The average over all clients, sum(n w) / sum(n). A weight that a client does not hold counts as 0."""
    return _divided(_reported(sums)[0], sums.n)


def wfa(sums: Sums) -> Tensor:
    """The average of each weight over the clients that hold it, sum(n m w) / sum(n m); 0 if none does."""
    (total, holders), k = _reported(sums), sums.layout.prunable_size
    return torch.cat([_divided(total[:k], holders), _divided(total[k:], sums.n)])


def _divided(total: Tensor, by: Tensor | int) -> Tensor:
    """total / max(1, by) in single precision, a part at a time to save memory."""
    out = torch.empty(total.shape, device=total.device)
    for at in range(0, len(total), _PART):
        span = slice(at, at + _PART)
        torch.div(total[span], by[span].clamp(min=1) if isinstance(by, Tensor) else by, out=out[span])
    return out


def _reported(sums: Sums) -> tuple[Tensor, Tensor]:
    """The sums of the weights and of the samples of their holders."""
    if sums.weights is None or sums.holders is None:
        raise ValueError(
            "clients reported no weights in this round, so there is nothing to average. If this phase is not for "
            "training, such as the first phase of spdst, check `s.phase` in `aggregate` and leave the phase to "
            "super(). Otherwise use report='weights' in the method's `work`."
        )
    return sums.weights, sums.holders


Aggregator = Literal["fedavg", "wfa"]
AGGREGATORS: dict[str, Callable[[Sums], Tensor]] = {"fedavg": fedavg, "wfa": wfa}


def average(name: str, sums: Sums) -> Tensor:
    """The averaged flat vector by the aggregator of that name."""
    return AGGREGATORS[name](sums)


def averaged(name: str, sums: Sums) -> Weights:
    """The average as a model that is active wherever a client's is."""
    return Weights(union(sums), average(name, sums))


def union(sums: Sums) -> Mask:
    """The mask of all weights that at least one client holds."""
    return Mask(sums.layout, _reported(sums)[1] > 0)


def trimmed_mean(values: Tensor, shares: Tensor, trim: float) -> Tensor:
    """The weighted mean of each column without NaN, and without the share `trim` of the weight at either end."""
    ranked, kept = ranked_shares(values, shares, trim)
    total = kept.sum(0)
    return torch.where(total > 0, (ranked * kept).sum(0) / total, 0.0)


def ranked_shares(values: Tensor, shares: Tensor, trim: float) -> tuple[Tensor, Tensor]:
    """Each column in ascending order, NaN as 0, and the weight that trimming leaves to each of its values."""
    ranked, order = values.double().sort(0)  # NaN comes last
    weight = ~ranked.isnan() * shares.double()[:, None].expand_as(ranked).gather(0, order)
    below = weight.cumsum(0)
    # A little more than asked for: a rounding error times a huge number would be a large one. Half or more: the median.
    cut = min(trim + 1e-9 if trim else 0.0, 0.5 - 1e-6) * below[-1]
    kept = torch.minimum(below, below[-1] - cut) - torch.maximum(below - weight, cut)
    return ranked.nan_to_num(0.0), kept.clamp(min=0)
