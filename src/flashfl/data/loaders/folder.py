"""Images in folders, one folder a class: PATH/train/CLASS/*.png and PATH/test/CLASS/*.png, or PATH/CLASS/*.png."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...core.errors import DataError
from ..augment import IMAGENET, CropFlip
from ..dataset import DataSet, Options, Pair, images
from ..pictures import picture_files, read_picture, stack


def load(path: Path, options: Options) -> DataSet:
    """The images in RGB. Classes are numbered in the order of their folders' names."""
    train = path / "train" if (path / "train").is_dir() else path
    tests = [path / name for name in ("test", "val") if train != path and (path / name).is_dir()][:1]
    if not path.is_dir():
        raise DataError(f"{path.absolute()} is not a folder. Name a folder that has a folder of images for each class")
    names = _classes(train)
    if len(names) < 2:
        raise DataError(
            f"{train.absolute()} has {len(names)} folders, expected at least 2: one folder of images for each class. "
            "If these folders lie deeper, name the folder that holds them."
        )
    pairs: list[Pair] = []
    for part in (train, *tests):
        mine = _classes(part)
        others = [name for name in mine if name not in names]
        if others:
            raise DataError(
                f"{part} has folders that {train} does not have: {', '.join(others)}. Remove or rename them."
            )
        if not mine:
            raise DataError(f"{part} has no folders: it needs at least one of those in {train}.")
        files = [(file, names.index(name)) for name in mine for file in picture_files(part / name)]
        size = pairs[0][0].shape[2:] if pairs else None
        pixels = stack(((file, read_picture(file)) for file, _ in files), options.size, size)
        pairs.append((pixels, np.array([label for _, label in files])))
    return images(pairs, len(names), IMAGENET, CropFlip())


def _classes(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.glob("[!.]*") if f.is_dir())
