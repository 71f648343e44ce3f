"""Images in folders, one folder a class: PATH/train/CLASS/*.png and PATH/test/..., or PATH/CLASS/*.png alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ConfigError, DataError
from .augment import CropFlip, Normalise
from .dataset import DataSet, Options, Pair, images
from .files import damaged

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
IMAGES = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def picture(path: Path, size: tuple[int, int] | None = None, resize: bool = False) -> NDArray[Any]:
    """An image file as uint8 RGB (3, H, W); of `size` (H, W), by scaling if `resize`, else it must have it."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("reading image files needs the pillow package: pip install 'flashfl[images]'") from None
    try:
        with Image.open(path) as file:
            image = rgb(file)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the data set lists it, fetch it again") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken chunk
        raise damaged(path, f"not readable as an image ({error})") from None
    if size and resize:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    if size and (image.height, image.width) != size:
        raise DataError(
            f"{path} has {image.height}x{image.width} pixels where {size[0]}x{size[1]} belong; "
            "--size N (task.size) scales the images of a folder to one size"
        )
    return np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)


def rgb(image: Any) -> Any:
    """A pillow image in RGB; pillow itself would cut 16-bit grey off at 255 instead of scaling it."""
    if image.mode.startswith("I") and (grey := np.asarray(image)).max(initial=0) > 255:
        from PIL import Image

        image = Image.fromarray((grey.clip(0, 65535) // 257).astype(np.uint8))
    return image.convert("RGB")


def load(path: Path, options: Options) -> DataSet:
    """The images under `path`, in RGB. Classes are numbered in the order of their folders' names."""
    if not path.is_dir():
        raise DataError(f"no folder {path.absolute()}: folder:PATH names a folder with one folder of images a class")
    train = path / "train" if (path / "train").is_dir() else path
    tests = [path / name for name in ("test", "val") if train != path and (path / name).is_dir()]
    names = _classes(train)
    if len(names) < 2:
        raise DataError(f"{train} holds {len(names)} folders: it needs one folder of images for each of the classes")
    if alien := [name for test in tests[:1] for name in _classes(test) if name not in names]:
        raise DataError(f"{tests[0]} holds classes that {train} does not: {', '.join(alien)}")
    pair = _read(train, names, options.size, None)
    test = _read(tests[0], names, options.size, pair[0].shape[2:]) if tests else None
    augment = CropFlip() if options.augment else None
    return images(f"folder:{path}", pair, test, len(names), IMAGES, augment)


def _classes(folder: Path) -> list[str]:
    return sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))


def _files(folder: Path) -> list[Path]:
    """The images in a class's folder and those below; hidden ones are an editor's or a system's."""
    found = [f.relative_to(folder) for f in folder.rglob("*") if f.suffix.lower() in _ENDINGS and f.is_file()]
    return sorted(folder / f for f in found if not any(part.startswith(".") for part in f.parts))


def _read(folder: Path, names: list[str], side: int, size: Any) -> Pair:
    files: list[tuple[Path, int]] = []
    for label, name in enumerate(names):
        mine = _files(folder / name)
        if not mine and (folder / name).is_dir():  # a class may be left out of the test images, not left empty
            raise DataError(f"no images under {folder / name}: looked for {', '.join(_ENDINGS)}")
        files += [(file, label) for file in mine]
    if not files:
        raise DataError(f"no images under {folder}: looked for {', '.join(_ENDINGS)} in {', '.join(names)}")
    resize = side > 0
    size = (side, side) if resize else size
    pixels = []
    for file, _ in files:
        pixels.append(picture(file, size, resize))
        size = size or pixels[0].shape[1:]
    return np.stack(pixels), np.array([label for _, label in files], dtype=np.int64)
