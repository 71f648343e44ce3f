"""FLOPs of local training, layer by layer: d * (fwd + back_in) + s * back_wt.

d is the layer's density; s is d where no gradient of inactive weights is needed (frozen masks, random growth) and 1
where it is. What counts is the arithmetic of convolutions and linear maps that hardware which skips zeros would do;
norms, activations, pooling and the products inside attention are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.layout import Layout
from ..core.state import Local

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TURNED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Cost:
    """FLOPs of one sample in one dense layer: forward, gradient of the input, gradient of the weight."""

    fwd: int = 0
    back_in: int = 0
    back_wt: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.fwd + other.fwd, self.back_in + other.back_in, self.back_wt + other.back_wt)

    def step(self, density: float = 1.0, dense_gradient: bool = False) -> float:
        """FLOPs of training on one sample at this density."""
        return density * (self.fwd + self.back_in) + (1.0 if dense_gradient else density) * self.back_wt


def layer_costs(module: nn.Module, layout: Layout, inputs: tuple[Tensor, ...]) -> dict[str, Cost]:
    """The cost of each weight of a convolution or linear map, by its name, found by one forward pass of one sample.

    A layer whose input needs no gradient (the first) has no back_in, a fixed one no back_wt.
    """
    trained = {layer.name for layer in layout.of_kind("prunable", "dense")}
    for name, p in module.named_parameters():
        p.requires_grad_(name in trained)
    costs: dict[str, Cost] = {}

    def watch(name: str) -> Any:
        def hook(part: nn.Module, given: tuple[Any, ...], output: Tensor) -> None:
            weight = part.get_parameter("weight")
            flops = 2 * _products(part, given[0], output) // max(1, len(inputs[0]))
            cost = Cost(flops, flops * given[0].requires_grad, flops * weight.requires_grad)
            key = f"{name}.weight" if name else "weight"
            costs[key] = costs.get(key, Cost()) + cost

        return hook

    parts = [(n, m) for n, m in module.named_modules() if isinstance(m, (*_CONVS, *_TURNED, nn.Linear))]
    handles = [part.register_forward_hook(watch(name)) for name, part in parts]
    module.eval()
    try:
        with torch.enable_grad():
            module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return costs


def _products(part: nn.Module, given: Tensor, output: Tensor) -> int:
    """Multiplications of a dense forward pass: every weight is used once for each place of the map."""
    weight = part.get_parameter("weight")
    if isinstance(part, nn.Linear):
        return weight.numel() * (output.numel() // part.out_features)
    if isinstance(part, _TURNED):
        return weight.numel() * (given.numel() // given.shape[-1 - len(part.kernel_size)])
    return weight.numel() * (output.numel() // output.shape[-1 - len(part.kernel_size)])  # type: ignore[arg-type]


def task_costs(task: Any) -> dict[str, Cost]:
    """`layer_costs` of a task's model on one of its samples; empty where there is no sample to try."""
    for source in [*task.judges, *task.train]:
        if len(source):
            inputs, _ = source.fetch(torch.arange(1))
            return layer_costs(task.build(), task.layout, tuple(x.cpu() for x in inputs))
    return {}


def sample_flops(
    layout: Layout, costs: Mapping[str, Cost], densities: Sequence[float], dense_gradient: bool = False
) -> float:
    """FLOPs of training on one sample with these densities of the prunable layers; all others are dense."""
    density = {layer.name: d for layer, d in zip(layout.prunable, densities, strict=True)}
    return sum(cost.step(density.get(name, 1.0), dense_gradient and name in density) for name, cost in costs.items())


def samples_of(local: Local, n: int) -> int:
    """How many samples a client of `n` samples trains on under this order."""
    if local.report == "statistics":
        return n
    return local.epochs * (min(n, local.max_steps * local.batch) if local.max_steps else n)


def order_flops(layout: Layout, costs: Mapping[str, Cost], local: Local, n: int, densities: Sequence[float]) -> float:
    """FLOPs of a client's whole work in one round; gathering statistics is a forward pass only."""
    if local.report == "statistics":
        costs = {name: Cost(cost.fwd) for name, cost in costs.items()}
    dense_gradient = bool(getattr(local.adapt, "dense_gradient", False))
    return samples_of(local, n) * sample_flops(layout, costs, densities, dense_gradient)
