"""Images in folders, one folder a class: PATH/train/CLASS/*.png and PATH/test/CLASS/*.png, or PATH/CLASS/*.png."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...core.errors import DataError
from ..augment import IMAGENET, CropFlip
from ..dataset import DataSet, Options, Pair, images
from ..pictures import read_picture, stack

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def load(path: Path, options: Options) -> DataSet:
    """The images in RGB. Classes are numbered in the order of their folders' names."""
    if not path.is_dir():
        raise DataError(
            f"there is no folder {path.absolute()}. folder:PATH must name a folder that has one subfolder of images "
            "for each class."
        )
    train = path / "train" if (path / "train").is_dir() else path
    tests = [path / name for name in ("test", "val") if train != path and (path / name).is_dir()][:1]
    names = _classes(train)
    if len(names) < 2:
        raise DataError(f"{train} holds {len(names)} folders: it needs at least 2, a folder of images for each class")
    if unknown := [name for test in tests for name in _classes(test) if name not in names]:
        raise DataError(
            f"{tests[0]} holds classes that {train} does not: {', '.join(unknown)}. Remove them, or add them to {train}"
        )
    pairs: list[Pair] = []
    for part in (train, *tests):
        files = [(file, label) for label, name in enumerate(names) for file in _files(part / name)]
        if not files:
            raise DataError(f"no images under {part}: looked for {', '.join(_ENDINGS)} in {', '.join(names)}")
        size = pairs[0][0].shape[2:] if pairs else None
        pixels = stack(((file, read_picture(file)) for file, _ in files), options.size, size)
        pairs.append((pixels, np.array([label for _, label in files])))
    return images(pairs, len(names), IMAGENET, CropFlip())


def _classes(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    """The images in a class's folder and below it. Hidden files are an editor's or a system's."""
    if not folder.is_dir():  # the test images may lack a class
        return []
    found = [f.relative_to(folder) for f in folder.rglob("*") if f.suffix.lower() in _ENDINGS and f.is_file()]
    files = sorted(folder / f for f in found if not any(part.startswith(".") for part in f.parts))
    if not files:
        raise DataError(f"no images under {folder}: looked for {', '.join(_ENDINGS)}")
    return files
