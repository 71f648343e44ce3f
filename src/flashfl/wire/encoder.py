"""Messages to bytes. Every section is planned as pieces of known size, so counting and writing are one path."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ..core.mask import Mask
from .errors import BadCount, BadField, TooLarge
from .frame import CODES, SECTION, SECTIONS, check_sections, split_parts, tag_bytes, write_frame
from .geometry import geometry
from .masks import plan
from .message import Coding, Encoded, Message, Parts
from .reader import Chunk, Piece
from .settings import local_bytes, metrics_bytes
from .tensors import extras_pieces, fixed_hash, fixed_pieces
from .values import Form, values_piece, values_size

Sections = dict[str, list[Piece]]


class _Planned(NamedTuple):
    sections: Sections
    coding: Coding

    @property
    def parts(self) -> Parts:
        return split_parts({name: sum(piece.size for piece in pieces) for name, pieces in self.sections.items()})

    def body(self) -> Iterator[Chunk]:
        for name, pieces in self.sections.items():
            yield SECTION.pack(CODES[name], sum(piece.size for piece in pieces))
            for piece in pieces:
                yield from piece.write()


def encode(
    message: Message,
    bases: Sequence[Mask] = (),
    values: Form = "fp32",
    held: Collection[str] = (),
    form: str | None = None,
) -> Encoded:
    """The message as bytes.

    `bases`: masks the receiver is known to hold; the mask goes as the smallest form they allow, or as `form`.
    `held`: hashes of fixed tensors the receiver holds. Lossy `values` are rounded under `message.value_key`.
    """
    planned = _plan(message, bases, values, held, form)
    parts = planned.parts
    if parts.total >= 1 << 32:
        raise TooLarge(f"a message of {parts.total} bytes: less than 4 GiB can travel")
    data = write_frame(message, parts.total, planned.body())
    assert len(data) == parts.total, "a piece is not as long as it said"
    return Encoded(data, parts, planned.coding)


def size(
    message: Message,
    bases: Sequence[Mask] = (),
    values: Form = "fp32",
    held: Collection[str] = (),
    form: str | None = None,
) -> Parts:
    """What `encode` would give, counted and not written."""
    return _plan(message, bases, values, held, form).parts


def size_with(
    message: Message, active: int, mask_bytes: int, values: Form = "fp32", held: Collection[str] = ()
) -> Parts:
    """What `size` would give if `message` had a mask of `active` weights that takes `mask_bytes`, and their values.

    For engines that count on a device: neither the mask nor the values need to be in the message.
    """
    sections = _small_sections(message)
    sections["mask"] = [Piece(mask_bytes, tuple)]
    sections["values"] = [Piece(values_size(message.layout, active, message.carries, values), tuple)]
    if message.extra:
        sections["extra"] = extras_pieces(message.extra, active)
    if message.fixed:
        sections["fixed"] = fixed_pieces(message.fixed, message.layout, held)
    return _Planned(sections, Coding()).parts


def _plan(message: Message, bases: Sequence[Mask], form: Form, held: Collection[str], only: str | None) -> _Planned:
    sections, mask = _small_sections(message), message.mask
    counts: tuple[int, ...] = ()
    coding = Coding(values=form, held=tuple(x for x in map(fixed_hash, message.fixed.values()) if x in held))
    if mask is not None:
        counts = mask.counts
        if message.counts is not None and tuple(message.counts) != counts:
            raise BadCount("the counts given are not the mask's")
        choice = plan(mask, bases, only)
        sections["mask"] = [choice.piece]
        coding = Coding(choice.form, choice.base, form, coding.held)
    if message.values is not None:
        if mask is None and message.carries != "statistics":
            raise BadField("values cannot travel without their mask")
        sections["values"] = [
            values_piece(message.values, message.layout, counts, message.carries, form, message.value_key)
        ]
    if message.extra:
        sections["extra"] = extras_pieces(message.extra, sum(counts) if mask is not None else None)
    if message.fixed:
        sections["fixed"] = fixed_pieces(message.fixed, message.layout, held)
    names = tuple(name for name in SECTIONS if name in sections)
    check_sections(message.kind, names)
    return _Planned({name: sections[name] for name in names}, coding)


def _small_sections(message: Message) -> Sections:
    """Everything that depends on neither mask nor values."""
    out: dict[str, bytes] = {}
    if message.start is not None:
        out["start"] = tag_bytes(message.start)
    if message.own is not None:
        out["own"] = bytes.fromhex(message.own)
    if message.local is not None:
        out["local"] = local_bytes(message.local)
    if message.counts is not None and message.mask is None:
        out["counts"] = geometry(message.layout).write_counts(message.counts)
    if message.metrics:
        out["metrics"] = metrics_bytes(message.metrics)
    if message.lacks is not None:
        out["lacks"] = bytes.fromhex(message.lacks)
    return {name: [Piece.of(data)] for name, data in out.items()}
