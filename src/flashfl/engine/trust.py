"""Reads updates: whether one answers its order, and the weights it reports.

The codec refuses bytes that are malformed and values that are not finite. Here are the checks that need to know what
was asked for. How far an update may move the model is another matter: see `robust`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.client import active_range, fields_of, moves_mask, overrides, reports_changes
from ..core.exchange import Local, Traffic, Update
from ..core.mask import Mask, repacked
from ..core.precision import EXACT, Precision
from ..sparsity import recipe_mask
from ..wire import Limits, Message, decode, size_with
from ..wire.errors import NegativeVariance, NonFinite, WrongContent, WrongDensity, WrongTag
from .pipeline import tallied

LARGEST_METRIC = 1e30  # the largest metric or extra; sums of such numbers stay finite


def read_update(data: bytes, order: Message, own: Mask | None, compared: bool = False) -> tuple[Update, Traffic]:
    """The update that answers `order` and what it took, or the WireError that says why this is none.

    own: the mask that the client keeps, which the update may refer to. compared: the changes of clients will be
    compared, so the update needs its `start`.
    """
    known = {mask.hash: mask for mask in (order.mask, own) if mask is not None}
    message = _restored(decode(data, order.layout, known=known, limits=limits_of(order)), order)
    check_update(message, order, frozen_mask(order, own))
    update = _as_update(message, order)
    if compared and order.mask is not None and order.values is not None:
        update = replace(update, start=start_of(update, order.work, order.mask, order.values))
    return update, message.traffic


def frozen_mask(order: Message, own: Mask | None) -> Mask | None:
    """The mask that the client must return; None if it may move its mask, or if its own is unknown here."""
    local = order.work
    if local.adapt is not None or moves_mask(local.parts):
        return None
    if "mask" in local.keep and order.start is not None:
        return own
    return order.mask if local.start is None else recipe_mask(order.layout, local.start)


def check_update(update: Message, order: Message, frozen: Mask | None = None) -> None:
    """Raise what is wrong with `update` as an answer to `order`.

    `frozen`: the mask that the client must return; None: it may have moved its mask.
    """
    if update.kind != "update" or update.tag != order.tag or update.client != order.client:
        raise WrongTag(
            f"got {update.kind!r} of client {update.client} for (phase, round, attempt) = {update.tag}, expected "
            f"'update' of client {order.client} for {order.tag}"
        )
    if update.n != order.n:  # averages are weighted by it, so the client must not change it
        raise WrongContent(f"client {update.client} reports {update.n} samples, expected {order.n}")
    for name, value in update.metrics.items():
        if not abs(value) <= LARGEST_METRIC:
            raise WrongContent(f"client {update.client} reports {name} = {value:.3g}, above {LARGEST_METRIC:g}")
    _check_extras(update, order)
    local = order.work
    counts = update.mask.counts if update.mask is not None else update.counts
    carries = None if local.report == "counts" else local.update_carries
    sent = (None if update.values is None else update.carries, update.mask is not None, counts is not None)
    wanted = (carries, local.report in ("weights", "mask"), local.report != "statistics")
    if sent != wanted:
        raise WrongContent(f"client {update.client} sent {_contents(*sent)}, expected {_contents(*wanted)}")
    if counts is not None:
        least, most = _active(order)
        if not least <= sum(counts) <= most:
            wanted_active = str(least) if least == most else f"{least} to {most}"
            raise WrongDensity(f"client {update.client} has {sum(counts)} active weights, expected {wanted_active}")
    if frozen is not None and update.mask is not None and not update.mask.equal(frozen):
        raise WrongContent(
            f"client {update.client} changed its mask; frozen masks must be returned unchanged. If a part of the "
            "method changes the mask, define `active` in this part."
        )
    _check_variances(update)


def _contents(carries: str | None, mask: bool, counts: bool) -> str:
    """What a message carries, in words."""
    found = [f"values ({carries})"] * (carries is not None) + ["a mask"] * mask + ["layer counts"] * counts
    return " and ".join(found) or "nothing"


def _check_extras(update: Message, order: Message) -> None:
    """Extras must be as the order's parts declare them, or have the name, form and shape of an extra in the order."""
    declared = fields_of(order.work.parts, "reports", order.layout)
    for name in declared.keys() - update.extra.keys():
        raise WrongContent(f"client {update.client} did not send {name!r}, although its parts declare it in `reports`")
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


