"""Mask mismatch SM(i, j) = 1 - |Mi & Mj| / |Mi or Mj| of all pairs of several masks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pairwise(masks: Iterable[NDArray[Any]], sizes: Sequence[int]) -> NDArray[np.float64]:
    """The mismatch of every pair of boolean masks: [1 + layers, n, n], the whole model first, then each layer."""
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
    """A mask as 64-bit words. Each layer begins with a new word."""
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
