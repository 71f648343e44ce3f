"""Masks with exact budgets: random, by magnitude, and how far two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.layout import Layout
from ..core.rng import Device, hashes
from ..core.state import Mask, Recipe
from .pattern import select
from .select import lowest_by_layer, magnitude


def random_mask(layout: Layout, budgets: Sequence[int], key: int, device: Device = "cpu", nm: int = 0) -> Mask:
    """A random mask with these budgets. Under one key, smaller budgets give a subset of what larger ones give."""
    bits = _select(layout, lambda start, stop: hashes(key, start, stop, device), budgets, nm, True, device)
    return Mask(layout, bits, tuple(budgets), Recipe(key, tuple(budgets), nm))


def mask_of(layout: Layout, recipe: Recipe, device: Device = "cpu") -> Mask:
    """The random mask that a recipe describes."""
    return random_mask(layout, recipe.budgets, recipe.key, device, recipe.nm)


def top_mask(layout: Layout, vector: Tensor, budgets: Sequence[int], nm: int = 0) -> Mask:
    """The weights of largest magnitude, budget by budget; of equals the lower index. Smaller budgets nest too."""
    bits = _select(layout, lambda start, stop: -magnitude(vector[start:stop]), budgets, nm, False, vector.device)
    return Mask(layout, bits, tuple(budgets))


def _select(
    layout: Layout, keys: Callable[[int, int], Tensor], budgets: Sequence[int], nm: int, distinct: bool, device: Device
) -> Tensor:
    if nm == 0:
        return lowest_by_layer(layout, lambda *span: keys(*span)[None], [budgets], None, distinct, device)[0]
    spans = zip(layout.prunable, budgets, strict=True)
    return torch.cat([select(layer, keys(layer.start, layer.stop), budget, nm) for layer, budget in spans])


def mismatch(a: Mask, b: Mask) -> float:
    """SM(a, b) = 1 - |a & b| / |a or b|, over the whole model; 0 for two empty masks."""
    return _mismatch(a.bits, b.bits)


def layer_mismatch(a: Mask, b: Mask) -> tuple[float, ...]:
    """SM of each layer."""
    return tuple(_mismatch(a.bits[x.start : x.stop], b.bits[x.start : x.stop]) for x in a.layout.prunable)


def _mismatch(a: Tensor, b: Tensor) -> float:
    union = int((a | b).sum())
    return 1.0 - int((a & b).sum()) / union if union else 0.0
