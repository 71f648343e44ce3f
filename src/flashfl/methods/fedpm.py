"""FedPM: the weights are frozen and random; clients train the probability that each is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate import fedavg
from ..core.client import Clients, Part, Rows, draw
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..core.method import Method
from ..core.rng import fold, hashes, uniform
from ..core.state import Plan, State

_EDGE = 0.01  # probabilities stay this far from 0 and 1, so that scores stay finite


def frozen(layout: Layout, key: int, device: torch.device | str = "cpu") -> Tensor:
    """The random weights [K]: +-sqrt(2 / inputs), the sign drawn for each weight."""
    signs = (hashes(key, 0, layout.prunable_size, device) & 1).float() * 2 - 1
    for layer in layout.prunable:
        signs[layer.span] *= math.sqrt(2 * layer.shape[0] / layer.size)
    return signs


@dataclass(frozen=True)
class Scores(Part):
    """The vector holds scores s; the forward pass sees frozen weights times Bernoulli(sigmoid(s)).

    rate: what the gradient of the scores is multiplied by.
    """

    key: int = 0
    rate: float = 1.0

    def active(self, layout: Layout, before: int) -> tuple[int, int]:
        return 0, layout.prunable_size

    def begin(self, c: Clients) -> None:
        c.state["frozen"] = frozen(c.layout, self.key, c.start.device).expand(len(c.start), -1)

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        used, kept = r.state["frozen"], weights.clone()
        k = used.shape[1]
        kept[:, :k] = used * (draw(r)[:, :k] < weights[:, :k].sigmoid())
        return kept

    def backward(self, r: Rows, gradient: Tensor) -> None:
        used = r.state["frozen"]
        chance = r.weights[:, : used.shape[1]].sigmoid()
        gradient[:, : used.shape[1]].mul_(self.rate * used * chance * (1 - chance))

    def finish(self, c: Clients) -> None:
        k = c.layout.prunable_size
        drawn = torch.stack([uniform(fold(key, "bits"), k, c.vectors.device) for key in c.keys])
        c.masks = drawn < c.vectors[:, :k].sigmoid()


@dataclass(frozen=True)
class FedPM(Method):
    """Federated probabilistic mask training (Isik et al., ICLR 2023).

    Prunable weights are frozen at random signed constants. Clients train scores s: in each step a weight is used with
    probability theta = sigmoid(s), and the gradient passes the draw unchanged (straight through). A client sends one
    draw of all weights, a bit each. The server's posterior is Beta(a, b) with a = b = 1 before each round; its mode
    (a - 1) / (a + b - 2) is the share of clients that drew the weight. That is the next theta.

    Silent or open in the paper: draws count with weights n; the learning rate stays what it is in the first round
    (near 0, rounds would only draw bits again, and theta would drift to 0 or 1 by chance); tensors that are not
    prunable are trained and averaged as ever; theta stays within 0.01 of 0 and 1; scores start at 0; the model that
    is evaluated uses weights with theta > 1/2.
    Bytes: up one bit a prunable weight, less where the bits are uneven, as the mask is coded. Down 4 bytes a weight.
    When: uploads are the bottleneck. Not to be confused with methods that prune trained weights.

    rate: scores learn this many times faster than other weights. Plain SGD needs that, as sigmoid'(s) is at most 1/4.
    """

    name: ClassVar[str] = "fedpm"
    exact: ClassVar[bool] = False
    rate: float = 10.0

    def __post_init__(self) -> None:
        check_range("(0, inf)", rate=self.rate)

    def init(self, plan: Plan) -> State:
        vector = plan.initial()
        vector[: plan.layout.prunable_size] = 0.0
        return State(plan, Weights.dense(plan.layout, vector))

    def work(self, s: State, client: Client) -> Local:
        scores = Scores(fold(s.plan.key, "frozen"), self.rate)
        return self.local(s, lr=s.plan.local.lr, report="mask", parts=(scores,))

    def aggregate(self, s: State, sums: Sums) -> State:
        assert sums.holders is not None
        vector, k = fedavg(sums), s.layout.prunable_size
        vector[:k] = (sums.holders / sums.n).clamp(_EDGE, 1 - _EDGE).logit().float()
        return s.next(Weights(s.mask, vector))

    def views(self, s: State) -> Mapping[str, Weights]:
        vector, k = s.weights.vector.clone(), s.layout.prunable_size
        used = Mask(s.layout, vector[:k] > 0)
        vector[:k] = frozen(s.layout, fold(s.plan.key, "frozen"), vector.device)
        return {"after": Weights.masked(used, vector)}
