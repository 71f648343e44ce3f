"""SSFL: one mask by saliency, found before training and frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..aggregate import Aggregator, average
from ..core.exchange import Client, Local, Sums
from ..core.mask import Mask, Weights
from ..core.state import TRAINING, Phase, State
from ..sparsity import weight_budget
from ..sparsity.select import largest
from .common import AddedUp, WithDensity

SALIENCY = Phase("saliency", 1, counts=False)


@dataclass(frozen=True)
class Saliency(AddedUp):
    """Reports |gradient * weight| of every prunable weight."""

    name: ClassVar[str] = "saliency"

    def amount(self, weights: Tensor, gradient: Tensor) -> Tensor:
        return (gradient * weights).abs()


@dataclass(frozen=True)
class SSFL(WithDensity):
    """Salient sparse federated learning (Ohib et al., TMLR 2026).

    Before training, every client computes |g * w| of the initial weights on one batch. The server averages these
    scores with weights n, keeps the round(d K) weights of the highest score over the whole model, and freezes the mask.
    Training starts from the same initial weights under the mask.

    Silent in the paper: clients that are absent in the first phase are not asked again; ties go to the lower index.
    Bytes: as d in both directions, plus one dense upload of scores and one dense model down in the first phase. The
    mask travels once.
    When: the mask should fit data without costing rounds. Not to be confused with SPDST, whose first phase finds layer
    densities and draws the mask at random.

    density: the share of prunable weights that is active.
    """

    name: ClassVar[str] = "ssfl"
    phases: ClassVar[tuple[Phase, ...]] = (SALIENCY, TRAINING)
    aggregator: Aggregator = "fedavg"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        return tuple(clients) if s.phase == SALIENCY else super().cohort(s, clients)

    def work(self, s: State, client: Client) -> Local:
        if s.phase == SALIENCY:
            return self.local(s, epochs=1, max_steps=1, lr=0.0, report="counts", parts=(Saliency(),))
        return self.local(s)

    def aggregate(self, s: State, sums: Sums) -> State:
        if s.phase != SALIENCY:
            return s.next(Weights(s.mask, average(self.aggregator, sums)))
        scores = sums.extra["saliency"] / sums.n
        bits = largest(scores, weight_budget(s.layout, self.density))
        return s.enter(TRAINING, Weights.masked(Mask(s.layout, bits), s.weights.vector))
