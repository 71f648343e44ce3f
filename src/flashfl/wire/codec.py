"""Messages to bytes and back, as FORMAT.md describes. What decodes is what an encoder could have written.

Nothing here builds a dense vector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ..core.exchange import Carries, Traffic
from ..core.layout import Layout
from ..core.mask import Mask
from ..core.precision import EXACT, Precision
from .errors import BadField
from .frame import CODES, TAG, check_sections, read_frame, traffic_of, write_frame
from .geometry import geometry
from .masks import mask_to_bytes, read_mask
from .message import Encoded, Message
from .reader import Chunk, Limits, Reader, pack
from .settings import local_bytes, read_local
from .tensors import extras_chunks, extras_size, metrics_bytes, read_extras, read_metrics
from .values import read_values, values_chunks, values_size

T = TypeVar("T")


def encode(message: Message, bases: Sequence[Mask] = (), values: Precision = EXACT, form: str | None = None) -> Encoded:
    """The message as bytes.

    `bases`: masks the receiver is known to hold; the mask goes as the smallest form they allow, or as `form`. Lossy
    `values` are rounded under `message.value_key`. Those of an update may be changes; the caller makes them.
    """
    mask, counts = message.mask, message.mask.counts if message.mask is not None else ()
    sections: dict[str, Sequence[Chunk]] = {name: [data] for name, data in _small_sections(message).items()}
    if mask is not None:
        sections["mask"] = [mask_to_bytes(mask, bases, form)]
    if message.values is not None:
        sections["values"] = values_chunks(
            message.values, message.layout, counts, message.carries, values, message.value_key
        )
    if message.extra:
        sections["extra"] = extras_chunks(message.extra, sum(counts) if mask is not None else None)
    names = [name for name in CODES if name in sections]
    check_sections(message.kind, names)
    return write_frame(message, {name: sections[name] for name in names})


def size_with(message: Message, active: int, mask_bytes: int, values: Precision = EXACT) -> Traffic:
    """What `encode` would take if `message` had a mask of `active` weights that takes `mask_bytes`, and their values.

    For engines that count on a device: neither the mask nor the values need to be in the message. Levels of changes
    count as plain, so this is the most they take; `coded.plan_levels` says how much less.
    """
    lengths = {name: len(data) for name, data in _small_sections(message).items()}
    lengths["mask"] = mask_bytes
    lengths["values"] = values_size(message.layout, active, message.carries, values)
    if message.extra:
        lengths["extra"] = extras_size(message.extra)
    return traffic_of(message.kind, lengths)


def _small_sections(message: Message) -> dict[str, bytes]:
    """Everything that depends on neither mask nor values."""
    out: dict[str, bytes] = {}
    if message.start is not None:
        out["start"] = pack(TAG, *message.start)
    if message.own is not None:
        out["own"] = bytes.fromhex(message.own)
    if message.local is not None:
        out["local"] = local_bytes(message.local, message.layout)
    if message.counts is not None and message.mask is None:
        out["counts"] = geometry(message.layout).write_counts(message.counts)
    if message.metrics:
        out["metrics"] = metrics_bytes(message.metrics)
    if message.lacks is not None:
        out["lacks"] = bytes.fromhex(message.lacks)
    return out


def decode(
    data: bytes | bytearray | memoryview,
    layout: Layout,
    known: Mapping[str, Mask] | None = None,
    limits: Limits | None = None,
) -> Message:
    """The message in `data`, or a WireError that names what is wrong with it. `known`: masks held here, by hash."""
    limits = limits or Limits()
    head, found = read_frame(memoryview(data).cast("B"), layout, limits.message)
    traffic = traffic_of(head.kind, {name: reader.left for name, reader in found.items()})

    def section(name: str, read: Callable[[Reader], T]) -> T | None:
        if name not in found:
            return None
        value = read(found[name])
        found[name].end()
        return value

    no_values: tuple[None, Carries, Precision] = (None, "all", EXACT)
    mask = section("mask", lambda reader: read_mask(reader, layout, known or {}, limits.recipes))
    counts = mask.counts if mask is not None else None
    values, carries, precision = section("values", lambda reader: read_values(reader, layout, counts)) or no_values
    if precision.changes and head.kind != "update":
        raise BadField(f"this message of kind {head.kind!r} sends changes instead of weights; only updates may do that")
    active = mask.active if mask is not None else None
    return replace(
        head,
        start=section("start", lambda reader: reader.unpack(TAG)),
        own=section("own", Reader.hash),
        local=section("local", lambda reader: read_local(reader, layout, limits)),
        mask=mask,
        values=values,
        carries=carries,
        counts=section("counts", geometry(layout).read_counts) if mask is None else counts,
        metrics=section("metrics", lambda reader: read_metrics(reader, limits)) or {},
        extra=section("extra", lambda reader: read_extras(reader, limits, active)) or {},
        lacks=section("lacks", Reader.hash),
        precision=precision,
        traffic=traffic,
    )
