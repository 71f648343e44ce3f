"""Rounding to fewer bits, the same on every device: fp16, bf16, and whole levels of a scale.

Rounding is a pure function of values and key. Rounding again changes nothing under any key. Values are one vector, or
one in each row of a matrix; each has a key of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.precision import Form, Rounding
from ..core.rng import fold, hash_rows, unit

BLOCK = 64  # values that share a scale under int4
TINY = 2.0**-107  # values whose scale would be smaller are sent as zeros
TOPS = {"int8": 127, "int4": 7}  # the largest level
_HALF_MAX, _HALF_NORMAL = 65504.0, 2.0**-14


class Levels(NamedTuple):
    """Whole numbers, and the scales they are multiples of."""

    scales: Tensor
    levels: Tensor  # int8


def _noise(values: Tensor, keys: Sequence[int]) -> Tensor:
    """A hash for each value."""
    return hash_rows(keys, 0, values.shape[-1], values.device).view(values.shape)


def round_half(values: Tensor, form: Form, rounding: Rounding, keys: Sequence[int]) -> Tensor:
    """fp32 values that fp16 or bf16 can express."""
    if rounding == "nearest":
        narrow = torch.float16 if form == "fp16" else torch.bfloat16
        most = torch.finfo(narrow).max
        return torch.where(values.isfinite(), values.clamp(-most, most).to(narrow).float(), values)
    return _round_bf16(values, keys) if form == "bf16" else _round_fp16(values, keys)


def _round_bf16(values: Tensor, keys: Sequence[int]) -> Tensor:
    """Add 16 random bits below the last one kept, cut; what would overflow stays at the largest."""
    bits = values.contiguous().view(torch.int32)
    noise = _noise(values, keys) & 0xFFFF
    cut = ((bits + noise) & -0x10000).view(torch.float32)
    cut = torch.where(cut.isinf(), (bits & -0x10000).view(torch.float32), cut)
    return torch.where(values.isfinite(), cut, values)


def _round_fp16(values: Tensor, keys: Sequence[int]) -> Tensor:
    """As bf16 with 13 bits; below the normal range a fixed step of 2**-24; beyond the range the largest."""
    bits = values.contiguous().view(torch.int32)
    noise = _noise(values, keys)
    normal = ((bits + (noise & 0x1FFF)) & -0x2000).view(torch.float32)
    steps = values.abs() * 2.0**24
    whole = steps.floor()
    small = torch.copysign((whole + (unit(noise) < steps - whole)) * 2.0**-24, values)
    rounded = torch.where(values.abs() < _HALF_NORMAL, small, normal).clamp(-_HALF_MAX, _HALF_MAX)
    return torch.where(values.isfinite(), rounded, values)


def to_levels(values: Tensor, sizes: Sequence[int], form: Form, rounding: Rounding, keys: Sequence[int]) -> Levels:
    """Scales and levels of some tensors, one after another. int8 has a scale per tensor, int4 one per BLOCK values.

    A scale has few significant bits, so level times scale is exact in fp32. The largest magnitude that shares a scale
    always gets the largest level, so the scale can be found again from the rounded values.
    """
    magnitudes, most = values.abs(), float(TOPS[form])
    tops = largest(magnitudes, sizes, form)
    wide = tops / torch.full_like(tops, most)  # a GPU divides by a number less exactly than by a tensor
    if form == "int8":
        scales = (wide.view(torch.int32) & -0x80).view(torch.float32)
    else:
        scales = round_half(wide, "bf16", rounding, [fold(key, "scales") for key in keys])
        down = (wide.view(torch.int32) & -0x10000).view(torch.float32)
        scales = torch.where((scales * most).isfinite(), scales, down)
    scales = torch.where(scales < TINY, torch.zeros_like(scales), scales)
    scale, top = spread(scales, sizes, form), spread(tops, sizes, form)
    steps = magnitudes / torch.where(scale > 0, scale, torch.ones_like(scale))
    whole = steps.floor()
    more = steps - whole >= 0.5 if rounding == "nearest" else unit(_noise(values, keys)) < steps - whole
    levels = torch.where(magnitudes >= top, torch.full_like(whole, most), whole + more).clamp(max=most)
    levels = torch.copysign(torch.where(scale > 0, levels, torch.zeros_like(levels)), values)
    return Levels(scales, levels.to(torch.int8))


def largest(magnitudes: Tensor, sizes: Sequence[int], form: Form) -> Tensor:
    """The largest of the values that share a scale; 0 where there are none."""
    if form == "int4":
        padded = torch.nn.functional.pad(magnitudes, (0, -magnitudes.shape[-1] % BLOCK))
        return padded.view(*magnitudes.shape[:-1], scale_count(sizes, form), BLOCK).amax(-1)
    none = magnitudes.new_zeros(magnitudes.shape[:-1])
    pieces = torch.split(magnitudes, list(sizes), -1)
    return torch.stack([piece.amax(-1) if piece.shape[-1] else none for piece in pieces], -1)


def spread(each: Tensor, sizes: Sequence[int], form: Form) -> Tensor:
    """One number per scale, repeated for each value that shares it; no device is waited for."""
    if form == "int8":
        pieces = zip(each.unbind(-1), sizes, strict=True)
        return torch.cat([number[..., None].expand(*number.shape, size) for number, size in pieces], -1)
    return each[..., None].expand(*each.shape, BLOCK).flatten(-2)[..., : sum(sizes)]


def from_levels(found: Levels, sizes: Sequence[int], form: Form) -> Tensor:
    """The values that scales and levels stand for."""
    return found.levels.float() * spread(found.scales, sizes, form)


def scale_count(sizes: Sequence[int], form: Form) -> int:
    """How many scales tensors of these sizes have."""
    return len(sizes) if form == "int8" else -(-sum(sizes) // BLOCK)


def to_nibbles(levels: Tensor) -> Tensor:
    """Two levels a byte, the first in the low half."""
    pairs = torch.nn.functional.pad(levels, (0, len(levels) % 2)).view(torch.uint8).view(-1, 2) & 15
    return pairs[:, 0] | (pairs[:, 1] << 4)


def from_nibbles(nibbles: Tensor, count: int) -> Tensor:
    """The levels that `to_nibbles` packed, as int8."""
    halves = torch.stack([nibbles & 15, nibbles >> 4], 1).reshape(-1).to(torch.int8)
    return torch.where(halves > 7, halves - 16, halves)[:count]
