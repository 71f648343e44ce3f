"""Five ways to say which weights are active, written and read. The writer takes the smallest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np
import torch

from ..core.layout import Layout
from ..core.mask import Mask, Recipe, count_layers
from ..sparsity.masks import recipe_mask
from ..sparsity.pattern import LARGEST_NM, Groups
from . import rice
from .errors import BadCount, BadField, BadMask, UnknownMask
from .geometry import Geometry, geometry
from .reader import Array, Reader

FORMS = ("known", "recipe", "difference", "rice", "bitmap")  # the place in this list is the form's code
_TAIL = 4096  # how far from a layer's end its last position is looked for


def mask_to_bytes(mask: Mask, bases: Sequence[Mask] = (), only: str | None = None) -> bytes:
    """A hash if the receiver holds the mask, else the smallest form. `only` allows just that form.

    bases: masks the receiver holds. Ties go to the form named first in FORMS, then to the base given first. A form that
    cannot be smaller than the best so far is not tried.
    """
    geo = geometry(mask.layout)
    if only in (None, "known") and any(mask.equal(base) for base in bases):
        return b"\0" + bytes.fromhex(mask.hash)
    found: list[bytes] = []

    def may_win(form: str, least: int) -> bool:
        return only == form or (only is None and all(least < len(data) for data in found))

    if mask.recipe is not None and may_win("recipe", geo.recipe_size):
        found.append(_recipe(mask, mask.recipe, geo))
    for base in bases:
        if may_win("difference", geo.difference_size(0, 0)):
            found.append(_difference(mask, base, geo))
    if may_win("rice", _least_rice(mask, geo)):
        found.append(_rice(mask, geo))
    if may_win("bitmap", geo.bitmap_size):
        found.append(b"\4" + mask.packed.tobytes())
    if not found:
        raise BadField(
            f"the mask cannot be sent as {only!r}. 'known' needs a mask that the receiver already holds, 'recipe' "
            "needs a mask made from a recipe, and 'difference' a base mask."
        )
    return min(found, key=len)


def mask_from_bytes(data: bytes, layout: Layout) -> Mask:
    """The mask that `mask_to_bytes` wrote without bases. Anything else raises a WireError."""
    reader = Reader(memoryview(data), "mask")
    mask = read_mask(reader, layout, {})
    reader.end()
    return mask


def _host(mask: Mask) -> Array:
    bits: Array = mask.bits.detach().cpu().numpy()
    return bits


def check_recipe(recipe: Recipe, layout: Layout) -> None:
    """A recipe must fit the layout, and its mask must keep exactly its budgets."""
    if not 0 <= recipe.key < 1 << 64:
        raise BadField(f"the recipe's key is {recipe.key}; it must be from 0 to 2**64 - 1")
    if recipe.nm and not 2 <= recipe.nm <= LARGEST_NM:
        raise BadField(f"the recipe's group size is {recipe.nm}; it must be 0 or from 2 to {LARGEST_NM}")
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


def _recipe(mask: Mask, recipe: Recipe, geo: Geometry) -> bytes:
    check_recipe(recipe, mask.layout)
    head = b"\1" + bytes.fromhex(mask.hash) + recipe.key.to_bytes(8, "little") + recipe.nm.to_bytes(2, "little")
    return head + geo.write_counts(recipe.budgets)


def _least_rice(mask: Mask, geo: Geometry) -> int:
    """A size the Rice form cannot be below, from layer counts and last positions alone.

    n gaps that skip s places in all take at least n(1 + k) + (s - n(2**k - 1)) / 2**k bits, whatever the gaps.
    """
    bits, total = _host(mask), 0
    for stop, size, count in zip(accumulate(geo.sizes), geo.sizes, mask.counts, strict=True):
        coded = min(count, size - count)
        tail = bits[stop - min(size, _TAIL) : stop]
        at = np.flatnonzero(tail if coded == count else ~tail)
        skipped = size - len(tail) + int(at[-1]) + 1 - coded if coded and at.size else 0
        total += min(
            coded * (1 + k) + (max(0, skipped - coded * ((1 << k) - 1)) >> k) for k in range(size.bit_length() + 1)
        )
    return geo.rice_size(0, 0) + total // 8


def _rice(mask: Mask, geo: Geometry) -> bytes:
    bits = _host(mask)
    lists = [rice.Coded.of(bits[layer.span]) for layer in mask.layout.prunable]
    return b"\3" + geo.write_counts([each.count for each in lists]) + rice.write(lists)


def _difference(mask: Mask, base: Mask, geo: Geometry) -> bytes:
    before, active = _host(base), base.places.cpu().numpy()
    changed = np.flatnonzero(before ^ _host(mask))
    rank, drops = np.searchsorted(active, changed), before[changed]  # rank: how many active weights lie before each
    places = np.concatenate([rank[drops], len(active) + (changed - rank)[~drops]])
    universe, layers, lists = _universe(base), len(geo.sizes), []
    edges = [0, *accumulate(universe)]
    for size, first, (start, stop) in zip(universe, edges, pairwise(np.searchsorted(places, edges)), strict=False):
        ranks = places[start:stop] - first
        fewer = ranks if 2 * len(ranks) <= size else np.delete(np.arange(size), ranks)
        lists.append(rice.Coded.at(len(ranks), fewer))
    counts = [each.count for each in lists]
    head = b"\2" + bytes.fromhex(base.hash) + geo.write_counts(counts[:layers]) + geo.write_counts(counts[layers:])
    return head + rice.write(lists)


def _universe(base: Mask) -> tuple[int, ...]:
    """The active weights of each layer, then the inactive ones."""
    return (*base.counts, *(size - count for size, count in zip(base.layout.sizes, base.counts, strict=True)))


def read_mask(reader: Reader, layout: Layout, known: Mapping[str, Mask], recipes: bool = True) -> Mask:
    """A mask in any form. known: masks held here, by hash. recipes: whether it may be a recipe."""
    code, geo = reader.number(1), geometry(layout)
    if code >= len(FORMS):
        raise BadField(f"mask form {code} does not exist; the forms are 0 to {len(FORMS) - 1}")
    form = FORMS[code]
    if form in ("known", "difference"):
        base = known.get(name := reader.hash())
        if base is None:
            raise UnknownMask(name)
        return base if form == "known" else _read_difference(reader, base, geo)
    if form == "recipe":
        if not recipes:
            raise BadField("the mask is a recipe, but the order did not allow one: send it in another form")
        return _read_recipe(reader, layout, geo)
    if form == "rice":
        counts = geo.read_counts(reader)
        return Mask(layout, torch.from_numpy(rice.read_flags(reader, counts, geo.sizes)), counts)
    bits = torch.from_numpy(reader.bits(layout.prunable_size))
    return Mask(layout, bits, count_layers(layout, bits))


def _read_recipe(reader: Reader, layout: Layout, geo: Geometry) -> Mask:
    name, key, nm = reader.hash(), reader.number(8), reader.number(2)
    recipe = Recipe(key, geo.read_counts(reader), nm)
    check_recipe(recipe, layout)
    mask = recipe_mask(layout, recipe)
    if mask.hash != name:
        raise BadMask(
            f"the random mask made from this message has the hash {mask.hash}, the sender's has {name}. Check that "
            "both sides run the same version of flashfl."
        )
    return mask


def _read_difference(reader: Reader, base: Mask, geo: Geometry) -> Mask:
    drops, adds, universe = geo.read_counts(reader), geo.read_counts(reader), _universe(base)
    if any(count > most for count, most in zip(drops + adds, universe, strict=True)):
        raise BadCount(
            "mask: the difference drops more weights than the base mask has active, or grows more than it has inactive"
        )
    moved, bits = rice.read_flags(reader, drops + adds, universe), _host(base).copy()
    active = base.places.cpu().numpy()
    grown = np.flatnonzero(moved[len(active) :])  # ranks among the inactive weights
    bits[active] = ~moved[: len(active)]
    bits[grown + np.searchsorted(active - np.arange(len(active)), grown, side="right")] = True
    counts = tuple(had - drop + add for had, drop, add in zip(base.counts, drops, adds, strict=True))
    return Mask(base.layout, torch.from_numpy(bits), counts)
