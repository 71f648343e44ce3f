"""Forced disagreement (the paper's Table 2): what it costs when masks change by a given amount in every round."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..aggregate import average
from ..core.errors import ConfigError
from ..core.rng import hashes
from ..core.state import Client, Mask, Order, State, Sums, Weights
from ..sparsity.select import lowest
from .spdst import SPDST


@dataclass(frozen=True)
class Disagree(SPDST):
    """SPDST whose mask is made to differ from one round to the next: at random, in chosen layers, by a given mismatch.

    sm: the mismatch between the masks of consecutive rounds in each chosen layer. first, last: which layers, counted
    from 1; a last of 0 is the model's last. A layer too dense for that much change changes as much as it can.
    """

    name: ClassVar[str] = "disagree"
    sm: float = 0.8
    first: int = 1
    last: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.sm <= 1:
            raise ConfigError(f"sm = {self.sm}: must lie between 0 and 1")
        if self.first < 1 or self.last < 0 or self.nm:
            raise ConfigError("first must be at least 1, last at least 0, and nm 0")

    def order(self, s: State, client: Client) -> Order:
        order = super().order(s, client)
        return order if s.stage == 1 else replace(order, weights=s.weights.restrict(self._mask(s)))

    def aggregate(self, s: State, sums: Sums) -> State:
        if s.stage == 1:
            return super().aggregate(s, sums)
        mask = self._mask(s)
        return s.next(Weights(mask, average(self.aggregator, sums)), mask=self.moved(s, mask))

    def _mask(self, s: State) -> Mask:
        """The mask this round trains; the one judged after it is the same, so it is never judged untrained."""
        return s.kept(Mask, "mask") if "mask" in s.extra else s.mask

    def moved(self, s: State, mask: Mask) -> Mask:
        """As many weights a layer, but only i of b in common: 1 - i / (2b - i) = sm."""
        bits = mask.bits.clone()
        stop = self.last or len(mask.counts)
        for i, (layer, b) in enumerate(zip(s.layout.prunable, mask.counts, strict=True), start=1):
            if not self.first <= i <= stop:
                continue
            change = min(b - round(2 * b * (1 - self.sm) / (2 - self.sm)), layer.size - b)
            active = mask.bits[layer.start : layer.stop]
            ranks = hashes(s.key("disagree"), layer.start, layer.stop, bits.device)
            part = bits[layer.start : layer.stop]
            part &= ~lowest(ranks, change, active)
            part |= lowest(ranks, change, ~active)
        return Mask(s.layout, bits, mask.counts)
