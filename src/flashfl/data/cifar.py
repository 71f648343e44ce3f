"""CIFAR-10 and CIFAR-100, in the python and in the binary version."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .augment import CropFlip, Normalise
from .dataset import DataSet, Form, Options, Pair, check_labels, images
from .files import damaged, read
from .pickles import loads

_PIXELS = 3 * 32 * 32
_NORMS = {
    10: Normalise((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: Normalise((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
_MD5 = {
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
}


def _python(path: Path, classes: int, options: Options) -> Pair:
    """One file of the python version: a pickled dict of an N by 3072 array and a list of labels."""
    held = loads(read(path, _MD5.get(path.name) if options.verify else None), path)
    key = b"labels" if classes == 10 else b"fine_labels"
    held = {k.encode() if isinstance(k, str) else k: v for k, v in held.items()} if isinstance(held, dict) else {}
    x, y = held.get(b"data"), held.get(key)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != _PIXELS:
        raise damaged(path, f"'data' is not an array of uint8, N by {_PIXELS}")
    if isinstance(y, list) and all(isinstance(n, int) for n in y):
        y = np.array(y)  # of objects, where a number is too large
    if not isinstance(y, np.ndarray) or y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise damaged(path, f"{key.decode()!r} is not a list of {len(x)} labels")
    return x, y.astype(np.int64)


def _binary(path: Path, classes: int, options: Options) -> Pair:
    """One file of the binary version: an image is its label (CIFAR-100: a coarse one, then the fine) and 3072 bytes."""
    head = 1 if classes == 10 else 2
    data = np.frombuffer(read(path), dtype=np.uint8)
    if len(data) == 0 or len(data) % (head + _PIXELS):
        raise damaged(path, f"its {len(data)} bytes are no whole number of records of {head + _PIXELS}")
    rows = data.reshape(-1, head + _PIXELS)
    return rows[:, head:], rows[:, head - 1].astype(np.int64)


def _form(folder: str, classes: int, train: tuple[str, ...], test: str, read_file: Any) -> Form:
    def load(paths: list[Path], options: Options) -> DataSet:
        pairs: list[Pair] = []
        for path in paths:
            x, y = read_file(path, classes, options)
            check_labels(path, y, classes)
            pairs.append((x.reshape(-1, 3, 32, 32), y))
        augment = CropFlip() if options.augment else None
        return images(f"cifar{classes}", _join(pairs[:-1]), _join(pairs[-1:]), classes, _NORMS[classes], augment)

    return Form(tuple(f"{folder}/{name}" for name in (*train, test)), load, checksums=read_file is _python)


def _join(pairs: list[Pair]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Several files' samples as one array of each kind, which we own."""
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


_BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
CIFAR10 = (
    _form("cifar-10-batches-py", 10, _BATCHES, "test_batch", _python),
    _form("cifar-10-batches-bin", 10, tuple(f"{name}.bin" for name in _BATCHES), "test_batch.bin", _binary),
)
CIFAR100 = (
    _form("cifar-100-python", 100, ("train",), "test", _python),
    _form("cifar-100-binary", 100, ("train.bin",), "test.bin", _binary),
)
