"""Data sets of images or texts with labels from the Hugging Face hub, through the optional `datasets` package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...core.errors import ConfigError, DataError
from ..augment import IMAGENET, CropFlip
from ..columns import LABELS, is_id
from ..dataset import DataSet, Info, Options, Pair, images, texts
from ..pictures import rgb, stack

if TYPE_CHECKING:
    from PIL.Image import Image

_TESTS = ("test", "validation", "val", "valid", "dev")
_TEXTS = ("text", "sentence", "content", "review", "document", "comment", "tweet", "message")  # what is read, if there
_SECOND = ("question", "query", "premise", "hypothesis")  # half of a pair, even beside one of those


class Rows(Protocol):
    """A split, as the `datasets` package gives it."""

    features: Mapping[str, Any]

    def __len__(self) -> int: ...
    def __getitem__(self, column: str) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Split:
    """The rows of a split, the class of each, and how errors call it."""

    rows: Rows
    classes: list[int]
    name: str

    def texts(self, column: str) -> tuple[list[str], list[int]]:
        held = list(self.rows[column])
        if None in held:
            raise DataError(f"{self.name} has no {column} in row {held.index(None)}")
        return held, self.classes

    def pictures(self, column: str) -> Iterator[tuple[str, Image]]:
        for picture in self.rows[column]:
            if picture is None:
                raise DataError(f"{self.name} has a row without an image")
            yield self.name, rgb(picture)


def hub(name: str, repository: str) -> Info:
    """The data set of a repository on the hub, written REPOSITORY or REPOSITORY:CONFIG."""
    return Info(name, "from the Hugging Face hub", lambda paths, options: _load(repository, options))


def _load(name: str, options: Options) -> DataSet:
    """The input is the first column of images, else the one column of texts.

    The test samples are the split called test, or validation, that has labels. Without one, clients hold some back.
    """
    found = _fetch(name)
    if "train" not in found:
        raise DataError(f"hub:{name} has no split 'train'; it has {', '.join(found)}")
    if len(found["train"]) == 0:
        raise DataError(f"hub:{name}: split 'train' is empty")
    features = found["train"].features
    label = _label(features, name)
    known = _known_labels(found["train"], label, name)
    tests = [split for split in _TESTS if split in found and _labelled(found[split], label)]
    splits = [_split(found[split], label, known, f"hub:{name}: split {split!r}") for split in ("train", *tests[:1])]
    if column := next((c for c, feature in features.items() if _kind(feature) == "Image"), None):
        return _images(splits, column, len(known), options)
    column = _text(features, label, name)
    train, *test = (split.texts(column) for split in splits)
    return texts(train, test[0] if test else None, len(known), options)


def _images(splits: list[Split], column: str, classes: int, options: Options) -> DataSet:
    pairs: list[Pair] = []
    for split in splits:
        size = pairs[0][0].shape[2:] if pairs else None
        pixels = stack(split.pictures(column), options.size, "BICUBIC", size)
        pairs.append((pixels, np.array(split.classes)))
    augment = CropFlip() if options.augment else None
    return images(pairs[0], pairs[1] if pairs[1:] else None, classes, IMAGENET, augment)


def _fetch(name: str) -> Mapping[str, Rows]:
    try:
        import datasets
    except ImportError:
        raise ConfigError("hub:NAME needs the datasets package: pip install 'flashfl[hub]'") from None
    repository, _, config = name.partition(":")
    try:
        splits: Mapping[str, Rows] = datasets.load_dataset(repository, config or None)
    except Exception as error:  # the package raises many kinds: no such name, no network, no such config
        raise DataError(f"hub:{name} could not be fetched: {type(error).__name__}: {error}") from None
    return splits


def _kind(feature: object) -> str:
    return type(feature).__name__


def _text(features: Mapping[str, Any], label: str, name: str) -> str:
    """The column of texts, if it is clear which."""
    strings = [c for c, f in features.items() if _kind(f) == "Value" and f.dtype in ("string", "large_string")]
    columns = [c for c in strings if c != label and not is_id(c)]
    if not columns:
        kinds = {column: _kind(feature) for column, feature in features.items()}
        raise DataError(f"hub:{name} has neither images nor texts: its columns are {kinds}")
    liked = [column for column in _TEXTS if column in columns]
    if len(columns) == 1 or (liked and not set(columns) & set(_SECOND)):
        return (liked or columns)[0]
    raise DataError(f"hub:{name} has several columns of texts, and one is expected: {', '.join(columns)}")


def _label(features: Mapping[str, Any], name: str) -> str:
    """The column of labels."""
    labels = [column for column, feature in features.items() if _kind(feature) == "ClassLabel"]
    labels += [column for column in LABELS if column in features]
    if not labels:
        raise DataError(f"hub:{name} has no column of labels: its columns are {', '.join(features)}")
    return labels[0]


def _known_labels(train: Rows, label: str, name: str) -> dict[object, int]:
    """The class of each label: whole numbers are their own, strings are numbered in the order of the alphabet."""
    if _kind(train.features[label]) == "ClassLabel":
        return {i: i for i in range(int(train.features[label].num_classes))}
    given = [value for value in train[label] if _is_label(value)]
    if all(isinstance(value, str) for value in given):
        return {value: i for i, value in enumerate(sorted(set(given)))}
    if all(isinstance(value, int | float) and value >= 0 and float(value).is_integer() for value in given):
        return {i: i for i in range(int(max(given)) + 1)}
    raise DataError(f"hub:{name}: the labels in {label!r} are neither all whole numbers nor all strings: {given[:3]}")


def _is_label(value: object) -> bool:
    return value is not None and value != -1


def _labelled(split: Rows, label: str) -> bool:
    """Whether a split has labels; those of a contest's test samples are kept secret."""
    return label in split.features and any(_is_label(value) for value in split[label])


def _split(rows: Rows, label: str, known: Mapping[object, int], name: str) -> Split:
    given = list(rows[label])
    lost = [i for i, value in enumerate(given) if value not in known]
    if lost:
        example = f"row {lost[0]} has {given[lost[0]]!r}"
        raise DataError(f"{name} has {len(lost)} of {len(given)} rows without a known {label}: {example}")
    return Split(rows, [known[value] for value in given], name)
