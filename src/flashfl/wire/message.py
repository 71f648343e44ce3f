"""What a message holds, before it is written and after it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ..core.exchange import Carries, Extra, Local, Tag, Traffic
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..core.precision import EXACT, Precision
from ..core.rng import fold

Kind = Literal["order", "update", "lack"]
KINDS: tuple[Kind, ...] = ("order", "update", "lack")


@dataclass(frozen=True, eq=False)
class Message:
    """An order, an update, or a lack: a client's reply that it does not hold what its order builds on.

    `values` is packed as by `Weights.packed`: the active prunable weights in order, then the dense layers, then the
    statistics. `carries` says whether all of that travels, the weights without statistics, or the statistics alone. An
    update without a mask reports layer `counts`; with one, its counts are the mask's.
    """

    kind: Kind
    layout: Layout
    tag: Tag
    client: int
    n: int = 0
    key: int = 0
    start: Tag | None = None  # orders: the accepted round whose memory the client starts from
    own: str | None = None  # orders: the hash of the client's own mask, where the server still holds it
    local: Local | None = None  # orders only
    mask: Mask | None = None
    values: Tensor | None = None
    carries: Carries = "all"
    counts: tuple[int, ...] | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)
    lacks: str | None = None  # lacks only: the hash of what the client does not hold: a mask, or notes of its parts
    precision: Precision = EXACT  # set by the decoder: how the values travelled
    traffic: Traffic = Traffic()  # noqa: RUF009 - frozen; set by the decoder: what the bytes were for

    @property
    def work(self) -> Local:
        """What an order asks for."""
        return self.local or Local()

    @property
    def value_key(self) -> int:
        """The key by which a lossy form rounds this message's values."""
        return value_key(self.key, self.kind, self.tag, self.client)

    def weights(self) -> Weights:
        """The model in this message, as a dense vector. Statistics that were not sent are zero."""
        if self.mask is None or self.values is None or self.carries == "statistics":
            raise ValueError(f"this {self.kind} carries no weights")
        values = self.values
        if self.carries == "weights":
            values = torch.cat([values, values.new_zeros(self.layout.size - self.layout.trained_size)])
        return Weights.unpack(self.mask, values)


def value_key(key: int, kind: Kind, tag: Tag, client: int) -> int:
    """The rounding key of a message with these header fields; engines that never encode round by it."""
    return fold(key, "values", kind, *tag, client)


@dataclass(frozen=True)
class Encoded:
    """A message as bytes, and what they are for."""

    data: bytes
    traffic: Traffic
