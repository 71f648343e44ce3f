"""Masks on disk, small: a file is named by its content, so a mask that stays is written once.

The first byte of a file says its form. `g`: the gaps between active weights as bytes (255 means "255 and more to
come"), Huffman-coded by zlib, within a few percent of the entropy bound. `b`: one bit a weight, for dense masks.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import files
from ..core.errors import DataError

Bits = NDArray[np.bool_]
_DENSE = 0.25  # from this density on, gaps save little and take long


def pack(bits: Bits) -> bytes:
    """A mask as bytes."""
    if np.count_nonzero(bits) > _DENSE * len(bits):
        return b"b" + np.packbits(bits, bitorder="little").tobytes()
    escapes, rest = np.divmod(np.diff(np.flatnonzero(bits), prepend=-1) - 1, 255)
    codes = np.full(int(escapes.sum()) + len(rest), 255, np.uint8)
    codes[np.cumsum(escapes + 1) - 1] = rest
    squeeze = zlib.compressobj(6, strategy=zlib.Z_HUFFMAN_ONLY)
    return b"g" + squeeze.compress(codes.tobytes()) + squeeze.flush()


def unpack(data: bytes, size: int) -> Bits:
    """The mask of `size` weights that `pack` wrote, or a DataError."""
    form, body = data[:1], data[1:]
    if form == b"b" and len(body) == (size + 7) // 8:
        return np.unpackbits(np.frombuffer(body, np.uint8), count=size, bitorder="little").astype(bool)
    if form != b"g":
        raise DataError("a mask snapshot is damaged: it is not of a known form and size")
    try:
        stretch = zlib.decompressobj()
        codes = np.frombuffer(stretch.decompress(body, size + size // 255 + 1), np.uint8)
        if not stretch.eof:
            raise zlib.error("it does not end where it should")
    except zlib.error as error:
        raise DataError(f"a mask snapshot is damaged: {error}") from None
    ends = codes != 255
    places = np.cumsum(codes.astype(np.int64))[ends] + np.arange(int(ends.sum()))
    if len(places) and places[-1] >= size:
        raise DataError("a mask snapshot is damaged: it does not fit the model")
    bits = np.zeros(size, bool)
    bits[places] = True
    return bits


class Snapshots:
    """A folder of masks by name; the name is a digest of the bits."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, bits: Bits) -> str:
        """Keep a mask; its name."""
        digest = hashlib.blake2b(np.packbits(bits, bitorder="little").tobytes(), digest_size=8)
        name = digest.hexdigest()
        path = self.path(name)
        if not path.exists():
            files.put(path, pack(bits))
        return name

    def get(self, name: str, size: int) -> Bits:
        """The mask of that name, or a DataError that says what is wrong with it."""
        try:
            bits = unpack(self.path(name).read_bytes(), size)
        except OSError as error:
            raise DataError(f"the mask snapshot {name} cannot be read ({error.strerror})") from None
        packed: Any = np.packbits(bits, bitorder="little")
        if hashlib.blake2b(packed.tobytes(), digest_size=8).hexdigest() != name:
            raise DataError(f"the mask snapshot {name} is damaged: its content does not have the digest it is named by")
        return bits

    def path(self, name: str) -> Path:
        if not name.isalnum():
            raise DataError(f"{name[:40]!r} is not the name of a mask snapshot")
        return self.folder / f"{name}.mask"
