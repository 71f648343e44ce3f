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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.exchange import Local, Update
from ..core.layout import Layout
from ..core.mask import Mask
from ..wire import Message
from ..wire.errors import ChangeTooLarge, NegativeVariance, NonFinite, WrongContent, WrongDensity, WrongTag

LARGEST = 1e6  # the largest weight accepted
LARGEST_MEAN = 1e12  # the largest running mean; a running variance may be its square
LARGEST_METRIC = 1e30  # the largest metric or extra; sums of such numbers stay finite
_PART = 1 << 20  # values that are squared in double precision at a time
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


def check_update(
    update: Message, order: Message, active: int | None = None, bounded: bool = True, mask: Mask | None = None
) -> None:
    """Raise what is wrong with `update` as an answer to `order`.

    `active`: how many weights the client's mask must have; None: as many as the order's. `bounded`: whether values
    must stay within bounds. `mask`: the mask that the client must return; None: it may have moved its mask.
    """
    if update.kind != "update" or update.tag != order.tag or update.client != order.client:
        raise WrongTag(
            f"got an update of client {update.client} for round {update.tag}, "
            f"expected one of client {order.client} for round {order.tag}"
        )
    if update.n < 1:
        raise WrongContent(f"client {update.client} reports {update.n} samples, expected at least 1")
    for name, value in update.metrics.items():
        if not abs(value) <= LARGEST_METRIC:
            raise WrongContent(f"client {update.client} reports {name} = {value:.3g}, above {LARGEST_METRIC:g}")
    _check_extras(update, order)
    report = order.local.report if order.local is not None else "weights"
    if report == "statistics":
        if update.carries != "statistics":
            raise WrongContent(f"client {update.client} was asked for statistics and sent {update.carries!r}")
        _check_values(update, bounded)
        return
    counts = update.mask.counts if update.mask is not None else update.counts
    if (update.values is None) != (report == "counts") or counts is None:
        raise WrongContent(f"client {update.client} was asked for {report} and sent something else")
    expected = active if active is not None else sum(order.mask.counts) if order.mask is not None else None
    total = sum(counts)
    if expected is not None and total != expected:
        raise WrongDensity(f"client {update.client} has {total} active weights, expected {expected}")
    if report == "weights":
        if update.mask is None or update.carries != order.carries:
            raise WrongContent(f"client {update.client} sent {update.carries!r}, expected {order.carries!r}")
        if mask is not None and not update.mask.equal(mask):
            raise WrongContent(f"client {update.client} changed its mask; frozen masks must be returned unchanged")
        _check_values(update, bounded)


def _check_extras(update: Message, order: Message) -> None:
    """Extras must have the name, form and shape of an extra in the order."""
    for name, extra in update.extra.items():
        asked = order.extra.get(name)
        if asked is None or asked.form != extra.form:
            raise WrongContent(
                f"client {update.client} sent the extra {name!r} ({extra.form}), which the order did not ask for"
            )
        shape = asked.value.flatten().shape if asked.form == "bits" else asked.value.shape
        if asked.form != "masked" and extra.value.shape != shape:  # a masked one is as long as the update's own mask
            raise WrongContent(
                f"the extra {name!r} of client {update.client} has shape {tuple(extra.value.shape)}, "
                f"expected {tuple(shape)}"
            )
        if not _within(extra.value, LARGEST_METRIC):
            raise WrongContent(f"the extra {name!r} of client {update.client} holds a number above {LARGEST_METRIC:g}")


def _check_values(update: Message, bounded: bool) -> None:
    """Values must be finite, within bounds, and variances at least 0."""
    if update.values is None:
        raise WrongContent(f"client {update.client} sent no values")
    if not all_finite(update.values):
        raise NonFinite(f"the values of client {update.client} contain an infinity or NaN")
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
    if update.mask is None or update.values is None or order.mask is None or order.values is None:
        raise ValueError("both messages must carry weights")
    new, old = _trained(update, update.layout), _trained(order, order.layout)
    if update.mask.equal(order.mask):
        parts = zip(new.split(_PART), old.split(_PART), strict=True)
        return math.sqrt(sum(float((a - b).double().square().sum()) for a, b in parts))
    a, b = sum(update.mask.counts), sum(order.mask.counts)
    mine, theirs = update.mask.bits.numpy(), order.mask.bits.numpy()
    change = new.double()
    change[a:] -= old[b:]
    both = torch.from_numpy(theirs[np.flatnonzero(mine)])  # of the update's weights those that the order has too
    change[:a][both] -= old[:b][torch.from_numpy(mine[np.flatnonzero(theirs)])]
    return float(torch.linalg.vector_norm(change))


def _trained(message: Message, layout: Layout) -> Tensor:
    """The packed weights without statistics."""
    assert message.values is not None
    tail = layout.size - layout.trained_size if message.carries == "all" else 0
    return message.values[: message.values.numel() - tail]


