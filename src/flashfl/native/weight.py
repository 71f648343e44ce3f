"""The active weights of one layer, in place of its weight tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .library import Conv, call
from .standin import StandIn

WIDE = 0.35  # layers at least this dense use lists for four planes at once


class Lists(NamedTuple):
    """Where active weights are needed: groups of planes, distances, and the slot of each weight. See lists.h."""

    ptr: Tensor
    off: Tensor
    slot: Tensor


class SparseWeight(StandIn):
    """A weight tensor of which only the active values exist.

    places: where they lie in the tensor, ascending. values: a leaf of the graph, so that they get a gradient. A
    function without a kernel sees the whole tensor.
    """

    requires_grad = True
    is_cuda = False
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, shape: Sequence[int], places: Tensor, values: Tensor) -> None:
        self.shape = torch.Size(shape)
        self.places, self.values = places, values
        self._lists: dict[tuple[str | int, ...], Lists] = {}

    @property
    def density(self) -> float:
        return len(self.places) / max(1, self.shape.numel())

    def moved(self, places: Tensor, values: Tensor) -> None:
        """Other weights are active now."""
        self.places, self.values = places, values
        self._lists.clear()

    def dense(self) -> Tensor:
        """The whole tensor, with zeros."""
        return self.values.new_zeros(self.shape.numel()).index_put((self.places,), self.values).view(self.shape)

    def members(self, groups: int) -> int:
        return 4 if groups == 1 and self.density >= WIDE else 1

    def forward_list(self, conv: Conv) -> Lists:
        """The list of the forward pass and of the weights' gradient, made when a geometry is first met."""
        return self._plan("plan", conv, -(-conv.out // conv.members), "out_pad")

    def input_list(self, conv: Conv) -> Lists:
        """The lists of the input's gradient."""
        return self._plan("plan_input", conv, conv.sh * conv.sw * -(-conv.in_ // conv.members), "in_pad")

    def _plan(self, function: str, conv: Conv, groups: int, unused: str) -> Lists:
        ignored = ("blocks", "threads", unused)
        key = (function, *(getattr(conv, name) for name, _ in Conv._fields_ if name not in ignored))
        if key not in self._lists:
            n = len(self.places)
            lists = Lists(*(torch.empty(size, dtype=torch.int32) for size in (groups + 1, n, n)))
            entries = call(function, conv, self.places, n, *lists)
            self._lists[key] = lists._replace(off=lists.off[:entries].clone()) if entries < n else lists
        return self._lists[key]
