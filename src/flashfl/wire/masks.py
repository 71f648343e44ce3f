"""Five ways to say which weights are active, written and read. The writer takes the smallest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ..core.layout import Layout
from ..core.mask import Mask, Recipe
from ..sparsity.masks import recipe_mask
from ..sparsity.pattern import Groups
from . import rice
from .errors import BadCount, BadField, BadMask, UnknownMask
from .geometry import Geometry, geometry
from .reader import Array, Chunk, Piece, Reader

FORMS = ("known", "recipe", "difference", "rice", "bitmap")  # the place in this list is the form's code
_TAIL = 4096  # how far from a layer's end its last position is looked for
_MOST_NM = (1 << 16) - 1


class Choice(NamedTuple):
    """A mask in one form. `base` is the hash of the mask the receiver must hold, for known and difference."""

    form: str
    base: str | None
    piece: Piece


def mask_to_bytes(mask: Mask) -> bytes:
    """The mask in the smallest form that needs no other mask: a recipe, Rice-coded gaps or a bitmap."""
    return b"".join(plan(mask).piece.write())


def mask_from_bytes(data: bytes, layout: Layout) -> Mask:
    """The mask that `mask_to_bytes` wrote. Anything else raises a WireError."""
    return read_mask(Reader(memoryview(data), "mask"), layout, {})[0]


def plan(mask: Mask, bases: Sequence[Mask] = (), only: str | None = None) -> Choice:
    """A hash if the receiver holds the mask, else the smallest form. `only` allows just that form.

    Ties go to the form named first in FORMS, then to the base given first. A form that cannot be smaller than the best
    so far is not worked out.
    """
    geo, found = geometry(mask.layout), None
    if only in (None, "known") and any(mask.equal(base) for base in bases):
        return Choice("known", mask.hash, Piece(geo.known_size, lambda: (b"\0", bytes.fromhex(mask.hash))))
    if only in (None, "recipe") and mask.recipe is not None:
        found = _recipe(mask, mask.recipe, geo)
    for base in bases if only in (None, "difference") else ():
        if geo.difference_size(0, 0) < _size(found):
            found = _smaller(found, _difference(mask, base, geo))
    if only == "rice" or (only is None and _least_rice(mask, geo, _size(found)) < _size(found)):
        found = _smaller(found, _rice(mask, geo))
    if only in (None, "bitmap") and geo.bitmap_size < _size(found):
        found = Choice("bitmap", None, Piece(geo.bitmap_size, lambda: (b"\4", mask.packed.tobytes())))
    if found is None:
        raise BadField(f"the mask cannot be sent as {only!r}: no base equals it, or it has no recipe")
    return found


def _size(choice: Choice | None) -> float:
    return choice.piece.size if choice is not None else math.inf


def _smaller(found: Choice | None, other: Choice) -> Choice:
    return other if found is None or other.piece.size < found.piece.size else found


def _host(mask: Mask) -> Array:
    bits: Array = mask.bits.detach().cpu().numpy()
    return bits


def check_recipe(recipe: Recipe, layout: Layout) -> None:
    """A recipe must fit the layout, and its mask must keep exactly its budgets."""
    if not 0 <= recipe.key < 1 << 64:
        raise BadField(f"the recipe's key is {recipe.key}; it must be from 0 to 2**64 - 1")
    if recipe.nm and not 2 <= recipe.nm <= _MOST_NM:
        raise BadField(f"the recipe's group size is {recipe.nm}; it must be 0 or from 2 to {_MOST_NM}")
    if len(recipe.budgets) != len(layout.prunable):
        raise BadCount(f"the recipe has {len(recipe.budgets)} budgets for {len(layout.prunable)} prunable layers")
    for layer, budget in zip(layout.prunable, recipe.budgets, strict=True):
        least, most = 0, layer.size
        if recipe.nm:
            groups = Groups.of(layer, recipe.nm)
            least = groups.rows * groups.per_group(budget)
            most = least + groups.rest
        if not least <= budget <= most:
            raise BadCount(f"the recipe keeps {budget} weights of {layer.name!r}; it must be from {least} to {most}")


def _recipe(mask: Mask, recipe: Recipe, geo: Geometry) -> Choice:
    check_recipe(recipe, mask.layout)
    head = b"\1" + bytes.fromhex(mask.hash) + recipe.key.to_bytes(8, "little") + recipe.nm.to_bytes(2, "little")
    return Choice("recipe", None, Piece.of(head + geo.write_counts(recipe.budgets)))


def _least_rice(mask: Mask, geo: Geometry, enough: float) -> int:
    """A size the Rice form cannot be below, from layer counts and last positions alone; no closer than `enough`.

    n gaps that skip s places in all take at least n(1 + k) + (s - n(2**k - 1)) / 2**k bits, whatever the gaps.
    """
    if geo.rice_size(0, 0) >= enough:
        return geo.rice_size(0, 0)
    bits, total = _host(mask), 0
    for start, size, count in zip(geo.starts.tolist(), geo.sizes.tolist(), mask.counts, strict=True):
        coded = min(count, size - count)
        tail = bits[max(start, start + size - _TAIL) : start + size]
        at = np.flatnonzero(tail if coded == count else ~tail)
        skipped = size - len(tail) + int(at[-1]) + 1 - coded if coded and at.size else 0
        total += min(
            coded * (1 + k) + (max(0, skipped - coded * ((1 << k) - 1)) >> k) for k in range(size.bit_length() + 1)
        )
    return geo.rice_size(0, 0) + total // 8


def _block(head: bytes, lists: rice.Lists, size: int) -> Piece:
    """A head, the lists' parameters, the unary stream's length, and the two streams."""

    def write() -> tuple[Chunk, ...]:
        low, unary = lists.streams()
        return head, lists.k.astype(np.uint8).tobytes(), len(unary).to_bytes(4, "little"), low, unary

    return Piece(size, write)


def _rice(mask: Mask, geo: Geometry) -> Choice:
    bits, counts = _host(mask), mask.counts
    coded = rice.coded_counts(np.array(counts, np.int64), geo.sizes)
    ranks = [np.zeros(0, np.int64)]  # layer by layer: a full layer codes nothing, so nothing should be made
    for start, size, count, n in zip(geo.starts.tolist(), geo.sizes.tolist(), counts, coded.tolist(), strict=True):
        layer = bits[start : start + size]
        ranks.append(np.flatnonzero(layer if count == n else ~layer))
    lists = rice.Lists.coding(np.concatenate(ranks), coded)
    size = geo.rice_size(lists.low_bits, lists.unary_bits)
    return Choice("rice", None, _block(b"\3" + geo.write_counts(counts), lists, size))


def _difference(mask: Mask, base: Mask, geo: Geometry) -> Choice:
    bits, before = _host(mask), _host(base)
    active = np.flatnonzero(before)
    has = geo.split(active)
    first = np.cumsum(has) - has
    changed = np.flatnonzero(bits ^ before)
    grows = bits[changed]
    dropped, grown = changed[~grows], changed[grows]
    drops, adds = geo.split(dropped), geo.split(grown)
    ranks = np.concatenate(
        [
            np.searchsorted(active, dropped) - np.repeat(first, drops),
            grown - np.searchsorted(active, grown) - np.repeat(geo.starts - first, adds),
        ]
    )
    lists = rice.Lists.of(ranks, np.concatenate([drops, adds]), np.concatenate([has, geo.sizes - has]))
    head = b"\2" + bytes.fromhex(base.hash) + geo.write_counts(drops.tolist()) + geo.write_counts(adds.tolist())
    size = geo.difference_size(lists.low_bits, lists.unary_bits)
    return Choice("difference", base.hash, _block(head, lists, size))


def read_mask(
    reader: Reader, layout: Layout, known: Mapping[str, Mask], recipes: bool = True
) -> tuple[Mask, str, str | None]:
    """The mask, its form, and the hash of the base it leaned on. `recipes`: whether it may be a recipe."""
    code, base = reader.u8(), None
    if code >= len(FORMS):
        raise BadField(f"mask form {code} does not exist; the forms are 0 to {len(FORMS) - 1}")
    form, geo = FORMS[code], geometry(layout)
    if form in ("known", "difference"):
        name = reader.hash()
        base = known.get(name)
        if base is None:
            raise UnknownMask(name)
    if base is not None:
        mask = base if form == "known" else _read_difference(reader, base, geo)
    elif form == "recipe":
        if not recipes:
            raise BadField("the mask is a recipe where none was asked for; send it in another form")
        mask = _read_recipe(reader, layout, geo)
    elif form == "rice":
        mask = _read_rice(reader, layout, geo)
    else:
        mask = Mask(layout, torch.from_numpy(reader.bits(geo.total).view(bool)))
        mask = Mask(layout, mask.bits, mask.counts)
    reader.end()
    return mask, form, base.hash if base is not None else None


def _read_recipe(reader: Reader, layout: Layout, geo: Geometry) -> Mask:
    name = reader.hash()
    key, nm = int.from_bytes(reader.take(8), "little"), int.from_bytes(reader.take(2), "little")
    recipe = Recipe(key, tuple(geo.read_counts(reader).tolist()), nm)
    check_recipe(recipe, layout)
    mask = recipe_mask(layout, recipe)
    if mask.hash != name:
        raise BadMask(f"the recipe gives the mask {mask.hash}, the message says {name}; the two sides differ")
    return mask


def _read_block(reader: Reader, counts: Array, universe: Array) -> Array:
    """The coded ranks of a block's lists: those of the complement where that is smaller."""
    k = np.frombuffer(reader.take(len(counts)), np.uint8).astype(np.int64)
    unary = reader.u32()
    low = reader.bits(int((rice.coded_counts(counts, universe) * np.minimum(k, rice.MAX_K + 1)).sum()))
    return rice.read(counts, universe, k, low, reader.take(unary))


