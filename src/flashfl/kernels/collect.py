"""A stack of updates in two passes: one finds those that are finite, one adds these up; nothing is copied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _finite(values, found, size, BLOCK: tl.constexpr):
    """Whether all values of a block of a row are finite."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values + row * size + at, mask=at < size, other=0.0)
    tl.store(found + row * tl.num_programs(0) + block, tl.min((tl.abs(value) < float("inf")).to(tl.int32), 0))


@triton.jit
def _add(values, bits, share, weights, holders, rows, first, size, K, bits_step, BLOCK: tl.constexpr):
    """Add share times value and share times held, over the rows; a row whose share is 0 is not even read."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, prunable = (at >= first) & (at < size), at < K
    total = tl.load(weights + at, mask=inside, other=0.0)
    held = tl.load(holders + at, mask=prunable, other=0)
    value, active = values + at, bits + at
    for row in range(rows):
        n = tl.load(share + row)
        total += tl.load(value, mask=inside & (at < tl.where(n > 0, size, 0)), other=0.0).to(tl.float64) * n.to(
            tl.float64
        )
        held += tl.where(tl.load(active, mask=prunable, other=0) != 0, n, 0)
        value += size
        active += bits_step
    tl.store(weights + at, total, mask=inside)
    tl.store(holders + at, held, mask=prunable)


def finite(values: Tensor) -> Tensor:
    """For each row, whether its values are finite."""
    rows, size = values.shape
    blocks = triton.cdiv(size, _BLOCK)
    found = torch.empty(rows, blocks, dtype=torch.int32, device=values.device)
    _finite[(blocks, rows)](values, found, size, _BLOCK)
    return found.amin(1) > 0


def add(values: Tensor, bits: Tensor, share: Tensor, weights: Tensor, holders: Tensor, first: int) -> None:
    """weights[first:] += share @ values[:, first:] in double precision; holders += share @ bits.

    bits may be [1, ...]: the same for all rows.
    """
    rows, size = values.shape
    step = 0 if len(bits) == 1 else bits.shape[1]
    grid = (triton.cdiv(size, _BLOCK),)
    _add[grid](values, bits, share, weights, holders, rows, first, size, bits.shape[1], step, _BLOCK)
