"""HAM: a multiplicative step beside each gradient step, as a part of a client's work."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.client import Clients, Part, Rows
from ..core.parts import part

_GRADIENT = "multiply gradient"


@part
@dataclass(frozen=True)
class Multiply(Part):
    """After each step, sparse weights w become w * exp(-lr * (strength * sign(w) * g + shrink)), with gradient g.

    g is the loss's gradient before the step; weight decay is not in it.
    """

    strength: float = 0.0
    shrink: float = 0.0

    def begin(self, c: Clients) -> None:
        c.state[_GRADIENT] = torch.zeros(len(c.keys), c.layout.trained_size, device=c.start.device)

    def before(self, r: Rows, gradient: Tensor) -> None:
        r.state[_GRADIENT].copy_(gradient)

    def after(self, r: Rows, gradient: Tensor) -> None:
        sparse = slice(0, r.place.spans[-1].stop if r.place.spans else 0)
        weights, g = r.weights[:, sparse], r.state[_GRADIENT][:, sparse]
        weights.mul_(torch.exp(-r.lr * (self.strength * weights.sign() * g + self.shrink)))
