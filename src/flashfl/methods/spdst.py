"""SPDST (FLASH, approach 1): learn how dense each layer should be, then train one frozen random mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..aggregate import Aggregator, average
from ..core.errors import ConfigError
from ..core.method import Method, sample
from ..core.rng import fold
from ..core.state import Client, Order, Plan, State, Sums, Weights
from ..sparsity import PruneRegrow, allocate, calibrate, check_pattern, pattern_budgets, random_mask
from .common import check_density, check_rule, fresh, initial, warn_of_pattern


@dataclass(frozen=True)
class SPDST(Method):
    """Sensitivity-driven pre-defined sparse training.

    warmup_clients, warmup_epochs: who learns layer densities in stage 1, and for how long; 0 clients skip the stage.
    adapt: how masks move in stage 1. mask_init: the frozen mask is random, or by magnitude (pretrained models).
    nm: the group size M of an N:M pattern; 0 for none.
    """

    name: ClassVar[str] = "spdst"
    density: float = 0.05
    warmup_clients: int = 10
    warmup_epochs: int = 10
    adapt: PruneRegrow = field(default_factory=PruneRegrow)
    mask_init: Literal["random", "magnitude"] = "random"
    nm: int = 0
    aggregator: Aggregator = "fedavg"

    def __post_init__(self) -> None:
        check_density(self.density)
        if self.warmup_clients < 0 or self.warmup_epochs < 1:
            raise ConfigError("warmup_clients must be at least 0 and warmup_epochs at least 1")
        check_pattern(self.nm)
        check_rule(self.adapt)

    def init(self, plan: Plan) -> State:
        budgets = allocate(plan.layout, "uniform", self.density)
        mask = random_mask(plan.layout, budgets, fold(plan.key, "mask"), plan.device)
        s = State(plan, Weights.masked(mask, initial(plan)), stage=1)
        return s if self.warmup_clients else self.begin(s, [self.density] * len(budgets))

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        return sample(s, clients, self.warmup_clients) if s.stage == 1 else super().cohort(s, clients)

    def order(self, s: State, client: Client) -> Order:
        if s.stage == 1:
            work = self.local(s, epochs=self.warmup_epochs, adapt=self.adapt, report="counts")
            return s.order(client, work)
        return super().order(s, client)

    def aggregate(self, s: State, sums: Sums) -> State:
        if s.stage == 1:
            return self.begin(s, sums.layer_densities)
        return s.next(Weights(s.mask, average(self.aggregator, sums)))

    def begin(self, s: State, densities: Sequence[float]) -> State:
        """Stage 2: new weights under a mask whose layer densities follow what stage 1 learned."""
        budgets = pattern_budgets(s.layout, calibrate(s.layout, densities, self.density), self.nm)
        warn_of_pattern(s.layout, budgets, self.density, self.nm)
        return s.enter(2, fresh(s, budgets, self.mask_init, self.nm))
