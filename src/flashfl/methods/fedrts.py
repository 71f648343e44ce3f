"""FedRTS: the mask is drawn from Beta distributions that the clients' weights and gradients update."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..aggregate import average
from ..core.client import Clients, Field, Part, Rows
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..core.state import Plan, State
from ..sparsity.select import largest_by_layer
from .feddst import Adjusted


@dataclass(frozen=True)
class LastGradient(Part):
    """Keeps the gradient of the last batch for the parts behind it."""

    def begin(self, c: Clients) -> None:
        c.state["gradient"] = c.start.new_zeros(len(c.start), c.layout.prunable_size)

    def before(self, r: Rows, gradient: Tensor) -> None:
        r.state["gradient"].copy_(gradient[:, : r.state["gradient"].shape[1]])


@dataclass(frozen=True)
class Votes(Part):
    """Votes for active weights, which the server reads off the update, and for inactive ones, which the client sends.

    kept: of each layer the number of active weights that count as good. wanted: of inactive ones with large gradients.
    """

    kept: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()

    def reports(self, layout: Layout) -> Mapping[str, Field]:
        return {"wanted": Field("indices", layout.prunable_size)} if any(self.wanted) else {}

    def finish(self, c: Clients) -> None:
        if any(self.wanted):
            c.report["wanted"] = largest_by_layer(c.layout, c.state["gradient"], self.wanted, ~c.masks)

    def tally(self, layout: Layout, vectors: Tensor, masks: Tensor) -> Mapping[str, Tensor]:
        return {"kept": largest_by_layer(layout, vectors[:, : layout.prunable_size], self.kept, masks)}


@dataclass(frozen=True)
class FedRTS(Adjusted):
    """Federated robust pruning by Thompson sampling (Huang et al., NeurIPS 2025).

    Every weight has a Beta(a, b), from a = b = 1. After each round, for active weights
    X = 1/2 [among the kappa largest of its layer in the average] + 1/2 sum p_i [the same in client i's weights],
    a += `scale` * X, b += `scale` * (1 - X). Every `interval` rounds up to `until`, clients also send the positions of
    the K_l - kappa_l largest gradients among inactive weights; there X = sum p_i [sent]. Then the server draws from all
    Betas and keeps the K_l largest draws of each layer.
    kappa_l = K_l - (rate / 2) (1 + cos(pi t / T)) K_l, rounded; p_i = n_i / sum n.

    Silent or open in the paper: rate is 0.4 in the paper and 0.2 in the public code; gradients are those of the last
    batch; draws are made on the CPU with a generator seeded by the run's key, so that every device draws alike; ERK
    budgets; a regrown weight starts at 0.
    Bytes: as d in both directions, plus positions of gradients up and a new mask down in adjustment rounds.
    When: cohorts are small and unlike, so single rounds mislead. Not to be confused with FedDST, which adjusts on each
    client and trusts one round.
    """

    name: ClassVar[str] = "fedrts"
    until: float = 0.6  # the share of rounds after which the mask is frozen
    rate: float = 0.4  # the share of active weights that do not count as good in the first round; it falls as a cosine
    scale: float = 10.0  # how much one round changes a weight's Beta

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[0, 1]", rate=self.rate)
        check_range("(0, inf)", scale=self.scale)

    def init(self, plan: Plan) -> State:
        s = super().init(plan)
        ones = torch.ones_like(s.weights.vector[: s.layout.prunable_size])
        return replace(s, extra={"a": ones, "b": ones})

    def _kappa(self, s: State) -> tuple[int, ...]:
        share = 1 - self.rate / 2 * (1 + math.cos(math.pi * s.round / s.plan.rounds))
        return tuple(round(share * count) for count in s.mask.counts)

    def work(self, s: State, client: Client) -> Local:
        kappa = self._kappa(s)
        if not self.adjusts(s):
            return self.local(s, parts=(Votes(kappa),))
        rows = zip(s.mask.counts, kappa, s.layout.sizes, strict=True)
        wanted = tuple(min(count - good, size - count) for count, good, size in rows)
        return self.local(s, parts=(LastGradient(), Votes(kappa, wanted)))

    def aggregate(self, s: State, sums: Sums) -> State:
        mean, k, bits = average(self.aggregator, sums), s.layout.prunable_size, s.mask.bits
        best = largest_by_layer(s.layout, mean[None, :k], self._kappa(s), bits[None])[0]
        good = (0.5 * best + 0.5 * sums.extra["kept"] / sums.n).float()
        told = bits
        if "wanted" in sums.extra:
            good = torch.where(bits, good, (sums.extra["wanted"] / sums.n).float())
            told = torch.ones_like(bits)
        a = s.kept(Tensor, "a") + self.scale * good * told
        b = s.kept(Tensor, "b") + self.scale * (1 - good) * told
        if not self.adjusts(s):
            return s.next(Weights(s.mask, mean), a=a, b=b)
        drawn = _beta(a, b, s.key("beta"))
        mask = Mask(s.layout, largest_by_layer(s.layout, drawn[None], s.mask.counts)[0], s.mask.counts)
        return s.next(Weights.masked(mask, mean), before=Weights(s.mask, mean), a=a, b=b)


def _beta(a: Tensor, b: Tensor, key: int) -> Tensor:
    """A draw from Beta(a, b) for each weight."""
    generator = torch.Generator().manual_seed(key >> 1)
    x, y = (torch._standard_gamma(each.cpu().double(), generator=generator) for each in (a, b))
    return (x / (x + y)).float().to(a.device)
