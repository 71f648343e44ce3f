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
_TEXTS = ("text", "sentence", "content", "review", "document", "comment", "tweet", "message")  # what is read, if there
_SECOND = ("question", "query", "premise", "hypothesis")  # half of a pair, even beside one of those
_IDS = ("id", "idx", "uid", "guid", "uuid")
Split = tuple[str, Any, list[int]]  # its name, its rows, their classes


def load(name: str, options: Options) -> DataSet:
    """The data set `name`, or `name:config`. Its first image column, else its one column of texts, is the input.

    It is judged on the split called test, or validation, that has labels; without one clients hold out some.
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
    if len(train) == 0:
        raise DataError(f"hub:{name}: split 'train' is empty")
    label = _label(train, name)
    known = _classes(train, label, name)
    test = [s for s in _TESTS if s in splits and _labelled(splits[s], label)][:1]
    held = [(s, splits[s], _targets(splits[s], label, known, f"hub:{name}: split {s!r}")) for s in ("train", *test)]
    kinds = {column: type(feature).__name__ for column, feature in train.features.items()}
    for column, kind in kinds.items():
        if kind == "Image":
            return _pictures(name, held, column, len(known), options)
    strings = [column for column in kinds if column != label and _is_string(train.features[column])]
    if texts := [c for c in strings if c.lower() not in _IDS and not c.lower().endswith("_id")]:
        return _texts(name, held, _text(texts, name), len(known), options)
    raise DataError(f"hub:{name} has neither images nor texts: its columns are {kinds}")


def _is_string(feature: Any) -> bool:
    return type(feature).__name__ == "Value" and getattr(feature, "dtype", "") in ("string", "large_string")


def _text(columns: list[str], name: str) -> str:
    """The column of texts, if it is clear which."""
    liked = [column for column in _TEXTS if column in columns]
    if len(columns) == 1 or (liked and not set(columns) & set(_SECOND)):
        return (liked or columns)[0]
    raise DataError(f"hub:{name} has several columns of texts, and one is expected: {', '.join(columns)}")


def _label(train: Any, name: str) -> str:
    """The column of labels."""
    for column, feature in train.features.items():
        if type(feature).__name__ == "ClassLabel":
            return str(column)
    for column in ("label", "labels", "fine_label"):
        if column in train.features:
            return column
    raise DataError(f"hub:{name} has no column of labels: its columns are {', '.join(train.features)}")


def _classes(train: Any, label: str, name: str) -> dict[Any, int]:
    """The class of each label: whole numbers are their own, strings count in the order of the alphabet."""
    if type(train.features[label]).__name__ == "ClassLabel":
        return {i: i for i in range(int(train.features[label].num_classes))}
    given = [value for value in train[label] if _is_label(value)]
    if all(isinstance(value, str) for value in given):
        return {value: i for i, value in enumerate(sorted(set(given)))}
    if all(isinstance(value, int | float) and value >= 0 and float(value).is_integer() for value in given):
        return {i: i for i in range(int(max(given)) + 1)}
    raise DataError(f"hub:{name}: the labels in {label!r} are neither all whole numbers nor all strings: {given[:3]}")


def _is_label(value: Any) -> bool:
    return value is not None and value != -1


def _labelled(split: Any, label: str) -> bool:
    """Whether a split has labels; those of a contest's test samples are kept secret."""
    return label in split.features and any(_is_label(value) for value in split[label])


def _targets(split: Any, label: str, known: dict[Any, int], where: str) -> list[int]:
    """The class of each row."""
    given = list(split[label])
    lost = [i for i, value in enumerate(given) if value not in known]
    if lost:
        example = f"row {lost[0]} has {given[lost[0]]!r}"
        raise DataError(f"{where} has {len(lost)} of {len(given)} rows without a known {label}: {example}")
    return [known[value] for value in given]


def _pictures(name: str, held: list[Split], column: str, classes: int, options: Options) -> DataSet:
    first = held[0][1][0][column]
    size = (options.size, options.size) if options.size else getattr(first, "size", (0, 0))
    pairs: list[Pair] = []
    for split, rows, labels in held:
        where = f"hub:{name}: split {split!r}"
        pixels = [_picture(row, size, options.size > 0, where) for row in rows[column]]
        pairs.append((np.stack(pixels), np.array(labels)))
    augment = CropFlip() if options.augment else None
    return images(f"hub:{name}", pairs[0], pairs[1] if pairs[1:] else None, classes, IMAGES, augment)


def _picture(image: Any, size: tuple[int, int], resize: bool, where: str) -> NDArray[Any]:
    """A pillow image as uint8 RGB (3, H, W)."""
    if image is None:
        raise DataError(f"{where} has a row without an image")
    image = rgb(image)
    if resize:
        image = image.resize(size)
    if image.size != size:
        raise DataError(f"{where} has images of {image.size} where {size} pixels belong: scale them with task.size")
    return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)


def _texts(name: str, held: list[Split], column: str, classes: int, options: Options) -> DataSet:
    from pathlib import Path

    texts = [list(rows[column]) for _, rows, _ in held]
    for (split, _, _), some in zip(held, texts, strict=True):
        if None in some:
            raise DataError(f"hub:{name}: split {split!r} has no {column} in row {some.index(None)}")
    if options.vocab:
        tokenizer = Tokenizer.wordpiece(Path(options.vocab))
    else:
        tokenizer = Tokenizer.of_words(texts[0], options.vocab_size)
    arrays = [text_arrays(t, y, tokenizer, options.length) for t, (_, _, y) in zip(texts, held, strict=True)]
    test = arrays[1] if arrays[1:] else None
    return DataSet(f"hub:{name}", arrays[0], test, classes, (options.length,), vocab=len(tokenizer))
