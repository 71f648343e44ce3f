"""A layout as the mask forms see it: its layers' sizes, the bytes that hold their counts, and the size of each form.

Encoder and counter share these sizes, so what is counted is what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ..core.layout import Layout
from .errors import BadCount
from .reader import Bits, Reader, byte_length

HASH = 8


@dataclass(frozen=True)
class Geometry:
    """Sizes of the prunable layers, and what follows from them."""

    sizes: tuple[int, ...]

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The bytes that hold each layer's count."""
        return tuple(byte_length(size.bit_length()) for size in self.sizes)

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
        return byte_length(low) + byte_length(unary) + (1 + HASH + 2 * (sum(self.widths) + len(self.sizes)) + 4)

    def rice_size(self, low: Bits, unary: Bits) -> Bits:
        """Form, counts, parameters, the unary stream's length, the streams."""
        return byte_length(low) + byte_length(unary) + (1 + sum(self.widths) + len(self.sizes) + 4)

    @property
    def bitmap_size(self) -> int:
        """Form and one bit a weight."""
        return 1 + byte_length(sum(self.sizes))

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
