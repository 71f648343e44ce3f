"""The privacy settings of a run, checked and completed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from ..core.errors import ConfigError
from .accounting import multiplier_for
from .policy import Policy
from .vector import Noise, Ranges


class PrivacySettings(Protocol):
    """The training settings that decide about privacy."""

    @property
    def secure(self) -> bool: ...
    @property
    def dp_epsilon(self) -> float: ...
    @property
    def dp_delta(self) -> float: ...
    @property
    def dp_clip(self) -> float: ...
    @property
    def dp_noise(self) -> float: ...
    @property
    def ranges(self) -> Ranges: ...
    @property
    def policy(self) -> Policy: ...
    @property
    def rounds(self) -> int: ...
    @property
    def per_round(self) -> int: ...


@dataclass(frozen=True)
class Privacy:
    """How the clients of a run are protected.

    secure: sums are opened, single updates never. noise: of differential privacy; None: no such noise. budget: the
    epsilon that may be spent at `delta`; 0: no limit.
    """

    secure: bool
    ranges: Ranges
    policy: Policy
    noise: Noise | None = None
    delta: float = 0.0
    budget: float = 0.0

    def noisers(self, cohort: int) -> int:
        """How many shares of noise are sure to be added up: one by the server, or those of honest survivors."""
        return self.policy.honest(cohort) if self.secure else 1


def check_settings(s: PrivacySettings) -> None:
    """Refuse settings that cannot be meant."""
    for name in ("dp_epsilon", "dp_noise"):
        value = getattr(s, name)
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} = {value}: must be a number of at least 0")
    if not (math.isfinite(s.dp_clip) and s.dp_clip > 0):
        raise ConfigError(f"dp_clip = {s.dp_clip}: must be a number above 0")
    if not 0 < s.dp_delta < 1:
        raise ConfigError(f"dp_delta = {s.dp_delta}: must be above 0 and below 1; 1 / clients or less makes sense")
    if s.secure and s.per_round < s.policy.least:
        raise ConfigError(
            f"per_round = {s.per_round}: secure aggregation needs at least {s.policy.least} clients a round"
        )


def privacy_of(s: PrivacySettings, clients: int) -> Privacy | None:
    """The protection that these settings ask for; None if they ask for none.

    With an epsilon and no noise, the noise is the least that the planned rounds allow.
    """
    if not (s.secure or s.dp_epsilon or s.dp_noise):
        return None
    if not (s.dp_epsilon or s.dp_noise):
        return Privacy(s.secure, s.ranges, s.policy)
    cohort = min(s.per_round, clients)
    multiplier = s.dp_noise or multiplier_for(s.dp_epsilon, s.dp_delta, s.rounds, clients, cohort, known=s.secure)
    return Privacy(s.secure, s.ranges, s.policy, Noise(s.dp_clip, multiplier), s.dp_delta, s.dp_epsilon)
