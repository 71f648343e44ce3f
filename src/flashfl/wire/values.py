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
from .errors import BadField, NonFinite
from .reader import Array, Chunk, Piece, Reader

Form = Literal["fp32", "fp16", "bf16", "int8"]
FORMS: tuple[Form, ...] = ("fp32", "fp16", "bf16", "int8")
Carries = Literal["all", "weights", "statistics"]
CARRIES: tuple[Carries, ...] = ("all", "weights", "statistics")
ITEM = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
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
        if (carries == "weights" and statistic) or (carries == "statistics" and not statistic):
            continue
        size = next(sizes) if layer.kind == "prunable" else layer.size
        coarse = layer.kind == "prunable" or (not statistic and (form != "int8" or len(layer.shape) >= 2))
        out.append(Segment(at, at + size, coarse and form != "fp32"))
        at += size
    return tuple(out)


def count_values(layout: Layout, active: int, carries: Carries) -> int:
    """How many values a message carries."""
    statistics = layout.size - layout.trained_size
    if carries == "statistics":
        return statistics
    return active + layout.trained_size - layout.prunable_size + (statistics if carries == "all" else 0)


def values_size(layout: Layout, active: int, carries: Carries, form: Form) -> int:
    """Bytes of the values section, without looking at a value."""
    total = count_values(layout, active, carries)
    counts = (active, *(0 for _ in layout.sizes[1:])) if layout.sizes else ()
    coarse = [part for part in segments(layout, counts, carries, form) if part.coarse]
    rounded = sum(part.stop - part.start for part in coarse)
    return 2 + 4 * (total - rounded) + ITEM[form] * rounded + (4 * len(coarse) if form == "int8" else 0)


def round_values(values: Tensor, parts: Sequence[Segment], form: Form, key: int) -> Tensor:
    """`values` exactly as the other side will decode them."""
    if form == "fp32" or not any(part.coarse for part in parts):
        return values
    coarse = _pick(values, parts, True)
    if form == "bf16":
        coarse = _round_bf16(coarse, key)
    elif form == "fp16":
        coarse = _round_fp16(coarse, key)
    else:
        levels, scales = _levels(coarse, parts, key)
        coarse = levels * _spread(scales, parts)
    return _merge(coarse, _pick(values, parts, False), parts)


def _pick(values: Tensor, parts: Sequence[Segment], coarse: bool) -> Tensor:
    chosen = [values[part.start : part.stop] for part in parts if part.coarse == coarse]
    return torch.cat(chosen) if chosen else values[:0]


def _merge(coarse: Tensor, fine: Tensor, parts: Sequence[Segment]) -> Tensor:
    """The packed vector again from its coarse and its fine values."""
    out, at = [], [0, 0]
    for part in parts:
        source, size = (coarse if part.coarse else fine), part.stop - part.start
        out.append(source[at[part.coarse] : at[part.coarse] + size])
        at[part.coarse] += size
    return torch.cat(out) if out else fine


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


def _levels(coarse: Tensor, parts: Sequence[Segment], key: int) -> tuple[Tensor, Tensor]:
    """Whole numbers -127..127 and a scale per coarse segment.

    A scale keeps 17 significant bits, so level times scale is exact in fp32; the largest magnitude is always level 127,
    so the scale can be found again from the rounded values.
    """
    sizes = [part.stop - part.start for part in parts if part.coarse]
    zero = coarse.new_zeros(1)
    tops = torch.stack([torch.cat([piece.abs(), zero]).amax() for piece in torch.split(coarse, sizes)])
    scales = ((tops / torch.full_like(tops, 127.0)).view(torch.int32) & -0x80).view(torch.float32)
    scales = torch.where(scales < TINY, torch.zeros_like(scales), scales)
    scale, top = _spread(scales, parts), _spread(tops, parts)
    steps = coarse.abs() / torch.where(scale > 0, scale, torch.ones_like(scale))
    whole = steps.floor()
    levels = whole + (uniform(key, coarse.numel(), coarse.device) < steps - whole)
    levels = torch.where(coarse.abs() >= top, torch.full_like(levels, 127.0), levels).clamp(max=127.0)
    levels = torch.copysign(torch.where(scale > 0, levels, torch.zeros_like(levels)), coarse)
    return levels + 0.0, scales  # adding zero turns -0.0, which bytes cannot tell, into 0.0


def _spread(each: Tensor, parts: Sequence[Segment]) -> Tensor:
    """One number per coarse segment, repeated for each of its values; no device is waited for."""
    sizes = [part.stop - part.start for part in parts if part.coarse]
    return torch.cat([number.expand(size) for number, size in zip(each.unbind(), sizes, strict=True)])


