"""The largest entries of a layer's input, which parts that prune inputs let it save."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _find(x, share, threshold, count, spacing, N1, N2, N3, S0, S1, S2, S3, LOW: tl.constexpr, BLOCK: tl.constexpr):
    """The magnitude at which the largest of `count` regularly spaced entries begin: bit by bit, from the highest."""
    i = tl.arange(0, BLOCK)
    inside, at = i < count, i * spacing
    d, at = at % N3, at // N3
    c, at = at % N2, at // N2
    place = (at // N1) * S0 + (at % N1) * S1 + c * S2 + d * S3
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0x7FFFFFFF)
    smaller = tl.floor((1 - tl.load(share).to(tl.float32)) * count).to(tl.int32)
    smaller = tl.minimum(tl.maximum(smaller, 0), count - 1)
    found = tl.zeros([], dtype=tl.int32)
    for step in tl.static_range((32 - LOW) // 2):  # two bits at a time, the sign being 0
        unit = 1 << (30 - 2 * step)
        # How many keys are below found + unit, + 2 units and + 3 units: three counts of 20 bits in one sum.
        below = (key < found + unit).to(tl.int64)
        if step > 0:
            below += (key < found + 2 * unit).to(tl.int64) << 20
            below += (key < found + 3 * unit).to(tl.int64) << 40
        counts = tl.sum(below, 0)
        digit = ((counts & 0xFFFFF) <= smaller).to(tl.int32)
        if step > 0:
            digit += (((counts >> 20) & 0xFFFFF) <= smaller).to(tl.int32)
            digit += ((counts >> 40) <= smaller).to(tl.int32)
        found += digit * unit
    tl.store(threshold, found)


@triton.jit
def _keep(x, threshold, out, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0)
    key = value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(out + at, tl.where(key >= tl.load(threshold), value, 0.0), mask=at < size)


def largest(x: Tensor, share: Tensor, spacing: int) -> Tensor:
    """See `engine.replica.largest`. The entries that decide are at most 32,768."""
    if x.dim() > 4:
        return largest(x.flatten(3), share, spacing).view(x.shape)
    if not (x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last)):
        x = x.contiguous()
    count, ones = -(-x.numel() // spacing), 4 - x.dim()
    sizes, strides = (1,) * ones + x.shape, (0,) * ones + x.stride()
    threshold = torch.empty((), dtype=torch.int32, device=x.device)
    out = torch.empty_like(x)
    low = 16 if x.dtype == torch.bfloat16 else 0  # bits that are never set
    block = triton.next_power_of_2(count)
    _find[(1,)](x, share, threshold, count, spacing, *sizes[1:], *strides, low, block, num_warps=32)
    _keep[(triton.cdiv(x.numel(), _BLOCK),)](x, threshold, out, x.numel(), _BLOCK, num_warps=4)
    return out
