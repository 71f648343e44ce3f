"""NST: every client runs sparse learning on its own mask; nobody looks for agreement (the paper's naive baseline)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..aggregate import Aggregator, average, union
from ..core.method import Method
from ..core.rng import fold
from ..core.state import Client, Order, Plan, Recipe, State, Sums, Weights
from ..sparsity import PruneRegrow, allocate, mask_of
from .common import check_density, check_rule, initial


@dataclass(frozen=True)
class NST(Method):
    """Naive sparse training: clients keep and move masks of their own, so the averaged model is denser than any.

    adapt: how a client moves its mask in every round.
    """

    name: ClassVar[str] = "nst"
    exact: ClassVar[bool] = False
    density: float = 0.05
    adapt: PruneRegrow = field(default_factory=PruneRegrow)
    aggregator: Aggregator = "fedavg"

    def __post_init__(self) -> None:
        check_density(self.density)
        check_rule(self.adapt)

    def init(self, plan: Plan) -> State:
        recipe = self._start(plan)
        mask = mask_of(plan.layout, recipe, plan.device)
        return State(plan, Weights.masked(mask, initial(plan)))

    def order(self, s: State, client: Client) -> Order:
        return s.order(client, self.local(s, adapt=self.adapt, keep=("mask",), start=self._start(s.plan)))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights(union(sums), average(self.aggregator, sums)))

    def _start(self, plan: Plan) -> Recipe:
        """The common random mask a client starts from the first time it takes part."""
        return Recipe(fold(plan.key, "mask"), allocate(plan.layout, "uniform", self.density))
