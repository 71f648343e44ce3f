"""What a run has spent of its clients' privacy, worked out by Google's dp-accounting.

Two numbers for the same delta. `known`: against somebody who knows the cohorts, such as the server. A client loses
privacy in the rounds it took part in, and the client with the most rounds counts. `sampled`: against somebody who sees
models only and does not know the cohorts, which adds amplification by sampling.

Neighbours are two runs that differ in the data of one client. Replacing a clipped change moves the sum by up to twice
the clip, so noise of `multiplier` times the clip counts as multiplier / 2 against that sensitivity.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError
from ..core.files import put


@dataclass(frozen=True)
class Epsilon:
    """Privacy spent so far at a run's delta."""

    known: float  # against somebody who knows the cohorts
    sampled: float  # against somebody who does not


@lru_cache(maxsize=256)
def _one_round(multiplier: float, clients: int, cohort: int) -> tuple[Any, Any]:
    """The orders that dp-accounting tries, and at each the Renyi divergence of one round."""
    try:
        import dp_accounting as dp
    except ImportError as error:
        raise ConfigError(f"differential privacy needs `pip install flashfl[privacy]` ({error})") from None
    event: Any = dp.GaussianDpEvent(multiplier / 2)
    if cohort < clients:
        event = dp.SampledWithoutReplacementDpEvent(clients, cohort, event)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE).compose(event)
    return accountant.orders, accountant.rdp


def epsilon_sampled(multiplier: float, rounds: int, delta: float, clients: int, cohort: int) -> float:
    """Of every client after so many rounds, each with `cohort` of `clients` drawn at random and in secret.

    With little noise the bound for samples is looser than the one without amplification, which holds too.
    """
    if not rounds:
        return 0.0
    found = [_one_round(multiplier, clients, cohort), _one_round(multiplier, 1, 1)]
    from dp_accounting.rdp import compute_epsilon

    return min(float(compute_epsilon(orders, rounds * divergence, delta)[0]) for orders, divergence in found)


def epsilon_known(multiplier: float, rounds: int, delta: float) -> float:
    """Of a client that took part in so many rounds, against somebody who knows which."""
    return epsilon_sampled(multiplier, rounds, delta, 1, 1)


def most_rounds(rounds: int, clients: int, cohort: int) -> int:
    """In so many rounds of a run no client is likely to take part: the chance that one does is below 1 %."""
    share = cohort / clients
    if share >= 1:
        return rounds
    tail, most = 0.0, rounds
    while most > 0:
        ways = math.lgamma(rounds + 1) - math.lgamma(most + 1) - math.lgamma(rounds - most + 1)
        tail += math.exp(ways + most * math.log(share) + (rounds - most) * math.log1p(-share))
        if tail * clients > 0.01:
            break
        most -= 1
    return min(rounds, most + 1)


def multiplier_for(epsilon: float, delta: float, rounds: int, clients: int, cohort: int, known: bool) -> float:
    """The least noise, in clips, with which so many rounds stay within epsilon. known: cohorts are no secret."""
    own = most_rounds(rounds, clients, cohort)

    def spent(multiplier: float) -> float:
        if known:
            return epsilon_known(multiplier, own, delta)
        return epsilon_sampled(multiplier, rounds, delta, clients, cohort)

    low, high = 0.0, 1.0
    while spent(high) > epsilon:
        low, high = high, 2 * high
        if high > 2**20:
            raise ConfigError(
                f"dp_epsilon = {epsilon}, dp_delta = {delta}: no noise is large enough for {rounds} rounds. Raise "
                "dp_epsilon or dp_delta, or train fewer rounds"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if spent(middle) > epsilon else (low, middle)
    return high


class Ledger:
    """The rounds that clients' updates were asked for in. Every attempt counts, also one that is repeated.

    It is written before each attempt, so that no interruption can forget one.
    """

    def __init__(self, multiplier: float, delta: float, clients: int, cohort: int, path: Path | None = None) -> None:
        self.multiplier, self.delta, self.clients, self.cohort, self.path = multiplier, delta, clients, cohort, path
        self.attempts, self.taken = 0, Counter[int]()
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            self.attempts = int(found["attempts"])
            self.taken = Counter({int(client): int(times) for client, times in found["taken"].items()})
            spent = float(found["multiplier"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error!r}), so nobody knows how much privacy is spent: start a new run"
            ) from None
        # Rounds that were run with less noise count with that noise.
        self.multiplier = min(self.multiplier, spent)

    def spend(self, cohort: Iterable[int]) -> None:
        """These clients are asked for updates now."""
        self.attempts += 1
        self.taken.update(cohort)
        if self.path is not None:
            found = {"attempts": self.attempts, "multiplier": self.multiplier, "delta": self.delta, "taken": self.taken}
            put(self.path, json.dumps(found).encode(), sync=True)

    def epsilon(self, more: int = 0) -> Epsilon:
        """What is spent, or would be if every client took part in so many more rounds."""
        own = max(self.taken.values(), default=0) + more
        sampled = epsilon_sampled(self.multiplier, self.attempts + more, self.delta, self.clients, self.cohort)
        return Epsilon(epsilon_known(self.multiplier, own, self.delta), sampled)
