"""PruneFL: the server keeps the weights whose gradients promise the most per unit of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate import Aggregator, average
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..core.state import TRAINING, Phase, State
from ..sparsity import weight_budget
from ..sparsity.select import largest, lowest, magnitude
from .common import AddedUp, WithDensity

INITIAL = Phase("initial pruning", 1, counts=False)


@dataclass(frozen=True)
class SquaredGradients(AddedUp):
    """Reports the squared gradients of all prunable weights, added up over the steps."""

    name: ClassVar[str] = "squares"

    def amount(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return gradient.square()


@dataclass(frozen=True)
class PruneFL(WithDensity):
    """PruneFL (Jiang et al., 2022): adaptive pruning by gradients and time.

    First, one client trains the dense model for a round and the server prunes it. Then, every `interval` rounds,
    clients also send their squared gradients, added up over their steps. The server keeps the active weights that are
    not among the share `prunable` of least |w|. With importance g_j^2 (summed over clients) and time t_j of weight j,
    it then takes the others in descending order of g_j^2 / t_j as long as that is above
    Gamma = sum g_j^2 / (c + sum t_j) of those taken, and at most round(d K) in all.

    Silent or changed: which weights may be dropped at once (0.3 of the active ones of the whole model; the public code
    takes as many of each layer and lets 0.3 decay slowly; in the first pruning all); time is counted in FLOPs of one
    training step (c: those of layers that are not prunable, and `overhead` times those of the dense model, for what a
    round takes beside arithmetic); the size is capped at d, so that methods compare at equal density; the first pruning
    uses the same rule; the client of the first phase is the one with the most samples; a weight that comes back starts
    at 0.
    Bytes: as d in both directions, plus 4 bytes for each prunable weight up in adjustment rounds.
    When: the time of a round matters more than bytes. Not to be confused with FedDST, where clients choose.

    density: the mask is never denser than this. interval: rounds between adjustments. prunable: the share of active
    weights that an adjustment may drop. overhead: the time of a round beside arithmetic, where 1 is the time of a dense
    training step; with 0, few weights are worth their time.
    """

    name: ClassVar[str] = "prunefl"
    phases: ClassVar[tuple[Phase, ...]] = (INITIAL, TRAINING)
    exact: ClassVar[bool] = False
    counts_flops: ClassVar[bool] = True
    interval: int = 50
    prunable: float = 0.3
    overhead: float = 1.0
    aggregator: Aggregator = "fedavg"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[1, inf)", interval=self.interval)
        check_range("[0, inf)", overhead=self.overhead)
        check_range("[0, 1]", prunable=self.prunable)

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        if s.phase != INITIAL:
            return super().cohort(s, clients)
        # If a round is repeated, the client did not answer: ask the next one.
        ranked = sorted(clients, key=lambda c: (-c.n, c.id))
        return (ranked[s.attempt % len(ranked)],)

    def adjusts(self, s: State) -> bool:
        """Whether the mask moves after this round."""
        return s.phase == INITIAL or (s.round + 1) % self.interval == 0

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(SquaredGradients(),) if self.adjusts(s) else ())

    def aggregate(self, s: State, sums: Sums) -> State:
        mean = average(self.aggregator, sums)
        if not self.adjusts(s):
            return s.next(Weights(s.mask, mean))
        flops = s.plan.flops or (1.0,) * (len(s.layout.sizes) + 1)
        constant = flops[-1] + self.overhead * sum(t * k for t, k in zip(flops, s.layout.sizes, strict=False))
        safe = torch.zeros_like(s.mask.bits)
        if s.phase != INITIAL:
            sizes = magnitude(mean[: s.layout.prunable_size])
            safe = s.mask.bits & ~lowest(sizes, math.ceil(self.prunable * s.mask.active), s.mask.bits)
        kept = best_per_time(s.layout, sums.extra["squares"], flops, constant, self.density, safe)
        model = Weights.masked(Mask(s.layout, kept), mean)
        return s.enter(TRAINING, model) if s.phase == INITIAL else s.next(model, before=Weights(s.mask, mean))


def best_per_time(
    layout: Layout, squares: Tensor, flops: Sequence[float], constant: float, density: float, safe: Tensor
) -> Tensor:
    """The `safe` weights and those worth their time, at most round(density * K). flops: of a weight of each layer."""
    times = torch.cat([squares.new_full((size,), max(t, 1e-9)) for size, t in zip(layout.sizes, flops, strict=False)])
    worth, room = (squares / times).float(), weight_budget(layout, density) - int(safe.sum())
    order = largest(worth, room, ~safe).nonzero().squeeze(1)
    order = order[torch.argsort(-worth[order], stable=True)]
    gained, spent = squares[safe].sum() + squares[order].cumsum(0), times[safe].sum() + times[order].cumsum(0)
    good = squares[order] / times[order] >= gained / (spent + constant)
    stop = int(good.long().cumprod(0).sum())  # the first that is worth less than those taken ends it
    out = safe.clone()
    out[order[: stop if bool(safe.any()) else max(1, stop)]] = True
    return out
