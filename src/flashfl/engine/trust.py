"""Whether to accept an update: it is checked against its order, and against the rest of its cohort.

The codec has already refused bytes that are malformed. Here are the checks that need to know what was asked for. Norms
are taken over the weights that the client reports as active, without a dense vector.

With `factor` above 0, weights and statistics have fixed bounds too. No working model comes near them, and a weight of
1e30, once averaged, would spoil the model for good. Statistics have far looser bounds, as a norm layer may see inputs
that nobody has scaled. An attacker who stays below the bounds is stopped by the comparison with the cohort.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.client import active_range, fields_of, reports_changes
from ..core.exchange import Local
from ..core.mask import Mask
from ..wire import Message
from ..wire.errors import ChangeTooLarge, NegativeVariance, WrongContent, WrongDensity, WrongTag

LARGEST = 1e6  # the largest weight accepted
LARGEST_MEAN = 1e12  # the largest running mean; a running variance may be its square
LARGEST_METRIC = 1e30  # the largest metric or extra; sums of such numbers stay finite
_NEAR = 0.2  # a change below this share of the weights' length is accepted, however little the others move
_UNIT = 0.1  # the least median of activations: most clients may have a dead layer, and then any median is too small


@dataclass(frozen=True)
class Trust:
    """How far a server trusts its clients.

    factor: reject an update whose change per step is more than this many times the cohort's median, unless it is a
    small share of the weights; 0 accepts all. least: cohorts smaller than this are not compared. clip: shorten changes
    that are more than this many times the cohort's median; 0 shortens none. trim: average each weight without this
    share of its holders at either end; 0 averages all.
    """

    factor: float = 10.0
    least: int = 3
    clip: float = 0.0
    trim: float = 0.0

    @property
    def needs_cohort(self) -> bool:
        """Whether updates can be added only once the whole cohort is known."""
        return self.factor > 0 or self.clip > 0 or self.trim > 0


def check_update(update: Message, order: Message, bounded: bool = True, frozen: Mask | None = None) -> None:
    """Raise what is wrong with `update` as an answer to `order`.

    `bounded`: whether values must stay within bounds. `frozen`: the mask that the client must return; None: it may have
    moved its mask.
    """
    if update.kind != "update" or update.tag != order.tag or update.client != order.client:
        raise WrongTag(
            f"got an update of client {update.client} for round {update.tag}, "
            f"expected one of client {order.client} for round {order.tag}"
        )
    if update.n != order.n:  # averages are weighted by it, so the client must not change it
        raise WrongContent(f"client {update.client} reports {update.n} samples, expected {order.n}")
    for name, value in update.metrics.items():
        if not abs(value) <= LARGEST_METRIC:
            raise WrongContent(f"client {update.client} reports {name} = {value:.3g}, above {LARGEST_METRIC:g}")
    _check_extras(update, order)
    local = order.local or Local()
    carries = {"weights": order.carries, "mask": "rest", "statistics": "statistics", "counts": None}[local.report]
    counts = update.mask.counts if update.mask is not None else update.counts
    fits = (update.mask is not None) == (local.report in ("weights", "mask"))
    fits = fits and (counts is not None or local.report == "statistics")
    if not fits or carries != (update.carries if update.values is not None else None):
        raise WrongContent(f"client {update.client} was asked for {local.report} and sent something else")
    if counts is not None and order.mask is not None and local.report != "statistics":
        expected = sum(local.start.budgets if local.start is not None else order.mask.counts)
        least, most = active_range(local.parts, order.layout, expected)
        if not least <= sum(counts) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise WrongDensity(f"client {update.client} has {sum(counts)} active weights, expected {wanted}")
    if frozen is not None and update.mask is not None and not update.mask.equal(frozen):
        raise WrongContent(f"client {update.client} changed its mask; frozen masks must be returned unchanged")
    _check_values(update, bounded)


def _check_extras(update: Message, order: Message) -> None:
    """Extras must be as the order's parts declare them, or have the name, form and shape of an extra in the order."""
    declared = fields_of((order.local or Local()).parts, "reports", order.layout)
    for name in declared.keys() - update.extra.keys():
        raise WrongContent(f"client {update.client} did not send the extra {name!r}, which its parts report")
    for name, extra in update.extra.items():
        asked, fits = order.extra.get(name), False
        if name in declared:
            wanted = torch.Size([] if declared[name].form == "scalar" else [declared[name].size])
            fits = declared[name].form == extra.form and (extra.form == "masked" or extra.value.shape == wanted)
        elif asked is not None and asked.form == extra.form:
            shape = asked.value.flatten().shape if asked.form == "bits" else asked.value.shape
            fits = asked.form == "masked" or extra.value.shape == shape  # as long as the update's own mask, or alike
        if not fits:
            raise WrongContent(
                f"client {update.client} sent the extra {name!r} ({extra.form}, shape {tuple(extra.value.shape)}), "
                "which the order did not ask for"
            )
        if not _within(extra.value, LARGEST_METRIC):
            raise WrongContent(f"the extra {name!r} of client {update.client} holds a number above {LARGEST_METRIC:g}")


def _check_values(update: Message, bounded: bool) -> None:
    """Variances must be at least 0, and values within bounds. The codec has refused what is not finite."""
    if update.values is None:
        return
    found = _statistics(update)
    trained = update.values[: update.values.numel() - sum(part.numel() for part in found.values())]
    for name, part in {"a weight": trained, **found}.items():
        variance = name.rsplit(".", 1)[-1] == "running_var"
        if variance and part.numel() and float(part.min()) < 0:
            raise NegativeVariance(f"client {update.client}: {name} is {float(part.min())}, expected at least 0")
        most = LARGEST if part is trained else LARGEST_MEAN**2 if variance else LARGEST_MEAN
        if bounded and not _within(part, most):
            raise ChangeTooLarge(f"client {update.client}: {name} is above {most:g}")


