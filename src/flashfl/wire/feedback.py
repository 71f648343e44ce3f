"""Error feedback: a client adds what rounding took from its last update to the next one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..core.client import Clients, Field, Part
from ..core.layout import Layout
from ..core.mask import count_layers
from ..core.parts import part
from ..core.precision import Precision
from .values import round_values, segments

_RESIDUAL = "rounding residual"


@part
@dataclass(frozen=True)
class Feedback(Part):
    """u = what the client would report + e; it reports u, which travels as Q(u), and remembers e = u - Q(u).

    upload: how updates travel, rounded to the nearest. A weight that leaves the mask loses its residual. Clients keep 4
    bytes a trained weight between rounds.
    """

    upload: Precision = Precision(rounding="nearest")  # noqa: RUF009 - frozen

    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        return {_RESIDUAL: Field("dense", layout.trained_size)}

    def finish(self, c: Clients) -> None:
        layout, trained = c.layout, c.layout.trained_size
        base = c.start[:, :trained] if self.upload.changes else torch.zeros_like(c.start[:, :trained])
        wanted = c.vectors[:, :trained] - base + c.memory[_RESIDUAL]
        wanted[:, : layout.prunable_size].masked_fill_(~c.masks, 0.0)
        sent, dense = torch.zeros_like(wanted), c.masks.new_ones(trained - layout.prunable_size)
        for row, bits in enumerate(c.masks):
            parts = segments(layout, count_layers(layout, bits), "weights", self.upload.values)
            travels = torch.cat([bits, dense])
            sent[row, travels] = round_values(wanted[row, travels], parts, self.upload, 0)
        c.memory[_RESIDUAL] = wanted - sent
        held = base.clone()
        held[:, : layout.prunable_size].masked_fill_(~c.masks, 0.0)
        c.vectors = torch.cat([held + wanted, c.vectors[:, trained:]], 1)
