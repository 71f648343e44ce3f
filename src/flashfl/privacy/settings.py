"""The privacy settings of a run, checked and completed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from ..core.errors import ConfigError, check_range
from .accounting import Draw, epsilon_of, multiplier_for
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
    def dp_sampling(self) -> str: ...
    @property
    def static_bn(self) -> bool: ...
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
    epsilon that may be spent at `delta`; 0: no limit. draw: how cohorts are drawn.
    """

    secure: bool
    ranges: Ranges
    policy: Policy
    noise: Noise | None = None
    delta: float = 0.0
    budget: float = 0.0
    draw: Draw = field(default_factory=Draw)

    def noisers(self, cohort: int) -> int:
        """How many shares of noise are sure to be added up: one by the server, or those of honest survivors."""
        return self.policy.honest(cohort) if self.secure else 1

    def most(self, asked: int) -> int:
        """No more clients than this are added up in a round that asks so many. It must not tell how coins fell."""
        mean, clients = self.draw.cohort, self.draw.clients
        # A cohort is larger with a probability below e^-60, and its sum could then overflow, which reveals nothing.
        return min(clients, mean + math.ceil(12 * math.sqrt(mean)) + 36) if self.draw.poisson else asked


def check_settings(s: PrivacySettings) -> None:
    """Refuse settings that cannot be meant."""
    check_range("[0, inf)", dp_epsilon=s.dp_epsilon, dp_noise=s.dp_noise)
    check_range("(0, inf)", dp_clip=s.dp_clip)
    check_range("(0, 1)", "Usual values are 1 / clients or less", dp_delta=s.dp_delta)
    private = s.dp_epsilon > 0 or s.dp_noise > 0
    if s.dp_sampling == "poisson" and s.secure:
        raise ConfigError(
            "dp_sampling = 'poisson': not possible with secure = true. Poisson sampling protects only from those who "
            "do not know the cohorts, and the server knows them. Set dp_sampling = 'fixed', or secure = false."
        )
    if s.dp_sampling == "poisson" and not private:
        raise ConfigError("dp_sampling = 'poisson': needs noise. Set dp_epsilon or dp_noise, or dp_sampling = 'fixed'.")
    if private and s.static_bn:
        raise ConfigError(
            "static_bn = true: not possible under differential privacy. Use static_bn = false: BatchNorm statistics "
            "then get noise in every round, with the weights."
        )
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
    draw, multiplier = Draw(clients, min(s.per_round, clients), s.dp_sampling == "poisson"), s.dp_noise
    if s.dp_epsilon and not multiplier:
        multiplier = multiplier_for(s.dp_epsilon, s.dp_delta, s.rounds, draw, known=s.secure)
    elif s.dp_epsilon and epsilon_of(multiplier, {Draw() if s.secure else draw: 1}, s.dp_delta) > s.dp_epsilon:
        raise ConfigError(
            f"dp_noise = {multiplier:g} is too little: one round would spend more than dp_epsilon = {s.dp_epsilon:g}. "
            "Raise one of them, or set dp_noise = 0: flashfl then chooses the noise."
        )
    if multiplier < s.policy.noise:
        raise ConfigError(
            f"policy.noise = {s.policy.noise:g}: clients insist on that much noise, and these settings give "
            f"{multiplier:.4g}. Raise dp_noise, or lower dp_epsilon or policy.noise."
        )
    if not multiplier:
        return Privacy(s.secure, s.ranges, s.policy)
    return Privacy(s.secure, s.ranges, s.policy, Noise(s.dp_clip, multiplier), s.dp_delta, s.dp_epsilon, draw)
