"""The 8x8 digits: the data set that is always there, as a file of the package.

These are the test images of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits", UCI Machine
Learning Repository (1998), https://archive.ics.uci.edu/dataset/80, CC BY 4.0, in their order, as 8-bit numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...core.rng import fold, permutation
from ..augment import Normalise
from ..dataset import DataSet, Files, Options, images

_TRAIN = 1437


def _load(paths: list[Path], options: Options) -> DataSet:
    """The split into training and test images is the same for every seed."""
    with np.load(Path(__file__).with_name("digits.npz"), allow_pickle=False) as file:
        x, y = file["images"], file["labels"].astype(np.int64)
    order = permutation(fold(0, "digits"), len(y)).numpy()
    x, y = x.reshape(-1, 1, 8, 8)[order], y[order]
    norm = Normalise((0.3053,), (0.3760,), white=16)
    return images([(x[:_TRAIN], y[:_TRAIN]), (x[_TRAIN:], y[_TRAIN:])], 10, norm)


DIGITS = Files(_load)
