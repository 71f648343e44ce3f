"""Masks with exact budgets: random, by magnitude, and how far two of them differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.exchange import Order
from ..core.layout import Layer, Layout
from ..core.mask import Mask, Recipe, count_layers
from ..core.rng import Device, hashes
from ..core.state import Plan
from .pattern import select
from .select import lowest, lowest_by_layer, magnitude


def random_mask(plan: Plan, budgets: Sequence[int], key: int, nm: int = 0) -> Mask:
    """A random mask with these layer budgets. With the same key, a smaller mask is part of a larger one."""
    return recipe_mask(plan.layout, Recipe(key, tuple(budgets), nm), plan.device)


def recipe_mask(layout: Layout, recipe: Recipe, device: Device = "cpu") -> Mask:
    """The random mask that a recipe describes."""
    key, budgets = recipe.key, recipe.budgets
    bits = _select(layout, lambda start, stop: hashes(key, start, stop, device), budgets, recipe.nm, True, device)
    return Mask(layout, bits, budgets, recipe)


def starting_mask(order: Order) -> Mask:
    """The mask of a client that remembers none: a random one if the order has a recipe, else the order's."""
    model, recipe = order.weights, order.local.start
    return model.mask if recipe is None else recipe_mask(model.layout, recipe, model.vector.device)


def top_mask(layout: Layout, vector: Tensor, budgets: Sequence[int], nm: int = 0) -> Mask:
    """The mask of the largest weights of each layer, by absolute value. On a tie, the lower index wins."""
    bits = _select(layout, lambda start, stop: -magnitude(vector[start:stop]), budgets, nm, False, vector.device)
    return Mask(layout, bits, tuple(budgets))


def _select(
    layout: Layout, keys: Callable[[int, int], Tensor], budgets: Sequence[int], nm: int, distinct: bool, device: Device
) -> Tensor:
    if nm == 0 or not layout.prunable:
        return lowest_by_layer(layout, lambda *span: keys(*span)[None], [budgets], None, distinct, device)[0]
    spans = zip(layout.prunable, budgets, strict=True)
    return torch.cat([select(layer, keys(layer.start, layer.stop), budget, nm) for layer, budget in spans])


def random_choice(layer: Layer, key: int, count: int, candidates: Tensor) -> Tensor:
    """A boolean mask over one layer of `count` random candidates."""
    return lowest(hashes(key, layer.start, layer.stop, candidates.device), count, candidates)


def mismatch(a: Mask, b: Mask) -> float:
    """How different two masks are: 1 - |a & b| / |a or b| (Eq. 1). 0: equal; 1: no weight in common."""
    return jaccard(sum(common(a, b)), a.active, b.active)


def common(a: Mask, b: Mask) -> tuple[int, ...]:
    """How many weights of each layer are active in both masks."""
    return count_layers(a.layout, a.bits & b.bits.to(a.bits.device))


def jaccard(common: int, a: int, b: int) -> float:
    """SM from the sizes of two masks and of what they share."""
    union = a + b - common
    return 1.0 - common / union if union else 0.0
