"""Dense FedAvg (McMahan et al., 2017): the baseline everything is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..aggregate import Aggregator, average
from ..core.method import Method
from ..core.state import Mask, Plan, State, Sums, Weights
from .common import initial


@dataclass(frozen=True)
class Dense(Method):
    """Every weight is trained, sent and averaged."""

    name: ClassVar[str] = "dense"
    aggregator: Aggregator = "fedavg"

    def init(self, plan: Plan) -> State:
        mask = Mask.full(plan.layout, plan.device)
        return State(plan, Weights(mask, initial(plan)))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights(s.mask, average(self.aggregator, sums)))
