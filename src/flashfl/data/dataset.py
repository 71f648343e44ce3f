"""What a data set is once loaded, and what is known of one before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .augment import Normalise
from .examples import Arrays, Augment
from .files import damaged, find, missing


@dataclass(frozen=True)
class Options:
    """What may be chosen about how a data set is read."""

    verify: bool = True  # compare with the published checksums
    augment: bool = True
    length: int = 64  # tokens a text is cut or padded to
    vocab: str = ""  # a WordPiece vocab.txt; empty: a vocabulary of the training texts' words
    vocab_size: int = 8192  # words of that vocabulary
    size: int = 0  # pixels a side that images of a folder are scaled to; 0: they must be of one size


@dataclass(frozen=True, eq=False)
class DataSet:
    """Samples to train on and to judge on, held once and shared by everyone.

    `shape` is (channels, height, width) of an image or (tokens,) of a text; `writers` says who made each training
    sample, where that is known.
    """

    name: str
    train: Arrays
    test: Arrays | None
    classes: int
    shape: tuple[int, ...]
    writers: NDArray[Any] | None = None
    vocab: int = 0

    @property
    def labels(self) -> NDArray[np.int64]:
        labels: NDArray[np.int64] = self.train.target.numpy()
        return labels


Pair = tuple[NDArray[Any], NDArray[Any]]  # images and labels


def images(
    name: str,
    train: Pair,
    test: Pair | None,
    classes: int,
    norm: Normalise,
    augment: Augment | None = None,
    writers: NDArray[Any] | None = None,
) -> DataSet:
    """A data set of uint8 images (N, C, H, W); only training images are augmented."""

    def arrays(pair: Pair, change: Augment | None) -> Arrays:
        target = torch.from_numpy(pair[1].astype(np.int64))
        return Arrays((torch.from_numpy(pair[0]),), target, norm, change)

    shape = tuple(int(n) for n in train[0].shape[1:])
    return DataSet(name, arrays(train, augment), arrays(test, None) if test else None, classes, shape, writers)


def check_labels(path: Path, labels: NDArray[Any], classes: int) -> None:
    """Raise unless every label is a class."""
    if len(labels) == 0:
        raise damaged(path, "it holds no samples")
    if labels.min() < 0 or labels.max() >= classes:
        raise damaged(
            path,
            f"it has the label {labels.max() if labels.max() >= classes else labels.min()}, "
            f"but labels run from 0 to {classes - 1}",
        )


@dataclass(frozen=True)
class Form:
    """One published form of a data set: its files under the root, and what reads them."""

    files: tuple[str, ...]
    read: Callable[[list[Path], Options], DataSet]
    checksums: bool = False  # whether the published files' are known, and compared


@dataclass(frozen=True)
class Info:
    """What is known of a data set without reading it."""

    name: str
    about: str
    train: int
    test: int
    classes: int
    shape: tuple[int, ...]
    model: str  # the model it is trained with unless another is asked for
    forms: tuple[Form, ...]
    get: str = ""  # how to get its files
    megabytes: int = 0  # that the files take, about

    @property
    def files(self) -> tuple[str, ...]:
        """The files of the form that is looked for first."""
        return self.forms[0].files

    def absent(self, root: Path) -> tuple[str, ...]:
        """The files missing from the form that is nearest to being there; none if the data set is present."""
        lacking = [tuple(name for name in form.files if find(root, name) is None) for form in self.forms]
        return min(lacking, key=len)

    def present(self, root: Path) -> bool:
        return not self.absent(root)

    def form(self, root: Path) -> Form:
        """The first form all of whose files are there."""
        for form in self.forms:
            if all(find(root, name) for name in form.files):
                return form
        raise missing(self.name, root, self.absent(root), self.get)

    def load(self, root: Path, options: Options = Options()) -> DataSet:  # noqa: B008 - frozen
        """Read the first form all of whose files are there."""
        form = self.form(root)
        return form.read([path for name in form.files if (path := find(root, name))], options)
