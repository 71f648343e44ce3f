"""Whether to believe an update: it is held against the order that caused it, and against the rest of its cohort.

The codec has already refused what is not finite or not well formed; here are the checks that need to know what was
asked for. Norms are taken over the weights the client reports as active, without a dense vector.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.layout import Layout
from .errors import ChangeTooLarge, NegativeVariance, NonFinite, WrongContent, WrongDensity, WrongTag
from .geometry import count_layers, same
from .message import Message

_PART = 1 << 20  # values that are looked at in double precision at a time


@dataclass(frozen=True)
class Trust:
    """How far a server believes its clients."""

    factor: float = 10.0  # a change above this many times the cohort's median is refused; 0: any change is believed
    least: int = 3  # cohorts smaller than this have no median worth the name


def check_update(update: Message, order: Message, active: int | None = None) -> None:
    """Raise what is wrong with `update` as an answer to `order`.

    `active`: how many weights the client's mask must have; None: as many as the order's.
    """
    if update.kind != "update" or update.tag != order.tag or update.client != order.client:
        raise WrongTag(
            f"an update of client {update.client} for round {update.tag}, "
            f"expected client {order.client} for round {order.tag}"
        )
    if update.n < 1:
        raise WrongContent(f"client {update.client} reports {update.n} samples")
    report = order.local.report if order.local is not None else "weights"
    if report == "statistics":
        if update.carries != "statistics":
            raise WrongContent(f"client {update.client} was asked for statistics and sent {update.carries!r}")
        _check_statistics(update)
        return
    counts = count_layers(update.mask) if update.mask is not None else update.counts
    if (update.values is None) != (report == "counts") or counts is None:
        raise WrongContent(f"client {update.client} was asked for {report} and sent something else")
    expected = active if active is not None else sum(count_layers(order.mask)) if order.mask is not None else None
    total = sum(counts)
    if expected is not None and total != expected:
        raise WrongDensity(f"client {update.client} has {total} active weights, expected {expected}")
    if report == "weights":
        if update.mask is None or update.carries != order.carries:
            raise WrongContent(f"client {update.client} sent {update.carries!r} for {order.carries!r}")
        _check_statistics(update)


def _check_statistics(update: Message) -> None:
    """Finite, and no variance below zero."""
    if update.values is None:
        raise WrongContent(f"client {update.client} sent no values")
    if not all_finite(update.values):
        raise NonFinite(f"the values of client {update.client} hold an infinity or a not-a-number")
    for name, part in _statistics(update).items():
        if name.rsplit(".", 1)[-1] == "running_var" and part.numel() and float(part.min()) < 0:
            raise NegativeVariance(f"client {update.client}: {name} is {float(part.min())}")


def all_finite(values: Tensor) -> bool:
    """Whether there is neither an infinity nor a not-a-number, found without a copy of the values."""
    return not values.numel() or all(math.isfinite(float(x)) for x in torch.aminmax(values))


def _statistics(update: Message) -> dict[str, Tensor]:
    """The statistics that travelled, by name: always the tail of the values."""
    if update.values is None or update.carries == "weights":
        return {}
    first = update.layout.size - update.values.numel()
    layers = update.layout.of_kind("statistic")
    return {layer.name: update.values[layer.start - first : layer.stop - first] for layer in layers}


def change_norm(update: Message, order: Message) -> float:
    """The 2-norm of the change over the update's active weights and the dense layers; a weight not sent counts as 0."""
    if update.mask is None or update.values is None or order.mask is None or order.values is None:
        raise ValueError("both messages must carry weights")
    new, old = _trained(update, update.layout), _trained(order, order.layout)
    if same(update.mask, order.mask):
        parts = zip(new.split(_PART), old.split(_PART), strict=True)
        return math.sqrt(sum(float((a - b).double().square().sum()) for a, b in parts))
    a, b = sum(count_layers(update.mask)), sum(count_layers(order.mask))
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


def check_cohort(norms: Mapping[int, float], trust: Trust | None = None) -> dict[int, ChangeTooLarge]:
    """Client id -> why its change is not believed, for those far above the cohort's median."""
    trust = trust or Trust()
    if trust.factor <= 0 or len(norms) < trust.least:
        return {}
    finite = [norm for norm in norms.values() if math.isfinite(norm)]
    median = statistics.median(finite) if finite else 0.0
    return {
        client: ChangeTooLarge(
            f"client {client} moved its weights by {norm:.3g}, the cohort's median is {median:.3g}: "
            f"above {trust.factor:g} times that it is not believed"
        )
        for client, norm in sorted(norms.items())
        if not math.isfinite(norm) or norm > trust.factor * median > 0
    }
