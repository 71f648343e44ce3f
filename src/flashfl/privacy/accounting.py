"""What a run has spent of its clients' privacy, worked out by Google's dp-accounting.

Two numbers for the same delta. `known`: against somebody who knows the cohorts, such as the server. A client loses
privacy in the rounds it took part in, and the client with the most rounds counts. `sampled`: against somebody who sees
models only and does not know the cohorts, which adds amplification by sampling.

Neighbours are two runs that differ in the data of one client. Replacing a clipped change moves the sum by up to twice
the clip, so noise of `multiplier` times the clip counts as multiplier / 2 against that sensitivity. With Poisson
cohorts `sampled` has other neighbours, as dp-accounting offers no others: one client reports its change, or zeros.
That moves the sum by up to the clip.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..core.errors import CheckpointError, ConfigError
from ..core.exchange import Spent
from ..core.files import put
from .policy import log_ways


@dataclass(frozen=True)
class Draw:
    """How a cohort was drawn: so many of these clients at random, or each alone with the chance cohort / clients.

    The default stands for a cohort that is no secret: it amplifies nothing.
    """

    clients: int = 1
    cohort: int = 1
    poisson: bool = False


@lru_cache(maxsize=256)
def _one_round(multiplier: float, draw: Draw) -> tuple[Any, Any]:
    """The orders that dp-accounting tries, and at each the Renyi divergence of one round."""
    try:
        import dp_accounting as dp
    except ImportError as error:
        raise ConfigError(
            f"differential privacy needs the dp-accounting package ({error}): pip install 'flashfl[privacy]'"
        ) from None
    relations, secret = dp.NeighboringRelation, draw.cohort < draw.clients
    relation, event = relations.REPLACE_ONE, dp.GaussianDpEvent(multiplier / 2)
    if draw.poisson:
        relation, event = relations.REPLACE_SPECIAL, dp.GaussianDpEvent(multiplier)
    if secret and draw.poisson:
        event = dp.PoissonSampledDpEvent(draw.cohort / draw.clients, event)
    elif secret:
        event = dp.SampledWithoutReplacementDpEvent(draw.clients, draw.cohort, event)
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation).compose(event)
    return accountant.orders, accountant.rdp


def epsilon_of(multiplier: float, draws: Mapping[Draw, int], delta: float) -> float:
    """Of every client after so many rounds of each kind. All must have the same neighbours.

    With little noise the bound for samples is looser than the one without amplification, which holds too.
    """
    if not sum(draws.values()):
        return 0.0
    orders, _ = _one_round(multiplier, Draw())
    from dp_accounting.rdp import compute_epsilon

    def total(kinds: Mapping[Draw, int]) -> float:
        divergence = sum(times * _one_round(multiplier, draw)[1] for draw, times in kinds.items())
        return float(compute_epsilon(orders, divergence, delta)[0])

    poisson = next(iter(draws)).poisson
    return min(total(draws), total({Draw(poisson=poisson): sum(draws.values())}))


def epsilon_known(multiplier: float, rounds: int, delta: float) -> float:
    """Of a client that took part in so many rounds, against somebody who knows which."""
    return epsilon_of(multiplier, {Draw(): rounds}, delta)


def most_rounds(rounds: int, clients: int, cohort: int) -> int:
    """In so many rounds of a run no client is likely to take part: the chance that one does is below 1 %."""
    share = cohort / clients
    if share >= 1:
        return rounds
    tail, most = 0.0, rounds
    while most > 0:
        tail += math.exp(log_ways(rounds, most) + most * math.log(share) + (rounds - most) * math.log1p(-share))
        if tail * clients > 0.01:
            break
        most -= 1
    return min(rounds, most + 1)


def multiplier_for(epsilon: float, delta: float, rounds: int, draw: Draw, known: bool) -> float:
    """The least noise, in clips, with which so many rounds stay within epsilon. known: cohorts are no secret."""
    draws = {Draw(): most_rounds(rounds, draw.clients, draw.cohort)} if known else {draw: rounds}
    low, high = 0.0, 1.0
    while epsilon_of(high, draws, delta) > epsilon:
        low, high = high, 2 * high
        if high > 2**20:
            raise ConfigError(
                f"dp_epsilon = {epsilon}, dp_delta = {delta}: no noise is large enough for {rounds} rounds. Raise "
                "dp_epsilon or dp_delta, or train fewer rounds"
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if epsilon_of(middle, draws, delta) > epsilon else (low, middle)
    return high


class Ledger:
    """The rounds that clients' updates were asked for in. Every attempt counts, also one that is repeated.

    It is written before each attempt, so that no interruption can forget one. planned: how cohorts should be drawn.
    """

    def __init__(self, multiplier: float, delta: float, planned: Draw, path: Path | None = None) -> None:
        self.multiplier, self.delta, self.planned, self.path = multiplier, delta, planned, path
        self.draws, self.taken = Counter[Draw](), Counter[int]()
        if path is not None and path.exists():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            found = json.loads(path.read_text())
            self.draws = Counter({Draw(int(n), int(m), bool(p)): int(times) for n, m, p, times in found["draws"]})
            self.taken = Counter({int(client): int(times) for client, times in found["taken"].items()})
            spent = float(found["multiplier"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error!r}), so the privacy spent so far is unknown: start a new run"
            ) from None
        # Rounds that were run with less noise count with that noise.
        self.multiplier = min(self.multiplier, spent)

    def spend(self, cohort: Iterable[int], draw: Draw | None = None) -> None:
        """These clients are asked for updates now. draw: how they were chosen, if not as planned."""
        self.draws[draw or self.planned] += 1
        self.taken.update(cohort)
        if self.path is not None:
            draws = [[*astuple(draw), times] for draw, times in self.draws.items()]
            found = {"draws": draws, "multiplier": self.multiplier, "delta": self.delta, "taken": self.taken}
            put(self.path, json.dumps(found).encode(), sync=True)

    def epsilon(self, more: int = 0) -> Spent:
        """What is spent, or would be if every client took part in so many more rounds."""
        own = max(self.taken.values(), default=0) + more
        draws = self.draws + Counter({self.planned: more})
        sampled = epsilon_of(self.multiplier, draws, self.delta)
        return Spent(epsilon_known(self.multiplier, own, self.delta), sampled, self.delta)
