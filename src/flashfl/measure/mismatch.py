"""Mask mismatch SM(i, j) = 1 - |Mi & Mj| / |Mi or Mj| of all pairs of several masks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1 << 20  # weights that are compared at once: few enough for exact counts in float32


def pairwise(masks: Sequence[NDArray[np.bool_]]) -> NDArray[np.float64]:
    """The mismatch of every pair of boolean masks: [n, n]."""
    common = np.zeros((len(masks), len(masks)))
    for start in range(0, len(masks[0]), _CHUNK):
        part = np.stack([mask[start : start + _CHUNK] for mask in masks]).astype(np.float32)
        common += part @ part.T
    own = np.diagonal(common)
    union = own[:, None] + own[None, :] - common
    return np.where(union > 0, 1 - common / np.maximum(union, 1), 0.0)
