"""PDST: one random mask, known to all, drawn before training and frozen (FLASH without its first stage)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..aggregate import Aggregator, average
from ..core.method import Method
from ..core.rng import fold
from ..core.state import Plan, State, Sums, Weights
from ..sparsity import Allocation, allocate, random_mask
from .common import check_density, initial


@dataclass(frozen=True)
class PDST(Method):
    """Pre-defined sparse training: clients agree on the mask because nobody ever moves it.

    allocation: how dense each layer is: uniform, erk, erk+.
    """

    name: ClassVar[str] = "pdst"
    density: float = 0.05
    allocation: Allocation = "uniform"
    aggregator: Aggregator = "fedavg"

    def __post_init__(self) -> None:
        check_density(self.density)

    def init(self, plan: Plan) -> State:
        key = fold(plan.key, "mask")
        mask = random_mask(plan.layout, allocate(plan.layout, self.allocation, self.density), key, plan.device)
        return State(plan, Weights.masked(mask, initial(plan)))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights(s.mask, average(self.aggregator, sums)))
