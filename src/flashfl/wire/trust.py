"""Whether to believe an update: it is held against the order that caused it, and against the rest of its cohort.

The codec has already refused what is not finite or not well formed; here are the checks that need to know what was
asked for. Norms are taken over the weights the client reports as active, without a dense vector.

Where clients may lie, weights and statistics are bounded for any cohort: no model that works comes near, and a weight
of 1e30, once averaged, would leave a model from which nobody's loss is finite again. Statistics are bounded far more
loosely, as a norm may see inputs that nobody has scaled. An attacker who stays below is stopped by the cohort alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.mask import Mask
from .errors import ChangeTooLarge, NegativeVariance, NonFinite, WrongContent, WrongDensity, WrongTag
from .message import Message

LARGEST = 1e6  # of a weight
LARGEST_MEAN = 1e12  # of a running mean; its square of a running variance
LARGEST_METRIC = 1e30  # of a metric or an extra: far above any that means something, and sums of it stay finite
_PART = 1 << 20  # values that are looked at in double precision at a time
_NEAR = 0.2  # of the weights' length: a whole change below this is believed, however little the others move
_UNIT = 0.1  # activations below this count as this: of a layer that is dead at most clients any median is too small


@dataclass(frozen=True)
class Trust:
    """How far a server believes its clients."""

    # A change a step above this many times the cohort's median is refused, unless it is a small share of the weights;
    # 0: all are believed.
    factor: float = 10.0
    least: int = 3  # cohorts smaller than this have no median worth the name


def check_update(
    update: Message, order: Message, active: int | None = None, bounded: bool = True, mask: Mask | None = None
) -> None:
    """Raise what is wrong with `update` as an answer to `order`.

    `active`: how many weights the client's mask must have; None: as many as the order's. `bounded`: whether numbers no
    working model has are refused. `mask`: the one that weights must come with; None: it may have moved.
    """
    if update.kind != "update" or update.tag != order.tag or update.client != order.client:
        raise WrongTag(
            f"an update of client {update.client} for round {update.tag}, "
            f"expected client {order.client} for round {order.tag}"
        )
    if update.n < 1:
        raise WrongContent(f"client {update.client} reports {update.n} samples")
    for name, value in update.metrics.items():
        if not abs(value) <= LARGEST_METRIC:
            raise WrongContent(f"client {update.client} reports {name} = {value:.3g}")
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
            raise WrongContent(f"client {update.client} sent {update.carries!r} for {order.carries!r}")
        if mask is not None and not update.mask.equal(mask):
            raise WrongContent(f"client {update.client} moved its mask, which was to stay as it was")
        _check_values(update, bounded)


def _check_extras(update: Message, order: Message) -> None:
    """An update may answer the order's extras with tensors of the same name, form and shape, and carry no others."""
    for name, extra in update.extra.items():
        asked = order.extra.get(name)
        if asked is None or asked.form != extra.form:
            raise WrongContent(f"client {update.client} sent an extra that was not asked for: {name!r}, {extra.form}")
        shape = asked.value.flatten().shape if asked.form == "bits" else asked.value.shape
        if asked.form != "masked" and extra.value.shape != shape:  # a masked one is as long as the update's own mask
            raise WrongContent(
                f"the extra {name!r} of client {update.client} has shape {tuple(extra.value.shape)}, not {tuple(shape)}"
            )
        if not _within(extra.value, LARGEST_METRIC):
            raise WrongContent(f"the extra {name!r} of client {update.client} holds a number above {LARGEST_METRIC:g}")


def _check_values(update: Message, bounded: bool) -> None:
    """Finite, of a size that a model can have, and no variance below zero."""
    if update.values is None:
        raise WrongContent(f"client {update.client} sent no values")
    if not all_finite(update.values):
        raise NonFinite(f"the values of client {update.client} hold an infinity or a not-a-number")
    found = _statistics(update)
    trained = update.values[: update.values.numel() - sum(part.numel() for part in found.values())]
    for name, part in {"a weight": trained, **found}.items():
        variance = name.rsplit(".", 1)[-1] == "running_var"
        if variance and part.numel() and float(part.min()) < 0:
            raise NegativeVariance(f"client {update.client}: {name} is {float(part.min())}")
        most = LARGEST if part is trained else LARGEST_MEAN**2 if variance else LARGEST_MEAN
        if bounded and not _within(part, most):
            raise ChangeTooLarge(f"client {update.client}: {name} is above {most:g}")


