"""FEMNIST as LEAF makes it: JSON files of users, each with images and labels."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..augment import Normalise
from ..dataset import DataSet, Files, Options, check_labels, images
from ..files import Arrays, cached, damaged, read

_CLASSES = 62


def _load(paths: list[Path], options: Options) -> DataSet:
    """Every user's images; a user is a writer."""
    train, test = (_split(folder) for folder in paths)
    pairs = [(held["images"], held["labels"]) for held in (train, test)]
    norm = Normalise((0.0,), (1.0,))  # LEAF trains on pixels between 0 (ink) and 1 (paper) as they are
    return images(pairs, _CLASSES, norm, writers=np.asarray(train["writers"]))


def _split(folder: Path) -> Arrays:
    """One of LEAF's folders. Its JSON takes minutes to read, so the arrays are kept."""
    files = sorted(folder.glob("all_data_*.json"))

    def make() -> Arrays:
        users = [user for file in files for user in _users(file)]
        if not users:
            raise damaged(folder, "it holds no all_data_*.json file with users")
        names = [name for name, _, y in users for _ in y]
        return {
            "images": np.concatenate([x for _, x, _ in users]),
            "labels": np.concatenate([y for _, _, y in users]),
            "writers": np.unique(names, return_inverse=True)[1].astype(np.int64),
        }

    return cached(folder, "", files, ["images", "labels", "writers"], make)


def _users(file: Path) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.int64]]]:
    """The users of a file: name, uint8 images, labels."""
    try:
        held = json.loads(read(file))
        for user in held["users"]:
            data = held["user_data"][user]
            x, y = np.asarray(data["x"], dtype=np.float32), np.asarray(data["y"], dtype=np.int64).ravel()
            check_labels(file, y, len(x), _CLASSES)
            yield str(user), np.rint(x * 255).clip(0, 255).astype(np.uint8).reshape(len(y), 1, 28, 28), y
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        what = f"expected JSON from LEAF with `users` and `user_data` ({type(error).__name__}: {error})"
        raise damaged(file, what) from None


FEMNIST = Files(
    read=_load,
    forms=tuple((f"{f}/train", f"{f}/test") for f in ("femnist", "femnist/data", "leaf/data/femnist/data")),
    get="Make it with LEAF (https://github.com/TalwalkarLab/leaf): in data/femnist run ./preprocess.sh -s niid "
    "--sf 1.0 -k 0 -t sample, then put data/train and data/test into the folder femnist/",
)
