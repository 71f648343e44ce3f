"""ZeroFL: sparse forward and backward passes, a dense server model, uploads above the density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..aggregate import wfa
from ..core.client import Clients, Part, Rows
from ..core.errors import ConfigError
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.method import Method
from ..core.parts import part
from ..core.state import Plan, State
from ..sparsity import allocate, top_mask
from ..sparsity.select import keep_largest, lowest_by_layer, magnitude
from .common import check_density, follow, where_held

Upload = Literal["weights", "changes of the largest weights", "largest changes"]


@part
@dataclass(frozen=True)
class Swat(Part):
    """The forward pass sees the largest weights of each layer, chosen anew in each step; inputs are pruned alike."""

    density: float = 0.05

    def computes(self, densities: Sequence[float]) -> Sequence[float]:
        return [self.density for _ in densities]

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        sizes = [span.stop - span.start for span in r.place.spans]
        return keep_largest(weights, r.place.spans, [max(1, round(self.density * size)) for size in sizes])

    def inputs(self, weight: Tensor) -> Tensor:
        return torch.full((), self.density, device=weight.device)


@part
@dataclass(frozen=True)
class Largest(Part):
    """Report the largest weights of each layer, their changes, or the largest changes."""

    density: float = 0.05
    upload: Upload = "weights"

    @property
    def changes(self) -> bool:  # type: ignore[override]
        return self.upload != "weights"

    def active(self, layout: Layout, before: int) -> tuple[int, int]:
        return (sum(allocate(layout, "uniform", self.density)),) * 2

    def finish(self, c: Clients) -> None:
        layout, k, budgets = c.layout, c.layout.prunable_size, allocate(c.layout, "uniform", self.density)
        trained = c.change() if self.upload != "weights" else c.vectors[:, : layout.trained_size]
        ranked = trained if self.upload == "largest changes" else c.vectors
        c.masks = lowest_by_layer(layout, -magnitude(ranked[:, :k]), [budgets] * len(ranked), device=ranked.device)
        c.vectors = torch.cat([trained, c.vectors[:, layout.trained_size :]], 1)


@dataclass(frozen=True)
class ZeroFL(Method):
    """ZeroFL (Qiu et al., ICLR 2022): SWAT-style sparse training on clients.

    The server's model is dense. In each step the forward pass uses the largest weights of each layer, a share
    `density`; the backward pass uses the same weights, and for the gradient of a weight the largest entries of the
    layer's input, the same share. That gradient is dense, so every weight learns. Clients send the share
    density + `mask_ratio` of each layer: the largest weights (variant 1), the changes of the largest weights (2), or
    the largest changes (3).

    Silent in the paper: how the server averages weights that only some send (over those who sent them; a weight that
    nobody sent keeps its value; changes are averaged over all); entries of large inputs are ranked by a sample of
    32,768; the model that is evaluated has the `density` largest weights of each layer, as the forward pass sees it.
    Bytes: up density + mask_ratio with the mask. Down the whole model.
    When: clients lack arithmetic rather than bytes. Not to be confused with SparsyFed, whose server model gets sparse.
    """

    name: ClassVar[str] = "zerofl"
    exact: ClassVar[bool] = False
    density: float = 0.05  # the share of each layer that forward and backward passes use
    mask_ratio: float = 0.1  # clients send the share density + mask_ratio of each layer
    upload: Upload = "weights"  # what clients send: variants 1, 2 and 3

    def __post_init__(self) -> None:
        check_density(self.density)
        if not (self.mask_ratio >= 0 and self.density + self.mask_ratio <= 1):
            raise ConfigError(f"mask_ratio = {self.mask_ratio}: must be from 0 to 1 - density, {1 - self.density:g}")

    def init(self, plan: Plan) -> State:
        return State(plan, Weights.dense(plan.layout, plan.initial()))

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(Swat(self.density), Largest(self.density + self.mask_ratio, self.upload)))

    def aggregate(self, s: State, sums: Sums) -> State:
        if self.upload != "weights":
            return s.next(Weights(s.mask, follow(s, sums)))
        return s.next(Weights(s.mask, where_held(s, sums, wfa(sums))))

    def views(self, s: State) -> Mapping[str, Weights]:
        budgets = allocate(s.layout, "uniform", self.density)
        return {"after": s.weights.restrict(top_mask(s.layout, s.weights.vector, budgets))}
