"""PDST: one random mask, known to all, drawn before training and frozen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..aggregate import Aggregator, average
from ..core.exchange import Sums
from ..core.mask import Weights
from ..core.rng import fold
from ..core.state import Plan, State
from ..sparsity import Allocation, allocate, random_mask
from .common import WithDensity


@dataclass(frozen=True)
class PDST(WithDensity):
    """Pre-defined sparse training: one random mask for the whole run.

    The server draws a random mask and keeps it. Clients train the active weights only, and the server averages them
    (Algorithm 1 without its first phase).

    Bytes: the active weights and all dense tensors, in both directions. The mask travels once, as a key of a few bytes.
    When: as the simplest sparse baseline.
    Not to be confused with SPDST, which first measures how dense each layer should be. There is no other difference.

    density: the share of prunable weights that are active. allocation: how dense each layer is. uniform: all layers
    alike; erk: small layers are denser (sum(shape) / prod(shape)); erk+: as erk, with small layers at 0.2 or more.
    """

    name: ClassVar[str] = "pdst"
    allocation: Allocation = "uniform"
    aggregator: Aggregator = "fedavg"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def init(self, plan: Plan) -> State:
        budgets = allocate(plan.layout, self.allocation, self.density)
        mask = random_mask(plan, budgets, fold(plan.key, "mask"))
        return State(plan, Weights.masked(mask, plan.initial()))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights(s.mask, average(self.aggregator, sums)))