def values_piece(
    values: Tensor, layout: Layout, counts: Sequence[int], carries: Carries, form: Form, key: int
) -> Piece:
    """The values section. Refuses what is not finite or not as many as the mask and the layout say."""
    expected = count_values(layout, sum(counts), carries)
    if values.dim() != 1 or values.numel() != expected:
        raise BadField(f"values of shape {tuple(values.shape)} given, ({expected},) expected for this mask and layout")

    def write() -> tuple[Chunk, ...]:
        parts = segments(layout, counts, carries, form)
        plain = values.detach().to("cpu", torch.float32)
        _finite(plain.numpy())
        head = bytes([CARRIES.index(carries), FORMS.index(form)])
        if form == "fp32" or not any(part.coarse for part in parts):
            return head, _raw(plain, "<f4")
        coarse, fine = _pick(plain, parts, True), _pick(plain, parts, False)
        if form == "int8":
            levels, scales = _levels(coarse, parts, key)
            return head, _raw(scales, "<f4"), levels.to(torch.int8).numpy().tobytes(), _raw(fine, "<f4")
        if form == "fp16":
            return head, _raw(_round_fp16(coarse, key).to(torch.float16), "<f2"), _raw(fine, "<f4")
        upper = (_round_bf16(coarse, key).view(torch.int32) >> 16).to(torch.int16)
        return head, _raw(upper, "<i2"), _raw(fine, "<f4")

    return Piece(values_size(layout, sum(counts), carries, form), write)


def _raw(tensor: Tensor, dtype: str) -> Chunk:
    """A tensor's bytes, where they lie."""
    return tensor.contiguous().numpy().astype(dtype, copy=False).view(np.uint8).data


def _finite(array: Array) -> None:
    # A not-a-number is both extremes, and looking for those takes no memory.
    if array.size and not (np.isfinite(array.max()) and np.isfinite(array.min())):
        raise NonFinite("the values hold an infinity or a not-a-number; training has diverged, or the sender is broken")


def read_head(reader: Reader) -> tuple[Carries, Form]:
    carries, form = reader.u8(), reader.u8()
    if carries >= len(CARRIES) or form >= len(FORMS):
        raise BadField(f"values: kind {carries} or form {form} does not exist; kinds are 0 to 2, forms 0 to 3")
    return CARRIES[carries], FORMS[form]


def read_values(reader: Reader, layout: Layout, counts: Sequence[int], carries: Carries, form: Form) -> Tensor:
    """The packed fp32 values, after the two bytes that `read_head` takes."""
    parts = segments(layout, counts, carries, form)
    coarse_count = sum(part.stop - part.start for part in parts if part.coarse)
    fine_count = count_values(layout, sum(counts), carries) - coarse_count
    if form == "int8":
        scales = reader.array("<f4", sum(part.coarse for part in parts))
        coarse = _read_levels(scales, reader.array("i1", coarse_count), parts)
    elif form == "bf16":
        coarse = (reader.array("<u2", coarse_count).astype(np.uint32) << 16).view(np.float32)
    else:
        coarse = reader.array("<f2", coarse_count).astype(np.float32)
    fine = reader.array("<f4", fine_count)
    reader.end()
    _finite(coarse)
    _finite(fine)
    if not coarse_count:
        return torch.from_numpy(fine)
    return _merge(torch.from_numpy(coarse), torch.from_numpy(fine), parts)


def _read_levels(scales: Array, levels: Array, parts: Sequence[Segment]) -> Array:
    """Level times scale; refuses scales and levels that no sender would choose."""
    _finite(scales)
    sizes = [part.stop - part.start for part in parts if part.coarse]
    words = scales.view(np.uint32)
    if bool((words & 0x8000007F).any()) or bool((levels == -128).any()):
        raise BadField("values: an int8 scale is negative or has more than 17 significant bits, or a level is -128")
    at = 0
    for scale, size in zip(scales.tolist(), sizes, strict=True):
        part = levels[at : at + size]
        top = int(np.abs(part).max()) if size else 0
        if (scale == 0) != (top == 0) or (scale > 0 and (top != 127 or not scale >= TINY or 127 * scale >= 2.0**128)):
            raise BadField(f"values: the int8 scale {scale:g} does not fit levels of at most {top}")
        at += size
    out: Array = levels.astype(np.float32) * np.repeat(scales, sizes)
    return out
