"""A layout as the mask forms see it: its layers' sizes, the bytes that hold their counts, and the size of each form.

Encoder and counter share these sizes, so what is counted is what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..core.layout import Layout
from .errors import BadCount
from .reader import Array, Bits, Reader, byte_length

HASH = 8


@dataclass(frozen=True)
class Geometry:
    """Sizes and first positions of the prunable layers, and the bytes that hold each layer's count."""

    sizes: Array
    starts: Array
    widths: tuple[int, ...]
    total: int

    @property
    def layers(self) -> int:
        return len(self.widths)

    @property
    def known_size(self) -> int:
        """Form and hash."""
        return 1 + HASH

    @property
    def recipe_size(self) -> int:
        """Form, hash, key, group size, budgets."""
        return 1 + HASH + 8 + 2 + sum(self.widths)

    def difference_size(self, low: Bits, unary: Bits) -> Bits:
        """Form, base, two counts and two parameters a layer, the unary stream's length, the streams."""
        return byte_length(low) + byte_length(unary) + (1 + HASH + 2 * (sum(self.widths) + self.layers) + 4)

    def rice_size(self, low: Bits, unary: Bits) -> Bits:
        """Form, counts, parameters, the unary stream's length, the streams."""
        return byte_length(low) + byte_length(unary) + (1 + sum(self.widths) + self.layers + 4)

    @property
    def bitmap_size(self) -> int:
        """Form and one bit a weight."""
        return 1 + byte_length(self.total)

    def write_counts(self, counts: Sequence[int]) -> bytes:
        sizes = tuple(self.sizes.tolist())
        if len(counts) != len(sizes) or any(not 0 <= c <= k for c, k in zip(counts, sizes, strict=True)):
            raise BadCount(f"layer counts {tuple(counts)} do not fit prunable layers of {sizes} weights")
        return b"".join(int(c).to_bytes(w, "little") for c, w in zip(counts, self.widths, strict=True))

    def read_counts(self, reader: Reader) -> Array:
        """Layer counts, none above its layer's size."""
        counts = np.array([int.from_bytes(reader.take(width), "little") for width in self.widths], np.int64)
        for layer in np.flatnonzero(counts > self.sizes)[:1]:
            raise BadCount(f"{reader.what}: {counts[layer]} weights in prunable layer {layer} of {self.sizes[layer]}")
        return counts

    def split(self, positions: Array) -> Array:
        """How many of the ascending positions lie in each layer."""
        return np.diff(np.searchsorted(positions, np.append(self.starts, self.total)))


@lru_cache(maxsize=64)
def _geometry(sizes: tuple[int, ...]) -> Geometry:
    array = np.array(sizes, np.int64)
    widths = tuple(byte_length(size.bit_length()) for size in sizes)
    return Geometry(array, np.cumsum(array) - array, widths, sum(sizes))


def geometry(layout: Layout) -> Geometry:
    return _geometry(layout.sizes)
