"""The server's own step: how far, and in which direction, the model follows the average of a round."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .errors import ConfigError
from .mask import Weights
from .parts import part
from .state import State

_MOMENTUM, _VARIANCE = "server momentum", "server variance"


@part
@dataclass(frozen=True)
class ServerStep:
    """FedAvgM (Hsu et al., 2019) and FedAdam (Reddi et al., 2021) on the server, for any method.

    The method's next model minus the one before it is a change d. FedAvgM: m = momentum * m + d, w = w + lr * m.
    FedAdam: m = momentum * m + (1 - momentum) * d, v = adam * v + (1 - adam) * d^2, w = w + lr * m / (sqrt(v) + tau).
    By default w = w + d: the method's model itself. BatchNorm statistics are the method's. Where the mask moves, what
    leaves it loses its momentum. Momentum starts anew with each phase. Nothing more travels.
    """

    lr: float = 1.0
    momentum: float = 0.0
    adam: float = 0.0  # 0: FedAvgM
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if not (self.lr > 0 and self.tau > 0 and 0 <= self.momentum < 1 and 0 <= self.adam < 1):
            raise ConfigError(
                f"server: lr = {self.lr}, tau = {self.tau}, momentum = {self.momentum}, adam = {self.adam}: lr and "
                "tau must be above 0, momentum and adam at least 0 and below 1"
            )

    def apply(self, before: State, after: State) -> State:
        """`after`, which a method made of `before`, with the model that this step leads to."""
        plain = (self.lr, self.momentum, self.adam) == (1.0, 0.0, 0.0)
        if plain or before.phase != after.phase or not after.phase.counts:
            return after
        trained, k = after.layout.trained_size, after.layout.prunable_size
        start, vector = before.weights.vector[:trained], after.weights.vector.clone()
        change = vector[:trained] - start
        fresh = torch.zeros_like(change)
        old = before.extra.get(_MOMENTUM, fresh)
        assert isinstance(old, torch.Tensor)
        new = old * self.momentum + change * (1 - self.momentum if self.adam else 1.0)
        new[:k].masked_fill_(~after.mask.bits, 0.0)
        extra = {**after.extra, _MOMENTUM: new}
        step = new
        if self.adam:
            seen = before.extra.get(_VARIANCE, fresh)
            assert isinstance(seen, torch.Tensor)
            variance = extra[_VARIANCE] = seen * self.adam + change.square() * (1 - self.adam)
            step = new / (variance.sqrt() + self.tau)
        vector[:trained] = start + self.lr * step
        return replace(after, weights=Weights.masked(after.mask, vector), extra=extra)
