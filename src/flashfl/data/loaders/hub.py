"""Data sets of images or texts with labels from the Hugging Face hub, through the optional `datasets` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ...core.errors import ConfigError, DataError
from ..augment import IMAGENET, CropFlip
from ..columns import LABELS, is_id
from ..dataset import DataSet, Options, Pair, Texts, images, texts
from ..pictures import rgb, stack

_TESTS = ("test", "validation", "val", "valid", "dev")
_TEXTS = ("text", "sentence", "content", "review", "document", "comment", "tweet", "message")  # what is read, if there
_SECOND = ("question", "query", "premise", "hypothesis")  # half of a pair, even beside one of those
_NO_LABEL = (None, -1)
_CLASSES = 1 << 16  # that whole numbers may name: a model has an output for each


Rows = Any  # a split, as the `datasets` package gives it: rows[column], and rows.features by column


def load(name: str, options: Options) -> DataSet:
    """The data set REPOSITORY or REPOSITORY:CONFIG.

    The input is the first column of images, else the one column of texts. The test samples are the split called test,
    or validation, that has labels. Without one, clients hold some back.
    """
    splits = _fetch(name)
    try:
        return _read(splits, options)
    except DataError as error:
        raise DataError(
            f"hub:{name}: {error}. You can also select rows and columns yourself with the datasets package, and pass "
            "them to fl.Task"
        ) from None


def _fetch(name: str) -> Mapping[str, Rows]:
    try:
        import datasets
    except ImportError:
        raise ConfigError("hub:NAME needs the datasets package: pip install 'flashfl[hub]'") from None
    repository, _, config = name.partition(":")
    try:
        splits: Mapping[str, Rows] = datasets.load_dataset(repository, config or None)
    except Exception as error:  # the package raises many kinds: no such name, no network, no such config
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"hub:{name} could not be fetched ({why}). Check the name and the network.") from None
    return splits


def _read(splits: Mapping[str, Rows], options: Options) -> DataSet:
    if not splits.get("train"):
        raise DataError(f"it needs a split 'train' with samples, and its splits are {', '.join(splits)}")
    train = splits["train"]
    label = _label(train)
    classes = _classes(train, label)
    labelled = [s for s in _TESTS if s in splits and label in splits[s].features]
    tests = [s for s in labelled if any(x not in _NO_LABEL for x in splits[s][label])][:1]
    pictures = [column for column, feature in train.features.items() if type(feature).__name__ == "Image"]
    column = pictures[0] if pictures else _text(train, label)
    pairs: list[Pair] = []
    held: list[Texts] = []
    for split in ("train", *tests):
        given, values = list(splits[split][label]), _values(splits[split], column, split)
        if lost := [f"row {i} has {value!r}" for i, value in enumerate(given) if value not in classes]:
            where = f"{len(lost)} of {len(given)} rows of split {split!r}"
            raise DataError(f"the label (column {label!r}) is missing or unknown in {where}: {lost[0]}")
        targets = [classes[value] for value in given]
        if pictures:
            size = pairs[0][0].shape[2:] if pairs else None
            found = ((f"split {split!r}", rgb(value)) for value in values)
            pairs.append((stack(found, options.size, size, "BICUBIC"), np.array(targets)))
        else:
            held.append((list(values), targets))
    if not pictures:
        return texts(held, len(classes), options)
    return images(pairs, len(classes), IMAGENET, CropFlip())


def _label(train: Rows) -> str:
    """The column of labels."""
    labels: list[str] = [column for column, feature in train.features.items() if type(feature).__name__ == "ClassLabel"]
    labels += [column for column in LABELS if column in train.features]
    if not labels:
        raise DataError(
            f"it has no column of labels: one of type ClassLabel, or called {' or '.join(LABELS)}. Its columns are "
            f"{', '.join(train.features)}"
        )
    return labels[0]


def _classes(train: Rows, label: str) -> dict[object, int]:
    """The class of each label: whole numbers are their own, strings are numbered in the order of the alphabet."""
    if type(train.features[label]).__name__ == "ClassLabel":
        return {i: i for i in range(int(train.features[label].num_classes))}
    given = [value for value in train[label] if value not in _NO_LABEL]
    if all(isinstance(value, str) for value in given):
        return {value: i for i, value in enumerate(sorted(set(given)))}
    if all(isinstance(value, int | float) and 0 <= value < _CLASSES and value == int(value) for value in given):
        return {i: i for i in range(int(max(given)) + 1)}
    raise DataError(f"labels must be whole numbers from 0 to {_CLASSES - 1}, or strings: {label!r} has {given[:3]}")


def _values(rows: Rows, column: str, split: str) -> Iterator[Any]:
    """The values of a column, none of which may be missing."""
    for i, value in enumerate(rows[column]):
        if value is None:
            raise DataError(f"split {split!r} has no {column} in row {i}")
        yield value


def _text(train: Rows, label: str) -> str:
    """The column of texts, if it is clear which."""
    strings = [c for c, f in train.features.items() if getattr(f, "dtype", "") in ("string", "large_string")]
    columns = [c for c in strings if c != label and not is_id(c)]
    liked = [column for column in _TEXTS if column in columns]
    if len(columns) == 1 or (liked and not set(columns) & set(_SECOND)):
        return (liked or columns)[0]
    found = ", ".join(columns) or "none"
    raise DataError(f"it needs a column of images, or exactly one text column. Its text columns: {found}")
