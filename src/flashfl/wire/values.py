"""The values of a message: weights as fp32, fp16, bf16, int8 or int4, and the rest as fp32 or fp16.

Rounding is a pure function of values and key, so an engine that writes no bytes rounds like one that does. Rounding
again changes nothing under any key, so reading and writing again gives the same bytes. Statistics belong to the rest.
Under int8 and int4 so do tensors of fewer than two dimensions (biases, normalisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.exchange import Carries
from ..core.layout import Kind, Layout
from ..core.precision import FORMS, Form, Precision
from ..core.rng import fold
from .coded import plain_size, read_coded, read_plain, write_levels
from .errors import BadField, BadSection, NonFinite
from .levels import TINY, TOPS, Levels, from_levels, largest, round_half, scale_count, to_levels
from .reader import Chunk, Reader

CARRIES: dict[Carries, tuple[Kind, ...]] = {  # the place in this list is the code
    "all": ("prunable", "dense", "statistic"),
    "weights": ("prunable", "dense"),
    "statistics": ("statistic",),
    "rest": ("dense", "statistic"),
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SCALES = {"int8": torch.float32, "int4": torch.bfloat16}  # both hold the scales exactly
_REST16, _CHANGES, _CODED = 16, 32, 64  # flags beside the form


class Segment(NamedTuple):
    """A run of packed values that belongs to one layer; only coarse segments are rounded."""

    size: int
    coarse: bool


def segments(layout: Layout, counts: Sequence[int], carries: Carries, form: Form) -> tuple[Segment, ...]:
    """Where each layer's values lie in a packed vector, and which of them `form` rounds."""
    sizes, out = iter(counts), []
    for layer in layout.of_kind(*CARRIES[carries]):
        prunable = layer.kind == "prunable"
        coarse = prunable or (layer.kind != "statistic" and (form not in TOPS or len(layer.shape) >= 2))
        out.append(Segment(next(sizes, 0) if prunable else layer.size, coarse and form != "fp32"))
    return tuple(out)


def values_size(layout: Layout, active: int, carries: Carries, how: Precision) -> int:
    """Bytes of the values section, without looking at a value. Levels of changes may take less: see `coded`."""
    counts = (active, *(0 for _ in layout.sizes[1:])) if layout.sizes else ()
    parts, form = segments(layout, counts, carries, how.values), how.values
    sizes, fine = _sizes(parts, True), sum(_sizes(parts, False))
    if form in TOPS:
        coarse = SCALES[form].itemsize * scale_count(sizes, form) + plain_size(sum(sizes), form)
    else:
        coarse = DTYPES[form].itemsize * sum(sizes)
    return 2 + coarse + DTYPES[how.rest].itemsize * fine


def round_values(values: Tensor, parts: Sequence[Segment], how: Precision, *keys: int) -> Tensor:
    """`values` exactly as the other side will decode them: one message's, or [messages, values] with a key for each."""
    return round_with_levels(values, parts, how, *keys)[0]


def round_with_levels(
    values: Tensor, parts: Sequence[Segment], how: Precision, *keys: int
) -> tuple[Tensor, Tensor | None]:
    """`round_values`, and the levels on the way; None where there are none."""
    sizes, form = _sizes(parts, True), how.values
    fine = _round_rest(_pick(values, parts, False), how, keys)
    if not sizes:
        return fine, None
    coarse = _pick(values, parts, True)
    if form not in TOPS:
        return _merge(round_half(coarse, form, how.rounding, keys), fine, parts), None
    found = to_levels(coarse, sizes, form, how.rounding, keys)
    return _merge(from_levels(found, sizes, form), fine, parts), found.levels


def _round_rest(fine: Tensor, how: Precision, keys: Sequence[int]) -> Tensor:
    if how.rest == "fp32":
        return fine
    return round_half(fine, "fp16", how.rounding, [fold(key, "rest") for key in keys])


def _sizes(parts: Sequence[Segment], coarse: bool) -> list[int]:
    return [part.size for part in parts if part.coarse == coarse]


def _pick(values: Tensor, parts: Sequence[Segment], coarse: bool) -> Tensor:
    pieces = values.split([part.size for part in parts], -1)
    chosen = [piece for piece, part in zip(pieces, parts, strict=True) if part.coarse == coarse]
    if len(chosen) == len(parts):
        return values
    return torch.cat(chosen, -1) if chosen else values[..., :0]


def _merge(coarse: Tensor, fine: Tensor, parts: Sequence[Segment]) -> Tensor:
    """The packed vector again from its coarse and its fine values."""
    pieces = {True: iter(coarse.split(_sizes(parts, True), -1)), False: iter(fine.split(_sizes(parts, False), -1))}
    return torch.cat([next(pieces[part.coarse]) for part in parts], -1)


