"""Sparse mask mismatch SM(i, j) = 1 - |Mi & Mj| / |Mi or Mj|, between two masks or all pairs of many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.state import Mask


def shared(before: Mask, after: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of each layer: the weights active in both masks, and those active in `after`.

    Reductions run where the masks are; a GPU is waited for once.
    """
    if after.bits.is_cuda or before.bits.is_cuda:
        return _shared_on_device(before, after)
    both = (before.bits & after.bits).numpy()
    common = [int(np.count_nonzero(both[x.start : x.stop])) for x in after.layout.prunable]
    return tuple(common), counts_of(after)


def _shared_on_device(before: Mask, after: Mask) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """All sums queued first, then read together: one wait."""
    layers = after.layout.prunable
    both = before.bits.to(after.bits.device) & after.bits
    parts = [both[x.start : x.stop].sum() for x in layers]
    if after.known_counts is None:
        parts += [after.bits[x.start : x.stop].sum() for x in layers]
    numbers = torch.stack(parts).tolist() if parts else []
    counts = tuple(numbers[len(layers) :]) if after.known_counts is None else after.known_counts
    return tuple(numbers[: len(layers)]), counts


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


def pairwise(masks: Iterable[NDArray[Any]], sizes: Sequence[int]) -> NDArray[np.float64]:
    """SM of every pair of boolean masks: [1 + layers, n, n], first the whole model, then each layer."""
    rows = [_words(mask, sizes) for mask in masks]
    starts = np.cumsum([0, *(_word_count(size) for size in sizes[:-1])])
    common = np.zeros((len(sizes), len(rows), len(rows)))
    for i, a in enumerate(rows):
        for j, b in enumerate(rows[: i + 1]):
            common[:, i, j] = common[:, j, i] = np.add.reduceat(_ones(a & b), starts)
    return np.stack([_distance(common.sum(0)), *map(_distance, common)])


def _word_count(size: int) -> int:
    return max(1, -(-size // 64))


def _words(mask: NDArray[Any], sizes: Sequence[int]) -> NDArray[np.uint64]:
    """A mask as 64-bit words, each layer beginning a new one."""
    words = np.zeros(sum(map(_word_count, sizes)), np.uint64)
    raw, start, at = words.view(np.uint8), 0, 0
    for size in sizes:
        packed = np.packbits(mask[start : start + size])
        raw[at : at + len(packed)] = packed
        start, at = start + size, at + 8 * _word_count(size)
    return words


_TABLE = np.array([bin(byte).count("1") for byte in range(256)], np.int64)


def _ones(words: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The number of ones of each word."""
    if hasattr(np, "bitwise_count"):
        return np.bitwise_count(words).astype(np.int64)
    found: NDArray[np.int64] = _TABLE[words.view(np.uint8)].reshape(-1, 8).sum(1)  # NumPy 1
    return found


def _distance(common: NDArray[np.float64]) -> NDArray[np.float64]:
    own = np.diagonal(common)
    union = own[:, None] + own[None, :] - common
    return np.where(union > 0, 1 - common / np.maximum(union, 1), 0.0)
