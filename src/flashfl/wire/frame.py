"""The outside of a message: header, checksum, and sections in ascending order of their codes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ..core.exchange import Tag
from ..core.layout import Layout
from .errors import (
    BadChecksum,
    BadField,
    BadLength,
    BadMagic,
    BadSection,
    BadVersion,
    TooLarge,
    TrailingBytes,
    WrongLayout,
)
from .message import KINDS, Kind, Message, Parts
from .reader import Chunk, Reader

MAGIC, VERSION = b"FLSH", 1
HEADER = struct.Struct("<4sBB8sIIBIHQQQ")  # magic version kind layout checksum length tag(3) client n key
CHECKSUM = slice(14, 18)
TAG = struct.Struct("<BIH")
SECTION = struct.Struct("<BI")  # code, length of what follows
SECTIONS = ("start", "own", "local", "mask", "values", "counts", "metrics", "extra", "fixed", "lacks")
CODES = {name: code for code, name in enumerate(SECTIONS, 1)}
ALLOWED: dict[Kind, tuple[str, ...]] = {
    "order": ("start", "own", "local", "mask", "values", "extra", "fixed"),
    "update": ("mask", "values", "counts", "metrics", "extra"),
    "lack": ("lacks",),
}
REQUIRED: dict[Kind, tuple[str, ...]] = {"order": ("local",), "update": (), "lack": ("lacks",)}
SPLIT = {"mask": "mask", "values": "values", "extra": "values", "fixed": "values"}  # the rest is overhead


def split_parts(sections: Mapping[str, int]) -> Parts:
    """What a message of sections of these lengths spends on what."""
    sums = {"values": 0, "mask": 0, "overhead": HEADER.size + SECTION.size * len(sections)}
    for name, length in sections.items():
        sums[SPLIT.get(name, "overhead")] += length
    return Parts(**sums)


class Frame(NamedTuple):
    """A received message with its sections still closed."""

    kind: Kind
    tag: Tag
    client: int
    n: int
    key: int
    sections: dict[str, Reader]


def write_frame(message: Message, total: int, body: Iterable[Chunk]) -> bytes:
    """Header, checksum, body."""
    header = _header(message, total)
    chunks = [header[: CHECKSUM.start], b"", header[CHECKSUM.stop :], *body]
    check = 0
    for chunk in chunks:
        check = zlib.crc32(chunk, check)
    chunks[1] = check.to_bytes(4, "little")
    return b"".join(chunks)


def _header(message: Message, total: int) -> bytes:
    kind, layout = KINDS.index(message.kind), bytes.fromhex(message.layout.hash)
    try:
        return HEADER.pack(MAGIC, VERSION, kind, layout, 0, total, *message.tag, message.client, message.n, message.key)
    except struct.error as error:
        raise BadField(f"tag {message.tag}, client {message.client}, n {message.n} or the key: {error}") from None


def tag_bytes(tag: Tag) -> bytes:
    try:
        return TAG.pack(*tag)
    except struct.error as error:
        raise BadField(f"the tag {tag}: {error}") from None


def checksum(data: memoryview) -> int:
    """CRC-32 of everything but the checksum itself. It finds damage, not forgery."""
    return zlib.crc32(data[CHECKSUM.stop :], zlib.crc32(data[: CHECKSUM.start]))


def seal(data: bytes | bytearray) -> bytes:
    """`data` with its checksum made right: for whoever edits a message on purpose."""
    out = bytearray(data)
    out[CHECKSUM] = checksum(memoryview(out)).to_bytes(4, "little")
    return bytes(out)


def check_sections(kind: Kind, names: Sequence[str]) -> None:
    for name in names:
        if name not in ALLOWED[kind]:
            raise BadSection(f"the section {name!r} has no place in {kind!r}")
    for name in REQUIRED[kind]:
        if name not in names:
            raise BadSection(f"the section {name!r} is missing in {kind!r}")
    if "mask" in names and "counts" in names:
        raise BadSection("counts beside a mask that gives them")
    if "own" in names and "start" not in names:
        raise BadSection("a mask kept from a round that is not named")
    if kind == "update" and not {"mask", "values", "counts"} & set(names):
        raise BadSection("an update without a mask, values or counts")


def read_frame(data: memoryview, layout: Layout, most: int) -> Frame:
    """Whatever can be refused before a section is opened is refused here."""
    if len(data) > most:
        raise TooLarge(f"a message of {len(data)} bytes, at most {most} allowed")
    if bytes(data[:4]) != MAGIC[: len(data)] or not data:
        raise BadMagic("this is no message of ours")
    if len(data) < HEADER.size:
        raise BadLength(f"{len(data)} bytes are less than a header")
    _, version, kind, theirs, check, total, stage, round, attempt, client, n, key = HEADER.unpack(data[: HEADER.size])
    if version != VERSION:
        raise BadVersion(f"version {version} of the format: this side speaks {VERSION}")
    if len(data) < total:
        raise BadLength(f"{len(data)} of {total} bytes arrived")
    if len(data) > total:
        raise TrailingBytes(f"{len(data) - total} bytes after the end of the message")
    if checksum(data) != check:
        raise BadChecksum("the message was damaged on its way")
    if theirs.hex() != layout.hash:
        raise WrongLayout(f"the sender's layout is {theirs.hex()}, this side's {layout.hash}: not the same model")
    if kind >= len(KINDS):
        raise BadField(f"message kind {kind} does not exist")
    sections = _split(Reader(data[HEADER.size :], "message"))
    check_sections(KINDS[kind], tuple(sections))
    if KINDS[kind] == "lack" and (n or key):
        raise BadField("samples or a key where only a mask is lacking")
    return Frame(KINDS[kind], (stage, round, attempt), client, n, key, sections)


def _split(reader: Reader) -> dict[str, Reader]:
    out: dict[str, Reader] = {}
    last = 0
    while reader.left:
        code, length = reader.unpack(SECTION)
        if not last < code <= len(SECTIONS):
            raise BadSection(f"section {code} after section {last}")
        out[SECTIONS[code - 1]] = Reader(reader.take(length), SECTIONS[code - 1])
        last = code
    return out
