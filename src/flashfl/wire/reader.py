"""A strict cursor over received bytes, and pieces of a message that know their size before they are written."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .errors import BadField, BadLength, TrailingBytes

Array = np.ndarray[Any, Any]
Chunk = bytes | bytearray | memoryview


class Piece(NamedTuple):
    """Bytes to come: `size` is exact before `write` is called."""

    size: int
    write: Callable[[], Sequence[Chunk]]

    @staticmethod
    def of(data: bytes) -> Piece:
        return Piece(len(data), lambda: (data,))


class Reader:
    """Reads forward only; asking for more than there is, or leaving something over, is an error."""

    __slots__ = ("at", "data", "what")

    def __init__(self, data: memoryview, what: str) -> None:
        self.data, self.what, self.at = data, what, 0

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int) -> memoryview:
        if count > self.left:
            raise BadLength(f"{self.what}: {count} bytes expected, {self.left} left")
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def u8(self) -> int:
        return self.take(1)[0]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def hash(self) -> str:
        """Eight bytes as 16 hex digits."""
        return self.take(8).hex()

    def name(self) -> str:
        """A length byte and that many printable ASCII characters, at least one."""
        raw = bytes(self.take(self.u8()))
        if not raw or not all(32 <= byte < 127 for byte in raw):
            raise BadField(f"{self.what}: the name {raw[:40]!r} is not printable ASCII")
        return raw.decode("ascii")

    def array(self, dtype: str, count: int) -> Array:
        """`count` little-endian numbers, copied, in the machine's byte order."""
        found = np.frombuffer(self.take(count * np.dtype(dtype).itemsize), dtype)
        return found.astype(found.dtype.newbyteorder("="))

    def end(self) -> None:
        if self.left:
            raise TrailingBytes(f"{self.what}: {self.left} bytes too many")


def name_bytes(name: str) -> bytes:
    """What `Reader.name` reads."""
    raw = name.encode("ascii", "replace")
    if not 0 < len(raw) < 256 or not name.isascii() or not name.isprintable():
        raise BadField(f"the name {name[:40]!r} cannot travel: 1 to 255 printable ASCII characters")
    return bytes([len(raw)]) + raw


def byte_length(bits: int) -> int:
    return (bits + 7) // 8
