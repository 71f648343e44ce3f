"""Bytes to messages, strictly: what decodes is what an encoder could have written."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from ..core.exchange import Tag
from ..core.layout import Layout
from ..core.mask import Mask
from .errors import BadSection
from .frame import TAG, read_frame, split_parts
from .geometry import geometry
from .message import Coding, Message
from .reader import Reader
from .settings import Limits, read_local, read_metrics
from .tensors import read_extras, read_fixed
from .unmask import Build, read_mask, rebuild
from .values import Carries, Form, read_head, read_values


def decode(
    data: bytes | bytearray | memoryview,
    layout: Layout,
    known: Mapping[str, Mask] | None = None,
    limits: Limits | None = None,
    fixed: Mapping[str, Tensor] | None = None,
    build: Build = rebuild,
) -> Message:
    """The message that `data` is, or a WireError that names what is wrong with it.

    `known`: masks this side holds, by hash; `fixed`: fixed tensors, by hash; `build` makes a mask from a recipe.
    """
    limits = limits or Limits()
    frame = read_frame(memoryview(data).cast("B"), layout, limits.message)
    found = frame.sections
    parts = split_parts({name: reader.left for name, reader in found.items()})
    mask, form, base = None, None, None
    counts: tuple[int, ...] = ()
    if "mask" in found:
        mask, form, base = read_mask(found["mask"], layout, known or {}, build if limits.recipes else None)
        counts = mask.counts
    values, carries, value_form = _values(found, layout, mask, counts)
    active = sum(counts) if mask is not None else None
    tensors, held = read_fixed(found["fixed"], layout, limits, fixed or {}) if "fixed" in found else ({}, ())
    return Message(
        frame.kind,
        layout,
        frame.tag,
        frame.client,
        frame.n,
        frame.key,
        start=_start(found),
        own=_hash(found, "own"),
        local=read_local(found["local"], limits) if "local" in found else None,
        mask=mask,
        values=values,
        carries=carries,
        counts=counts if mask is not None else _counts(found, layout),
        metrics=read_metrics(found["metrics"], limits) if "metrics" in found else {},
        extra=read_extras(found["extra"], limits, active) if "extra" in found else {},
        fixed=tensors,
        lacks=_hash(found, "lacks"),
        coding=Coding(form, base, value_form, held),
        parts=parts,
    )


def _values(
    found: Mapping[str, Reader], layout: Layout, mask: Mask | None, counts: tuple[int, ...]
) -> tuple[Tensor | None, Carries, Form]:
    if "values" not in found:
        return None, "all", "fp32"
    carries, form = read_head(found["values"])
    if mask is None and carries != "statistics":
        raise BadSection("values without the mask they belong to")
    return read_values(found["values"], layout, counts, carries, form), carries, form


def _start(found: Mapping[str, Reader]) -> Tag | None:
    if "start" not in found:
        return None
    stage, round, attempt = found["start"].unpack(TAG)
    found["start"].end()
    return stage, round, attempt


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
