"""The outside of a message: header, checksum, and sections in ascending order of their codes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence

from ..core.exchange import Traffic
from ..core.layout import Layout
from . import errors
from .message import KINDS, Encoded, Kind, Message
from .reader import Chunk, Reader, pack

MAGIC, VERSION = b"FLSH", 1
HEADER = struct.Struct("<4sBB8sIIBIHQQQ")  # magic version kind layout checksum length tag(3) client n key
CHECKSUM = slice(14, 18)
TAG = struct.Struct("<BIH")
SECTION = struct.Struct("<BI")  # code, length of what follows
CODES = {  # 9 is reserved
    "start": 1, "own": 2, "local": 3, "mask": 4, "values": 5, "counts": 6, "metrics": 7, "extra": 8, "lacks": 10,
}  # fmt: skip
NAMES = {code: name for name, code in CODES.items()}
ALLOWED: dict[Kind, tuple[str, ...]] = {
    "order": ("start", "own", "local", "mask", "values", "extra"),
    "update": ("mask", "values", "counts", "metrics", "extra"),
    "lack": ("lacks",),
}
REQUIRED: dict[Kind, tuple[str, ...]] = {"order": ("local",), "update": (), "lack": ("lacks",)}
SPLIT = {"mask": "mask", "values": "values", "extra": "values"}  # the rest is overhead


def traffic_of(kind: Kind, sections: Mapping[str, int]) -> Traffic:
    """What a message of sections of these lengths spends on what. Orders go down, the rest up."""
    sums = {"values": 0, "mask": 0, "overhead": HEADER.size + SECTION.size * len(sections)}
    for name, length in sections.items():
        sums[SPLIT.get(name, "overhead")] += length
    total = sum(sums.values())
    return Traffic(down=total, **sums) if kind == "order" else Traffic(up=total, **sums)


def write_frame(message: Message, sections: Mapping[str, Sequence[Chunk]]) -> Encoded:
    """Header, checksum, sections; and what the bytes are for."""
    lengths = {name: sum(map(len, chunks)) for name, chunks in sections.items()}
    traffic = traffic_of(message.kind, lengths)
    if traffic.total >= 1 << 32:
        raise errors.TooLarge(f"the message has {traffic.total} bytes; less than 4 GiB can be sent")
    kind, layout = KINDS.index(message.kind), bytes.fromhex(message.layout.hash)
    fields = (*message.tag, message.client, message.n, message.key)
    header = pack(HEADER, MAGIC, VERSION, kind, layout, 0, traffic.total, *fields)
    out: list[Chunk] = [header[: CHECKSUM.start], b"", header[CHECKSUM.stop :]]
    for name, chunks in sections.items():
        out += [SECTION.pack(CODES[name], lengths[name]), *chunks]
    check = 0
    for chunk in out:
        check = zlib.crc32(chunk, check)
    out[1] = check.to_bytes(4, "little")
    return Encoded(b"".join(out), traffic)


def checksum(data: memoryview) -> int:
    """CRC-32 of everything but the checksum itself. It finds damage, not forgery."""
    return zlib.crc32(data[CHECKSUM.stop :], zlib.crc32(data[: CHECKSUM.start]))


def seal(data: bytes | bytearray) -> bytes:
    """`data` with a correct checksum, for code that edits messages on purpose."""
    out = bytearray(data)
    out[CHECKSUM] = checksum(memoryview(out)).to_bytes(4, "little")
    return bytes(out)


def check_sections(kind: Kind, names: Sequence[str]) -> None:
    for name in names:
        if name not in ALLOWED[kind]:
            raise errors.BadSection(f"the message is of kind {kind!r}, which has no section {name!r}")
    for name in REQUIRED[kind]:
        if name not in names:
            raise errors.BadSection(f"the message is of kind {kind!r} and lacks its section {name!r}")
    if "mask" in names and "counts" in names:
        raise errors.BadSection(
            "the message has both a mask and layer counts: leave the counts out, as the mask gives them"
        )
    if "own" in names and "start" not in names:
        raise errors.BadSection(
            "the order has a section 'own', the mask that a client stored, but no section 'start', the round it was "
            "stored in"
        )
    if kind == "update" and not {"mask", "values", "counts"} & set(names):
        raise errors.BadSection("the update is empty: it has no mask, values or counts")


def read_frame(data: memoryview, layout: Layout, most: int) -> tuple[Message, dict[str, Reader]]:
    """The header's fields, and the sections, still closed. Checks everything that can be checked before."""
    if len(data) > most:
        raise errors.TooLarge(f"the message has {len(data)} bytes, at most {most} are accepted here")
    if bytes(data[:4]) != MAGIC[: len(data)] or not data:
        raise errors.BadMagic(f"the bytes are not a message: they begin with {bytes(data[:4])!r}, expected {MAGIC!r}")
    if len(data) < HEADER.size:
        raise errors.BadLength(f"the message has {len(data)} bytes, its header alone has {HEADER.size}: it was cut off")
    _, version, kind, theirs, check, total, phase, round, attempt, client, n, key = HEADER.unpack(data[: HEADER.size])
    if version != VERSION:
        raise errors.BadVersion(
            f"the message is in version {version} of the format, this side reads version {VERSION} only"
        )
    if len(data) < total:
        raise errors.BadLength(f"{len(data)} of the message's {total} bytes arrived: it was cut off")
    if len(data) > total:
        raise errors.TrailingBytes(f"{len(data) - total} bytes follow the end of the message")
    if checksum(data) != check:
        raise errors.BadChecksum("the checksum is wrong: the message was damaged on its way. Send it again")
    if theirs.hex() != layout.hash:
        raise errors.WrongLayout(
            f"the sender's model has layout {theirs.hex()}, this side's {layout.hash}; give both sides the same model"
        )
    if kind >= len(KINDS):
        raise errors.BadField(f"message kind {kind} does not exist; the kinds are 0 to {len(KINDS) - 1}")
    sections = _split(Reader(data[HEADER.size :], "message"))
    check_sections(KINDS[kind], tuple(sections))
    if KINDS[kind] == "lack" and (n or key):
        raise errors.BadField(f"a message of kind 'lack' has n = {n} and key = {key}; both must be 0")
    return Message(KINDS[kind], layout, (phase, round, attempt), client, n, key), sections


def _split(reader: Reader) -> dict[str, Reader]:
    out: dict[str, Reader] = {}
    last = 0
    while reader.left:
        code, length = reader.unpack(SECTION)
        if code not in NAMES:
            raise errors.BadSection(f"section {code} does not exist in version {VERSION} of the format")
        if code <= last:
            raise errors.BadSection(f"section {code} comes after section {last}; sections must ascend and not repeat")
        out[NAMES[code]] = Reader(reader.take(length), NAMES[code])
        last = code
    return out
