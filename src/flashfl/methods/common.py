"""What several methods do alike."""

from __future__ import annotations

from torch import Tensor

from ..core.errors import ConfigError
from ..core.rng import fold
from ..core.state import Mask, Plan, State, Weights
from ..sparsity import random_mask, top_mask


def check_density(density: float) -> None:
    if not 0 < density <= 1:
        raise ConfigError(f"density = {density}: must be above 0 and at most 1 (0.05 keeps every twentieth weight)")


def initial(plan: Plan, stage: int = 1) -> Tensor:
    """The model's initial weights on the plan's device; another stage draws others."""
    return plan.draw(fold(plan.key, "weights", stage)).to(plan.device)


def fresh(s: State, budgets: tuple[int, ...], mask_init: str, nm: int = 0) -> Weights:
    """A new start with these budgets: weights drawn anew, under a mask that is random or by their magnitude."""
    vector = initial(s.plan, stage=2)
    mask: Mask = (
        top_mask(s.layout, vector, budgets, nm)
        if mask_init == "magnitude"
        else random_mask(s.layout, budgets, s.key("mask"), s.plan.device, nm)
    )
    return Weights.masked(mask, vector)
