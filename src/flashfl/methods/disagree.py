"""Forced disagreement: what it costs when masks change by a given amount in every round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..aggregate import average
from ..core.errors import ConfigError, check_range
from ..core.exchange import Client, Sums
from ..core.mask import Mask, Weights
from ..core.state import State
from ..sparsity import random_choice
from .spdst import SENSITIVITY, SPDST


@dataclass(frozen=True)
class Disagree(SPDST):
    """SPDST whose mask changes at random from round to round, by a given mismatch, in chosen layers.

    A layer with b active weights keeps i of them, so that SM = 1 - i / (2b - i) (Eq. 1) is the one asked for. A layer
    too dense for that changes as much as it can.

    Bytes: as SPDST, plus a full mask every round.
    When: with `--central`, for the paper's Table 2: disagreement in late layers costs more than in early ones.
    Not to be confused with NST, where disagreement is what clients arrive at, not an input.

    sm: mismatch between the masks of consecutive rounds. first: the first layer that changes, counted from 1. last: the
    last layer that changes; 0: the model's last. The other settings are SPDST's.
    """

    name: ClassVar[str] = "disagree"
    sm: float = 0.8
    first: int = 1
    last: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[0, 1]", sm=self.sm)
        check_range("[1, inf)", first=self.first)
        check_range("[0, inf)", last=self.last)
        if self.nm:
            raise ConfigError(f"nm = {self.nm}: must be 0 here. Masks that change at random keep no N:M pattern")

    def models(self, s: State, clients: Sequence[Client]) -> Iterator[tuple[Client, Weights]]:
        weights = s.weights if s.phase == SENSITIVITY else s.weights.restrict(self._mask(s))
        return ((client, weights) for client in clients)

    def aggregate(self, s: State, sums: Sums) -> State:
        if s.phase == SENSITIVITY:
            return super().aggregate(s, sums)
        mask = self._mask(s)
        return s.next(Weights(mask, average(self.aggregator, sums)), mask=self.moved(s, mask))

    def _mask(self, s: State) -> Mask:
        """The mask this round trains. The model evaluated after the round has the same, so it is always trained."""
        return s.kept(Mask, "mask", s.mask)

    def moved(self, s: State, mask: Mask) -> Mask:
        """As many weights in each layer, but only i of b in common: 1 - i / (2b - i) = sm."""
        bits = mask.bits.clone()
        stop = self.last or len(mask.counts)
        for i, (layer, b) in enumerate(zip(s.layout.prunable, mask.counts, strict=True), start=1):
            if not self.first <= i <= stop:
                continue
            change = min(b - round(2 * b * (1 - self.sm) / (2 - self.sm)), layer.size - b)
            active, part = mask.bits[layer.span], bits[layer.span]
            part &= ~random_choice(layer, s.key("disagree"), change, active)
            part |= random_choice(layer, s.key("disagree"), change, ~active)
        return Mask(s.layout, bits, mask.counts)
