"""A layout as the mask forms see it: its layers' sizes, the bytes that hold their counts, and the size of each form.

Encoder and counter share these sizes, so what is counted is what is written.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..core.layout import Layout
from .errors import BadCount
from .reader import Bits, Reader, byte_length
from .rice import block_size

HASH = 8


class Geometry:
    """Sizes of the prunable layers, and what follows from them."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.widths = tuple(byte_length(size.bit_length()) for size in sizes)  # the bytes that hold each layer's count
        self.known_size = 1 + HASH  # form, hash
        self.recipe_size = 1 + HASH + 8 + 2 + sum(self.widths)  # form, hash, key, group size, budgets
        self.bitmap_size = 1 + byte_length(sum(sizes))  # form, one bit a weight

    def difference_size(self, low: Bits, unary: Bits) -> Bits:
        """Form, base, two counts a layer, a block of two lists a layer."""
        return block_size(2 * len(self.sizes), low, unary) + (1 + HASH + 2 * sum(self.widths))

    def rice_size(self, low: Bits, unary: Bits) -> Bits:
        """Form, counts, a block of a list a layer."""
        return block_size(len(self.sizes), low, unary) + (1 + sum(self.widths))

    def write_counts(self, counts: Sequence[int]) -> bytes:
        return b"".join(int(c).to_bytes(w, "little") for c, w in zip(counts, self.widths, strict=True))

    def read_counts(self, reader: Reader) -> tuple[int, ...]:
        """Layer counts, none above its layer's size."""
        counts = tuple(reader.number(width) for width in self.widths)
        for layer, (count, size) in enumerate(zip(counts, self.sizes, strict=True)):
            if count > size:
                raise BadCount(
                    f"{reader.what}: {count} active weights in prunable layer {layer}, which has {size} weights"
                )
        return counts


def geometry(layout: Layout) -> Geometry:
    return Geometry(layout.sizes)
