"""Messages to bytes and back, as FORMAT.md describes. What decodes is what an encoder could have written.

The writer plans every section as pieces of known size, so counting and writing are one path. Nothing here builds a
dense vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from ..core.exchange import Tag
from ..core.layout import Layout
from ..core.mask import Mask
from .errors import BadCount, BadField, BadSection, TooLarge
from .frame import CODES, SECTION, TAG, check_sections, read_frame, split_parts, tag_bytes, write_frame
from .geometry import geometry
from .masks import plan, read_mask
from .message import Coding, Encoded, Message, Parts
from .reader import Chunk, Limits, Piece, Reader, hash_bytes
from .settings import local_bytes, read_local
from .tensors import extras_pieces, metrics_bytes, read_extras, read_metrics
from .values import Carries, Form, read_head, read_values, values_piece, values_size

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


def encode(message: Message, bases: Sequence[Mask] = (), values: Form = "fp32", form: str | None = None) -> Encoded:
    """The message as bytes.

    `bases`: masks the receiver is known to hold; the mask goes as the smallest form they allow, or as `form`. Lossy
    `values` are rounded under `message.value_key`.
    """
    planned = _plan(message, bases, values, form)
    parts = planned.parts
    if parts.total >= 1 << 32:
        raise TooLarge(f"the message has {parts.total} bytes; less than 4 GiB can be sent")
    data = write_frame(message, parts.total, planned.body())
    assert len(data) == parts.total, "a piece is not as long as it said"
    return Encoded(data, parts, planned.coding)


def size(message: Message, bases: Sequence[Mask] = (), values: Form = "fp32") -> Parts:
    """What `encode` would give, counted and not written."""
    return _plan(message, bases, values, None).parts


def size_with(message: Message, active: int, mask_bytes: int, values: Form = "fp32") -> Parts:
    """What `size` would give if `message` had a mask of `active` weights that takes `mask_bytes`, and their values.

    For engines that count on a device: neither the mask nor the values need to be in the message.
    """
    sections = _small_sections(message)
    sections["mask"] = [Piece(mask_bytes, tuple)]
    sections["values"] = [Piece(values_size(message.layout, active, message.carries, values), tuple)]
    if message.extra:
        sections["extra"] = extras_pieces(message.extra, active)
    return _Planned(sections, Coding()).parts


def _plan(message: Message, bases: Sequence[Mask], values: Form, only: str | None) -> _Planned:
    sections, mask, coding = _small_sections(message), message.mask, Coding(values=values)
    counts: tuple[int, ...] = ()
    if mask is not None:
        counts = mask.counts
        if message.counts is not None and tuple(message.counts) != counts:
            raise BadCount(f"the message's counts {message.counts} are not its mask's, {counts}; leave them out")
        choice = plan(mask, bases, only)
        sections["mask"] = [choice.piece]
        coding = Coding(choice.form, choice.base, values)
    if message.values is not None:
        if mask is None and message.carries != "statistics":
            raise BadField("the message has values but no mask; values need the mask they belong to")
        sections["values"] = [
            values_piece(message.values, message.layout, counts, message.carries, values, message.value_key)
        ]
    if message.extra:
        sections["extra"] = extras_pieces(message.extra, sum(counts) if mask is not None else None)
    names = tuple(name for name in CODES if name in sections)
    check_sections(message.kind, names)
    return _Planned({name: sections[name] for name in names}, coding)


def _small_sections(message: Message) -> Sections:
    """Everything that depends on neither mask nor values."""
    out: dict[str, bytes] = {}
    if message.start is not None:
        out["start"] = tag_bytes(message.start)
    if message.own is not None:
        out["own"] = hash_bytes(message.own)
    if message.local is not None:
        out["local"] = local_bytes(message.local, message.layout)
    if message.counts is not None and message.mask is None:
        out["counts"] = geometry(message.layout).write_counts(message.counts)
    if message.metrics:
        out["metrics"] = metrics_bytes(message.metrics)
    if message.lacks is not None:
        out["lacks"] = hash_bytes(message.lacks)
    return {name: [Piece.of(data)] for name, data in out.items()}


def decode(
    data: bytes | bytearray | memoryview,
    layout: Layout,
    known: Mapping[str, Mask] | None = None,
    limits: Limits | None = None,
) -> Message:
    """The message in `data`, or a WireError that names what is wrong with it. `known`: masks held here, by hash."""
    limits = limits or Limits()
    frame = read_frame(memoryview(data).cast("B"), layout, limits.message)
    found = frame.sections
    parts = split_parts({name: reader.left for name, reader in found.items()})
    mask, form, base = None, None, None
    counts: tuple[int, ...] = ()
    if "mask" in found:
        mask, form, base = read_mask(found["mask"], layout, known or {}, limits.recipes)
        counts = mask.counts
    values, carries, value_form = _values(found, layout, mask, counts)
    active = sum(counts) if mask is not None else None
    return Message(
        frame.kind,
        layout,
        frame.tag,
        frame.client,
        frame.n,
        frame.key,
        start=_start(found),
        own=_hash(found, "own"),
        local=read_local(found["local"], layout, limits) if "local" in found else None,
        mask=mask,
        values=values,
        carries=carries,
        counts=counts if mask is not None else _counts(found, layout),
        metrics=read_metrics(found["metrics"], limits) if "metrics" in found else {},
        extra=read_extras(found["extra"], limits, active) if "extra" in found else {},
        lacks=_hash(found, "lacks"),
        coding=Coding(form, base, value_form),
        parts=parts,
    )


def _values(
    found: Mapping[str, Reader], layout: Layout, mask: Mask | None, counts: tuple[int, ...]
) -> tuple[Tensor | None, Carries, Form]:
    if "values" not in found:
        return None, "all", "fp32"
    carries, form = read_head(found["values"])
    if mask is None and carries != "statistics":
        raise BadSection("the message has values but no mask; values need the mask they belong to")
    return read_values(found["values"], layout, counts, carries, form), carries, form


def _start(found: Mapping[str, Reader]) -> Tag | None:
    if "start" not in found:
        return None
    phase, round, attempt = found["start"].unpack(TAG)
    found["start"].end()
    return phase, round, attempt


def _hash(found: Mapping[str, Reader], name: str) -> str | None:
    if name not in found:
        return None
    value = found[name].hash()
    found[name].end()
    return value


def _counts(found: Mapping[str, Reader], layout: Layout) -> tuple[int, ...] | None:
    if "counts" not in found:
        return None
    counts = tuple(geometry(layout).read_counts(found["counts"]).tolist())
    found["counts"].end()
    return counts