def _active(order: Message) -> tuple[int, int]:
    """The least and the most active weights of an update that answers this order."""
    local = order.work
    assert order.mask is not None
    before = sum(local.start.budgets if local.start is not None else order.mask.counts)
    return active_range(local.parts, order.layout, before)


def largest_answer(order: Message, values: Precision) -> int:
    """Bytes of the largest update that can answer this order: no mask takes more than a bit for each weight."""
    mask_bytes = order.layout.prunable_size // 8 + 2
    plain = size_with(replace(order, extra={}), _active(order)[1], mask_bytes, order.work.sends(values)).total
    limits = limits_of(order)
    return plain + (300 + 8 * limits.elements) * limits.extras


def limits_of(order: Message) -> Limits:
    """Reject more or larger extras than the order has, and a recipe unless the order allows one."""
    local = order.work
    declared = fields_of(local.parts, "reports", order.layout)
    sizes = [extra.value.numel() for extra in order.extra.values()] + [one.size for one in declared.values()]
    most, count = max([order.layout.prunable_size, *sizes]), len(declared.keys() | order.extra.keys())
    # The mask that a client kept may have been a recipe, and be unknown here by now.
    kept = "mask" in local.keep and order.start is not None and order.own is None
    return Limits(extras=count, elements=most, recipes=local.start is not None or kept)


def shifted(answer: Message, order: Message, sign: int) -> Message:
    """An answer with changes of the order's weights instead of weights (sign -1), or with weights again (1)."""
    assert answer.values is not None
    assert answer.mask is not None
    assert order.values is not None
    assert order.mask is not None
    values, start = answer.values.clone(), _weights_at(order.values, order.mask, answer.mask)
    values[: len(start)].add_(start, alpha=sign)
    return replace(answer, values=values)


def _weights_at(values: Tensor, old: Mask, new: Mask) -> Tensor:
    """The weights of a packed model, packed under another mask, without statistics."""
    layout = old.layout
    return repacked(values, old, new)[: new.active + layout.trained_size - layout.prunable_size]


def _restored(update: Message, order: Message) -> Message:
    """The update with weights, if it carries changes. They are added to the server's values, not to rounded ones."""
    asked, found = order.work.sends(EXACT).changes, update.precision.changes
    if update.values is None or update.mask is None:
        return update
    if found != asked:
        sent, wanted = ("changes", "weights") if found else ("weights", "changes")
        raise WrongContent(f"client {update.client} sent {sent} and was asked for {wanted}")
    if not found:
        return update
    update = shifted(update, order, 1)
    if update.values is not None and not bool(update.values.isfinite().all()):
        raise NonFinite(f"the changes of client {update.client} lead to weights that are not finite")
    return update


def _as_update(message: Message, order: Message) -> Update:
    """A decoded update. What did not travel of its values counts as zero."""
    layout, mask, values = message.layout, message.mask, message.values
    if values is not None and message.carries != "all":
        mask = order.mask if message.carries == "statistics" else mask
        assert mask is not None
        missing = values.new_zeros(mask.active + layout.size - layout.prunable_size - len(values))
        values = torch.cat([values, missing] if message.carries == "weights" else [missing, values])
    counts = message.counts if message.counts is not None else (0,) * len(layout.prunable)
    update = Update(message.client, message.n, mask, values, counts, dict(message.metrics), dict(message.extra))
    parts = order.work.parts
    if any(overrides(part, "tally") for part in parts) and (weights := update.weights) is not None:
        extra = {**update.extra, **tallied(parts, layout, weights.vector, weights.mask.bits)}
        update = replace(update, extra=extra)
    return update


def start_of(update: Update, local: Local, mask: Mask, values: Tensor) -> Tensor | None:
    """`Update.start` for an update whose order has these packed values under `mask`; None if it has no weights."""
    if local.report not in ("weights", "mask") or update.mask is None or update.values is None:
        return None
    start, active = _weights_at(values, mask, update.mask), update.mask.active
    if reports_changes(local.parts):
        return start.new_zeros(1).expand(len(start))
    if local.report == "mask":  # prunable weights are bits: the update has no values of them
        return torch.cat([torch.zeros_like(start[:active]), start[active:]])
    return start
