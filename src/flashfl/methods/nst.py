"""NST: every client moves its own mask and nobody looks for agreement. The paper's naive baseline."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..aggregate import Aggregator, averaged
from ..core.exchange import Client, Local, Sums
from ..core.mask import Recipe, Weights
from ..core.method import Method
from ..core.rng import fold
from ..core.state import Plan, State
from ..sparsity import PruneRegrow, allocate, random_mask
from .common import check_density, check_rule


@dataclass(frozen=True)
class NST(Method):
    """Naive sparse training: each client has its own mask and moves it.

    All clients start from one common random mask. In every round a client prunes and regrows, and it stores its
    mask for its next round. The server averages what comes back and counts a missing weight as 0.

    Bytes: up, the active weights, all dense tensors and the moved mask. Down, the weights in the union of all masks, so
    several times more.
    When: never in production. It shows what disagreement between masks costs (Section 3 of the paper).
    Not to be confused with JMWST, where the server brings all masks back to one after each move.

    density: of every client's model; the server's is denser. adapt: how a client moves its mask.
    """

    name: ClassVar[str] = "nst"
    exact: ClassVar[bool] = False
    density: float = 0.05
    adapt: PruneRegrow = field(default_factory=PruneRegrow)
    aggregator: Aggregator = "fedavg"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def __post_init__(self) -> None:
        check_density(self.density)
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
