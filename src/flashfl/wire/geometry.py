"""A layout as the mask forms see it: layers, their sizes, and the bytes that hold their counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..core.layout import Layout
from ..core.mask import Mask
from .errors import BadCount
from .reader import Array, Reader, byte_length

HASH = 8


@dataclass(frozen=True)
class Geometry:
    """What the forms need of a layout: sizes, starts, and the bytes that hold a layer's count."""

    sizes: Array
    starts: Array
    widths: tuple[int, ...]
    counts_bytes: int
    total: int

    @property
    def layers(self) -> int:
        return len(self.widths)

    @property
    def rice_fixed(self) -> int:
        """Bytes of the Rice form beside its streams: form, counts, parameters, the unary stream's length."""
        return 1 + self.counts_bytes + self.layers + 4

    @property
    def difference_fixed(self) -> int:
        """Bytes of the difference form beside its streams: form, base, two counts and parameters a layer, length."""
        return 1 + HASH + 2 * (self.counts_bytes + self.layers) + 4

    @property
    def recipe_size(self) -> int:
        return 1 + HASH + 8 + 2 + self.counts_bytes

    @property
    def bitmap_size(self) -> int:
        return 1 + byte_length(self.total)

    def write_counts(self, counts: Sequence[int]) -> bytes:
        return b"".join(int(c).to_bytes(w, "little") for c, w in zip(counts, self.widths, strict=True))

    def read_counts(self, reader: Reader) -> Array:
        """Layer counts, none above its layer's size."""
        found = [int.from_bytes(reader.take(width), "little") for width in self.widths]
        counts = np.array(found, np.int64)
        if bool((counts > self.sizes).any()):
            raise BadCount(f"{reader.what}: a layer count is above the layer's size")
        return counts


@lru_cache(maxsize=64)
def _geometry(sizes: tuple[int, ...]) -> Geometry:
    array = np.array(sizes, np.int64)
    widths = tuple(byte_length(size.bit_length()) for size in sizes)
    return Geometry(array, np.cumsum(array) - array, widths, sum(widths), sum(sizes))


def geometry(layout: Layout) -> Geometry:
    return _geometry(layout.sizes)


def host_bits(mask: Mask) -> Array:
    found: Array = mask.bits.detach().cpu().numpy()
    return found


def split(positions: Array, geo: Geometry) -> Array:
    """How many of the ascending positions lie in each layer."""
    edges = np.searchsorted(positions, np.append(geo.starts, geo.total))
    return np.diff(edges)
