"""SparsyFed: dense local training of reparametrised weights, cut to the largest at the end of each client's round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..aggregate import Aggregator, averaged
from ..core.client import Clients, Part, Rows
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.state import Plan, State
from ..sparsity import weight_budget
from ..sparsity.select import largest
from .common import WithDensity


@dataclass(frozen=True)
class Power(Part):
    """The forward pass sees sign(w) |w|^power; inputs are pruned to the density of their layer's weight."""

    power: float = 1.25

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        return powered(weights, r.place.spans[-1].stop, self.power)

    def backward(self, r: Rows, gradient: Tensor) -> None:
        k = r.place.spans[-1].stop
        gradient[:, :k].mul_(self.power * r.weights[:, :k].abs().pow(self.power - 1))

    def inputs(self, weight: Tensor) -> Tensor:
        return weight.count_nonzero() / weight.numel()


@dataclass(frozen=True)
class LargestWeights(Part):
    """Report the largest weights of the whole model only."""

    density: float = 0.05

    def active(self, layout: Layout, before: int) -> tuple[int, int]:
        return (weight_budget(layout, self.density),) * 2

    def finish(self, c: Clients) -> None:
        c.masks = largest(c.vectors[:, : c.layout.prunable_size], weight_budget(c.layout, self.density))


def powered(vectors: Tensor, k: int, power: float) -> Tensor:
    """Rows whose first k entries are w -> sign(w) |w|^power."""
    out = vectors.clone()
    out[..., :k] = out[..., :k].sign() * out[..., :k].abs().pow(power)
    return out


@dataclass(frozen=True)
class SparsyFed(WithDensity):
    """SparsyFed (Guastella et al., ICLR 2025).

    Forward and backward passes see v = sign(w) |w|^power; w starts so that v is the initial model of every method.
    So dL/dw = dL/dv * power * |w|^(power - 1): large weights learn faster and zeros stay zeros. For the gradient of
    a weight, the layer's input is pruned to the largest entries, as many as the share of non-zero weights. After
    local SGD the client keeps the round(d K) largest weights of the whole model and sends those. The server
    averages; a missing weight counts as 0.

    Silent in the paper: the first round starts from a dense model; entries of large inputs are ranked by a sample of
    32,768; the public code finds a layer's threshold in the first batch of a round only; the model that is evaluated
    and exported is v, as the forward pass sees it.
    Bytes: up as d with the mask. Down the union of the clients' masks, which falls as they agree.
    When: clients can afford dense steps but not dense uploads. The ranking is global, so a layer of small weights
    can lose all of them, and zeros stay zeros: without shortcuts around it, the model is then constant. Not to be
    confused with topk, which sends changes and whose model stays dense.

    density: of what clients send. power: the exponent of the reparametrisation; 1: none.
    """

    name: ClassVar[str] = "sparsyfed"
    exact: ClassVar[bool] = False
    power: float = 1.25
    aggregator: Aggregator = "fedavg"  # fedavg: weights that a client lacks count as 0; wfa: average over holders

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[1, inf)", power=self.power)

    def init(self, plan: Plan) -> State:
        vector = powered(plan.initial(), plan.layout.prunable_size, 1 / self.power)
        return State(plan, Weights.dense(plan.layout, vector))

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(Power(self.power), LargestWeights(self.density)))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(averaged(self.aggregator, sums))

    def views(self, s: State) -> Mapping[str, Weights]:
        return {"after": Weights(s.mask, powered(s.weights.vector, s.layout.prunable_size, self.power))}
