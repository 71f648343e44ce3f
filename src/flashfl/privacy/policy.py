"""What clients insist on before they take part in a secure sum: how many neighbours, and how many survivors."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache

from ..core.errors import ConfigError

COMPLETE = 40  # cohorts up to this size: every client is everyone's neighbour
_SECURE, _ALIVE = 40, 20  # -log2 of the chance that the neighbours are bad for privacy, or too few to finish


@dataclass(frozen=True)
class Policy:
    """The same for all parties of a run; clients hold it themselves and refuse a server that has another."""

    least: int = 3  # secure: the smallest cohort a client takes part in
    survive: float = 2 / 3  # secure: a round fails unless more than this share of the cohort finishes it
    corrupt: float = 0.1  # secure: the share of clients that may work together with the server
    noise: float = 0.0  # clients refuse rounds with less dp_noise than this

    def __post_init__(self) -> None:
        if self.least < 3:
            raise ConfigError(
                f"policy.least = {self.least}: must be at least 3. In a sum of 2 updates, each client could subtract "
                "its own and see the other's."
            )
        if not 0 <= self.corrupt < 1 / 3 or not (1 + self.corrupt) / 2 < self.survive < 1:
            raise ConfigError(
                f"policy.survive = {self.survive}, policy.corrupt = {self.corrupt}: corrupt must be at least 0 and "
                "below 1/3; survive must be above (1 + corrupt) / 2 and below 1. Otherwise a server could collect "
                "signatures for two different cohorts."
            )

    def threshold(self, cohort: int) -> int:
        """Of a cohort of this size, so many must survive each step."""
        return math.floor(self.survive * cohort) + 1

    def honest(self, cohort: int) -> int:
        """At least so many survivors are honest."""
        return self.threshold(cohort) - math.floor(self.corrupt * cohort)

    def neighbours(self, cohort: int) -> tuple[int, int]:
        """How many neighbours a client draws to hold its shares, and how many of them must answer."""
        if cohort <= COMPLETE:
            return cohort - 1, self.threshold(cohort) - 1
        return _sparse(cohort, math.floor(self.corrupt * cohort), cohort - self.threshold(cohort))


@lru_cache(maxsize=64)
def _sparse(n: int, corrupt: int, lost: int) -> tuple[int, int]:
    """The fewest neighbours k and the threshold t for a cohort of n (Bell et al. 2020, Section 3.3).

    Except with probability 2^-40 no client draws t corrupt neighbours, and the honest survivors stay connected. Except
    with probability 2^-20 every client has t neighbours that survive.
    """
    # More neighbours are never worse: search by halves.
    k = 2 + bisect.bisect_left(range(2, n - 1), True, key=lambda k: _fits(n, corrupt, lost, k))
    return k, _threshold(n, lost, k)


def _threshold(n: int, lost: int, k: int) -> int:
    """The highest threshold that every client's surviving neighbours reach."""
    t = k
    while t > 1 and _tail(n - 1, lost, k, k - t + 1) > 2.0**-_ALIVE / n:
        t -= 1
    return t


def _fits(n: int, corrupt: int, lost: int, k: int) -> bool:
    secure = _tail(n - 1, corrupt, k, _threshold(n, lost, k)) <= 2.0 ** -(_SECURE + 1) / n
    return secure and _split(n, n - corrupt - lost, k) <= 2.0 ** -(_SECURE + 1)


def _tail(population: int, marked: int, drawn: int, least: int) -> float:
    """The chance that a draw without replacement has at least so many marked ones."""
    every = range(max(0, least, drawn - population + marked), min(marked, drawn) + 1)
    whole = log_ways(population, drawn)
    return sum(math.exp(log_ways(marked, x) + log_ways(population - marked, drawn - x) - whole) for x in every)


def log_ways(of: int, some: int) -> float:
    """The logarithm of the number of ways to draw `some` of so many."""
    return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)


def _split(n: int, honest: int, k: int) -> float:
    """A bound on the chance that the honest survivors fall into two groups without an edge between them."""
    total = 0.0
    for group in range(1, honest // 2 + 1):
        miss = 0.0  # nobody in one group draws anybody of the other
        for size, other in ((group, honest - group), (honest - group, group)):
            if n - 1 - other < k:
                break
            miss += size * (log_ways(n - 1 - other, k) - log_ways(n - 1, k))
        else:
            total += math.exp(min(0.0, log_ways(honest, group) + miss))
    return total
