"""Narrower models inside a model: the first channels of every layer.

A coordinate belongs to a width p if its output channel is among the first ceil(p * outputs) of its layer and its input
channel among the first ceil(p * inputs). Tensors of one value a channel (biases, BatchNorm) follow their channels, so
that a dropped channel is exactly zero. The classifier loses the inputs that are dropped channels. The model's inputs
and the outputs of layers that are not prunable are never narrowed.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from ..core.layout import Layer, Layout
from ..core.mask import Mask
from ..core.rng import Device


def width_mask(layout: Layout, width: float, device: Device = "cpu") -> Mask:
    """The mask of the prunable weights that belong to a width."""
    return Mask(layout, belonging(layout, width, device)[: layout.prunable_size])


def scaled(layout: Layout) -> Tensor:
    """Which trained weights belong to layers that widths narrow: prunable weights and their biases."""
    out = torch.arange(layout.trained_size) < layout.prunable_size
    biases = {f"{layer.name.rpartition('.')[0]}.bias" for layer in layout.prunable}
    for layer in layout.of_kind("dense"):
        out[layer.span] = layer.name in biases
    return out


def classifier(layout: Layout) -> tuple[Layer, ...]:
    """The last matrix that is not prunable, and its bias; none if there is no such matrix."""
    names = [layer.name.rpartition(".")[0] for layer in layout.of_kind("dense") if len(layer.shape) > 1]
    return tuple(layer for layer in layout.of_kind("dense") if [layer.name.rpartition(".")[0]] == names[-1:])


@functools.lru_cache(maxsize=16)
def belonging(layout: Layout, width: float, device: Device = "cpu") -> Tensor:
    """Which trained weights belong to a width, [trained]. The tensor is shared: do not change it."""
    kept = torch.ones(layout.trained_size, dtype=torch.bool)
    whole = {layer.name.rpartition(".")[0] for layer in layout.of_kind("dense") if len(layer.shape) > 1}
    outputs: set[int] = set()  # of the prunable layers so far
    for layer in layout.prunable:
        kept[layer.span] = _matrix(layer, _first(layer.shape[0], width), width, outputs)
        outputs.add(layer.shape[0])
    for layer in classifier(layout)[:1]:
        kept[layer.span] = _matrix(layer, _first(layer.shape[0], 1), width, outputs)
    for layer in layout.of_kind("dense"):
        if len(layer.shape) == 1 and layer.name.rpartition(".")[0] not in whole:
            kept[layer.span] = _first(layer.size, width)
    return kept.to(device)


def _matrix(layer: Layer, rows: Tensor, width: float, outputs: set[int]) -> Tensor:
    """These rows of a weight [outputs, inputs, ...], flat.

    Inputs are narrowed if they are channels of an earlier layer, flat or not.
    """
    columns = layer.shape[1]
    before = max((size for size in outputs if columns % size == 0), default=0)
    inputs = _first(before, width).repeat_interleave(columns // before) if before else torch.ones(columns).bool()
    both = (rows[:, None] & inputs).view(*layer.shape[:2], *[1] * (len(layer.shape) - 2))
    return both.expand(layer.shape).flatten()


def _first(count: int, width: float) -> Tensor:
    return torch.arange(count) < math.ceil(width * count - 1e-9)
