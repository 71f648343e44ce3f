"""FedSpa: every client trains its own sparse model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from ..aggregate import Aggregator, average, union
from ..core.exchange import Client, Local, Sums
from ..core.mask import Recipe, Weights
from ..core.method import Method
from ..core.rng import fold
from ..core.state import Plan, State
from ..sparsity import Allocation, LayerRegrow, allocate
from .common import check_density


@dataclass(frozen=True)
class FedSpa(Method):
    """FedSpa: personal masks of one density (Huang et al., 2022).

    Each client has its own random mask with ERK+ budgets. It is sent only the part of the model that its mask covers.
    The server averages each weight over its holders, w = sum(n m w) / sum(n m); a weight that nobody held in the round
    keeps its value. With `moving`, a client prunes each layer at a rate that falls by a cosine over the run,
    rate * (1 + cos(pi t / T)) / 2, regrows by gradient, and keeps its mask. The paper recommends frozen masks.

    Silent in the paper: when in the round a mask moves (half-way through its steps); the model of a client is the
    server's under the client's mask.
    Bytes: as d in both directions. A frozen mask is a key; a moved one is sent up, and never down.
    When: clients' data differ so much that one model fits none. Not to be confused with NST, where the server counts
    missing weights as 0 and sends the whole union down.

    density: of each client's model; the server's is the union. moving: whether clients move their masks. adapt: how.
    """

    name: ClassVar[str] = "fedspa"
    exact: ClassVar[bool] = False
    personal: ClassVar[bool] = True
    density: float = 0.05
    allocation: Allocation = "erk+"
    moving: bool = False
    adapt: LayerRegrow = field(default_factory=lambda: LayerRegrow(0.5))
    aggregator: Aggregator = "wfa"

    def __post_init__(self) -> None:
        check_density(self.density)

    def init(self, plan: Plan) -> State:
        return State(plan, Weights.dense(plan.layout, plan.initial()))

    def work(self, s: State, client: Client) -> Local:
        budgets = allocate(s.layout, self.allocation, self.density)
        start = Recipe(fold(s.plan.key, "mask", client.id), budgets)
        if not self.moving:
            return self.local(s, start=start, personal=True)
        rate = self.adapt.rate * (1 + math.cos(math.pi * s.round / s.plan.rounds)) / 2
        return self.local(s, start=start, personal=True, keep=("mask",), adapt=replace(self.adapt, rate=rate))

    def aggregate(self, s: State, sums: Sums) -> State:
        held, mean = union(sums), average(self.aggregator, sums)
        k = s.layout.prunable_size
        mean[:k] = torch.where(held.bits, mean[:k], s.weights.vector[:k])
        return s.next(Weights(s.mask, mean))
