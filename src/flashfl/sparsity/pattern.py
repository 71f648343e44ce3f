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

_LARGEST = 65_535  # what a message can say


@dataclass(frozen=True)
class Groups:
    """How a layer splits under a pattern: `rows` groups of M, and `rest` positions outside any group."""

    layer: Layer
    m: int
    rows: int
    rest: int

    @staticmethod
    def of(layer: Layer, m: int) -> Groups:
        width = _dims(layer)[1] if len(layer.shape) >= 2 else 0
        rows = layer.size // width * (width // m) if width else 0
        return Groups(layer, m, rows, layer.size - rows * m)

    def split(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """[..., size] -> the groups [..., rows, M] and the rest [..., rest]."""
        out, width, inner = _dims(self.layer)
        table = flat.reshape(*flat.shape[:-1], out, width, inner).movedim(-2, -1)  # input dimension last
        cut = width // self.m * self.m if self.rows else 0
        groups = table[..., :cut].reshape(*flat.shape[:-1], self.rows, self.m)
        return groups, table[..., cut:].reshape(*flat.shape[:-1], self.rest)

    def join(self, groups: Tensor, rest: Tensor) -> Tensor:
        """The inverse of `split`."""
        lead, (out, width, inner) = groups.shape[:-2], _dims(self.layer)
        cut = width // self.m * self.m if self.rows else 0
        table = torch.cat(
            [groups.reshape(*lead, out, inner, cut), rest.reshape(*lead, out, inner, width - cut)], dim=-1
        )
        return table.movedim(-1, -2).reshape(*lead, self.layer.size)

    def per_group(self, budget: int) -> int:
        """N: nearest to the layer's density, from 1 to M."""
        return min(self.m, max(1, round(budget * self.m / self.layer.size))) if self.rows else 0


def _dims(layer: Layer) -> tuple[int, int, int]:
    """A layer as [outputs, inputs, the rest]; of a vector or a number everything is an output."""
    shape = layer.shape
    if len(shape) < 2:
        return layer.size, 1, 1
    out, width = (1, shape[0]) if layer.turned else shape[:2]
    return out, width, layer.size // (out * width) if layer.size else 0


def check_pattern(m: int) -> None:
    if m:
        check_range(f"[2, {_LARGEST}]", "It is the group size of an N:M pattern; 0: no pattern", nm=m)


def pattern_budgets(layout: Layout, budgets: Sequence[int], m: int) -> tuple[int, ...]:
    """What the layers keep once the pattern has rounded their densities: the density a run declares."""
    if m == 0:
        return tuple(budgets)
    out = []
    for layer, budget in zip(layout.prunable, budgets, strict=True):
        g = Groups.of(layer, m)
        out.append(g.rows * g.per_group(budget) + round(g.rest * budget / layer.size))
    return tuple(out)


def select(layer: Layer, keys: Tensor, budget: int, m: int = 0) -> Tensor:
    """The mask of one layer that keeps its `budget` lowest keys, pattern and all; keys are [..., size]."""
    if m == 0:
        return lowest(keys, budget)
    g = Groups.of(layer, m)
    groups, rest = g.split(keys)
    n = g.per_group(budget)
    return g.join(lowest(groups, n), lowest(rest, budget - n * g.rows))


def within_groups(layer: Layer, m: int, keys: Tensor, like: Tensor, candidates: Tensor) -> Tensor:
    """Of `candidates`, the lowest keys of each group, as many as `like` marks in that group."""
    g = Groups.of(layer, m)
    parts = zip(g.split(keys), g.split(like), g.split(candidates), strict=True)
    return g.join(*(lowest(k, want.sum(-1), c) for k, want, c in parts))
