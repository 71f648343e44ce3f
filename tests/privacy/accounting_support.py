"""Epsilon of rounds that are all alike."""

from __future__ import annotations

from flashfl.privacy.accounting import Draw, epsilon_of


def epsilon_sampled(
    multiplier: float, rounds: int, delta: float, clients: int, cohort: int, poisson: bool = False
) -> float:
    """Of every client after so many rounds, each with `cohort` of `clients` drawn at random and in secret."""
    return epsilon_of(multiplier, {Draw(clients, cohort, poisson): rounds}, delta)
