"""The one primitive under every mask: take the k lowest of some candidates, ties to the lower index, exactly k."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.kernel import kernel
from ..core.layout import Layout
from ..core.rng import Device

Keys = Tensor | Callable[[int, int], Tensor]
_LONG = 1 << 10  # keys in a row for which it pays to select instead of sorting


def magnitude(values: Tensor) -> Tensor:
    """|x| of float32 as int32 keys of the same order (the bits of a positive float rank like the float)."""
    return values.abs().to(torch.float32).view(torch.int32)


def lowest(keys: Tensor, count: int | Tensor, candidates: Tensor | None = None) -> Tensor:
    """A boolean mask, shaped like the integer `keys` [..., n], of the `count` lowest candidates of each row.

    Of equal keys the lower index is taken. `count` is one number for all rows or a tensor [...] with one each; it must
    not exceed the number of candidates (a row then falls short, and its owner's exact budget is lost).
    """
    if isinstance(count, int) and keys.dim() == 2 and (radix := _radix(keys)) is not None:
        found: Tensor = radix(((0, keys.shape[1]),), keys, [[count]] * len(keys), candidates, False)
        return found
    if keys.device.type == "cpu" and keys.shape[-1] >= _LONG and keys.numel():
        rows, counts = keys.reshape(-1, keys.shape[-1]), torch.as_tensor(count).expand(keys.shape[:-1]).flatten()
        among = [None] * len(rows) if candidates is None else candidates.expand(keys.shape).reshape(rows.shape)
        return torch.stack(list(map(_lowest_of_row, rows, counts.tolist(), among))).view(keys.shape)
    everyone = torch.ones_like(keys, dtype=torch.bool)
    pool = everyone if candidates is None else candidates
    order = keys.long().masked_fill(~pool, 1 << 62).argsort(dim=-1, stable=True)
    first = everyone.cumsum(-1) <= (count if isinstance(count, int) else count.to(keys.device)[..., None])
    return torch.zeros_like(everyone).scatter(-1, order, first) & pool


def largest(values: Tensor, count: int, candidates: Tensor | None = None) -> Tensor:
    """The `count` largest candidates of each row, by absolute value: values [..., n]."""
    return lowest(-magnitude(values), count, candidates)


def _lowest_of_row(keys: Tensor, count: int, candidates: Tensor | None) -> Tensor:
    """`lowest` for one row on a CPU, without a sort."""
    pool = keys if candidates is None else keys[candidates]
    if (count := min(count, len(pool))) <= 0:
        return torch.zeros_like(keys, dtype=torch.bool)
    threshold = _kth(pool, count)
    chosen = keys <= threshold if candidates is None else (keys <= threshold) & candidates
    if (extra := int(np.count_nonzero(chosen.numpy())) - count) > 0:  # of those on the threshold the last are too many
        chosen[((keys == threshold) & chosen).nonzero().squeeze(1)[-extra:]] = False
    return chosen


def lowest_by_layer(
    layout: Layout,
    keys: Keys,
    counts: Sequence[Sequence[int]],
    candidates: Tensor | None = None,
    distinct: bool = False,
    device: Device = "cpu",
) -> Tensor:
    """The lowest candidates of every layer of every row: keys [rows, K], counts[row][layer] of them.

    keys may be a function that gives those from one position up to another on `device`; on a CPU it is asked for one
    layer at a time, so that there are never as many keys as weights. distinct: no two candidates of a layer have equal
    keys, so there are no ties to settle.
    """
    if not isinstance(keys, Tensor) and torch.device(device).type != "cpu":
        keys = keys(0, layout.prunable_size)
    if isinstance(keys, Tensor) and (radix := _radix(keys)) is not None:
        chosen: Tensor = radix(layout.spans, keys, counts, candidates, distinct)
        return chosen
    parts = []
    for i, layer in enumerate(layout.prunable):
        mine = keys[:, layer.span] if isinstance(keys, Tensor) else keys(layer.start, layer.stop)
        wanted = torch.tensor([row[i] for row in counts], device=mine.device)
        parts.append(lowest(mine, wanted, None if candidates is None else candidates[:, layer.span]))
    return torch.cat(parts, 1) if parts else torch.zeros(len(counts), 0, dtype=torch.bool, device=device)


def largest_by_layer(layout: Layout, values: Tensor, counts: Sequence[int], candidates: Tensor | None = None) -> Tensor:
    """The counts[layer] largest candidates of every layer of every row, by absolute value: values [rows, K]."""
    return lowest_by_layer(layout, -magnitude(values), [counts] * len(values), candidates, device=values.device)


def _radix(keys: Tensor) -> Callable[..., Tensor] | None:
    """The kernel that selects among such keys, if there is one."""
    return kernel("select", "radix_lowest") if keys.is_cuda and keys.dtype == torch.int32 else None


def keep_largest(values: Tensor, spans: Sequence[slice], counts: Sequence[int]) -> Tensor:
    """float32 values [rows, columns] in which each span has kept its counts[i] largest, and values as large as those.

    The others are 0. Columns outside the spans stay as they are.
    """
    drop = tuple(span.stop - span.start - count for span, count in zip(spans, counts, strict=True))
    if values.is_cuda and (fast := kernel("select", "keep_largest")) is not None:
        kept: Tensor = fast(values.contiguous(), tuple((span.start, span.stop) for span in spans), drop)
        return kept
    out = values.clone()
    for span, count in zip(spans, drop, strict=True):
        sizes = values[:, span].abs()
        out[:, span].masked_fill_(sizes < _kth(sizes, count + 1), 0.0)
    return out


def _kth(keys: Tensor, count: int) -> Tensor:
    """The count-th lowest key of each row, [..., 1]."""
    if keys.is_cuda:
        return keys.topk(keys.shape[-1] - count + 1, sorted=False).values.amin(-1, keepdim=True)
    return torch.from_numpy(np.partition(keys.numpy(), count - 1)[..., count - 1 : count])
