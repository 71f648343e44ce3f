"""The 8x8 digits that come with scikit-learn: the data set that is always there."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..core.rng import fold, permutation
from .augment import Normalise
from .dataset import DataSet, Options, images

_TRAIN = 1437
NORM = Normalise((0.3053,), (0.3760,), white=16)


def load(paths: list[Path], options: Options) -> DataSet:
    """1,437 training and 360 test images; the split is fixed, whatever the seed of a run."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = permutation(fold(0, "digits"), len(y)).numpy()
    x = x.astype(np.uint8).reshape(-1, 1, 8, 8)[order]
    y = y[order]
    return images("digits", (x[:_TRAIN], y[:_TRAIN]), (x[_TRAIN:], y[_TRAIN:]), 10, NORM)
