"""Received masks, form by form, with every rule of the format checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch

from ..core.layout import Layout
from ..core.mask import Mask, Recipe, count_layers
from . import rice
from .errors import BadCount, BadField, BadMask, UnknownMask
from .geometry import Geometry, geometry, host_bits, split
from .masks import FORMS, plan
from .reader import Array, Reader, byte_length

Build = Callable[[Layout, Recipe], Mask]


def rebuild(layout: Layout, recipe: Recipe) -> Mask:
    """The random mask that a recipe describes."""
    from ..sparsity import recipe_mask  # late: the codec stands alone where nobody sends recipes

    return recipe_mask(layout, recipe)


def read_mask(
    reader: Reader, layout: Layout, known: Mapping[str, Mask], build: Build | None
) -> tuple[Mask, str, str | None]:
    """The mask, the form it came in, and the hash of the base it leaned on. `build`: None where no recipe is due."""
    code = reader.u8()
    if code >= len(FORMS):
        raise BadField(f"mask form {code} does not exist")
    form, geo = FORMS[code], geometry(layout)
    base: Mask | None = None
    if form in ("known", "difference"):
        name = reader.hash()
        base = known.get(name)
        if base is None:
            raise UnknownMask(name)
    if form == "known":
        mask = base
    elif form == "recipe":
        if build is None:
            raise BadField("the mask is a recipe where none was asked for")
        mask = _read_recipe(reader, layout, geo, build)
    elif form == "difference":
        assert base is not None
        mask = _read_difference(reader, base, geo)
    elif form == "rice":
        mask = _read_rice(reader, layout, geo)
    else:
        mask = _read_bitmap(reader, layout, geo)
    reader.end()
    assert mask is not None
    return mask, form, base.hash if base is not None else None


def _read_recipe(reader: Reader, layout: Layout, geo: Geometry, build: Build) -> Mask:
    name = reader.hash()
    key, nm = int.from_bytes(reader.take(8), "little"), int.from_bytes(reader.take(2), "little")
    recipe = Recipe(key, tuple(geo.read_counts(reader).tolist()), nm)
    try:
        mask = build(layout, recipe)
    except Exception as error:  # the builder is not ours, and its input is a stranger's
        raise BadField(f"the mask's recipe cannot be followed: {error}") from None
    mask = Mask(layout, mask.bits, count_layers(layout, mask.bits), recipe)
    if mask.hash != name or mask.known_counts != recipe.budgets:
        raise BadMask(f"the mask's recipe gives the mask {mask.hash}, not {name}, or not its budgets")
    return mask


def _read_block(reader: Reader, counts: Array, universe: Array) -> Array:
    k = np.frombuffer(reader.take(len(counts)), np.uint8).astype(np.int64)
    unary = reader.u32()
    low = byte_length(int((rice.coded_counts(counts, universe) * np.minimum(k, rice.MAX_K + 1)).sum()))
    return rice.read(counts, universe, k, reader.take(low), reader.take(unary))


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
    bits = host_bits(base).copy()
    active = np.flatnonzero(bits)
    has = split(active, geo)
    drops, adds = geo.read_counts(reader), geo.read_counts(reader)
    counts, universe = np.concatenate([drops, adds]), np.concatenate([has, geo.sizes - has])
    if bool((counts > universe).any()):
        raise BadCount("more weights dropped or grown than the base has")
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


def _read_bitmap(reader: Reader, layout: Layout, geo: Geometry) -> Mask:
    packed = np.frombuffer(reader.take(byte_length(geo.total)), np.uint8)
    bits = np.unpackbits(packed, bitorder="little")
    if bits[geo.total :].any():
        raise BadField("padding bits are not zero")
    mask = Mask(layout, torch.from_numpy(bits[: geo.total].astype(bool)))
    return Mask(layout, mask.bits, mask.counts)


def mask_to_bytes(mask: Mask) -> bytes:
    """The mask in the smallest form that needs no other mask: a recipe, Rice-coded gaps or a bitmap."""
    return b"".join(plan(mask).piece.write())


def mask_from_bytes(data: bytes, layout: Layout) -> Mask:
    """The mask that `mask_to_bytes` wrote. Anything else raises a WireError."""
    return read_mask(Reader(memoryview(data), "mask"), layout, {}, rebuild)[0]
