"""Augmentations of whole batches of uint8 images, with the same result on every device.

What happens to a sample depends only on the key and its position in the epoch, not on how an epoch is cut into
batches. All arithmetic is on integers, so a CPU and a GPU make the same pixels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.rng import fold, hashes
from .sources import Inputs

_ANGLES = 256  # rotations are drawn from this many angles
_POINT = 16  # binary places of the fixed-point sines


def _words(key: int, at: int, images: Tensor) -> Tensor:
    """A number in [0, 2**32) for each image, int64."""
    return hashes(key, at, at + len(images), images.device).to(torch.int64) & 0xFFFFFFFF


def _take(images: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """Each image's pixels at its rows `y` and columns `x` (N by H by W), the same for every channel."""
    n, channels, _, width = images.shape
    flat = y * width + x
    taken = images.flatten(2).gather(2, flat.view(n, 1, -1).expand(-1, channels, -1))
    return taken.view(n, channels, *flat.shape[1:])


@dataclass(frozen=True)
class CropFlip:
    """Shift each image by up to `padding` pixels in both directions, filling in black, and mirror half of them."""

    padding: int = 4

    def __call__(self, inputs: Inputs, key: int, at: int) -> Inputs:
        images, *rest = inputs
        words = _words(fold(key, "crop-flip"), at, images)
        places = 2 * self.padding + 1
        place = ((words >> 1) * places**2) >> 31  # the lowest bit is the mirror's
        height, width = images.shape[-2:]
        y = torch.arange(height, device=images.device) + (place // places).unsqueeze(1)
        x = torch.arange(width, device=images.device).expand(len(images), -1)
        x = torch.where((words & 1).to(torch.bool).unsqueeze(1), width - 1 - x, x) + (place % places).unsqueeze(1)
        padded = torch.nn.functional.pad(images, [self.padding] * 4)
        out = _take(padded, y.unsqueeze(2), x.unsqueeze(1))
        return (out, *rest)


@dataclass(frozen=True)
class Rotate:
    """Turn each image by up to `degrees` to either side, to the nearest pixel, with black outside."""

    degrees: float = 20.0

    def __call__(self, inputs: Inputs, key: int, at: int) -> Inputs:
        images, *rest = inputs
        draw = _words(fold(key, "rotate"), at, images) * _ANGLES >> 32
        cos, sin = _turns(self.degrees, str(images.device))[:, draw, None, None]
        height, width = images.shape[-2:]
        # Twice the distance from the centre, which is a whole number for even sides too.
        y = (2 * torch.arange(height, device=images.device) - height + 1).view(1, -1, 1)
        x = (2 * torch.arange(width, device=images.device) - width + 1).view(1, 1, -1)
        from_x = _pixel(cos * x + sin * y, width)
        from_y = _pixel(cos * y - sin * x, height)
        inside = (from_x >= 0) & (from_x < width) & (from_y >= 0) & (from_y < height)
        out = _take(images, from_y.clamp_(0, height - 1), from_x.clamp_(0, width - 1))
        return (out * inside.unsqueeze(1), *rest)


def _pixel(doubled: Tensor, side: int) -> Tensor:
    """The pixel nearest to a fixed-point place given as twice its distance from the centre."""
    return (doubled + (side << _POINT)) >> (_POINT + 1)


@lru_cache(maxsize=16)
def _turns(degrees: float, device: str) -> Tensor:
    """Fixed-point cosines and sines of the angles, 2 by _ANGLES."""
    angles = [math.radians(degrees * (2 * (i + 0.5) / _ANGLES - 1)) for i in range(_ANGLES)]
    rows = [[round(f(a) * (1 << _POINT)) for a in angles] for f in (math.cos, math.sin)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Normalise:
    """Turn uint8 images into float32 and normalise each channel; `mean` and `std` are on a scale of 0 to 1."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    white: int = 255

    def __call__(self, inputs: Inputs) -> Inputs:
        images, *rest = inputs
        mean, scale = _constants(self, str(images.device))
        return (images.to(torch.float32).sub_(mean).mul_(scale), *rest)


IMAGENET = Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # for pictures that nobody has measured


@lru_cache(maxsize=64)
def _constants(norm: Normalise, device: str) -> tuple[Tensor, Tensor]:
    """What `norm` subtracts and multiplies by. Cached, because a copy to a GPU at every batch would stall it."""
    mean = torch.tensor([m * norm.white for m in norm.mean], dtype=torch.float32)
    scale = torch.tensor([1 / (s * norm.white) for s in norm.std], dtype=torch.float32)
    return mean.view(-1, 1, 1).to(device), scale.view(-1, 1, 1).to(device)
