"""JMWST (FLASH, approach 2): clients move the mask too, and the server brings them back to one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..aggregate import average, union
from ..core.errors import ConfigError
from ..core.state import Client, Order, State, Sums, Weights
from ..sparsity import calibrate, top_mask
from .spdst import SPDST


@dataclass(frozen=True)
class JMWST(SPDST):
    """Joint mask and weight sparse training.

    r_int: masks move every r_int rounds. freeze_after: the round from which they no longer move; 0: never freeze.
    """

    name: ClassVar[str] = "jmwst"
    r_int: int = 1
    freeze_after: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r_int < 1 or self.freeze_after < 0:
            raise ConfigError("r_int must be at least 1 and freeze_after at least 0")

    def moves(self, s: State) -> bool:
        """Whether masks move in this round of stage 2."""
        return s.round % self.r_int == 0 and (self.freeze_after == 0 or s.round < self.freeze_after)

    def order(self, s: State, client: Client) -> Order:
        order = super().order(s, client)
        if s.stage == 2 and self.moves(s):
            return replace(order, local=replace(order.local, adapt=replace(self.adapt, nm=self.nm)))
        return order

    def aggregate(self, s: State, sums: Sums) -> State:
        if s.stage == 1 or not self.moves(s):
            return super().aggregate(s, sums)
        mean = average(self.aggregator, sums)
        return self.subsample(s, sums, Weights(union(sums), mean))

    def subsample(self, s: State, sums: Sums, mean: Weights) -> State:
        """Keep the largest averaged weights, as many in each layer as clients kept on average."""
        budgets = s.mask.counts if self.nm else calibrate(s.layout, sums.layer_densities, self.density)
        return s.next(mean.restrict(top_mask(s.layout, mean.vector, budgets, self.nm)), before=mean)
