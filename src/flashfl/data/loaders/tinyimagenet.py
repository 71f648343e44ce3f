"""TinyImageNet-200: the folder as published. Its images are kept as one array after they are first read."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ..augment import CropFlip, Normalise, Rotate
from ..dataset import DataSet, Files, Options, Pair, images
from ..files import Arrays, cached, damaged, read_text
from ..pictures import picture_files, read_picture, stack
from ..sources import Inputs

_NORM = Normalise((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821))
Listed = list[tuple[Path, int]]  # images and their classes


def augment(inputs: Inputs, key: int, at: int) -> Inputs:
    """Turn the images, then shift and mirror them."""
    return CropFlip()(Rotate()(inputs, key, at), key, at)


def _load(paths: list[Path], options: Options) -> DataSet:
    """The test images are those of the validation folder: the test folder has no labels."""
    wnids, train, annotations = paths
    classes = {name: i for i, name in enumerate(dict.fromkeys(read_text(wnids).split()))}
    listed = [(path, label) for name, label in classes.items() for path in picture_files(train / name)]
    tests = _validation(annotations, classes)
    pairs = [_decoded("train-", listed, wnids.parent), _decoded("val-", tests, wnids.parent)]
    return images(pairs, len(classes), _NORM, augment)


def _validation(annotations: Path, classes: dict[str, int]) -> Listed:
    files: Listed = []
    for number, line in enumerate(read_text(annotations).splitlines(), 1):
        columns = line.split("\t")
        if len(columns) < 2 or columns[1] not in classes or "/" in columns[0]:
            raise damaged(annotations, f"line {number}: expected an image name, a tab and a class that wnids.txt lists")
        files.append((annotations.parent / "images" / columns[0], classes[columns[1]]))
    if not files:
        raise damaged(annotations, "it lists no images")
    return files


def _decoded(label: str, files: Listed, folder: Path) -> Pair:
    paths = [path for path, _ in files]

    def make() -> Arrays:
        pictures = ((path, read_picture(path)) for path in paths)
        return {"images": stack(pictures, size=(64, 64))}

    return cached(folder, label, paths, ["images"], make)["images"], np.array([label for _, label in files])


TINYIMAGENET = Files(
    read=_load,
    forms=(tuple(f"tiny-imagenet-200/{file}" for file in ("wnids.txt", "train", "val/val_annotations.txt")),),
    get="Unpack http://cs231n.stanford.edu/tiny-imagenet-200.zip there; it needs the pillow package, and 1.4 GB "
    "of disk for the cache that flashfl makes",
)
