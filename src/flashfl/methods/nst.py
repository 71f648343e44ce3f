"""NST: every client moves its own mask and nobody looks for agreement. The paper's naive baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..aggregate import Aggregator, averaged
from ..core.exchange import Client, Local, Sums
from ..core.mask import Recipe, Weights
from ..core.rng import fold
from ..core.state import Plan, State
from ..sparsity import PruneRegrow, allocate, random_mask
from .common import WithDensity, check_rule


@dataclass(frozen=True)
class NST(WithDensity):
    """Naive sparse training: each client has its own mask and moves it.

    All clients start from one random mask. In every round a client prunes and regrows, and stores its mask for its next
    round. The server averages the models and counts a missing weight as 0.

    Bytes: up, the active weights, all dense tensors and the moved mask. Down, several times more: the weights that are
    active in any client's mask.
    When: never in production. It shows what different masks cost (Section 3 of the paper).
    Not to be confused with JMWST, where all clients start each round from one mask.

    density: the density of a client's model; the server's is denser. adapt: how a client moves its mask.
    """

    name: ClassVar[str] = "nst"
    exact: ClassVar[bool] = False
    adapt: PruneRegrow = field(default_factory=PruneRegrow)
    aggregator: Aggregator = "fedavg"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rule(self.adapt)

    def init(self, plan: Plan) -> State:
        start = self._start(plan)
        return State(plan, Weights.masked(random_mask(plan, start.budgets, start.key), plan.initial()))

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, adapt=self.adapt, keep=("mask",), start=self._start(s.plan))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(averaged(self.aggregator, sums))

    def _start(self, plan: Plan) -> Recipe:
        """The mask of a client that takes part for the first time."""
        return Recipe(fold(plan.key, "mask"), allocate(plan.layout, "uniform", self.density))
