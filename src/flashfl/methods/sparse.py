"""Sparse learning with a falling prune rate (Dettmers and Zettlemoyer, 2019), as in centralised training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..core.exchange import Client, Local
from ..core.state import State
from .jmwst import JMWST


@dataclass(frozen=True)
class Sparse(JMWST):
    """Centralised sparse learning: JMWST from a uniform mask, with a prune rate that falls linearly to 0.

    With one client that holds all data (`--central`) a round is an epoch and the server's mask is the client's. That is
    the centralised training the paper compares federated methods with (Section 3, Table 1).

    Bytes: as JMWST. They mean little with one client.
    When: with `--central`, to see what sparse learning reaches without federation.
    Not to be confused with JMWST, whose prune rate does not fall over the rounds.

    adapt: its rate is that of the first round. The other settings are JMWST's.
    """

    name: ClassVar[str] = "sparse"
    warmup_clients: int = 0

    def work(self, s: State, client: Client) -> Local:
        work = super().work(s, client)
        if not self.moves(s):
            return work
        # With one epoch the rule moves once, at half its rate. Here the rate has a schedule of its own.
        full = self.adapt.rate * (2 if work.epochs == 1 else 1)
        rate = min(0.99, full * (1 - s.round / s.plan.rounds))
        return replace(work, adapt=replace(self.adapt, nm=self.nm, rate=rate))
