"""MNIST and its relatives, in IDX files: a magic number, the sizes of the dimensions, then plain numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..augment import Normalise
from ..dataset import DataSet, Files, Options, Pair, check_labels, images
from ..files import damaged, read

_TYPES = {8: ">u1", 12: ">i4"}
_MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    "qmnist-train-labels-idx2-int": "1d43300e7f41ddcbf7fd006cbe865af9",
}
_FILES = tuple(_MD5)[:4]


def read_idx(path: Path, dims: int, kind: int = 8) -> NDArray[Any]:
    """The array in an IDX file: `kind` is the file's number for the type of its values."""
    data, start = read(path), 4 + 4 * dims
    magic = bytes([0, 0, kind, dims])
    if data[:4] != magic:
        raise damaged(path, f"it begins with {data[:4].hex() or 'nothing'}, expected {magic.hex()}")
    shape = [int.from_bytes(data[at : at + 4], "big") for at in range(4, start, 4)]
    dtype = np.dtype(_TYPES[kind])
    wanted = start + prod(shape) * dtype.itemsize
    if len(data) != wanted:
        raise damaged(path, f"it has {len(data)} bytes, but sizes {shape} need {wanted}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def _pair(pixels: Path, labels: Path) -> Pair:
    """The images of one file and the labels of another."""
    x, y = read_idx(pixels, 3), read_idx(labels, 1)
    check_labels(labels, y, len(x), 10)
    return x[:, None], y


def _load(norm: Normalise, paths: list[Path], options: Options) -> DataSet:
    return images([_pair(*paths[:2]), _pair(*paths[2:4])], 10, norm)


def _with_writers(paths: list[Path], options: Options) -> DataSet:
    """MNIST, with who wrote each training digit: column 2 of QMNIST's labels of the same images."""
    mnist = MNIST.read(paths[:4], options)
    rows = read_idx(paths[4], 2, kind=12)
    if rows.shape[1:] != (8,) or not np.array_equal(rows[:, 0], mnist.labels):
        raise damaged(paths[4], "expected 8 columns, the first with the digits of MNIST's training images")
    return replace(mnist, writers=rows[:, 2])


def _forms(*folders: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(f"{folder}/{file}" for file in _FILES) for folder in folders)


MNIST = Files(
    read=partial(_load, Normalise((0.1307,), (0.3081,))),
    forms=_forms("mnist", "MNIST/raw"),
    md5=_MD5,
    get="Get the four IDX files, gzipped or not, from https://ossci-datasets.s3.amazonaws.com/mnist/ and put them "
    "into the folder mnist/",
)
WRITERS = Files(
    read=_with_writers,
    forms=tuple((*form, "qmnist/qmnist-train-labels-idx2-int") for form in MNIST.forms),
    md5=_MD5,
    get="Get MNIST (see there), and qmnist-train-labels-idx2-int.gz from "
    "https://github.com/facebookresearch/qmnist into the folder qmnist/",
)
FASHION = Files(
    read=partial(_load, Normalise((0.2860,), (0.3530,))),
    forms=_forms("fashion-mnist", "FashionMNIST/raw"),
    get="Get the four IDX files from https://github.com/zalandoresearch/fashion-mnist and put them into the folder "
    "fashion-mnist/",
)
