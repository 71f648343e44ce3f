"""Where a model is sparse: budgets, masks, patterns and how masks move."""

from .allocate import Allocation, allocate, calibrate, nested, share_out, weight_budget
from .masks import common, jaccard, mismatch, random_choice, random_mask, recipe_mask, starting_mask, top_mask
from .pattern import check_pattern, pattern_budgets
from .rules import LayerRegrow, PruneRegrow, move

__all__ = [
    "Allocation",
    "LayerRegrow",
    "PruneRegrow",
    "allocate",
    "calibrate",
    "check_pattern",
    "common",
    "jaccard",
    "mismatch",
    "move",
    "nested",
    "pattern_budgets",
    "random_choice",
    "random_mask",
    "recipe_mask",
    "share_out",
    "starting_mask",
    "top_mask",
    "weight_budget",
]
