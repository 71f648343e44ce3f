"""Exact k-lowest selection in every layer of every client at once: radix selection by histograms.

Four passes over the keys, eight bits each, find for every (client, layer) the key of the last one taken. Sorting does
the same in ten times the time. The result is bit for bit that of `sparsity.select.lowest`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.layout import Layout

BLOCK, BINS = 4096, 256


@triton.jit
def _count(keys, candidates, prefix, counts, layer_of, start_of, stop_of, K, L, SHIFT: tl.constexpr,
           FIRST: tl.constexpr, ALL: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr):  # fmt: skip
    """Histogram of the next eight bits of the keys whose higher bits are the prefix."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer, stop = tl.load(layer_of + block), tl.load(stop_of + block)
    at = tl.load(start_of + block) + tl.arange(0, BLOCK)
    inside = at < stop
    key = tl.load(keys + row * K + at, mask=inside, other=0).to(tl.uint32, bitcast=True) ^ 0x80000000
    if not ALL:
        inside = inside & (tl.load(candidates + row * K + at, mask=inside, other=0) != 0)
    if not FIRST:
        inside = inside & ((key >> (SHIFT + 8)) == tl.load(prefix + row * L + layer).to(tl.uint32))
    digit = ((key >> SHIFT) & 255).to(tl.int32)
    # What does not count is put above the bins that are read.
    found = tl.histogram(tl.where(inside, digit, BINS), 2 * BINS)
    bins = tl.arange(0, 2 * BINS)
    tl.atomic_add(counts + (row * L + layer) * BINS + bins, found, mask=(bins < BINS) & (found > 0))


@triton.jit
def _mark(keys, candidates, threshold, below, equal, layer_of, start_of, stop_of, K, L, ALL: tl.constexpr,
          TIES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Which keys lie below their layer's threshold, and which on it."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    layer, stop = tl.load(layer_of + block), tl.load(stop_of + block)
    at = tl.load(start_of + block) + tl.arange(0, BLOCK)
    inside = at < stop
    key = (tl.load(keys + row * K + at, mask=inside, other=0).to(tl.uint32, bitcast=True) ^ 0x80000000).to(tl.int64)
    limit = tl.load(threshold + row * L + layer)  # -1 where nothing is taken
    good = inside
    if not ALL:
        good = good & (tl.load(candidates + row * K + at, mask=inside, other=0) != 0)
    if TIES:
        tl.store(below + row * K + at, good & (key < limit), mask=inside)
        tl.store(equal + row * K + at, good & (key == limit), mask=inside)
    else:
        tl.store(below + row * K + at, good & (key <= limit), mask=inside)


@functools.cache
def _blocks(layout: Layout, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For each block of work its layer and its span; blocks do not cross layers."""
    rows = [
        (i, at, layer.stop) for i, layer in enumerate(layout.prunable) for at in range(layer.start, layer.stop, BLOCK)
    ]
    table = torch.tensor(rows, dtype=torch.int32, device=device).T.contiguous()
    return table[0], table[1], table[2]


def radix_lowest(
    layout: Layout, keys: Tensor, counts: Sequence[Sequence[int]], candidates: Tensor | None, distinct: bool
) -> Tensor:
    """See `sparsity.select.lowest_by_layer`."""
    rows, k, n = len(keys), layout.prunable_size, len(layout.prunable)
    keys = keys.contiguous()
    among = keys if candidates is None else candidates.contiguous()
    blocks = _blocks(layout, keys.device)
    grid = (len(blocks[0]), rows)
    left = torch.tensor(counts, dtype=torch.int64).to(keys.device, non_blocking=True)
    nothing = left <= 0
    left = left.clamp(min=1)
    prefix = torch.zeros(rows, n, dtype=torch.int64, device=keys.device)
    for shift in (24, 16, 8, 0):
        found = torch.zeros(rows, n, BINS, dtype=torch.int32, device=keys.device)
        _count[grid](keys, among, prefix, found, *blocks, k, n, shift, shift == 24, candidates is None, BLOCK, BINS)
        running = found.cumsum(-1)
        digit = (running < left[..., None]).sum(-1).clamp(max=BINS - 1)
        before = running.gather(-1, digit[..., None]).squeeze(-1) - found.gather(-1, digit[..., None]).squeeze(-1)
        left = left - before
        prefix = prefix << 8 | digit
    threshold = prefix.masked_fill(nothing, -1)
    below = torch.empty(keys.shape, dtype=torch.bool, device=keys.device)
    if distinct:
        _mark[grid](keys, among, threshold, below, below, *blocks, k, n, candidates is None, False, BLOCK)
        return below
    equal = torch.empty_like(below)
    _mark[grid](keys, among, threshold, below, equal, *blocks, k, n, candidates is None, True, BLOCK)
    # One long scan: scanning each row by itself would leave all but a few multiprocessors idle.
    order = equal.flatten().cumsum(0, dtype=torch.int32).view(rows, k)
    for i, layer in enumerate(layout.prunable):
        span = slice(layer.start, layer.stop)
        earlier = order[:, span][:, :1] - equal[:, span][:, :1].to(torch.int32)
        below[:, span] |= equal[:, span] & (order[:, span] - earlier <= left[:, i : i + 1])
    return below
