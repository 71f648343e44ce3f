"""Values as fp32, fp16, bf16, or int8 with a scale per layer: rounded without bias, the same on every device.

Rounding is a pure function of values and key, so an engine that writes no bytes rounds like one that does. Rounding
again changes nothing under any key, so reading and writing again gives the same bytes. Statistics always travel as
fp32. Under int8 so do tensors of fewer than two dimensions (biases, normalisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.rng import hashes, uniform
from .errors import BadField, BadSection, NonFinite
from .reader import Chunk, Reader

Form = Literal["fp32", "fp16", "bf16", "int8"]
FORMS: tuple[Form, ...] = ("fp32", "fp16", "bf16", "int8")
Carries = Literal["all", "weights", "statistics", "rest"]  # rest: all but the active weights
CARRIES: tuple[Carries, ...] = ("all", "weights", "statistics", "rest")
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}  # coarse values
TINY = 2.0**-107  # under int8 a layer whose scale would be smaller is sent as zeros
_HALF_MAX, _HALF_NORMAL = 65504.0, 2.0**-14


class Segment(NamedTuple):
    """A run of packed values that belongs to one layer; only coarse segments are rounded."""

    start: int
    stop: int
    coarse: bool


def segments(layout: Layout, counts: Sequence[int], carries: Carries, form: Form) -> tuple[Segment, ...]:
    """Where each layer's values lie in a packed vector, and which of them `form` rounds."""
    sizes = iter(counts)
    out, at = [], 0
    for layer in layout.travelling:
        statistic = layer.kind == "statistic"
        size = next(sizes, 0) if layer.kind == "prunable" else layer.size
        if (carries == "weights" and statistic) or (carries == "statistics" and not statistic):
            continue
        if carries == "rest" and layer.kind == "prunable":
            continue
        coarse = layer.kind == "prunable" or (not statistic and (form != "int8" or len(layer.shape) >= 2))
        out.append(Segment(at, at + size, coarse and form != "fp32"))
        at += size
    return tuple(out)


def count_values(layout: Layout, active: int, carries: Carries) -> int:
    """How many values a message carries."""
    statistics = layout.size - layout.trained_size
    if carries == "statistics":
        return statistics
    dense = layout.trained_size - layout.prunable_size
    return (active if carries != "rest" else 0) + dense + (statistics if carries != "weights" else 0)


def values_size(layout: Layout, active: int, carries: Carries, form: Form) -> int:
    """Bytes of the values section, without looking at a value."""
    total = count_values(layout, active, carries)
    counts = (active, *(0 for _ in layout.sizes[1:])) if layout.sizes else ()
    coarse = [part for part in segments(layout, counts, carries, form) if part.coarse]
    rounded = sum(part.stop - part.start for part in coarse)
    return 2 + 4 * (total - rounded) + DTYPES[form].itemsize * rounded + (4 * len(coarse) if form == "int8" else 0)


def round_values(values: Tensor, parts: Sequence[Segment], form: Form, key: int) -> Tensor:
    """`values` exactly as the other side will decode them."""
    sizes = _coarse_sizes(parts)
    if not sizes:
        return values
    coarse = _unpack(_pack(_pick(values, parts, True), sizes, form, key), sizes)
    return _merge(coarse, _pick(values, parts, False), parts)


def _coarse_sizes(parts: Sequence[Segment]) -> list[int]:
    return [part.stop - part.start for part in parts if part.coarse]


def _pick(values: Tensor, parts: Sequence[Segment], coarse: bool) -> Tensor:
    chosen = [values[part.start : part.stop] for part in parts if part.coarse == coarse]
    if len(chosen) == len(parts):
        return values
    return torch.cat(chosen) if chosen else values[:0]


def _merge(coarse: Tensor, fine: Tensor, parts: Sequence[Segment]) -> Tensor:
    """The packed vector again from its coarse and its fine values."""
    out, at = [], [0, 0]
    for part in parts:
        source, size = (coarse if part.coarse else fine), part.stop - part.start
        out.append(source[at[part.coarse] : at[part.coarse] + size])
        at[part.coarse] += size
    return torch.cat(out)


def _pack(coarse: Tensor, sizes: Sequence[int], form: Form, key: int) -> tuple[Tensor, ...]:
    """Coarse values as they travel: for int8 the scales and the levels, else the rounded values."""
    if form == "int8":
        return _levels(coarse, sizes, key)
    rounded = _round_bf16(coarse, key) if form == "bf16" else _round_fp16(coarse, key)
    return (rounded.to(DTYPES[form]),)


