"""A strict cursor over received bytes, the receiver's limits, and what the cursor's fields look like when written."""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from .errors import BadCount, BadField, BadLength, BadOrder, TooLarge, TrailingBytes

Array = np.ndarray[Any, Any]  # numpy's arithmetic gives up exact types, so we name none
Chunk = bytes | bytearray | memoryview
Bits = TypeVar("Bits", int, Tensor)


@dataclass(frozen=True)
class Limits:
    """What a receiver is willing to handle. Each limit is checked before anything of that size is made."""

    message: int = 1 << 31  # bytes of a whole message
    json: int = 1 << 16  # bytes of the client's settings
    depth: int = 8  # nesting of the client's settings
    metrics: int = 64
    extras: int = 64
    elements: int = 1 << 28  # of one extra tensor
    recipes: bool = True  # whether a mask may be a recipe: a few bytes that cost a model's size to follow


class Reader:
    """Reads forward only. Asking for more bytes than are left is an error, and so are bytes left at the end."""

    __slots__ = ("at", "data", "what")

    def __init__(self, data: memoryview, what: str) -> None:
        self.data, self.what, self.at = data, what, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise BadLength(f"{self.what}: {count} more bytes expected, {self.left} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def number(self, size: int) -> int:
        """An unsigned number of `size` bytes."""
        return int.from_bytes(self.take(size), "little")

    def hash(self) -> str:
        """Eight bytes as 16 hex digits."""
        return self.take(8).hex()

    def bits(self, count: int) -> Array:
        """`count` packed bits as flags. The padding of the last byte must be zero."""
        found = np.unpackbits(np.frombuffer(self.take(byte_length(count)), np.uint8), bitorder="little").view(bool)
        if found[count:].any():
            raise BadField(f"{self.what}: padding bits are set; they must be zero")
        return found[:count]

    def array(self, dtype: str, count: int) -> Array:
        """`count` little-endian numbers, copied, in the machine's byte order."""
        found = np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)
        return found.astype(found.dtype.newbyteorder("="))

    def count(self, most: int, items: str) -> int:
        """A number of items, from 1 to `most`."""
        found = self.number(1)
        if found == 0:
            raise BadCount(f"the section {self.what!r} is empty: it has no {items}. Leave out an empty section.")
        if found > most:
            raise TooLarge(f"{found} {items}, at most {most} are accepted here")
        return found

    def name(self, seen: Collection[str]) -> str:
        """A length byte and that many printable ASCII characters; above all names before it."""
        raw = bytes(self.take(self.number(1)))
        if not raw or not all(32 <= byte < 127 for byte in raw):
            raise BadField(f"{self.what}: the name {raw[:40]!r} must be 1 to 255 printable ASCII characters")
        name = raw.decode("ascii")
        if seen and name <= max(seen):
            raise BadOrder(f"{self.what}: the name {name!r} is repeated or out of order; names must ascend")
        return name

    def end(self) -> None:
        if self.left:
            raise TrailingBytes(f"{self.what}: {self.left} bytes too many")


def pack(form: struct.Struct, *fields: bytes | int) -> bytes:
    """What `Reader.unpack` reads."""
    try:
        return form.pack(*fields)
    except struct.error as error:
        raise BadField(f"a message cannot hold {fields} in these fields: {error}") from None


def name_bytes(name: str) -> bytes:
    """What `Reader.name` reads."""
    if not 0 < len(name) < 256 or not name.isascii() or not name.isprintable():
        raise BadField(f"the name {name[:40]!r} cannot be sent; use 1 to 255 printable ASCII characters")
    return bytes([len(name)]) + name.encode("ascii")


def byte_length(bits: Bits) -> Bits:
    """How many bytes hold this many bits."""
    return (bits + 7) // 8
