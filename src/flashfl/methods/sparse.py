"""Sparse learning with a falling prune rate (Dettmers and Zettlemoyer, 2019): what centralised training does."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..core.state import Client, Order, State
from .jmwst import JMWST


@dataclass(frozen=True)
class Sparse(JMWST):
    """JMWST from a uniform mask, its prune rate falling linearly to 0 over the rounds.

    With one client that holds all data (`--central`) a round is an epoch and the server's mask is the client's: the
    centralised sparse learning that federated methods are held against. adapt: its rate is that of the first round.
    """

    name: ClassVar[str] = "sparse"
    warmup_clients: int = 0

    def order(self, s: State, client: Client) -> Order:
        order = super().order(s, client)
        if order.local.adapt is None or s.stage == 1:
            return order
        # A rule that moves once in an epoch takes half its rate there; here the rate has a schedule of its own.
        full = self.adapt.rate * (2 if order.local.epochs == 1 else 1)
        adapt = replace(order.local.adapt, rate=min(0.99, full * (1 - s.round / s.plan.rounds)))
        return replace(order, local=replace(order.local, adapt=adapt))
