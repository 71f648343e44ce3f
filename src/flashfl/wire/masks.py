"""Five ways to say which weights are active: the smallest is taken, each one's size known without writing it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.mask import Mask
from . import rice
from .errors import BadField
from .geometry import Geometry, geometry, host_bits, split
from .reader import Chunk, Piece

FORMS = ("known", "recipe", "difference", "rice", "bitmap")  # the place in this list is the form's code
_TAIL = 4096  # how far from a layer's end its last position is looked for


class Choice(NamedTuple):
    """A form that describes a mask, with the base it leans on (None unless known or difference)."""

    form: str
    base: str | None
    piece: Piece


def plan(mask: Mask, bases: Sequence[Mask] = (), only: str | None = None) -> Choice:
    """A hash if the receiver holds the mask, else the smallest form; `only` leaves no choice but among its bases.

    Ties go to the form named first in FORMS, then to the base given first. A form that cannot be smaller than the best
    so far is not worked out.
    """
    if only in (None, "known") and any(mask.equal(base) for base in bases):
        return _known(mask)
    geo, found = geometry(mask.layout), None
    if only in (None, "recipe") and mask.recipe is not None:
        found = _recipe(mask, geo)
    for base in bases if only in (None, "difference") else ():
        if geo.difference_fixed < _size(found):
            found = _smaller(found, _difference(mask, base, geo))
    if only == "rice" or (only is None and geo.rice_fixed < _size(found) and _least_rice(mask, geo) < _size(found)):
        found = _smaller(found, _rice(mask, geo))
    if only in (None, "bitmap") and geo.bitmap_size < _size(found):
        found = _bitmap(mask, geo)
    if found is None:
        raise BadField(f"the mask cannot be sent as {only!r}: no base equals it, or it has no recipe")
    return found


def _size(choice: Choice | None) -> float:
    return choice.piece.size if choice is not None else math.inf


def _smaller(found: Choice | None, other: Choice) -> Choice:
    return other if found is None or other.piece.size < found.piece.size else found


def _least_rice(mask: Mask, geo: Geometry) -> int:
    """A size the Rice form cannot be below, from layer counts and last positions alone.

    n gaps that skip s places in all take at least n(1 + k) + (s - n(2**k - 1)) / 2**k bits, whatever the gaps.
    """
    bits, total = host_bits(mask), 0
    for start, size, count in zip(geo.starts.tolist(), geo.sizes.tolist(), mask.counts, strict=True):
        coded = min(count, size - count)
        tail = bits[max(start, start + size - _TAIL) : start + size]
        at = np.flatnonzero(tail if coded == count else ~tail)
        skipped = size - len(tail) + int(at[-1]) + 1 - coded if coded and at.size else 0
        total += min(
            coded * (1 + k) + (max(0, skipped - coded * ((1 << k) - 1)) >> k) for k in range(size.bit_length() + 1)
        )
    return geo.rice_fixed + total // 8


def _known(mask: Mask) -> Choice:
    return Choice("known", mask.hash, Piece.of(b"\0" + bytes.fromhex(mask.hash)))


def _recipe(mask: Mask, geo: Geometry) -> Choice:
    recipe = mask.recipe
    assert recipe is not None
    if len(recipe.budgets) != geo.layers:
        raise BadField(f"the recipe has {len(recipe.budgets)} budgets for {geo.layers} layers")
    head = b"\1" + bytes.fromhex(mask.hash) + recipe.key.to_bytes(8, "little") + recipe.nm.to_bytes(2, "little")
    return Choice("recipe", None, Piece.of(head + geo.write_counts(recipe.budgets)))


def _block(head: bytes, lists: rice.Lists) -> Piece:
    """A head, the lists' parameters, the unary stream's length, and the two streams."""

    def write() -> tuple[Chunk, ...]:
        low, unary = lists.streams()
        return head, lists.k.astype(np.uint8).tobytes(), len(unary).to_bytes(4, "little"), low, unary

    return Piece(len(head) + len(lists.k) + 4 + lists.low_bytes + lists.unary_bytes, write)


def _rice(mask: Mask, geo: Geometry) -> Choice:
    bits, counts = host_bits(mask), mask.counts
    coded = rice.coded_counts(np.array(counts, np.int64), geo.sizes)
    ranks = []  # layer by layer: of a full mask nothing is coded, and nothing should be made
    for start, size, count, n in zip(geo.starts.tolist(), geo.sizes.tolist(), counts, coded.tolist(), strict=True):
        layer = bits[start : start + size]
        ranks.append(np.flatnonzero(layer if count == n else ~layer))
    lists = rice.Lists.coding(np.concatenate(ranks) if ranks else np.zeros(0, np.int64), coded)
    return Choice("rice", None, _block(b"\3" + geo.write_counts(counts), lists))


def _difference(mask: Mask, base: Mask, geo: Geometry) -> Choice:
    bits, before = host_bits(mask), host_bits(base)
    active = np.flatnonzero(before)
    has = split(active, geo)
    first = np.cumsum(has) - has
    changed = np.flatnonzero(bits ^ before)
    grows = bits[changed]
    dropped, grown = changed[~grows], changed[grows]
    drops, adds = split(dropped, geo), split(grown, geo)
    ranks = np.concatenate(
        [
            np.searchsorted(active, dropped) - np.repeat(first, drops),
            grown - np.searchsorted(active, grown) - np.repeat(geo.starts - first, adds),
        ]
    )
    lists = rice.Lists.of(ranks, np.concatenate([drops, adds]), np.concatenate([has, geo.sizes - has]))
    head = b"\2" + bytes.fromhex(base.hash) + geo.write_counts(drops.tolist()) + geo.write_counts(adds.tolist())
    return Choice("difference", base.hash, _block(head, lists))


def _bitmap(mask: Mask, geo: Geometry) -> Choice:
    return Choice("bitmap", None, Piece(geo.bitmap_size, lambda: (b"\4", mask.packed.tobytes())))
