"""Exact k-lowest selection in every layer of every client at once: radix selection, four bits at a time.

Eight passes over the keys find for every (client, layer) the key of the last one taken. A pass counts digits by adding
up, not by a histogram in shared memory: magnitudes of weights share their leading digits, and most keys are no
candidates at all, so a histogram would queue at one bin. The result is bit for bit that of `sparsity.select.lowest`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import BLOCK, Blocks, Spans, blocks


@triton.jit
def _load(keys, candidates, row, at, inside, K, ALL: tl.constexpr):
    """Keys as unsigned numbers of the same order, and which of them are candidates."""
    key = tl.load(keys + row * K + at, mask=inside, other=0).to(tl.uint32, bitcast=True) ^ 0x80000000
    if not ALL:
        inside = inside & (tl.load(candidates + row * K + at, mask=inside, other=0) != 0)
    return key, inside


@triton.jit
def _count(keys, candidates, prefix, counts, layer_of, start_of, stop_of, K, L, SHIFT: tl.constexpr,
           ALL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """How often each value of the next four bits occurs among candidates whose higher bits are the prefix."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.load(start_of + block) + tl.arange(0, BLOCK)
    key, good = _load(keys, candidates, row, at, at < tl.load(stop_of + block), K, ALL)
    slot = row * L + tl.load(layer_of + block)
    if SHIFT < 28:
        good = good & ((key >> (SHIFT + 4)) == tl.load(prefix + slot).to(tl.uint32))
    digit = ((key >> SHIFT) & 15).to(tl.int32)
    # Four counts to a sum, sixteen bits each: a block has fewer keys than that.
    one = good.to(tl.int64) << ((digit & 3) * 16).to(tl.int64)
    bins = tl.arange(0, 16)
    found = tl.zeros([16], dtype=tl.int32)
    for quarter in tl.static_range(4):
        packed = tl.sum(tl.where((digit >> 2) == quarter, one, 0), 0)
        each = (packed >> ((bins & 3) * 16).to(tl.int64)) & 65535
        found = tl.where((bins >> 2) == quarter, each.to(tl.int32), found)
    tl.atomic_add(counts + slot * 16 + bins, found, mask=found > 0)


@triton.jit
def _choose(counts, left, prefix):
    """The digit at which the running count reaches what is left to take; what is left within it."""
    slot = tl.program_id(0)
    bins = tl.arange(0, 16)
    found = tl.load(counts + slot * 16 + bins)
    wanted = tl.load(left + slot)
    digit = tl.minimum(tl.sum((tl.cumsum(found, 0) < wanted).to(tl.int32), 0), 15)
    tl.store(left + slot, wanted - tl.sum(tl.where(bins < digit, found, 0), 0))
    tl.store(prefix + slot, (tl.load(prefix + slot) << 4) | digit)


