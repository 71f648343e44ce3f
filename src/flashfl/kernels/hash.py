"""The keyed hash of `core.rng`, one pass for many keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x85EBCA6B
    x = x ^ (x >> 13)
    x = x * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _hash(words, out, start, n, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.load(words + 2 * row).to(tl.uint32, bitcast=True)
    high = tl.load(words + 2 * row + 1).to(tl.uint32, bitcast=True)
    x = _mix(_mix((start + at).to(tl.uint32, bitcast=True) ^ low) + high)
    tl.store(out + row * n + at, x.to(tl.int32, bitcast=True), mask=at < n)


def hash_rows(words: Sequence[Sequence[int]], start: int, stop: int, device: torch.device) -> Tensor:
    """int32 hashes [keys, stop - start]; words: the low and the high half of each key, as signed numbers."""
    n = stop - start
    out = torch.empty(len(words), n, dtype=torch.int32, device=device)
    keys = torch.tensor(words, dtype=torch.int32).view(-1, 2).to(device, non_blocking=True)
    if out.numel():
        _hash[(triton.cdiv(n, 2048), len(words))](keys, out, start, n, 2048)
    return out
