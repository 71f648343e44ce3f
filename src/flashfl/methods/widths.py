"""What HeteroFL and FjORD share: clients hold nested width slices of one model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..aggregate import wfa
from ..core.client import Part
from ..core.exchange import Client, Sums
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.state import Plan, State
from ..sparsity.width import belonging, width_mask
from .common import Nested, check_shares, share_densities


@dataclass(frozen=True)
class Width(Part):
    """Train only the channels of a width. The server counts who trained what, for tensors without a mask too."""

    widths: tuple[float, ...] = (1.0,)
    width: float = 1.0

    def tally(self, layout: Layout, vectors: Tensor, masks: Tensor) -> Mapping[str, Tensor]:
        return {"kept": belonging(layout, self.width, vectors.device).expand(len(vectors), -1)}


@dataclass(frozen=True)
class Widths(Nested):
    """A model of which each client holds the first channels; widths are the clients' densities."""

    widths: tuple[float, ...] = (0.25, 0.5, 1.0)  # the widths of the clients' models
    shares: tuple[float, ...] = (0.3, 0.3, 0.4)  # the share of clients that get each width

    def __post_init__(self) -> None:
        check_shares(self.widths, self.shares)
        object.__setattr__(self, "widths", tuple(sorted(self.widths)))

    def init(self, plan: Plan) -> State:
        masks = {f"mask {width}": width_mask(plan.layout, width, plan.device) for width in self.widths}
        top = masks[f"mask {self.widths[-1]}"]
        return State(plan, self._cut(plan.layout, Weights.masked(top, plan.initial()), self.widths[-1]), extra=masks)

    @property
    def sizes(self) -> tuple[float, ...]:
        return self.widths

    def admit(self, clients: Sequence[Client], key: int) -> tuple[Client, ...]:
        return share_densities(clients, self.widths, self.shares, key)

    def sub_model(self, s: State, size: float) -> Weights:
        return self._cut(s.layout, super().sub_model(s, size), size)

    def _cut(self, layout: Layout, model: Weights, width: float) -> Weights:
        """The model with zeros in the biases and BatchNorm parameters of dropped channels."""
        kept = belonging(layout, width, model.vector.device)
        return Weights(model.mask, torch.cat([model.vector[: len(kept)] * kept, model.vector[len(kept) :]]))

    def aggregate(self, s: State, sums: Sums) -> State:
        mean, kept, trained = wfa(sums), sums.extra["kept"], s.layout.trained_size
        assert sums.weights is not None
        found = (sums.weights[:trained] / kept.clamp(min=1)).float()
        mean[:trained] = torch.where(kept > 0, found, s.weights.vector[:trained])
        after = s.next(Weights(s.mask, mean))
        return self.keep_statistics(s, after, sums) if s.plan.local.statistics else after

    def views(self, s: State) -> Mapping[str, Weights]:
        narrow = {f"width {width}": self.sub_model(s, width) for width in self.widths[:-1]}
        return {"after": self.sub_model(s, self.widths[-1]), **narrow}
