"""Made-up data with the shapes of a known data set, for trial runs without its files."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.rng import fold
from ..augment import CropFlip, Normalise
from ..dataset import DataSet, Info, Options, images
from ..sources import Arrays
from ..text import tokens

_VOCAB = 1000
_TEST = 64


def make(info: Info, samples: int, writers: int, options: Options) -> DataSet:
    """`samples` training and a few test samples that look like their class, so that training can be seen to work."""
    rng = np.random.Generator(np.random.Philox(fold(0, "synthetic", info.name)))
    # Every class among the samples occurs about equally often, and a writer's samples lie apart.
    labels = [np.arange(n) % min(info.classes, n) for n in (samples, _TEST)]
    ids = np.arange(samples) % max(1, writers)
    if len(info.shape) == 1:
        length = min(options.length, 16)
        train, test = (_texts(y, length, rng) for y in labels)
        return DataSet(train, test, info.classes, ids, _VOCAB)
    prototypes = rng.integers(40, 216, (info.classes, *info.shape))
    noise = [rng.integers(-40, 40, (len(y), *info.shape), dtype=np.int16) for y in labels]
    pairs = [((prototypes[y] + n).astype(np.uint8), y) for y, n in zip(labels, noise, strict=True)]
    channels = info.shape[0]
    augment = CropFlip() if channels == 3 else None
    return images(pairs, info.classes, Normalise((0.5,) * channels, (0.25,) * channels), augment, ids)


def _texts(labels: NDArray[np.int64], length: int, rng: np.random.Generator) -> Arrays:
    """Random words, of which every third names the class; 0 pads the end."""
    ids = rng.integers(200, _VOCAB, (len(labels), length))
    ids = np.where(rng.random(ids.shape) < 1 / 3, 100 + labels[:, None], ids)
    ids[np.arange(length) >= rng.integers(length // 2, length + 1, len(labels))[:, None]] = 0
    return Arrays((torch.from_numpy(ids.astype(np.int32)),), torch.from_numpy(labels.astype(np.int64)), tokens)
