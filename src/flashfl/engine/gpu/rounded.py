"""Values that travel in fewer bits: models as the other side will decode them, many at once. No byte is made."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...core.exchange import Carries
from ...core.mask import Mask, Weights, stacked
from ...core.precision import Precision
from ...wire import segments, value_key
from ...wire.coded import plan_levels
from ...wire.values import round_with_levels
from ..work import Work

_MOST = 1 << 25  # values that are rounded at a time: what is worked out on the way needs ten times their room


def receive(works: Sequence[Work], how: Precision) -> None:
    """Put the model that each client decodes in the place of the one that was sent to it."""
    keys = [value_key(work.key, "order", work.order.tag, work.client.id) for work in works]
    vectors = stacked([work.sent.vector for work in works]).expand(len(works), -1)
    found, _ = rounded(vectors, [work.sent.mask for work in works], keys, works[0].local.order_carries, how)
    for work, vector in zip(works, found, strict=True):
        work.order = replace(work.order, weights=Weights(work.sent.mask, vector))


def decode(works: Sequence[Work], values: Tensor, how: Precision) -> tuple[Tensor, Tensor]:
    """Trained models, one in each row, as the server will decode them; and what coding saves of each in bytes."""
    keys = [value_key(work.key, "update", work.order.tag, work.client.id) for work in works]
    masks, layout = [work.mask for work in works], works[0].mask.layout
    if not how.changes:
        return rounded(values, masks, keys, works[0].local.update_carries, how)
    trained, head = layout.trained_size, slice(0, layout.prunable_size)
    inactive = ~stacked([mask.bits for mask in masks])
    change = values.clone()
    change[:, :trained] -= stacked([work.order.weights.vector for work in works])[:, :trained]
    change[:, head].masked_fill_(inactive, 0.0)  # the mask may have moved
    found, saved = rounded(change, masks, keys, works[0].local.order_carries, how)
    found[:, :trained] += stacked([work.sent.vector for work in works])[:, :trained]
    found[:, head].masked_fill_(inactive, 0.0)
    return found, saved


def rounded(
    vectors: Tensor, masks: Sequence[Mask], keys: Sequence[int], carries: Carries, how: Precision
) -> tuple[Tensor, Tensor]:
    """Models as the other side will decode them, and the bytes that coding saves. What does not travel stays.

    Neighbours under the same mask are rounded together.
    """
    layout, out = masks[0].layout, vectors.new_zeros(vectors.shape)
    k, stop = layout.prunable_size, layout.trained_size if carries == "weights" else layout.size  # where it ends
    saved = torch.zeros(len(vectors), dtype=torch.int64, device=vectors.device)
    out[:, stop:] = vectors[:, stop:]
    if carries == "rest":
        out[:, :k] = vectors[:, :k]
    for _, alike in itertools.groupby(range(len(masks)), key=lambda row: id(masks[row])):
        here = list(alike)
        first, end = here[0], here[-1] + 1
        mask, dense, active = masks[first], masks[first].active == k, 0 if carries == "rest" else masks[first].active
        parts = segments(layout, mask.counts, carries, how.values)
        most = max(1, _MOST // max(1, active + stop - k))
        for at in range(first, end, most):
            rows = slice(at, min(at + most, end))
            mine, into = vectors[rows], out[rows]
            picked = mine[:, :active] if dense or not active else mine.index_select(1, mask.places)
            found, levels = round_with_levels(torch.cat([picked, mine[:, k:stop]], 1), parts, how, *keys[rows])
            if how.changes and levels is not None:
                saved[rows] = plan_levels(levels, how.values).saved
            if dense:
                into[:, :active] = found[:, :active]
            elif active:
                into.index_copy_(1, mask.places, found[:, :active])
            into[:, k:stop] = found[:, active:]
    return out, saved
