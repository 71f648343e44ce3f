"""Pictures as arrays, through the optional `pillow` package."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import ConfigError, DataError
from .files import damaged

if TYPE_CHECKING:
    from PIL.Image import Image

_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


def picture_files(folder: Path) -> list[Path]:
    """The images in a folder and below it, at least one. Hidden files are an editor's or a system's."""
    found = [f.relative_to(folder) for f in folder.rglob("*") if f.suffix.lower() in _ENDINGS and f.is_file()]
    files = sorted(folder / f for f in found if not any(part.startswith(".") for part in f.parts))
    if not files:
        raise DataError(f"no images under {folder}: looked for {', '.join(_ENDINGS)}")
    return files


def read_picture(path: Path) -> Image:
    """The RGB picture in a file."""
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("reading image files needs the pillow package: pip install 'flashfl[images]'") from None
    try:
        with Image.open(path) as file:
            return rgb(file)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError: a broken chunk
        raise damaged(path, f"not readable as an image ({error})") from None


def rgb(picture: Image) -> Image:
    """A picture in RGB. Grey of 16 bits is scaled to 8; pillow itself would cut it off at 255."""
    if picture.mode.startswith("I") and (grey := np.asarray(picture)).max(initial=0) > 255:
        from PIL import Image

        picture = Image.fromarray((grey.clip(0, 65535) // 257).astype(np.uint8))
    return picture.convert("RGB")


def is_picture(value: object) -> TypeGuard[Image]:
    """Whether a value is one of pillow's pictures; pillow is not imported for the question."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def as_tensor(picture: Image) -> Tensor:
    """A picture as float32 (C, H, W) between 0 and 1, with one channel if it is grey, else three."""
    array = np.asarray(picture if picture.mode in ("L", "RGB") else rgb(picture), dtype=np.float32)
    return torch.from_numpy(array.reshape(*array.shape[:2], -1)).permute(2, 0, 1) / 255


def stack(
    pictures: Iterable[tuple[object, Image]],
    side: int = 0,
    size: tuple[int, ...] | None = None,
    resample: Literal["BILINEAR", "BICUBIC"] = "BILINEAR",
) -> NDArray[np.uint8]:
    """RGB pictures, each with where it is from, as one array (N, 3, H, W).

    They are scaled to `side` by `side` pixels. If that is 0, all must have `size`, or else that of the first.
    """
    from PIL.Image import Resampling

    held: list[NDArray[np.uint8]] = []
    for where, picture in pictures:
        scaled = picture.resize((side, side), Resampling[resample]) if side else picture
        array = np.asarray(scaled, dtype=np.uint8).transpose(2, 0, 1)
        found, size = array.shape[1:], size or array.shape[1:]
        if found != size:
            raise DataError(
                f"{where} has height and width {found}, expected {size}. For images of a folder or the hub, --size N "
                "(task.size) scales them"
            )
        held.append(array)
    return np.stack(held)