def _within(values: Tensor, most: float) -> bool:
    return not values.numel() or all(abs(float(x)) <= most for x in torch.aminmax(values))


def all_finite(values: Tensor) -> bool:
    """Whether there is neither an infinity nor a not-a-number, found without a copy of the values."""
    return not values.numel() or all(math.isfinite(float(x)) for x in torch.aminmax(values))


def _statistics(message: Message) -> dict[str, Tensor]:
    """The statistics that travelled, by name: always the tail of the values."""
    if message.values is None or message.carries == "weights":
        return {}
    first = message.layout.size - message.values.numel()
    layers = message.layout.of_kind("statistic")
    return {layer.name: message.values[layer.start - first : layer.stop - first] for layer in layers}


def activations(message: Message) -> dict[str, float]:
    """BatchNorm layer -> the root mean square of the activations its statistics speak of: mean^2 + variance."""
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
    mine, theirs = update.mask.bits, order.mask.bits
    change = new.double()
    change[a:] -= old[b:]
    head = change[:a]
    head[theirs[mine]] -= old[:b][mine[theirs]]
    return float(torch.linalg.vector_norm(change))


def _trained(message: Message, layout: Layout) -> Tensor:
    """The packed weights without statistics."""
    assert message.values is not None
    tail = layout.size - layout.trained_size if message.carries == "all" else 0
    return message.values[: message.values.numel() - tail]


def check_cohort(
    paces: Mapping[int, float], trust: Trust | None = None, reach: Mapping[int, float] | None = None
) -> dict[int, ChangeTooLarge]:
    """Client id -> why its change is not believed, for those whose change a step is far above the cohort's median.

    reach: each one's whole change as a share of the weights' length. Clients that have converged hardly move, and one
    that brings new data must not be held against that, so a change of a small share of the weights is always believed.
    """
    trust = trust or Trust()
    if trust.factor <= 0 or len(paces) < trust.least:
        return {}
    finite = [pace for pace in paces.values() if math.isfinite(pace)]
    median = statistics.median(finite) if finite else 0.0
    near = {client for client, share in (reach or {}).items() if share <= _NEAR}
    return {
        client: ChangeTooLarge(
            f"client {client} moved its weights by {pace:.3g} a step, the cohort's median is {median:.3g}: "
            f"above {trust.factor:g} times that it is not believed"
        )
        for client, pace in sorted(paces.items())
        if not math.isfinite(pace) or (pace > trust.factor * median > 0 and client not in near)
    }


def length(order: Message) -> float:
    """The 2-norm of an order's weights."""
    parts = _trained(order, order.layout).split(_PART)
    return math.sqrt(sum(float(part.double().square().sum()) for part in parts))


class Seen(NamedTuple):
    """What a client's statistics speak of: over how many samples, as they were sent to it, and as it reports them."""

    n: int
    before: Mapping[str, float]
    after: Mapping[str, float]


def check_statistics(seen: Mapping[int, Seen], trust: Trust | None = None) -> dict[int, ChangeTooLarge]:
    """Client id -> why its BatchNorm statistics are not believed: activations far above the cohort's, in some layer.

    Sizes are compared, and not single channels, which differ as much as data do. The median is that over clients or
    that over samples, whichever is larger: statistics move by steps, so those of many clients with little data may
    still lie near where they began, while one with much has data of its own kind. Whoever reports no more than it was
    sent passes: sub-models of other densities have activations of other sizes.
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
                    f"the statistics of client {client} speak of activations of {size:.3g} in {layer!r}, the cohort's "
                    f"median is {medians[layer]:.3g}: above {trust.factor:g} times that they are not believed"
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
