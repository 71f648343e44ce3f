"""Parts that change how a client's weights follow the gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..core.client import Part, Rows


@dataclass(frozen=True)
class Multiply(Part):
    """A multiplicative step after each SGD step (HAM): w <- w * exp(lr * (-rate * sign(w) * g - decay)).

    A weight whose gradient points away from zero grows by a factor, others shrink; signs never change. `g` is the
    gradient that the SGD step followed. Only prunable weights change.
    """

    rate: float = 1.0
    decay: float = 1e-3

    def after(self, r: Rows, gradient: Tensor) -> None:
        stop = r.place.spans[-1].stop if r.place.spans else 0
        weights = r.weights[:, :stop]
        weights.mul_((r.lr * (-self.rate * weights.sign() * gradient[:, :stop] - self.decay)).exp())
