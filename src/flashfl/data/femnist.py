"""FEMNIST as LEAF makes it: JSON files of users, each with its own images and labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from .augment import Normalise
from .cache import Arrays, cached, digest, stamp
from .dataset import DataSet, Form, Options, check_labels, images
from .files import damaged, read

_CLASSES = 62
_PIXELS = 28 * 28
_NORM = Normalise((0.0,), (1.0,))  # LEAF trains on pixels between 0 (ink) and 1 (paper) as they are


def load(paths: list[Path], options: Options) -> DataSet:
    """Every user's images; a user's training images are one writer's."""
    train, test = (_split(folder) for folder in paths)
    held = ((train["images"], train["labels"]), (test["images"], test["labels"]))
    return images("femnist", held[0], held[1], _CLASSES, _NORM, writers=np.asarray(train["writers"]))


def _split(folder: Path) -> Arrays:
    """One of LEAF's folders, kept as arrays after the first reading: the JSON takes minutes."""
    files = sorted(folder.glob("all_data_*.json"))
    if not files:
        raise damaged(folder, "it holds no all_data_*.json file")
    name = digest(stamp(file, file.name) for file in files)
    return cached(folder, name, ["images", "labels", "writers"], lambda: _parse(files))


def _parse(files: list[Path]) -> Arrays:
    pixels, labels, writers = [], [], []
    for file in files:
        for user, x, y in _users(file):
            pixels.append(x)
            labels.append(y)
            writers += [user] * len(y)
    if not pixels:
        raise damaged(files[0].parent, f"there are no users in {', '.join(file.name for file in files)}")
    return {
        "images": np.concatenate(pixels).reshape(-1, 1, 28, 28),
        "labels": np.concatenate(labels),
        "writers": np.unique(writers, return_inverse=True)[1].astype(np.int64),
    }


def _users(file: Path) -> list[tuple[str, Any, Any]]:
    """Each user of a file, with images as uint8 and labels."""
    try:
        held = json.loads(read(file))
        users, data = list(held["users"]), held["user_data"]
        out = []
        for user in users:
            x, y = np.asarray(data[user]["x"], dtype=np.float32), np.asarray(data[user]["y"], dtype=np.int64)
            if x.shape != (len(y), _PIXELS):
                raise damaged(file, f"user {user} has images of shape {x.shape} for {len(y)} labels")
            check_labels(file, y, _CLASSES)
            out.append((str(user), np.rint(x * 255).clip(0, 255).astype(np.uint8), y))
    except UnicodeDecodeError as error:
        raise damaged(file, f"not text ({error})") from None
    except json.JSONDecodeError as error:
        raise damaged(file, f"not JSON, or cut short ({error})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(file, f"not LEAF's form of users and user_data ({type(error).__name__}: {error})") from None
    return out


FEMNIST = tuple(
    Form((f"{folder}/train", f"{folder}/test"), load)
    for folder in ("femnist", "femnist/data", "leaf/data/femnist/data")
)
