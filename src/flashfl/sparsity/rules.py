"""How a client moves its mask while it trains: prune the smallest weights, regrow as many elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..core.errors import ConfigError
from ..core.layout import Layer, Layout
from ..core.parts import part
from ..core.rng import fold, hash_rows
from .allocate import share_out
from .pattern import within_groups
from .select import lowest, magnitude


@part
@dataclass(frozen=True)
class PruneRegrow:
    """In each layer drop the smallest active weights, then regrow as many in total where layers matter most.

    rate: the share of active weights dropped, before decay; growth: how new weights are chosen; nm: the group size of
    an N:M pattern inside whose groups pruning and growth then stay (0: none).
    """

    rate: float = 0.25
    growth: Literal["random", "gradient", "momentum"] = "random"
    nm: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise ConfigError(f"prune rate = {self.rate}: must be at least 0 and below 1")

    @property
    def dense_gradient(self) -> bool:
        """Whether choosing what to grow needs the gradient of inactive weights."""
        return self.growth != "random"

    def moments(self, epochs: int, batches: int) -> dict[int, float]:
        """After which steps the mask moves, and at what rate.

        With several epochs: after each but the last, decaying linearly. With one: once, half-way through it, so that
        the second half trains what was regrown.
        """
        if epochs == 1:
            return {math.ceil(batches / 2): self.rate / 2}
        return {e * batches: self.rate * (1 - e / epochs) for e in range(1, epochs)}

    def move(
        self,
        layout: Layout,
        vectors: Tensor,
        masks: Tensor,
        scores: Tensor | None,
        rate: float,
        keys: Sequence[int],
        counts: Sequence[Sequence[int]],
    ) -> list[tuple[int, ...]]:
        """Move the masks [clients, K] of a stack of models [clients, size] in place; the new layer counts.

        scores: |gradient| or |momentum| of every prunable weight, for growth by score. Weights that are dropped
        become 0, and so do regrown ones.
        """
        keys = [fold(key, "grow") for key in keys]
        drops = [[math.ceil(rate * c) for c in row] for row in counts]
        kept = [[c - d for c, d in zip(row, drop, strict=True)] for row, drop in zip(counts, drops, strict=True)]
        if self.nm:
            grown = drops
        else:
            grown = self._shares(layout, vectors, masks, drops, kept, counts)
        for i, layer in enumerate(layout.prunable):
            span = slice(layer.start, layer.stop)
            rank = (
                hash_rows(keys, layer.start, layer.stop, vectors.device)
                if self.growth == "random" or scores is None
                else -magnitude(scores[:, span])
            )
            self._move_layer(
                layer,
                vectors[:, span],
                masks[:, span],
                rank,
                [d[i] for d in drops],
                [g[i] for g in grown],
                [layer.size - row[i] for row in counts],
            )
        return [tuple(k + g for k, g in zip(a, b, strict=True)) for a, b in zip(kept, grown, strict=True)]

    def _shares(
        self,
        layout: Layout,
        vectors: Tensor,
        masks: Tensor,
        drops: Sequence[Sequence[int]],
        kept: Sequence[Sequence[int]],
        counts: Sequence[Sequence[int]],
    ) -> list[tuple[int, ...]]:
        """How many each layer regrows: in proportion to the mean magnitude of its active weights.

        Magnitudes are added in float64 and rounded to float32, so that the order of addition, which differs between
        devices, does not matter.
        """
        sums = torch.stack(
            [vectors[:, x.start : x.stop].abs().sum(-1, dtype=torch.float64) for x in layout.prunable], dim=-1
        )
        rows = sums.float().tolist()
        shares = []
        for total, drop, keep, count in zip(rows, drops, kept, counts, strict=True):
            importance = [s / c if c else 0.0 for s, c in zip(total, count, strict=True)]
            room = [k - a for k, a in zip(layout.sizes, keep, strict=True)]
            if not all(map(math.isfinite, importance)):
                importance = [1.0] * len(importance)  # a diverged client: it is left out later, do not stop here
            shares.append(share_out(importance, room, sum(drop)))
        return shares

    def _move_layer(
        self,
        layer: Layer,
        values: Tensor,
        active: Tensor,
        rank: Tensor,
        drop: Sequence[int],
        grow: Sequence[int],
        inactive: Sequence[int],
    ) -> None:
        """One layer of every client, in place. Where the inactive run out, the largest just dropped come back."""
        size = magnitude(values)
        dropped = lowest(size, _counts(drop, values), active)
        pool = ~active
        if self.nm or any(g > room for g, room in zip(grow, inactive, strict=True)):
            rank = torch.where(dropped, (1 << 33) - size.long(), rank.long())  # after every inactive one
            pool = pool | dropped
        if self.nm:
            grown = within_groups(layer, self.nm, rank, dropped, pool)
        else:
            grown = lowest(rank, _counts(grow, values), pool)
        values.masked_fill_(dropped & ~grown, 0.0)
        active &= ~dropped
        active |= grown


def _counts(numbers: Sequence[int], like: Tensor) -> int | Tensor:
    """One number where all rows agree (selecting is then cheaper), else one per row."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return torch.tensor(numbers, device=like.device)
