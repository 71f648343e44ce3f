"""Sparse mask mismatch SM(i, j) = 1 - |Mi & Mj| / |Mi or Mj|, between two masks or all pairs of many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.state import Mask

_BLOCK = 1 << 20  # columns multiplied at once: sums of ones stay exact in float32


def shared(before: Mask, after: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each layer: the weights active in both masks, and those active in `after`.

    Reductions run where the masks are; a GPU is waited for once.
    """
    layers = after.layout.prunable
    if not after.bits.is_cuda and not before.bits.is_cuda:
        both = (before.bits & after.bits).numpy()
        common = [int(np.count_nonzero(both[x.start : x.stop])) for x in layers]
        return tuple(common), counts_of(after)
    both_bits = before.bits.to(after.bits.device) & after.bits
    parts = [both_bits[x.start : x.stop].sum() for x in layers]
    if after.known_counts is None:
        parts += [after.bits[x.start : x.stop].sum() for x in layers]
    numbers = torch.stack(parts).tolist() if parts else []
    return tuple(numbers[: len(layers)]), after.known_counts or tuple(numbers[len(layers) :])


def counts_of(mask: Mask) -> tuple[int, ...]:
    """`mask.counts`, by numpy where it has to be counted on a CPU: quicker than a sum of booleans in torch."""
    if mask.known_counts is not None or mask.bits.is_cuda:
        return mask.counts
    bits = mask.bits.numpy()
    return tuple(int(np.count_nonzero(bits[x.start : x.stop])) for x in mask.layout.prunable)


def jaccard(common: int, a: int, b: int) -> float:
    """SM from the sizes of two masks and of what they share; 0 for two empty ones."""
    union = a + b - common
    return 1.0 - common / union if union else 0.0


def pairwise(masks: Sequence[NDArray[Any]], sizes: Sequence[int]) -> NDArray[np.float64]:
    """SM of every pair of boolean masks: [1 + layers, n, n], first the whole model, then each layer."""
    n = len(masks)
    common = np.zeros((len(sizes), n, n))
    start = 0
    for i, size in enumerate(sizes):
        for at in range(start, start + size, _BLOCK):
            stop = min(at + _BLOCK, start + size)
            rows = np.stack([mask[at:stop] for mask in masks]).astype(np.float32)
            common[i] += rows @ rows.T
        start += size
    return np.stack([_distance(common.sum(0)), *map(_distance, common)])


def _distance(common: NDArray[np.float64]) -> NDArray[np.float64]:
    own = np.diagonal(common)
    union = own[:, None] + own[None, :] - common
    return np.where(union > 0, 1 - common / np.maximum(union, 1), 0.0)
