"""How a client moves its mask while it trains: prune the smallest weights, regrow as many elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from ..core.errors import FlashError, check_range
from ..core.exchange import Adapt
from ..core.layout import Layout
from ..core.mask import count_rows
from ..core.parts import part
from ..core.rng import fold, hash_rows
from .allocate import share_out
from .pattern import check_pattern, within_groups
from .select import lowest_by_layer, magnitude

_Counts = Sequence[Sequence[int]]  # for each client, one number for each layer
_DECAY = 0.9  # of the running mean that momentum growth ranks by


@part
@dataclass(frozen=True)
class PruneRegrow:
    """Prune the smallest active weights of each layer, then grow as many weights again.

    Layers with larger active weights grow more.

    rate: the share of active weights that are pruned.
    growth: how new weights are chosen: at random, by the gradient of the last batch (RigL), or by its running mean
    (momentum).
    """

    rate: float = 0.25
    growth: Literal["random", "gradient", "momentum"] = "random"
    nm: int = field(default=0, metadata={"derived": True})  # the method's own; not to be set beside it

    def __post_init__(self) -> None:
        check_pattern(self.nm)
        check_range("[0, 1)", "This is the prune rate (adapt.rate)", rate=self.rate)

    @property
    def dense_gradient(self) -> bool:
        """Whether growth needs the gradient of inactive weights."""
        return self.growth != "random"

    def collect(self, scores: Tensor, gradient: Tensor) -> None:
        """Update `scores` with the gradient of one step: keep the last gradient, or a running mean of all."""
        if self.growth == "momentum":
            scores.mul_(_DECAY).add_(gradient)
        else:
            scores.copy_(gradient)

    def moments(self, epochs: int, batches: int) -> dict[int, Fraction]:
        """The steps after which the mask moves, each with its rate.

        With several epochs: after each but the last, decaying linearly. With one: once, half-way through it, so that
        the second half trains what was regrown.
        """
        rate = Fraction(str(self.rate))  # exact, so that no layer drops one weight too many
        if epochs == 1:
            return {math.ceil(batches / 2): rate / 2}
        return {e * batches: rate * (epochs - e) / epochs for e in range(1, epochs)}

    def move(
        self,
        layout: Layout,
        vectors: Tensor,
        masks: Tensor,
        scores: Tensor | None,
        rate: Fraction,
        keys: Sequence[int],
        counts: Sequence[Sequence[int]],
    ) -> None:
        """Move the masks [clients, K] of a stack of models [clients, size] in place.

        scores: |gradient| or |momentum| of every prunable weight, for growth by score. Weights that are dropped
        become 0, and so do regrown ones.
        """
        keys = [fold(key, "grow") for key in keys]
        drops = [[math.ceil(rate * c) for c in row] for row in counts]
        k, heads = layout.prunable_size, vectors[:, : layout.prunable_size]
        device = vectors.device
        scores = None if self.growth == "random" else scores

        def size(start: int, stop: int) -> Tensor:
            return magnitude(heads[:, start:stop])

        def rank(start: int, stop: int) -> Tensor:
            if scores is None:
                return hash_rows(keys, start, stop, device)
            return -magnitude(scores[:, start:stop])

        dropped = lowest_by_layer(layout, size, drops, masks, device=device)
        if self.nm:
            grown = self._within_groups(layout, rank(0, k), size(0, k), dropped, masks)
        else:
            shares = np.array(self._shares(layout, heads, drops, counts))
            new = np.minimum(shares, np.array(layout.sizes) - np.array(counts))  # what fits where a layer was inactive
            grown = lowest_by_layer(layout, rank, new.tolist(), ~masks, scores is None, device)
            if (back := shares - new).any():  # the rest comes back from what was dropped
                grown |= lowest_by_layer(layout, lambda *span: -size(*span), back.tolist(), dropped, device=device)
        heads.masked_fill_(dropped & ~grown, 0.0)
        masks &= ~dropped
        masks |= grown

    def _within_groups(self, layout: Layout, rank: Tensor, size: Tensor, dropped: Tensor, masks: Tensor) -> Tensor:
        """Growth inside the groups of a pattern: each gets back as many as it lost."""
        pool = dropped | ~masks
        rank = torch.where(dropped, (1 << 33) - size.long(), rank.long())  # what was just dropped last, largest first
        grown = torch.zeros_like(dropped)
        for layer in layout.prunable:
            own = (rows[:, layer.span] for rows in (rank, dropped, pool))
            grown[:, layer.span] = within_groups(layer, self.nm, *own)
        return grown

    def _shares(self, layout: Layout, heads: Tensor, drops: _Counts, counts: _Counts) -> list[tuple[int, ...]]:
        """How many each layer regrows: in proportion to the mean magnitude of its active weights.

        Magnitudes are added in float64 and rounded to float32, so that the order of addition, which differs between
        devices, does not matter.
        """
        sums = torch.stack([heads[:, x.span].abs().sum(-1, dtype=torch.float64) for x in layout.prunable], dim=-1)
        rows = sums.float().tolist()
        shares = []
        for total, drop, count in zip(rows, drops, counts, strict=True):
            importance = [s / c if c else 0.0 for s, c in zip(total, count, strict=True)]
            room = [k - c + d for k, c, d in zip(layout.sizes, count, drop, strict=True)]
            if not all(map(math.isfinite, importance)):
                importance = [1.0] * len(importance)  # a diverged client; it is dropped after training
            shares.append(share_out(importance, room, sum(drop)))
        return shares


@part
@dataclass(frozen=True)
class LayerRegrow(PruneRegrow):
    """Once a round, half-way through the steps, drop a share of each layer and regrow as much in that layer."""

    growth: Literal["random", "gradient", "momentum"] = "gradient"

    def moments(self, epochs: int, batches: int) -> dict[int, Fraction]:
        return {math.ceil(epochs * batches / 2): Fraction(str(self.rate))}

    def _shares(self, layout: Layout, heads: Tensor, drops: _Counts, counts: _Counts) -> list[tuple[int, ...]]:
        return [tuple(row) for row in drops]


def move(
    rule: Adapt,
    layout: Layout,
    vectors: Tensor,
    masks: Tensor,
    scores: Tensor | None,
    rate: Fraction,
    keys: Sequence[int],
    counts: Sequence[Sequence[int]],
) -> list[tuple[int, ...]]:
    """Move masks by a rule, which must keep the number of active weights. Returns the new layer counts."""
    rule.move(layout, vectors, masks, scores, rate, keys, counts)
    found = count_rows(layout, masks)
    for old, new in zip(counts, found, strict=True):
        if sum(old) != sum(new):
            raise FlashError(
                f"the rule {type(rule).__name__} turns {sum(old)} active weights into {sum(new)}: it must keep the "
                "number"
            )
    return found