@triton.jit
def _mark(keys, candidates, threshold, chosen, ties, layer_of, start_of, stop_of, K, L, ALL: tl.constexpr,
          TIES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Take what lies below its layer's threshold, and count what lies on it; without ties take that too."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.load(start_of + block) + tl.arange(0, BLOCK)
    inside = at < tl.load(stop_of + block)
    key, good = _load(keys, candidates, row, at, inside, K, ALL)
    limit = tl.load(threshold + row * L + tl.load(layer_of + block))  # -1 where nothing is taken
    taken = good & (key.to(tl.int64) < limit)
    equal = good & (key.to(tl.int64) == limit)
    if TIES:
        tl.store(ties + row * tl.num_programs(0) + block, tl.sum(equal.to(tl.int32), 0))
    else:
        taken = taken | equal
    tl.store(chosen + row * K + at, taken, mask=inside)


@triton.jit
def _settle(keys, candidates, threshold, left, before, ties, chosen, layer_of, start_of, stop_of, K, L,
            ALL: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of what lies on the threshold take the first ones of each layer."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    here = row * tl.num_programs(0) + block
    slot = row * L + tl.load(layer_of + block)
    room = tl.load(left + slot) - tl.load(before + here)
    if (tl.load(ties + here) > 0) & (room > 0):
        at = tl.load(start_of + block) + tl.arange(0, BLOCK)
        key, good = _load(keys, candidates, row, at, at < tl.load(stop_of + block), K, ALL)
        equal = good & (key.to(tl.int64) == tl.load(threshold + slot))
        taken = equal & (tl.cumsum(equal.to(tl.int32), 0) <= room)
        tl.store(chosen + row * K + at, taken, mask=taken)


def radix_lowest(
    spans: Spans, keys: Tensor, counts: Sequence[Sequence[int]], candidates: Tensor | None, distinct: bool
) -> Tensor:
    """See `sparsity.select.lowest_by_layer`."""
    chosen = torch.zeros(keys.shape, dtype=torch.bool, device=keys.device)
    if not len(keys) or not keys.shape[1]:
        return chosen
    keys, everyone = keys.contiguous(), candidates is None
    among = keys if candidates is None else candidates.contiguous()
    work, wanted = blocks(spans, keys.device), _counts(counts).to(keys.device, non_blocking=True)
    found, left = _kth(work, keys, wanted, among, everyone)
    threshold = found.masked_fill_(wanted <= 0, -1)
    rows, (k, n), grid = len(keys), (keys.shape[1], len(spans)), (len(work), len(keys))
    ties = torch.zeros(rows, len(work), dtype=torch.int32, device=keys.device)
    _mark[grid](keys, among, threshold, chosen, ties, *work.spans, k, n, everyone, not distinct, BLOCK, num_warps=8)
    if not distinct:
        before = work.before(ties).to(torch.int32)
        _settle[grid](
            keys, among, threshold, left, before, ties, chosen, *work.spans, k, n, everyone, BLOCK, num_warps=8
        )
    return chosen


def _kth(work: Blocks, keys: Tensor, counts: Tensor, among: Tensor, everyone: bool) -> tuple[Tensor, Tensor]:
    """The counts-th lowest key of each row and layer, as an unsigned number; how many of the keys on it to take."""
    (rows, n), device = counts.shape, keys.device
    left = counts.clamp(min=1)
    prefix = torch.zeros(rows, n, dtype=torch.int64, device=device)
    found = torch.zeros(8, rows, n, 16, dtype=torch.int32, device=device)
    for step in range(8):
        _count[(len(work), rows)](
            keys, among, prefix, found[step], *work.spans, keys.shape[1], n, 28 - 4 * step, everyone, BLOCK, num_warps=8
        )
        _choose[(rows * n,)](found[step], left, prefix)
    return prefix, left


def _counts(counts: Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32)


@functools.cache
def _constant(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """One row of counts on the device. It is kept for good: captured graphs use it."""
    return _counts([counts]).to(device)


@triton.jit
def _keep(values, threshold, out, layer_of, start_of, stop_of, COLUMNS, L, BLOCK: tl.constexpr):
    """Values with zeros in the place of those whose bits, without the sign, are below their layer's threshold."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.load(start_of + block) + tl.arange(0, BLOCK)
    inside = at < tl.load(stop_of + block)
    value = tl.load(values + row * COLUMNS + at, mask=inside, other=0.0)
    limit = tl.load(threshold + row * L + tl.load(layer_of + block))
    size = (value.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) | 0x80000000  # of the order of `_load`'s
    tl.store(out + row * COLUMNS + at, tl.where(size.to(tl.int64) < limit, 0.0, value), mask=inside)


def keep_largest(values: Tensor, spans: Spans, drop: tuple[int, ...]) -> Tensor:
    """See `sparsity.select.keep_largest`. It can be captured in a graph once it has run."""
    keys = values.abs().view(torch.int32)
    work, rows = blocks(spans, values.device), len(values)
    wanted = _constant(tuple(count + 1 for count in drop), values.device).expand(rows, -1).contiguous()
    threshold, _ = _kth(work, keys, wanted, keys, True)
    out = values.clone()
    _keep[(len(work), rows)](values, threshold, out, *work.spans, values.shape[1], len(spans), BLOCK, num_warps=8)
    return out
