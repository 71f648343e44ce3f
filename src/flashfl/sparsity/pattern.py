"""N:M patterns: of every M consecutive weights along the input dimension, N are active.

N is the one nearest to the layer's density, at least 1. What does not fill a group of M (the remainder of the input
dimension, and layers narrower than M) stays unstructured and gets what its density gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import check_range
from ..core.layout import Layer, Layout
from .select import lowest

LARGEST_NM = 65_535  # what a message can say


@dataclass(frozen=True)
class Groups:
    """How a layer [out, width, inner], whose inputs are `width`, splits into groups of M and positions outside them."""

    out: int
    width: int
    inner: int
    m: int

    @staticmethod
    def of(layer: Layer, m: int) -> Groups:
        if len(layer.shape) < 2:  # of a vector or a number everything is an output
            return Groups(layer.size, 1, 1, m)
        out, width = (1, layer.shape[0]) if layer.turned else layer.shape[:2]
        return Groups(out, width, layer.size // (out * width) if layer.size else 0, m)

    @property
    def rows(self) -> int:
        """How many groups there are."""
        return self.out * self.inner * (self.width // self.m)

    @property
    def rest(self) -> int:
        """How many positions are outside any group."""
        return self.out * self.inner * (self.width % self.m)

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """[..., size] -> the groups [..., rows, M] and the rest [..., rest]."""
        lead, cut = flat.shape[:-1], self.width - self.width % self.m
        table = flat.reshape(*lead, self.out, self.width, self.inner).movedim(-2, -1)  # input dimension last
        return table[..., :cut].reshape(*lead, self.rows, self.m), table[..., cut:].reshape(*lead, self.rest)

    def join(self, groups: Tensor, rest: Tensor) -> Tensor:
        """The inverse of `split`."""
        lead, past = groups.shape[:-2], self.width % self.m
        shape = (*lead, self.out, self.inner)
        table = torch.cat([groups.reshape(*shape, self.width - past), rest.reshape(*shape, past)], dim=-1)
        return table.movedim(-1, -2).reshape(*lead, self.out * self.width * self.inner)

    def per_group(self, budget: int) -> int:
        """N: nearest to the layer's density, from 1 to M."""
        size = self.out * self.width * self.inner
        return min(self.m, max(1, round(budget * self.m / size))) if self.rows else 0


def check_pattern(m: int) -> None:
    if m:
        check_range(f"[2, {LARGEST_NM}]", "It is the group size of an N:M pattern. Or set 0 for no pattern", nm=m)


def pattern_budgets(layout: Layout, budgets: Sequence[int], m: int) -> tuple[int, ...]:
    """What the layers keep once the pattern has rounded their densities: the density a run declares."""
    if m == 0:
        return tuple(budgets)
    out = []
    for layer, budget in zip(layout.prunable, budgets, strict=True):
        g = Groups.of(layer, m)
        out.append(g.rows * g.per_group(budget) + round(g.rest * budget / layer.size))
    return tuple(out)


def select(layer: Layer, keys: Tensor, budget: int, m: int) -> Tensor:
    """The mask of one layer that keeps its `budget` lowest keys under a pattern; keys are [..., size]."""
    g = Groups.of(layer, m)
    groups, rest = g.split(keys)
    n = g.per_group(budget)
    return g.join(lowest(groups, n), lowest(rest, budget - n * g.rows))


def within_groups(layer: Layer, m: int, keys: Tensor, like: Tensor, candidates: Tensor) -> Tensor:
    """Of `candidates`, the lowest keys of each group, as many as `like` marks in that group."""
    g = Groups.of(layer, m)
    parts = zip(g.split(keys), g.split(like), g.split(candidates), strict=True)
    return g.join(*(lowest(k, want.sum(-1), c) for k, want, c in parts))