def _read_rice(reader: Reader, layout: Layout, geo: Geometry) -> Mask:
    counts = geo.read_counts(reader)
    ranks = _read_block(reader, counts, geo.sizes)
    coded = rice.coded_counts(counts, geo.sizes)
    bits = np.zeros(geo.total, bool)
    bits[ranks + np.repeat(geo.starts, coded)] = True
    for layer in np.flatnonzero(coded != counts).tolist():
        part = bits[geo.starts[layer] : geo.starts[layer] + geo.sizes[layer]]
        np.logical_not(part, out=part)
    return Mask(layout, torch.from_numpy(bits), tuple(counts.tolist()))


def _read_difference(reader: Reader, base: Mask, geo: Geometry) -> Mask:
    bits = _host(base).copy()
    active = np.flatnonzero(bits)
    has = geo.split(active)
    drops, adds = geo.read_counts(reader), geo.read_counts(reader)
    counts, universe = np.concatenate([drops, adds]), np.concatenate([has, geo.sizes - has])
    if bool((counts > universe).any()):
        raise BadCount("mask: more weights dropped than the base has active, or more grown than it has inactive")
    ranks = _read_block(reader, counts, universe)
    coded = rice.coded_counts(counts, universe)
    if not np.array_equal(coded, counts):
        ranks = rice.complement(ranks, coded, universe, coded != counts)
    first = np.cumsum(has) - has
    total = int(drops.sum())
    dropped = active[ranks[:total] + np.repeat(first, drops)]
    free = ranks[total:] + np.repeat(geo.starts - first, adds)  # rank among all inactive of the base
    grown = free + np.searchsorted(active - np.arange(len(active)), free, side="right")
    bits[dropped] = False
    bits[grown] = True
    return Mask(base.layout, torch.from_numpy(bits), tuple((has - drops + adds).tolist()))
