"""What a data set is: before it is read (`Info`), and after (`DataSet`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.errors import DataError
from .augment import Normalise
from .files import damaged, find, verify
from .sources import Arrays, Augment
from .text import Tokenizer, tokens


@dataclass(frozen=True)
class Options:
    """How a data set is read."""

    verify: bool = True  # compare files with the published checksums
    length: int = 64  # tokens that a text is cut or padded to
    vocab: str = ""  # a WordPiece vocab.txt; empty: the most frequent words of the training texts
    vocab_size: int = 8192  # how many of those words
    size: int = 0  # pixels a side that images of a folder or the hub are scaled to; 0: they must have one size


@dataclass(frozen=True, eq=False)
class DataSet:
    """The samples of a data set, held once and shared by all clients.

    `writers` says who made each training sample, where that is known. `vocab`: how many tokens texts may have.
    """

    train: Arrays
    test: Arrays | None
    classes: int
    writers: NDArray[np.int64] | None = None
    vocab: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """(channels, height, width) of images, (tokens,) of texts."""
        return tuple(self.train.inputs[0].shape[1:])

    @property
    def labels(self) -> NDArray[np.int64]:
        return cast("NDArray[np.int64]", self.train.target.numpy())


Pair = tuple[NDArray[np.uint8], NDArray[np.integer]]  # images and labels
Texts = tuple[Sequence[str], Sequence[int]]  # texts and labels


def images(
    pairs: Sequence[Pair],
    classes: int,
    norm: Normalise,
    augment: Augment | None = None,
    writers: NDArray[np.int64] | None = None,
) -> DataSet:
    """A data set of uint8 images (N, C, H, W): those to train on, and perhaps those to test on, never augmented."""
    train, *test = (Arrays((torch.from_numpy(x),), torch.from_numpy(y.astype(np.int64)), norm) for x, y in pairs)
    return DataSet(replace(train, augment=augment), test[0] if test else None, classes, writers)


def texts(pairs: Sequence[Texts], classes: int, options: Options) -> DataSet:
    """A data set of texts as token ids: those to train on, and perhaps those to test on."""
    if options.vocab:
        tokenizer = Tokenizer.wordpiece(Path(options.vocab))
    else:
        tokenizer = Tokenizer.of_words(pairs[0][0], options.vocab_size)
    encoded = [(torch.from_numpy(tokenizer.encode(held, options.length)), torch.tensor(y)) for held, y in pairs]
    train, *test = (Arrays((ids,), labels.long(), tokens) for ids, labels in encoded)
    return DataSet(train, test[0] if test else None, classes, vocab=len(tokenizer))


def check_labels(path: Path, labels: NDArray[np.integer], count: int, classes: int) -> None:
    """Raise unless there are `count` labels, at least one, and all of them are classes."""
    if not 0 < len(labels) == count:
        raise damaged(path, f"it has {len(labels)} labels for {count} images")
    for label in (labels.min(), labels.max()):
        if not 0 <= label < classes:
            raise damaged(path, f"it has the label {label}, but labels run from 0 to {classes - 1}")


@dataclass(frozen=True)
class Files:
    """The files of a data set: where they lie, how they are read, and how to get them."""

    read: Callable[[list[Path], Options], DataSet]  # from the paths of one form
    forms: tuple[tuple[str, ...], ...] = ((),)  # the names under the data root, in each form they are published in
    md5: Mapping[str, str] = field(default_factory=dict)  # by file name, where it is known
    get: str = ""

    def find(self, root: Path) -> dict[str, Path | None]:
        """Where each file lies, in the form that misses fewest."""
        forms = [{name: find(root, name) for name in form} for form in self.forms]
        return min(forms, key=lambda form: list(form.values()).count(None))

    def absent(self, root: Path) -> list[str]:
        return [name for name, path in self.find(root).items() if path is None]

    def checksum(self, path: Path) -> str:
        """The published md5 of a file; empty where it is not known."""
        return self.md5.get(path.name.removesuffix(".gz"), "")


@dataclass(frozen=True)
class Info:
    """What is known of a data set before it is read; 0 or empty where it is not known."""

    name: str
    about: str
    train: int
    test: int
    classes: int
    shape: tuple[int, ...]
    model: str  # the one it is usually trained with
    megabytes: int  # that its files take, about
    files: Files

    def load(self, root: Path, options: Options = Options()) -> DataSet:  # noqa: B008 - frozen
        """Read the first complete form of its files, after comparing checksums."""
        if absent := self.files.absent(root):
            raise DataError(
                f"data set {self.name!r} is not complete under {root.absolute()}. Not found (gzipped or not):\n"
                + "".join(f"  {root / name}\n" for name in absent)
                + f"{self.files.get}\nTo use another folder, name it with --data-root or FLASHFL_DATA"
            )
        paths = [path for path in self.files.find(root).values() if path]
        for path in paths:
            if options.verify and (md5 := self.files.checksum(path)):
                verify(path, md5)
        return self.files.read(paths, options)
