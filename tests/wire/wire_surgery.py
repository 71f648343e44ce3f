"""Cutting messages open: sections out, changed, and back in with every length and the checksum made right."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import numpy as np

from flashfl.core.mask import Mask
from flashfl.wire import Message, encode
from flashfl.wire.frame import CODES, HEADER, SECTION, seal
from flashfl.wire.masks import FORMS

LENGTH = slice(18, 22)


def open_up(data: bytes) -> tuple[bytes, list[tuple[int, bytes]]]:
    """The header and (code, payload) of each section."""
    at, found = HEADER.size, []
    while at < len(data):
        code, length = SECTION.unpack(data[at : at + SECTION.size])
        at += SECTION.size
        found.append((code, data[at : at + length]))
        at += length
    return data[: HEADER.size], found


def close_up(header: bytes, sections: list[tuple[int, bytes]]) -> bytes:
    body = b"".join(SECTION.pack(code, len(payload)) + payload for code, payload in sections)
    out = bytearray(header + body)
    out[LENGTH] = struct.pack("<I", len(out))
    return seal(out)


def replace(data: bytes, name: str, payload: bytes) -> bytes:
    """The message with one section's payload exchanged, or the section added in its place."""
    header, sections = open_up(data)
    kept = [(code, old) for code, old in sections if code != CODES[name]]
    return close_up(header, sorted([*kept, (CODES[name], payload)]))


def remove(data: bytes, name: str) -> bytes:
    header, sections = open_up(data)
    return close_up(header, [(code, payload) for code, payload in sections if code != CODES[name]])


def payload(data: bytes, name: str) -> bytes:
    return dict(open_up(data)[1])[CODES[name]]


def again(message: Message, data: bytes, known: Mapping[str, Mask]) -> bytes:
    """A decoded message, written with the choices that the sender of `data` made."""
    form, base = mask_choice(payload(data, "mask")) if message.mask is not None else (None, None)
    return encode(message, (known[base],) if base else (), message.precision, form).data


def mask_choice(body: bytes) -> tuple[str, str | None]:
    """The form of a mask, and the hash of the mask that the receiver must hold."""
    form = FORMS[body[0]]
    return form, body[1:9].hex() if form in ("known", "difference") else None


HEADER_FIELDS = ((0, 4), (4, 5), (5, 6), (6, 14), (18, 22), (22, 23), (23, 27), (27, 29), (29, 37), (37, 45), (45, 53))
ODD = (0, 1, 2, 3, 7, 31, 32, 127, 128, 255)


def mutate_field(data: bytes, rng: np.random.Generator) -> bytes:
    """One header field, or one field of one section, changed; lengths and checksum right, so that it is really read."""
    header, sections = open_up(data)
    choice = int(rng.integers(10))
    if choice == 0 or not sections:
        start, stop = HEADER_FIELDS[int(rng.integers(len(HEADER_FIELDS)))]
        out = bytearray(data)
        out[start:stop] = (
            rng.bytes(stop - start) if rng.random() < 0.5 else bytes([ODD[int(rng.integers(10))]]) * (stop - start)
        )
        return seal(out)
    index = int(rng.integers(len(sections)))
    code, body = sections[index]
    if choice == 1:
        sections[index] = (int(rng.integers(max(CODES.values()) + 2)), body)
    elif choice == 2:
        del sections[index]
    elif choice == 3:
        sections.insert(index, sections[int(rng.integers(len(sections)))])
    elif choice == 4:
        cut = int(rng.integers(len(body) + 1))
        sections[index] = (code, body[:cut] if rng.random() < 0.5 else body + rng.bytes(1 + cut % 9))
    else:
        sections[index] = (code, _mutate_body(body, rng))
    return close_up(header, sections)


def _mutate_body(body: bytes, rng: np.random.Generator) -> bytes:
    """Fields lie at the front of a section and its data behind: the front is hit as often as all the rest."""
    if not body:
        return rng.bytes(3)
    out = bytearray(body)
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(min(len(out), 48) if rng.random() < 0.5 else len(out)))
        kind = int(rng.integers(4))
        if kind == 0:
            out[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            out[at] = ODD[int(rng.integers(len(ODD)))]
        elif kind == 2:
            out[at : at + 4] = struct.pack("<I", int(rng.integers(1 << 32)))[: len(out) - at]
        else:
            out[at] = (out[at] + (1 if rng.random() < 0.5 else 255)) % 256
    return bytes(out)


def mutate_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Damage as a line does it: bits flipped, bytes lost or added; mostly the checksum finds it."""
    out = bytearray(data)
    kind = int(rng.integers(4))
    at = int(rng.integers(len(out)))
    if kind == 0:
        out[at] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        out[at:at] = rng.bytes(int(rng.integers(1, 9)))
    else:
        out[at : at + 8] = rng.bytes(len(out[at : at + 8]))
    return bytes(out) if rng.random() < 0.5 or len(out) < 22 else seal(out)
