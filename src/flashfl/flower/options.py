"""What a deployment decides beyond a run's own settings: whom to wait for, how long, and how far to believe them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.errors import ConfigError


@dataclass(frozen=True)
class FlowerOptions:
    """How the server deals with clients it does not control."""

    clients: int = 0  # how many must have registered before the first round; 0: as many as take part in one
    wait: float = 300.0  # seconds to wait for them, then or whenever too few are left
    timeout: float = 600.0  # seconds a client has to answer an order
    poll: float = 0.2  # seconds between two looks for answers
    # A change a step above this many times the cohort's median is refused, unless all of it is a small share of the
    # weights; 0: all are believed.
    trust: float = 10.0
    max_samples: int = 0  # a client that registers more samples than this is refused; 0: none up to 2^32

    def __post_init__(self) -> None:
        for name in ("clients", "wait", "timeout", "poll", "trust", "max_samples"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} = {value}: must be a number of at least 0")
        if self.timeout == 0 or self.poll == 0:
            raise ConfigError("timeout and poll must be above 0")
