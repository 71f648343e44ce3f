"""CIFAR-10 and CIFAR-100, in the python and in the binary version."""

from __future__ import annotations

import pickletools
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..augment import CropFlip, Normalise
from ..dataset import DataSet, Files, Options, Pair, check_labels, images
from ..files import damaged, read

_SHAPE = (3, 32, 32)
_PIXELS = 3 * 32 * 32
_ORDERS: dict[str, Literal["C", "F"]] = {"NEWFALSE": "C", "NEWTRUE": "F"}  # is an array's content column by column?
_NORMS = {
    10: Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


def _python(path: Path, classes: int) -> Pair:
    """A file of the python version: a pickled dict with an N by 3072 array and a list of labels.

    To unpickle a file may run code. So its instructions are listed, not carried out. The longest string is the array's
    content, and the instruction before it says whether it lies column by column. Labels follow their list's name. The
    text "b", with which numpy makes an empty array, is followed by a version and the array's shape.
    """
    key, before = b"labels" if classes == 10 else b"fine_labels", ""
    strings: dict[bytes, tuple[str, list[Any]]] = {}  # each with the instruction before it, and the numbers after it
    numbers: list[Any] = []
    try:
        for instruction, value, _ in pickletools.genops(read(path)):
            if isinstance(value, str | bytes):
                numbers = []
                strings[value.encode("latin1", "replace") if isinstance(value, str) else value] = before, numbers
            elif instruction.name.startswith("BININT"):
                numbers.append(value)
            before = instruction.name
        pixels = max(strings, key=len)
        order = _ORDERS[strings[pixels][0]]
        _, count, width = strings[b"b"][1]
        x = np.frombuffer(pixels, np.uint8).reshape((count, width), order=order)
        return x.reshape(-1, *_SHAPE), np.array(strings[key][1])
    except (ValueError, KeyError) as error:
        what = f"it must be a pickled dict with uint8 images of {_PIXELS} bytes, and labels as {key.decode()!r}"
        raise damaged(path, f"{what} ({type(error).__name__}: {error})") from None


def _binary(path: Path, classes: int) -> Pair:
    """A file of the binary version. An image is its label (CIFAR-100: a coarse one, then the fine), then 3072 bytes."""
    head = 1 if classes == 10 else 2
    data, size = read(path), head + _PIXELS
    if len(data) % size:
        raise damaged(path, f"it has {len(data)} bytes, expected a multiple of {size}: an image and its label")
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    return rows[:, head:].reshape(-1, *_SHAPE), rows[:, head - 1]


def _load(classes: int, paths: list[Path], options: Options) -> DataSet:
    pairs = [(_binary if ".bin" in path.suffixes else _python)(path, classes) for path in paths]
    for path, (x, y) in zip(paths, pairs, strict=True):
        check_labels(path, y, len(x), classes)
    return images([_join(pairs[:-1]), _join(pairs[-1:])], classes, _NORMS[classes], CropFlip())


def _join(pairs: list[Pair]) -> Pair:
    """The samples of several files as arrays that may be written to."""
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


_GET = "Unpack https://www.cs.toronto.edu/~kriz/cifar-{}-python.tar.gz (or cifar-{}-binary.tar.gz) there"
_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
}
CIFAR10 = Files(
    read=partial(_load, 10),
    forms=(tuple(f"cifar-10-batches-py/{f}" for f in _MD5), tuple(f"cifar-10-batches-bin/{f}.bin" for f in _MD5)),
    md5=_MD5,
    get=_GET.format(10, 10),
)
CIFAR100 = Files(
    read=partial(_load, 100),
    forms=(
        ("cifar-100-python/train", "cifar-100-python/test"),
        ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin"),
    ),
    md5={"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    get=_GET.format(100, 100),
)
