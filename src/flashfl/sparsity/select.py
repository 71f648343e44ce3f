"""The one primitive under every mask: take the k lowest of some candidates, ties to the lower index, exactly k."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..core.kernel import kernel
from ..core.layout import Layout
from ..core.rng import Device

Keys = Tensor | Callable[[int, int], Tensor]
_LONG, _SAMPLE = 1 << 18, 1 << 16  # keys in a row that is worth sampling, and in a sample


def magnitude(values: Tensor) -> Tensor:
    """|x| of float32 as int32 keys of the same order (the bits of a positive float rank like the float)."""
    return values.abs().to(torch.float32).view(torch.int32)


def lowest(keys: Tensor, count: int | Tensor, candidates: Tensor | None = None) -> Tensor:
    """A boolean mask, shaped like the integer `keys` [..., n], of the `count` lowest candidates of each row.

    Of equal keys the lower index is taken. `count` is one number for all rows or a tensor [...] with one each; it must
    not exceed the number of candidates (a row then falls short, and its owner's exact budget is lost).
    """
    if keys.shape[-1] == 0 or (isinstance(count, int) and count <= 0):
        return torch.zeros_like(keys, dtype=torch.bool)
    if isinstance(count, int) and keys.dim() == 2 and (radix := _radix(keys)) is not None:
        found: Tensor = radix(((0, keys.shape[1]),), keys, [[count]] * len(keys), candidates, False)
        return found
    if isinstance(count, int) and keys.device.type == "cpu" and keys.shape[-1] >= _LONG:
        rows = keys.reshape(-1, keys.shape[-1])
        among = [None] * len(rows) if candidates is None else candidates.expand(keys.shape).reshape(rows.shape)
        return torch.stack([_lowest_of_many(*row, count) for row in zip(rows, among, strict=True)]).view(keys.shape)
    if candidates is not None:
        keys = keys.masked_fill(~candidates, torch.iinfo(keys.dtype).max)
    per_row = torch.as_tensor(count, device=keys.device)
    at = (per_row - 1).clamp(min=0).expand(keys.shape[:-1]).unsqueeze(-1)
    threshold = kth(keys, count) if isinstance(count, int) else keys.sort(-1).values.gather(-1, at)
    below = keys < threshold
    equal = keys == threshold
    if candidates is not None:
        equal &= candidates
    missing = at + 1 - below.sum(-1, keepdim=True)
    below |= equal & (equal.cumsum(-1, dtype=torch.int32) <= missing)
    if not isinstance(count, int):
        below &= (per_row > 0).expand(keys.shape[:-1]).unsqueeze(-1)
    return below


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
        span = slice(layer.start, layer.stop)
        mine = keys[:, span] if isinstance(keys, Tensor) else keys(layer.start, layer.stop)
        wanted = [row[i] for row in counts]
        count = wanted[0] if len(set(wanted)) == 1 else torch.tensor(wanted, device=mine.device)
        parts.append(lowest(mine, count, None if candidates is None else candidates[:, span]))
    return torch.cat(parts, 1) if parts else torch.zeros(len(counts), 0, dtype=torch.bool, device=device)


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
        if count > 0:
            out[:, span].masked_fill_(sizes < kth(sizes, count + 1), 0.0)
    return out


def _lowest_of_many(keys: Tensor, candidates: Tensor | None, count: int) -> Tensor:
    """`lowest` for one long row on a CPU, in few passes: a sample bounds the keys among which it pays to select."""
    stride = max(1, len(keys) // _SAMPLE)
    sample = keys[::stride] if candidates is None else keys[::stride][candidates[::stride]]
    expected = count // stride
    likely = expected + 4 * math.isqrt(expected) + 8
    bound = int(sample.kthvalue(likely).values) if likely < len(sample) else torch.iinfo(keys.dtype).max
    pool = _upto(keys, bound, candidates)
    if len(pool) < count:  # the sample was an unlucky one
        pool = _upto(keys, torch.iinfo(keys.dtype).max, candidates)
    if not len(pool):
        return torch.zeros_like(keys, dtype=torch.bool)
    threshold = pool.kthvalue(min(count, len(pool))).values
    chosen = keys <= threshold
    if candidates is not None:
        chosen &= candidates
    if (extra := int(np.count_nonzero(chosen.numpy())) - count) > 0:  # of those on the threshold the last are too many
        chosen[((keys == threshold) & chosen).nonzero().squeeze(1)[-extra:]] = False
    return chosen


def _upto(keys: Tensor, bound: int, candidates: Tensor | None) -> Tensor:
    """The keys of candidates that are at most `bound`."""
    if candidates is None:
        return keys[keys <= bound]
    return keys[(keys <= bound).logical_and_(candidates)]


def kth(keys: Tensor, count: int) -> Tensor:
    """The count-th lowest key of each row. A GPU selects the smaller side; a sort would move an index for each key."""
    if not keys.is_cuda:
        return keys.kthvalue(count, dim=-1, keepdim=True).values
    rest = keys.shape[-1] - count + 1
    if count <= rest:
        return keys.topk(count, largest=False, sorted=False).values.amax(-1, keepdim=True)
    return keys.topk(rest, sorted=False).values.amin(-1, keepdim=True)
