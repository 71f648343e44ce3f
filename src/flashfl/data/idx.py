"""The IDX format of MNIST and its relatives: a magic number, the sizes of the dimensions, then plain numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .augment import Normalise
from .dataset import DataSet, Form, Options, Pair, check_labels, images
from .files import damaged, read

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_NORM = Normalise((0.1307,), (0.3081,))
_FASHION = Normalise((0.2860,), (0.3530,))
FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
WRITERS = "qmnist/qmnist-train-labels-idx2-int"
_WRITER = 2  # the column of QMNIST's labels that says who wrote; 0 is the digit

# md5s of the uncompressed files: they hold for any gzip wrapper.
_MNIST = (
    "6bbc9ace898e44ae57da46a324031adb",
    "a25bea736e30d166cdddb491f175f624",
    "2646ac647ad5339dbf082846283269ea",
    "27ae3e4e09519cfbb04c329615203637",
)
_QMNIST = "1d43300e7f41ddcbf7fd006cbe865af9"


def read_idx(path: Path, dims: int, md5: str | None = None) -> NDArray[Any]:
    """The array in an IDX file, in the machine's own byte order."""
    data = read(path, md5)
    if len(data) < 4 or data[:2] != b"\0\0" or data[2] not in _TYPES:
        raise damaged(path, f"bad magic number {data[:4].hex() or '(empty file)'}, this is not an IDX file")
    if data[3] != dims:
        raise damaged(path, f"bad magic number {data[:4].hex()}: {data[3]} dimensions where {dims} belong")
    start = 4 + 4 * dims
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    dtype = np.dtype(_TYPES[data[2]])
    wanted = start + int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(data) != wanted:
        raise damaged(path, f"it has {len(data)} bytes, but sizes {shape} need {wanted}")
    array = np.frombuffer(data, dtype, offset=start).reshape(shape)
    return array.astype(dtype.newbyteorder("="))


def _read(name: str, paths: list[Path], norm: Normalise, md5s: tuple[str | None, ...]) -> DataSet:
    pairs: list[Pair] = []
    for pixels, labels, sums in ((paths[0], paths[1], md5s[:2]), (paths[2], paths[3], md5s[2:])):
        x, y = read_idx(pixels, 3, sums[0]), read_idx(labels, 1, sums[1])
        for path, array in ((pixels, x), (labels, y)):
            if array.dtype != np.uint8:
                raise damaged(path, f"it holds numbers of type {array.dtype} where uint8 belongs")
        size = "x".join(map(str, x.shape[1:]))
        if 0 in x.shape[1:]:
            raise damaged(pixels, f"its images have {size} pixels")
        if pairs and x.shape[1:] != pairs[0][0].shape[2:]:
            raise damaged(pixels, f"its images have {size} pixels, other than those of {paths[0].name}")
        if len(x) != len(y):
            raise damaged(labels, f"{len(y)} labels for the {len(x)} images of {pixels.name}")
        check_labels(labels, y, 10)
        pairs.append((x[:, None], y))
    return images(name, pairs[0], pairs[1], 10, norm)


def mnist(paths: list[Path], options: Options) -> DataSet:
    return _read("mnist", paths, _NORM, _MNIST if options.verify else (None,) * 4)


def fashion(paths: list[Path], options: Options) -> DataSet:
    return _read("fashion-mnist", paths, _FASHION, (None,) * 4)


def by_writer(paths: list[Path], options: Options) -> DataSet:
    """MNIST, with who wrote each training digit from QMNIST's extended labels for the same images."""
    known = _read("mnist-writers", paths[:4], _NORM, _MNIST if options.verify else (None,) * 4)
    rows = read_idx(paths[4], 2, _QMNIST if options.verify else None)
    if rows.shape[1] <= _WRITER or len(rows) != len(known.train):
        raise damaged(paths[4], f"a table of {rows.shape} where {len(known.train)} rows of 8 columns belong")
    if not np.array_equal(rows[:, 0], known.labels):
        raise damaged(paths[4], "its digits are not those of MNIST's training labels")
    return DataSet(known.name, known.train, known.test, 10, known.shape, rows[:, _WRITER])


MNIST = tuple(Form(tuple(f"{folder}/{file}" for file in FILES), mnist, True) for folder in ("mnist", "MNIST/raw"))
FASHION = tuple(
    Form(tuple(f"{folder}/{file}" for file in FILES), fashion) for folder in ("fashion-mnist", "FashionMNIST/raw")
)
MNIST_WRITERS = tuple(Form((*form.files, WRITERS), by_writer, True) for form in MNIST)