def values_chunks(
    values: Tensor, layout: Layout, counts: Sequence[int], carries: Carries, how: Precision, key: int
) -> list[Chunk]:
    """The values section. Refuses what is not finite."""
    parts = segments(layout, counts, carries, how.values)
    plain = values.detach().to("cpu", torch.float32)
    _check_finite(plain)
    coarse, fine = _pick(plain, parts, True), _round_rest(_pick(plain, parts, False), how, [key])
    form, changes, coded = how.values, how.changes and carries != "statistics", False
    chunks: list[Chunk] = []  # of the coarse values
    sizes = _sizes(parts, True)
    if sizes and form in TOPS:
        found = to_levels(coarse, sizes, form, how.rounding, [key])
        coded, levels = write_levels(found.levels, form, changes)
        chunks = [_raw(found.scales.to(SCALES[form])), levels]
    elif sizes:
        chunks = [_raw(round_half(coarse, form, how.rounding, [key]).to(DTYPES[form]))]
    code = FORMS.index(form) + _REST16 * (how.rest == "fp16") + _CHANGES * changes + _CODED * coded
    return [bytes([list(CARRIES).index(carries), code]), *chunks, _raw(fine.to(DTYPES[how.rest]))]


def _raw(tensor: Tensor) -> Chunk:
    """A tensor's bytes, where they lie: little-endian."""
    plain = tensor.contiguous()
    plain = plain.view(torch.int16) if plain.itemsize == 2 else plain  # numpy has no bf16
    array = plain.numpy()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).view(np.uint8).data


def _check_finite(values: Tensor) -> None:
    # A not-a-number is both extremes, and looking for those takes no memory.
    array = values.numpy()
    if array.size and not (np.isfinite(array.max()) and np.isfinite(array.min())):
        raise NonFinite("the values hold an infinity or a not-a-number; training has diverged, or the sender is broken")


def read_values(reader: Reader, layout: Layout, counts: Sequence[int] | None) -> tuple[Tensor, Carries, Precision]:
    """The packed fp32 values, what they are, and their form. `counts`: the mask's; None if the message has none."""
    kind, code = reader.number(1), reader.number(1)
    flags, number = code & (_REST16 | _CHANGES | _CODED), code & ~(_REST16 | _CHANGES | _CODED)
    if kind >= len(CARRIES) or number >= len(FORMS) or (flags & _REST16 and FORMS[number] == "fp32"):
        raise BadField(
            f"values: kind {kind} with form {code} does not exist. Kinds are 0 to 3. Forms are 0 to 4, and flags may "
            "be added to them; see flashfl/wire/FORMAT.md"
        )
    carries, form = list(CARRIES)[kind], FORMS[number]
    how = Precision(form, "fp16" if flags & _REST16 else "fp32", changes=bool(flags & _CHANGES))
    if how.changes and carries not in ("all", "weights"):
        raise BadField(f"values: only weights can be sent as changes, and these are {carries!r} values")
    if flags & _CODED and not (how.changes and form in TOPS):
        raise BadField("values: only int8 and int4 levels of changes can be coded")
    if counts is None and carries != "statistics":
        raise BadSection("the message has values but no mask; values need the mask they belong to")
    parts = segments(layout, counts or (), carries, form)
    sizes = _sizes(parts, True)
    coarse = _read_coarse(reader, sizes, how, bool(flags & _CODED))
    fine = _numbers(reader, DTYPES[how.rest], sum(_sizes(parts, False))).float()
    for some in (fine, coarse):
        _check_finite(some)
    return _merge(coarse, fine, parts) if sizes else fine, carries, how


def _read_coarse(reader: Reader, sizes: Sequence[int], how: Precision, coded: bool) -> Tensor:
    """The coarse values as fp32."""
    form, count = how.values, sum(sizes)
    if form not in TOPS:
        return _numbers(reader, DTYPES[form], count).float()
    if not sizes and not coded:
        return torch.empty(0)
    scales = _numbers(reader, SCALES[form], scale_count(sizes, form)).float()
    levels = read_coded(reader, count, form) if coded else read_plain(reader, count, form, how.changes)
    found = Levels(scales, levels)
    _check_levels(found, sizes, form)
    return from_levels(found, sizes, form)


def _numbers(reader: Reader, dtype: torch.dtype, count: int) -> Tensor:
    """What `_raw` wrote."""
    return torch.from_numpy(reader.array(f"<i{dtype.itemsize}", count)).view(dtype)


def _check_levels(found: Levels, sizes: Sequence[int], form: Form) -> None:
    """Refuses scales and levels that no sender would choose."""
    scales, levels, most = *found, TOPS[form]
    _check_finite(scales)
    if bool((scales.view(torch.int32) & -0x7FFFFF81).any()) or bool((levels < -most).any()):
        raise BadField(
            f"values: an {form} scale is negative or has more than 17 significant bits, or a level is below {-most}"
        )
    tops = largest(levels.abs(), sizes, form)
    wide = scales.double()
    fits = (tops == most) & (wide >= TINY) & (most * wide < 2.0**128)
    for at in (~torch.where(scales == 0, tops == 0, fits)).nonzero().flatten().tolist():
        raise BadField(
            f"values: {form} scale {scales[at]:g} with largest level {tops[at]}. If all levels are 0, the scale must "
            f"be 0. Otherwise the largest must be {most}, and the scale at least 2^-107 and below 2^128 / {most}."
        )