def _unpack(packed: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    *scales, numbers = packed
    return numbers.float() * _spread(scales[0], sizes) if scales else numbers.float()


def _round_bf16(values: Tensor, key: int) -> Tensor:
    """Add 16 random bits below the last one kept, cut; what would overflow stays at the largest."""
    bits = values.contiguous().view(torch.int32)
    noise = hashes(key, 0, values.numel(), values.device) & 0xFFFF
    cut = ((bits + noise) & -0x10000).view(torch.float32)
    cut = torch.where(cut.isinf(), (bits & -0x10000).view(torch.float32), cut)
    return torch.where(values.isfinite(), cut, values)


def _round_fp16(values: Tensor, key: int) -> Tensor:
    """As bf16 with 13 bits; below the normal range a fixed step of 2**-24; beyond the range the largest."""
    bits = values.contiguous().view(torch.int32)
    noise = hashes(key, 0, values.numel(), values.device)
    normal = ((bits + (noise & 0x1FFF)) & -0x2000).view(torch.float32)
    steps = values.abs() * 2.0**24
    whole = steps.floor()
    chance = ((noise >> 8) & 0xFFFFFF).to(torch.float32) * 2.0**-24
    small = torch.copysign((whole + (chance < steps - whole)) * 2.0**-24, values)
    rounded = torch.where(values.abs() < _HALF_NORMAL, small, normal).clamp(-_HALF_MAX, _HALF_MAX)
    return torch.where(values.isfinite(), rounded, values)


def _levels(coarse: Tensor, sizes: Sequence[int], key: int) -> tuple[Tensor, Tensor]:
    """A scale per coarse segment, and whole numbers -127..127.

    A scale keeps 17 significant bits, so level times scale is exact in fp32; the largest magnitude is always level 127,
    so the scale can be found again from the rounded values.
    """
    zero = coarse.new_zeros(1)
    tops = torch.stack([torch.cat([piece.abs(), zero]).amax() for piece in torch.split(coarse, list(sizes))])
    scales = ((tops / torch.full_like(tops, 127.0)).view(torch.int32) & -0x80).view(torch.float32)
    scales = torch.where(scales < TINY, torch.zeros_like(scales), scales)
    scale, top = _spread(scales, sizes), _spread(tops, sizes)
    steps = coarse.abs() / torch.where(scale > 0, scale, torch.ones_like(scale))
    whole = steps.floor()
    levels = whole + (uniform(key, coarse.numel(), coarse.device) < steps - whole)
    levels = torch.where(coarse.abs() >= top, torch.full_like(levels, 127.0), levels).clamp(max=127.0)
    levels = torch.copysign(torch.where(scale > 0, levels, torch.zeros_like(levels)), coarse)
    return scales, levels.to(torch.int8)


def _spread(each: Tensor, sizes: Sequence[int]) -> Tensor:
    """One number per coarse segment, repeated for each of its values; no device is waited for."""
    return torch.cat([number.expand(size) for number, size in zip(each.unbind(), sizes, strict=True)])


def values_chunks(
    values: Tensor, layout: Layout, counts: Sequence[int], carries: Carries, form: Form, key: int
) -> list[Chunk]:
    """The values section. Refuses what is not finite or not as many as the mask and the layout say."""
    expected = count_values(layout, sum(counts), carries)
    if values.dim() != 1 or values.numel() != expected:
        raise BadField(f"values of shape {tuple(values.shape)} given, ({expected},) expected for this mask and layout")
    parts = segments(layout, counts, carries, form)
    plain = values.detach().to("cpu", torch.float32)
    _check_finite(plain)
    sizes, coarse, fine = _coarse_sizes(parts), _pick(plain, parts, True), _pick(plain, parts, False)
    packed = _pack(coarse, sizes, form, key) if sizes else ()
    return [bytes([CARRIES.index(carries), FORMS.index(form)]), *map(_raw, packed), _raw(fine)]


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


def read_values(reader: Reader, layout: Layout, counts: Sequence[int] | None) -> tuple[Tensor, Carries, Form]:
    """The packed fp32 values, what they are, and their form. `counts`: the mask's; None if the message has none."""
    codes = reader.number(1), reader.number(1)
    if codes[0] >= len(CARRIES) or codes[1] >= len(FORMS):
        raise BadField(f"values: kind {codes[0]} or form {codes[1]} does not exist; kinds are 0 to 3, forms 0 to 3")
    carries, form = CARRIES[codes[0]], FORMS[codes[1]]
    if counts is None and carries != "statistics":
        raise BadSection("the message has values but no mask; values need the mask they belong to")
    counts = counts or ()
    parts = segments(layout, counts, carries, form)
    sizes = _coarse_sizes(parts)
    scales = [_numbers(reader, torch.float32, len(sizes))] if form == "int8" else []
    numbers = _numbers(reader, DTYPES[form], sum(sizes))
    fine = _numbers(reader, torch.float32, count_values(layout, sum(counts), carries) - sum(sizes))
    _check_finite(fine)
    if not sizes:
        return fine, carries, form
    for each in scales:
        _check_levels(each, numbers, sizes)
    coarse = _unpack((*scales, numbers), sizes)
    _check_finite(coarse)
    return _merge(coarse, fine, parts), carries, form


def _numbers(reader: Reader, dtype: torch.dtype, count: int) -> Tensor:
    """What `_raw` wrote."""
    plain = {2: "<i2", 1: "<i1", 4: "<f4"}[dtype.itemsize]
    return torch.from_numpy(reader.array(plain, count)).view(dtype)


def _check_levels(scales: Tensor, levels: Tensor, sizes: Sequence[int]) -> None:
    """Refuses scales and levels that no sender would choose."""
    _check_finite(scales)
    if bool((scales.view(torch.int32) & -0x7FFFFF81).any()) or bool((levels == -128).any()):
        raise BadField("values: an int8 scale is negative or has more than 17 significant bits, or a level is -128")
    for scale, part in zip(scales.tolist(), torch.split(levels, list(sizes)), strict=True):
        top = int(part.abs().max()) if len(part) else 0
        if (scale == 0) != (top == 0) or (scale > 0 and (top != 127 or not scale >= TINY or 127 * scale >= 2.0**128)):
            raise BadField(f"values: the int8 scale {scale:g} does not fit levels of at most {top}")
