"""ZeroFL: sparse forward and backward passes, a dense server model, uploads above the density."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..aggregate import wfa
from ..core.client import Clients, Part, Rows
from ..core.errors import check_range
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layer, Layout
from ..core.mask import Mask, Weights
from ..core.state import State
from ..sparsity import allocate, top_mask
from ..sparsity.select import keep_largest, largest_by_layer
from .common import WithDensity, follow, where_held

Upload = Literal["weights", "changes of the largest weights", "largest changes"]


@dataclass(frozen=True)
class Swat(Part):
    """The forward pass sees the largest weights of each layer, chosen anew in each step; inputs are pruned alike.

    Every output of a layer keeps its largest weight, also where that makes a few weights more than the density.
    """

    density: float = 0.05

    def computes(self, densities: Sequence[float]) -> Sequence[float]:
        return [self.density for _ in densities]

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        layers, spans = r.place.layout.prunable, r.place.spans
        seen = keep_largest(weights, spans, [max(1, round(self.density * layer.size)) for layer in layers])
        return torch.where(largest_of_outputs(weights, layers, spans), weights, seen)

    def inputs(self, weight: Tensor) -> Tensor:
        return torch.full((), self.density, device=weight.device)


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
        c.masks = largest_by_layer(layout, ranked[:, :k], budgets)
        c.vectors = torch.cat([trained, c.vectors[:, layout.trained_size :]], 1)


def largest_of_outputs(weights: Tensor, layers: Sequence[Layer], spans: Sequence[slice]) -> Tensor:
    """A boolean mask like `weights` [rows, columns] of the largest weight of every output of these layers.

    An output without weights is constant. BatchNorm would divide it by almost 0, and so would the gradient of all its
    weights: several hundred times too large, it would push the weights of most other outputs out of the largest.
    """
    sizes, found = weights.abs(), torch.zeros_like(weights, dtype=torch.bool)
    for layer, span in zip(layers, spans, strict=True):
        own, out = (each[:, span].unflatten(1, (layer.shape[0], -1)) for each in (sizes, found))
        torch.ge(own, own.amax(-1, keepdim=True), out=out)
    return found


@dataclass(frozen=True)
class ZeroFL(WithDensity):
    """ZeroFL (Qiu et al., ICLR 2022): SWAT-style sparse training on clients.

    The server's model is dense. In each step the forward pass uses the largest weights of each layer, a share
    `density`; the backward pass uses the same weights, and for the gradient of a weight the largest entries of the
    layer's input, the same share. That gradient is dense, so every weight learns. Clients send the share
    density + `mask_ratio` of each layer: the largest weights (variant 1), the changes of the largest weights (2), or
    the largest changes (3).

    Silent in the paper: a weight is averaged over the clients that sent it. One that nobody sent keeps its value.
    Changes are averaged over all clients. In inputs with more than 32,768 entries, the threshold comes from a sample
    of at most 32,768. The model that is evaluated has the largest weights only, as the forward pass sees it. Every
    output of a layer keeps its largest weight: an output without weights is constant, and BatchNorm would make its
    gradient several hundred times too large. All prunable layers are treated alike. Public code of SWAT and ZeroFL
    keeps the first layer dense; `prunable = "inner"` does that.

    Bytes: up density + mask_ratio with the mask. Down the whole model.
    When: clients lack arithmetic rather than bytes. Not to be confused with SparsyFed, whose server model gets sparse.
    """

    name: ClassVar[str] = "zerofl"
    exact: ClassVar[bool] = False
    density: float = 0.05  # the share of each layer that forward and backward passes use
    mask_ratio: float = 0.1  # clients send the share density + mask_ratio of each layer
    upload: Upload = "weights"  # what clients send: variants 1, 2 and 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("[0, 1)", mask_ratio=self.mask_ratio)
        sent = {"density + mask_ratio": self.density + self.mask_ratio}
        check_range("(0, 1]", "Clients send this share of the weights", **sent)

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(Swat(self.density), Largest(self.density + self.mask_ratio, self.upload)))

    def aggregate(self, s: State, sums: Sums) -> State:
        if self.upload != "weights":
            return s.next(Weights(s.mask, follow(s, sums)))
        return s.next(Weights(s.mask, where_held(s, sums, wfa(sums))))

    def views(self, s: State) -> Mapping[str, Weights]:
        layers, vector = s.layout.prunable, s.weights.vector[: s.layout.prunable_size]
        top = top_mask(s.layout, vector, allocate(s.layout, "uniform", self.density))
        spans = [layer.span for layer in layers]
        bits = top.bits | largest_of_outputs(vector[None], layers, spans)[0]
        return {"after": s.weights.restrict(Mask(s.layout, bits))}
