"""FLOPs of local training, layer by layer: d * (fwd + back_in) + s * back_wt.

d is the layer's density. s is d if no gradient of inactive weights is needed (frozen masks, random growth), else 1.
Counted are convolutions and linear maps, also those of attention and recurrent layers, on hardware that skips zeros.
Norms, activations, pooling and the products of attention are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from ..core.exchange import Local
from ..core.layout import Layout
from ..data.task import Task

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
    """The cost of each weight matrix by name, measured in one forward pass of one sample.

    A layer whose input needs no gradient (the first) has no back_in, a fixed one no back_wt.
    """
    trained = {layer.name for layer in layout.of_kind("prunable", "dense")}
    for name, p in module.named_parameters():
        p.requires_grad_(name in trained)
    costs: dict[str, Cost] = {}

    def watch(name: str) -> Any:
        def hook(part: nn.Module, args: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            for leaf, (given, places) in _uses(part, [*args, *named.values()], output).items():
                weight = attrgetter(leaf)(part)  # not always a parameter: weight_norm computes it
                flops = round(2 * weight.numel() * places) // len(inputs[0])
                cost = Cost(flops, flops * (given is None or given.requires_grad), flops * weight.requires_grad)
                key = f"{name}.{leaf}" if name else leaf
                costs[key] = costs.get(key, Cost()) + cost

        return hook

    kinds = (*_CONVS, *_TURNED, nn.Linear, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
    parts = [(n, m) for n, m in module.named_modules() if isinstance(m, kinds)]
    handles = [part.register_forward_hook(watch(name), with_kwargs=True) for name, part in parts]
    module.eval()
    try:
        with torch.enable_grad():
            module(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return costs


def _uses(part: nn.Module, given: Sequence[Any], output: Any) -> dict[str, tuple[Tensor | None, float]]:
    """Each weight matrix of a layer: its input (None: computed inside the layer), and how often it is used.

    Every weight is used once for each position of a feature map, or each step of a sequence.
    """
    first = given[0]
    if isinstance(part, nn.MultiheadAttention):
        places = [x.numel() // x.shape[-1] for x in given[:3]]
        if part._qkv_same_embed_dim:  # a third of the matrix for each input
            return {"in_proj_weight": (first, sum(places) / 3), "out_proj.weight": (None, places[0])}
        each = zip("qkv", given, places, strict=False)
        return {f"{which}_proj_weight": (x, n) for which, x, n in each} | {"out_proj.weight": (None, places[0])}
    if isinstance(part, nn.RNNBase | nn.RNNCellBase):
        first = first.data if isinstance(first, PackedSequence) else first
        steps = first.numel() // part.input_size
        entry = ("weight_ih", "weight_ih_l0", "weight_ih_l0_reverse")
        matrices = [leaf for leaf, p in part.named_parameters(recurse=False) if p.dim() > 1]
        return {leaf: (first if leaf in entry else None, steps) for leaf in matrices}
    if isinstance(part, nn.Linear):
        return {"weight": (first, output.numel() // part.out_features)}
    map_ = first if isinstance(part, _TURNED) else output
    return {"weight": (first, map_.numel() // map_.shape[-1 - len(part.kernel_size)])}  # type: ignore[arg-type]


def task_costs(task: Task) -> dict[str, Cost]:
    """`layer_costs` of a task's model on one of its samples."""
    inputs, _ = [*task.evaluation, *task.train][0].fetch(torch.arange(1))
    return layer_costs(task.build(), task.layout, tuple(x.to("cpu") for x in inputs))


def weight_flops(task: Task) -> tuple[float, ...]:
    """FLOPs of training on one sample: of one weight of each prunable layer, and last of all other layers together."""
    costs, prunable = task_costs(task), {layer.name: layer.size for layer in task.layout.prunable}
    rest = sum(cost.step() for name, cost in costs.items() if name not in prunable)
    return (*(costs.get(name, Cost()).step() / size for name, size in prunable.items()), rest)


def sample_flops(
    layout: Layout, costs: Mapping[str, Cost], densities: Sequence[float], dense_gradient: bool = False
) -> float:
    """FLOPs of training on one sample with these densities of the prunable layers. Other layers are dense."""
    density = {layer.name: d for layer, d in zip(layout.prunable, densities, strict=True)}
    return sum(cost.step(density.get(name, 1.0), dense_gradient and name in density) for name, cost in costs.items())


def order_flops(layout: Layout, costs: Mapping[str, Cost], local: Local, n: int, densities: Sequence[float]) -> float:
    """FLOPs in one round of a client with `n` samples. Gathering statistics takes one forward pass."""
    if local.report == "statistics":
        return n * sample_flops(layout, {name: Cost(cost.fwd) for name, cost in costs.items()}, densities)
    samples = local.epochs * (min(n, local.max_steps * local.batch) if local.max_steps else n)
    dense_gradient = local.adapt is not None and local.adapt.dense_gradient
    return samples * sample_flops(layout, costs, densities, dense_gradient)
