"""LotteryFL: every client prunes its own winning ticket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..aggregate import Aggregator, average
from ..core.client import Clients, Part
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.rng import fold
from ..core.state import State
from ..sparsity import weight_budget
from ..sparsity.select import lowest, magnitude
from .common import WithDensity, where_held


@dataclass(frozen=True)
class Ticket(Part):
    """Before training: if the model is good enough, drop a share of its weights and rewind the others."""

    key: int = 0
    rate: float = 0.2
    threshold: float = 0.5
    density: float = 0.05

    def active(self, layout: Layout, before: int) -> tuple[int, int]:
        return weight_budget(layout, self.density), before

    def begin(self, c: Clients) -> None:
        k, least = c.layout.prunable_size, weight_budget(c.layout, self.density)
        masks, vectors = c.masks.clone(), c.vectors.clone()
        for row, (mask, vector) in enumerate(zip(masks, vectors, strict=True)):
            count = int(mask.sum())
            if count > least and c.validate(row) >= self.threshold:
                drop = min(count - least, round(self.rate * count))
                mask &= ~lowest(magnitude(vector[:k]), drop, mask)
                vector[: c.layout.trained_size] = c.initial(self.key)[: c.layout.trained_size]
        c.masks, c.vectors = masks, vectors


@dataclass(frozen=True)
class LotteryFL(WithDensity):
    """LotteryFL (Li et al., 2020): personal lottery tickets.

    A client is sent the part of the model that its own mask covers. If its metric on its own samples is at least
    `threshold` and its mask is denser than `density`, it drops the share `rate` of its weights, those of least |w|, and
    rewinds the others to the initial weights. Then it trains, sends its part and keeps its mask. The server averages
    each weight over its holders; a weight that nobody held in the round keeps its value.

    Silent or open in the paper: weights are ranked over the whole model; the metric is taken on the last fifth of
    the client's samples, which it trains on too; a client's personal model is the server's under its mask; initial
    weights are drawn from the run's key, so rewinding costs no bytes.
    Bytes: at first the whole model in both directions; they fall with each client's mask, which is sent up as a
    difference when it shrinks.
    When: clients differ in their labels, and personal accuracy counts. Not to be confused with FedSpa, whose masks have
    their density from the start.

    density: where clients stop pruning. rate: the share of its weights that a client drops at a time. threshold: a
    client prunes if its metric is at least this.
    """

    name: ClassVar[str] = "lotteryfl"
    exact: ClassVar[bool] = False
    personal: ClassVar[bool] = True
    rate: float = 0.2
    threshold: float = 0.5
    aggregator: Aggregator = "wfa"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("(0, 1)", rate=self.rate)

    def work(self, s: State, client: Client) -> Local:
        ticket = Ticket(fold(s.plan.key, "weights", 1), self.rate, self.threshold, self.density)
        return self.local(s, personal=True, keep=("mask",), parts=(ticket,))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights(s.mask, where_held(s, sums, average(self.aggregator, sums))))
