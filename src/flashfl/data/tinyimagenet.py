"""TinyImageNet-200: the folder as published, kept as one array after it is first read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .augment import Chain, CropFlip, Normalise, Rotate
from .cache import Arrays, cached, digest, stamp
from .dataset import DataSet, Form, Options, images
from .files import damaged, read_text
from .folder import picture

_NORM = Normalise((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
_SIDE = 64
Files = list[tuple[Path, int]]  # image, class


def load(paths: list[Path], options: Options) -> DataSet:
    """100,000 training and, from the validation folder, 10,000 test images: the test folder has no labels."""
    wnids, train, annotations = paths
    names = read_text(wnids).split()
    if not names or len(set(names)) != len(names):
        raise damaged(wnids, "it is not a list of different class names")
    classes = {name: i for i, name in enumerate(names)}
    found = {"train": _train(train, classes), "val": _validation(annotations, classes)}
    pairs = [_decoded(split, files, wnids.parent) for split, files in found.items()]
    augment = Chain((Rotate(), CropFlip())) if options.augment else None
    return images("tinyimagenet", pairs[0], pairs[1], len(classes), _NORM, augment)


def _train(folder: Path, classes: dict[str, int]) -> Files:
    files: Files = []
    for name, label in classes.items():
        mine = sorted((folder / name / "images").glob("*.JPEG"))
        if not mine:
            raise damaged(folder / name / "images", "it holds no .JPEG images")
        files += [(path, label) for path in mine]
    return files


def _validation(annotations: Path, classes: dict[str, int]) -> Files:
    files: Files = []
    for number, line in enumerate(read_text(annotations).splitlines(), 1):
        columns = line.split("\t")
        if len(columns) < 2 or columns[1] not in classes:
            raise damaged(annotations, f"line {number} is not an image and a class of wnids.txt")
        files.append((annotations.parent / "images" / columns[0], classes[columns[1]]))
    if not files:
        raise damaged(annotations, "it lists no images")
    return files


def _decoded(split: str, files: Files, folder: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    def make() -> Arrays:
        pixels = np.empty((len(files), 3, _SIDE, _SIDE), dtype=np.uint8)
        for out, (path, _) in zip(pixels, files, strict=True):
            out[:] = picture(path, (_SIDE, _SIDE))
        return {"images": pixels}

    name = digest(stamp(path, str(path.relative_to(folder))) for path, _ in files)
    held = cached(folder, f"{split}-{name}", ["images"], make)
    return held["images"], np.array([label for _, label in files], dtype=np.int64)


FOLDER = "tiny-imagenet-200"
TINY = (Form((f"{FOLDER}/wnids.txt", f"{FOLDER}/train", f"{FOLDER}/val/val_annotations.txt"), load),)
