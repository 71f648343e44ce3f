"""Whether an update answers its order.

The codec has already refused bytes that are malformed and values that are not finite. Here are the checks that need to
know what was asked for. How far an update may move the model is another matter: see `robust`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.client import active_range, fields_of
from ..core.mask import Mask
from ..wire import Message
from ..wire.errors import NegativeVariance, WrongContent, WrongDensity, WrongTag

LARGEST_METRIC = 1e30  # the largest metric or extra; sums of such numbers stay finite


def check_update(update: Message, order: Message, frozen: Mask | None = None) -> None:
    """Raise what is wrong with `update` as an answer to `order`.

    `frozen`: the mask that the client must return; None: it may have moved its mask.
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
    local = order.work
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
    _check_variances(update)


def _check_extras(update: Message, order: Message) -> None:
    """Extras must be as the order's parts declare them, or have the name, form and shape of an extra in the order."""
    declared = fields_of(order.work.parts, "reports", order.layout)
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


def _check_variances(update: Message) -> None:
    """Running variances must be at least 0. Statistics are the tail of the values."""
    if update.values is None or update.carries == "weights":
        return
    first = update.layout.size - update.values.numel()
    for layer in update.layout.of_kind("statistic"):
        least = update.values[layer.start - first : layer.stop - first].min() if layer.size else torch.zeros(())
        if layer.name.rsplit(".", 1)[-1] == "running_var" and float(least) < 0:
            raise NegativeVariance(f"client {update.client}: {layer.name} is {float(least)}, expected at least 0")


def _within(values: Tensor, most: float) -> bool:
    return not values.numel() or all(abs(float(x)) <= most for x in torch.aminmax(values))
