"""FedSpa: every client trains its own sparse model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from ..aggregate import Aggregator, average
from ..core.errors import ConfigError
from ..core.exchange import Client, Local, Sums
from ..core.mask import Recipe, Weights
from ..core.rng import fold
from ..core.state import Plan, State
from ..sparsity import Allocation, LayerRegrow, allocate, random_mask
from .common import WithDensity, where_held


@dataclass(frozen=True)
class FedSpa(WithDensity):
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

    density: of each client's model; the server's is the union. masks: one for each client, or one for all, which is
    what FLASH's comparison ran. moving: whether clients move their masks. adapt: how.
    """

    name: ClassVar[str] = "fedspa"
    exact: ClassVar[bool] = False
    personal: ClassVar[bool] = True
    allocation: Allocation = "erk+"  # how the density is spread over layers, as in PDST
    masks: Literal["personal", "common"] = "personal"
    moving: bool = False
    adapt: LayerRegrow = field(default_factory=lambda: LayerRegrow(0.5))
    aggregator: Aggregator = "wfa"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moving and self.masks == "common":
            raise ConfigError("moving = true needs masks = 'personal': a common mask is frozen")

    def init(self, plan: Plan) -> State:
        if self.masks == "personal":
            return super().init(plan)
        start = self._start(plan, 0)
        return State(plan, Weights.masked(random_mask(plan, start.budgets, start.key), plan.initial()))

    def _start(self, plan: Plan, client: int) -> Recipe:
        """The mask of a client in its first round."""
        key = fold(plan.key, "mask", client) if self.masks == "personal" else fold(plan.key, "mask")
        return Recipe(key, allocate(plan.layout, self.allocation, self.density))

    def work(self, s: State, client: Client) -> Local:
        if self.masks == "common":  # the server's model is everybody's
            return self.local(s)
        start = self._start(s.plan, client.id)
        if not self.moving:
            return self.local(s, start=start, personal=True)
        rate = self.adapt.rate * (1 + math.cos(math.pi * s.round / s.plan.rounds)) / 2
        return self.local(s, start=start, personal=True, keep=("mask",), adapt=replace(self.adapt, rate=rate))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights.masked(s.mask, where_held(s, sums, average(self.aggregator, sums))))