def check_cohort(
    paces: Mapping[int, float], trust: Trust | None = None, reach: Mapping[int, float] | None = None
) -> dict[int, ChangeTooLarge]:
    """Client id -> why its update is rejected: its change per step is far above the cohort's median.

    reach: each client's whole change as a share of the weights' length. Clients that have converged hardly move, and a
    client with new data must not be compared with them. So a change by a small share of the weights is always accepted.
    """
    trust = trust or Trust()
    if trust.factor <= 0 or len(paces) < trust.least:
        return {}
    finite = [pace for pace in paces.values() if math.isfinite(pace)]
    median = statistics.median(finite) if finite else 0.0
    near = {client for client, share in (reach or {}).items() if share <= _NEAR}
    return {
        client: ChangeTooLarge(
            f"client {client}: weights changed by {pace:.3g} per step, over {trust.factor:g}x the cohort's median of "
            f"{median:.3g}; update rejected"
        )
        for client, pace in sorted(paces.items())
        if not math.isfinite(pace) or (pace > trust.factor * median > 0 and client not in near)
    }


def length(order: Message) -> float:
    """The 2-norm of an order's weights."""
    parts = _trained(order, order.layout).split(_PART)
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))


class Seen(NamedTuple):
    """What a client's statistics imply: its samples, and the activations as sent to it and as it reports them."""

    n: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def check_statistics(seen: Mapping[int, Seen], trust: Trust | None = None) -> dict[int, ChangeTooLarge]:
    """Client id -> why its update is rejected: its BatchNorm statistics imply activations far above the cohort's.

    Whole layers are compared, as single channels differ as much as data do. The median is taken over clients and over
    samples, and the larger one counts: statistics move step by step, so clients with little data may still be near the
    start when one with much data is far from it. A client that reports no more than it was sent passes: sub-models of
    other densities have activations of other sizes.
    """
    trust = trust or Trust()
    if trust.factor <= 0 or len(seen) < trust.least:
        return {}
    medians: dict[str, float] = {}
    for layer in next(iter(seen.values())).after:
        sizes = [(one.after[layer], one.n) for one in seen.values()]
        medians[layer] = max(_UNIT, _median(sizes), _median([(size, 1) for size, _ in sizes]))
    out = {}
    for client, one in sorted(seen.items()):
        for layer, size in one.after.items():
            if size > trust.factor * medians[layer] and size > one.before.get(layer, 0.0):
                out[client] = ChangeTooLarge(
                    f"client {client}: BatchNorm statistics of {layer!r} imply an RMS of {size:.3g}, over "
                    f"{trust.factor:g}x the cohort's median of {medians[layer]:.3g}; update rejected"
                )
                break
    return out


def _median(sizes: Sequence[tuple[float, int]]) -> float:
    """The size that half of the weight does not exceed."""
    left = sum(n for _, n in sizes) / 2
    for size, n in sorted(sizes):
        left -= n
        if left <= 0:
            return size
    return 0.0


class Cohort:
    """What is known about the changes of a round's clients: for checks and clipping that compare them."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self.norms: dict[int, float] = {}
        self._paces: dict[int, float] = {}  # change per step: a client with more data goes further
        self._reach: dict[int, float] = {}  # whole change as a share of the weights' length
        self._seen: dict[int, Seen] = {}
        self._length: tuple[Tensor | None, float] = (None, 0.0)  # of the weights last seen: most clients get the same

    def see(self, update: Message, order: Message) -> None:
        """Take in an update that answers `order`."""
        client, compares = update.client, self.trust.factor > 0
        if (compares or self.trust.clip > 0) and update.carries != "statistics" and update.mask is not None:
            self.norms[client] = change_norm(update, order)
            local = order.local or Local()
            self._paces[client] = self.norms[client] / (local.epochs * local.batches(update.n))
            if compares:
                self._reach[client] = self.norms[client] / max(self._length_of(order), 1e-30)
        if compares and (after := activations(update)):
            self._seen[client] = Seen(update.n, activations(order), after)

    def rejected(self) -> dict[int, ChangeTooLarge]:
        """Client id -> why its update is rejected."""
        found = check_statistics(self._seen, self.trust) | check_cohort(self._paces, self.trust, self._reach)
        for client in found:
            self.norms.pop(client, None)
        return found

    def shares(self) -> dict[int, float]:
        """Client id -> the share of its change that counts, for clients whose change is clipped."""
        if not self.trust.clip or not self.norms:
            return {}
        most = self.trust.clip * statistics.median(self.norms.values())
        return {client: most / norm for client, norm in self.norms.items() if norm > most}

    def _length_of(self, order: Message) -> float:
        if self._length[0] is not order.values:
            self._length = (order.values, length(order))
        return self._length[1]


def shortened(update: Update, order: Message, share: float) -> Update:
    """An update whose trained weights went only this share of their way from the order's. Statistics stay."""
    assert update.mask is not None
    assert update.values is not None
    start = order.weights().restrict(update.mask).packed()
    values, trained = update.values.clone(), len(start) - (order.layout.size - order.layout.trained_size)
    values[:trained] = start[:trained] + (values[:trained] - start[:trained]) * share
    return replace(update, values=values)
