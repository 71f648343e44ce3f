"""SPDST (FLASH, approach 1): learn how dense each layer should be, then train one frozen random mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ..aggregate import Aggregator, average
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.mask import Weights
from ..core.method import Method
from ..core.rng import fold
from ..core.state import TRAINING, Phase, Plan, State
from ..sparsity import PruneRegrow, allocate, calibrate, check_pattern, pattern_budgets, random_mask, top_mask
from .common import WithDensity, check_rule, warn_of_pattern

SENSITIVITY = Phase("sensitivity", 1, counts=False)  # the paper's stage 1


@dataclass(frozen=True)
class SPDST(WithDensity):
    """Sensitivity-driven pre-defined sparse training: FLASH with a frozen mask.

    In the first phase a few clients train sparse models and move their masks. They report only how dense each layer
    became (Eq. 2). The server averages these layer densities and scales them to the target density (Eq. 3). Then it
    draws one random mask with these layer densities, and all clients train with it (Algorithm 1, freez = 1).

    Bytes: the active weights and all dense tensors, in both directions. A random mask travels once, as a key.
    The first phase also sends the model once to a few clients.
    When: the first choice. It sends the fewest bytes of the FLASH methods.
    Not to be confused with JMWST, where the mask moves during training, or PDST, which has no first phase.

    density: the share of prunable weights that are active. warmup_clients: clients in the first phase; 0: no first
    phase. warmup_epochs: epochs that these clients train. adapt: how masks move in the first phase. mask_init: draw
    the mask at random, or take the largest initial weights (magnitude, for pretrained models). nm: group size M of an
    N:M pattern; 0: no pattern.
    """

    name: ClassVar[str] = "spdst"
    phases: ClassVar[tuple[Phase, ...]] = (SENSITIVITY, TRAINING)
    warmup_clients: int = 10
    warmup_epochs: int = 10
    adapt: PruneRegrow = field(default_factory=PruneRegrow)
    mask_init: Literal["random", "magnitude"] = "random"
    nm: int = 0
    aggregator: Aggregator = "fedavg"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[0, inf)", warmup_clients=self.warmup_clients)
        check_range("[1, inf)", warmup_epochs=self.warmup_epochs)
        check_pattern(self.nm)
        check_rule(self.adapt)

    @property
    def common(self) -> bool:
        # In the first phase masks move, and clients report nothing but layer counts.
        return type(self).work is SPDST.work and type(self).models is Method.models

    def init(self, plan: Plan) -> State:
        budgets = allocate(plan.layout, "uniform", self.density)
        mask = random_mask(plan, budgets, fold(plan.key, "mask"))
        s = State(plan, Weights.masked(mask, plan.initial()), SENSITIVITY)
        return s if self.warmup_clients else self.begin(s, [self.density] * len(budgets))

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        return s.sample(clients, self.warmup_clients if s.phase == SENSITIVITY else None)

    def work(self, s: State, client: Client) -> Local:
        if s.phase == SENSITIVITY:
            return self.local(s, epochs=self.warmup_epochs, adapt=self.adapt, report="counts", parts=())
        return self.local(s)

    def aggregate(self, s: State, sums: Sums) -> State:
        if s.phase == SENSITIVITY:
            return self.begin(s, sums.layer_densities)
        return s.next(Weights(s.mask, average(self.aggregator, sums)))

    def begin(self, s: State, densities: Sequence[float]) -> State:
        """The training phase: new weights under a mask whose layer densities follow `densities`."""
        budgets = pattern_budgets(s.layout, calibrate(s.layout, densities, self.density), self.nm)
        warn_of_pattern(s.layout, budgets, self.density, self.nm)
        vector = s.plan.initial(draw=2)
        if self.mask_init == "magnitude":
            mask = top_mask(s.layout, vector, budgets, self.nm)
        else:
            mask = random_mask(s.plan, budgets, s.key("mask"), self.nm)
        return s.enter(TRAINING, Weights.masked(mask, vector))
