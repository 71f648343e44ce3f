"""FedDST: clients move masks by gradients now and then, the server averages over holders and prunes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from ..aggregate import Aggregator, averaged
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.state import State
from ..sparsity import Allocation, LayerRegrow, top_mask
from .pdst import PDST


@dataclass(frozen=True)
class Adjusted(PDST):
    """PDST with ERK budgets, whose mask is adjusted now and then."""

    allocation: Allocation = "erk"
    interval: int = 10  # rounds between adjustments of the mask
    until: float = 0.67  # the share of rounds after which the mask is frozen

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[1, inf)", interval=self.interval)
        check_range("[0, 1]", until=self.until)

    def adjusts(self, s: State) -> bool:
        """Whether the mask moves in this round."""
        return s.round % self.interval == 0 and s.round < self.until * s.plan.rounds


@dataclass(frozen=True)
class FedDST(Adjusted):
    """Federated dynamic sparse training (Bibikar et al., AAAI 2022).

    One mask with ERK budgets. Every `interval` rounds, during the first `until` of the run, clients stop half-way
    through their steps: each layer drops the share `adapt.rate` of its weights, those of least |w|, and grows as many
    where the last batch's |gradient| is largest. The server averages each weight over the clients that hold it,
    w = sum(n m w) / sum(n m), and keeps the largest of each layer, as many as before.

    Silent or open in the paper: what "the middle" is with one epoch (half of the batches; with the defaults of the
    public code, masks move after the last of ten epochs); which rounds adjust (the first, then every `interval`-th; in
    the public code the second, twelfth and so on); where weights may grow (among those inactive before); whether the
    cosine decay of the rate changes the amount (the public code only lets it decide whether to adjust at all, so the
    rate is constant here and `until` ends it). The public code's rate is 0.5 by default, and 0.01 for CIFAR-10 in its
    examples.
    Bytes: as d in both directions, plus the moved mask up and the new mask down in rounds that adjust.
    When: a mask must be found during training. Not to be confused with JMWST, where missing weights count as 0 and
    layer budgets follow the clients; here every layer keeps its budget.
    """

    name: ClassVar[str] = "feddst"
    aggregator: Aggregator = "wfa"
    adapt: LayerRegrow = field(default_factory=lambda: LayerRegrow(0.5))

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, adapt=self.adapt if self.adjusts(s) else None)

    def aggregate(self, s: State, sums: Sums) -> State:
        if not self.adjusts(s):
            return super().aggregate(s, sums)
        mean = averaged(self.aggregator, sums)
        return s.next(mean.restrict(top_mask(s.layout, mean.vector, s.mask.counts)), before=mean)
