"""The levels of a message as bytes: plain, or those of changes in a Rice code if that is smaller.

Most changes are small. Level l becomes the number 2 * l, or -2 * l - 1 below zero, and the numbers are written as the
gaps of one list of a block; see `rice`. The size is a sum of code lengths, so a device can count it without writing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.precision import Form
from . import rice
from .errors import BadField, BadLength, OutOfRange
from .levels import TOPS, from_nibbles, to_nibbles
from .reader import Chunk, Reader, byte_length

BITS = {"int8": 8, "int4": 4}  # of a plain level


class LevelPlan(NamedTuple):
    """How the levels of each message are written."""

    k: Tensor
    saved: Tensor  # bytes that coding saves; 0: the levels are plain


def plan_levels(levels: Tensor, form: Form) -> LevelPlan:
    """The encoder's choice for levels of changes: of one message, or of one in each row. Nothing is waited for."""
    count, numbers = levels.shape[-1], _numbers(levels)
    sums = torch.stack([(numbers >> k).sum(-1, dtype=torch.int64) for k in range(BITS[form])])
    k, quotients = rice.best_of(sums, count)  # with a larger k nothing is saved
    coded = rice.block_size(1, count * k, count + quotients)
    return LevelPlan(k, (plain_size(count, form) - coded).clamp(min=0))


def plain_size(count: int, form: Form) -> int:
    """Bytes of plain levels."""
    return byte_length(count * BITS[form])


def _numbers(levels: Tensor) -> Tensor:
    """0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return ((levels << 1) ^ (levels >> 7)).view(torch.uint8)


def write_levels(levels: Tensor, form: Form, changes: bool) -> tuple[bool, Chunk]:
    """Whether the levels are coded, and their bytes."""
    if changes:
        k, saved = map(int, plan_levels(levels, form))
        if saved:
            return True, rice.write([rice.Coded(len(levels), _numbers(levels).numpy(), k)])
    plain = levels.view(torch.uint8) if form == "int8" else to_nibbles(levels)
    return False, plain.contiguous().numpy().data


def read_plain(reader: Reader, count: int, form: Form, changes: bool) -> Tensor:
    """Plain levels. Those of changes are refused if they would be smaller coded."""
    found = torch.from_numpy(reader.array("|u1", plain_size(count, form)))
    if form == "int4" and count % 2 and int(found[-1]) > 15:
        raise BadField("values: an odd number of int4 levels must end with half a byte of zeros")
    levels = found.view(torch.int8) if form == "int8" else from_nibbles(found, count)
    if changes and int(plan_levels(levels, form).saved):
        raise BadField(f"values: these {form} levels of changes take fewer bytes when they are coded. Send them coded.")
    return levels


def read_coded(reader: Reader, count: int, form: Form) -> Tensor:
    """Coded levels. Lengths are checked against the plain size before anything unfolds."""
    k, length, top = reader.number(1), reader.number(4), TOPS[form]
    if k > BITS[form] - 2:
        raise BadField(f"values: the Rice parameter is {k}; for {form} it must be 0 to {BITS[form] - 2}")
    saved = plain_size(count, form) - rice.block_size(1, count * k, 8 * length)
    if saved <= 0:
        raise BadLength("values: the coded levels are not smaller than plain ones. Send plain ones.")
    # A run so long that its number overflows gives another size, which is refused below.
    [numbers] = rice.read_gaps(reader, length, [count], [k], [count * (2 * top >> k)])
    if int(numbers.max()) > 2 * top:
        raise OutOfRange(f"values: a coded {form} level lies outside {-top} to {top}")
    levels = torch.from_numpy((numbers >> 1) ^ -(numbers & 1)).to(torch.int8)
    best = plan_levels(levels, form)
    if (int(best.k), int(best.saved)) != (k, saved):
        raise BadField(
            "values: the Rice parameter is not the best one. Use the one with the smallest size; if several tie, the "
            "lowest"
        )
    return levels