def _within(values: Tensor, most: float) -> bool:
    return not values.numel() or all(abs(float(x)) <= most for x in torch.aminmax(values))


def all_finite(values: Tensor) -> bool:
    """Whether all values are finite, found without a copy of them."""
    return not values.numel() or all(math.isfinite(float(x)) for x in torch.aminmax(values))


def _statistics(message: Message) -> dict[str, Tensor]:
    """The statistics that travelled, by name: always the tail of the values."""
    if message.values is None or message.carries == "weights":
        return {}
    first = message.layout.size - message.values.numel()
    layers = message.layout.of_kind("statistic")
    return {layer.name: message.values[layer.start - first : layer.stop - first] for layer in layers}


def activations(message: Message) -> dict[str, float]:
    """BatchNorm layer -> the RMS of its activations that its statistics imply: sqrt(mean^2 + variance)."""
    squares: dict[str, float] = {}
    for name, part in _statistics(message).items():
        layer, _, leaf = name.rpartition(".")
        found = part.double() if leaf == "running_var" else part.double().square()
        squares[layer] = squares.get(layer, 0.0) + float(found.mean() if found.numel() else 0.0)
    return {layer: math.sqrt(square) for layer, square in squares.items()}


def change_norm(update: Message, order: Message) -> float:
    """The 2-norm of the change over the update's active weights and the dense layers; a weight not sent counts as 0."""
    assert update.mask is not None
    assert order.mask is not None
    new, old = _trained(update), _trained(order)
    if update.mask.equal(order.mask):
        return float(torch.linalg.vector_norm(new - old, dtype=torch.float64))
    a, b = update.mask.active, order.mask.active
    mine, theirs = update.mask.bits.numpy(), order.mask.bits.numpy()
    change = new.double()
    change[a:] -= old[b:]
    both = torch.from_numpy(theirs[np.flatnonzero(mine)])  # of the update's weights those that the order has too
    change[:a][both] -= old[:b][torch.from_numpy(mine[np.flatnonzero(theirs)])]
    return float(torch.linalg.vector_norm(change))


def length(message: Message) -> float:
    """The 2-norm of a message's weights."""
    return float(torch.linalg.vector_norm(_trained(message), dtype=torch.float64))


def _trained(message: Message) -> Tensor:
    """The packed weights without statistics."""
    assert message.values is not None
    tail = message.layout.size - message.layout.trained_size if message.carries == "all" else 0
    return message.values[: message.values.numel() - tail]


class Number(NamedTuple):
    """A number of one update that is compared with the cohort's."""

    value: float
    fine: float  # a value up to this is accepted, however small the others' are
    n: int  # samples of the client


class Cohort:
    """Compares the updates of a round's clients.

    `changes`: how far each client's weights went per step, as a client with more data goes further. Clients that have
    converged hardly move, and a client with new data must not be compared with them. So a change by a small share of
    the weights' length is always accepted.

    `layers`: the activations that BatchNorm statistics imply. Whole layers are compared, as single channels differ as
    much as data do. A client that reports no more than it was sent is accepted: sub-models of other densities have
    activations of other sizes.
    """

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self.changes: dict[int, Number] = {}
        self.layers: dict[str, dict[int, Number]] = {}
        # Values, length and activations of the order last seen: most clients get the same one.
        self._order: tuple[Tensor | None, float, dict[str, float]] = (None, 0.0, {})

    def see(self, update: Message, order: Message) -> None:
        """Take in an update that answers `order`."""
        if self.trust.factor <= 0:
            return
        if self._order[0] is not order.values:
            self._order = (order.values, length(order), activations(order))
        _, far, before = self._order
        local = order.local or Local()
        if update.carries in ("all", "weights") and update.mask is not None:
            steps = local.epochs * local.batches(update.n)
            norm = length(update) if reports_changes(local.parts) else change_norm(update, order)
            self.changes[update.client] = Number(norm / steps, _NEAR * far / steps, update.n)
        for layer, size in activations(update).items():
            self.layers.setdefault(layer, {})[update.client] = Number(size, before.get(layer, 0.0), update.n)

    def rejected(self) -> dict[int, ChangeTooLarge]:
        """Client id -> why its update is rejected."""
        found: dict[int, ChangeTooLarge] = {}
        for layer, sizes in self.layers.items():
            median = max(_UNIT, _larger_median(sizes.values()))
            found = self._outliers(f"BatchNorm statistics of {layer!r} imply an RMS of", sizes, median) | found
        median = statistics.median(one.value for one in self.changes.values()) if self.changes else 0.0
        return found | self._outliers("weights changed per step by", self.changes, median)

    def _outliers(self, what: str, numbers: Mapping[int, Number], median: float) -> dict[int, ChangeTooLarge]:
        """Those far above the median. If that is 0, or if clients are few, it says nothing."""
        if len(numbers) < self.trust.least or not median:
            return {}
        return {
            client: ChangeTooLarge(
                f"client {client}: {what} {value:.3g}, over {self.trust.factor:g}x the cohort's median of "
                f"{median:.3g}; update rejected"
            )
            for client, (value, fine, _) in sorted(numbers.items())
            if value > self.trust.factor * median and value > fine
        }


def _larger_median(numbers: Collection[Number]) -> float:
    """The larger of the medians over clients and over samples.

    Statistics move step by step, so clients with little data may still be near the start when one with much data is far
    from it.
    """
    ranked = sorted(numbers)
    total, half = 0, sum(one.n for one in ranked) / 2
    for one in ranked:
        total += one.n
        if total >= half:
            break
    return max(one.value, ranked[(len(ranked) - 1) // 2].value)
