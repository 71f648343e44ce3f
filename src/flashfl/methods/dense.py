"""Dense FedAvg (McMahan et al., 2017): the baseline everything is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..aggregate import Aggregator, average
from ..core.exchange import Sums
from ..core.mask import Weights
from ..core.method import Method
from ..core.state import Plan, State


@dataclass(frozen=True)
class Dense(Method):
    """FedAvg: every weight is trained, sent and averaged.

    Clients train the whole model. The server averages their models, weighted by samples (Algorithm 3, fedAvg).

    Bytes: the whole model, in both directions, every round.
    When: as the baseline. With `values = "int8"` this is FedPAQ (Reisizadeh et al., 2020), which sends fewer bits for
    each weight. That paper rounds uploads only, and as changes: set `values_up = "int8"` and `upload = "changes"`.
    Not to be confused with top-k compression, which also trains densely but sends only the largest changes.

    aggregator: fedavg or wfa. They agree here, because everyone holds every weight.
    """

    name: ClassVar[str] = "dense"
    aggregator: Aggregator = "fedavg"

    def init(self, plan: Plan) -> State:
        return State(plan, Weights.dense(plan.layout, plan.initial()))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights(s.mask, average(self.aggregator, sums)))
