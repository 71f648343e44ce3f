"""Any data set of images or texts with labels on the Hugging Face hub, through the optional `datasets` package."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError, DataError
from .augment import CropFlip
from .dataset import DataSet, Options, Pair, images
from .folder import IMAGES, rgb
from .sst2 import text_arrays
from .text import Tokenizer

_TESTS = ("test", "validation", "val", "valid", "dev")


def load(name: str, options: Options) -> DataSet:
    """The data set `name`, or `name:config`. Its first image column, else its first text column, is the input.

    It is judged on the split called test, or validation, whose labels are known; without one clients hold out some.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError("hub:NAME needs the datasets package: pip install 'flashfl[hub]'") from None
    repo, _, config = name.partition(":")
    try:
        splits = datasets.load_dataset(repo, config or None)
    except Exception as error:  # the package raises many kinds: no such name, no network, no such config
        raise DataError(f"hub:{name} could not be fetched: {type(error).__name__}: {error}") from None
    if "train" not in splits:
        raise DataError(f"hub:{name} has no split 'train'; it has {', '.join(splits)}")
    train = splits["train"]
    label, classes = _label(train, name)
    test = next((splits[s] for s in _TESTS if s in splits and min(splits[s][label], default=-1) >= 0), None)
    kinds = {column: type(feature).__name__ for column, feature in train.features.items()}
    for column, kind in kinds.items():
        if kind == "Image":
            return _pictures(name, train, test, column, label, classes, options)
    for column, kind in kinds.items():
        if kind == "Value" and getattr(train.features[column], "dtype", "") in ("string", "large_string"):
            return _texts(name, train, test, column, label, classes, options)
    raise DataError(f"hub:{name} has neither images nor texts: its columns are {kinds}")


def _label(train: Any, name: str) -> tuple[str, int]:
    """The column of labels and the number of classes."""
    for column, feature in train.features.items():
        if type(feature).__name__ == "ClassLabel":
            return column, int(feature.num_classes)
    for column in ("label", "labels", "fine_label"):
        if column in train.features:
            return column, int(max(train[column])) + 1
    raise DataError(f"hub:{name} has no column of labels: its columns are {', '.join(train.features)}")


def _pictures(name: str, train: Any, test: Any, column: str, label: str, classes: int, options: Options) -> DataSet:
    size = (options.size, options.size) if options.size else train[0][column].size

    def pixels(split: Any) -> Pair:
        return np.stack([_picture(row, size, options.size > 0, name) for row in split[column]]), np.array(split[label])

    augment = CropFlip() if options.augment else None
    return images(f"hub:{name}", pixels(train), pixels(test) if test else None, classes, IMAGES, augment)


def _picture(image: Any, size: tuple[int, int], resize: bool, name: str) -> NDArray[Any]:
    """A pillow image as uint8 RGB (3, H, W)."""
    image = rgb(image)
    if resize:
        image = image.resize(size)
    if image.size != size:
        raise DataError(f"hub:{name} has images of {image.size} and of {size} pixels: scale them with task.size")
    return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)


def _texts(name: str, train: Any, test: Any, column: str, label: str, classes: int, options: Options) -> DataSet:
    from pathlib import Path

    texts = list(train[column])
    if options.vocab:
        tokenizer = Tokenizer.wordpiece(Path(options.vocab))
    else:
        tokenizer = Tokenizer.of_words(texts, options.vocab_size)
    held = text_arrays(texts, list(train[label]), tokenizer, options.length)
    judged = text_arrays(list(test[column]), list(test[label]), tokenizer, options.length) if test else None
    return DataSet(f"hub:{name}", held, judged, classes, (options.length,), vocab=len(tokenizer))
