"""Layers that keep only the largest entries of their input for the gradient of their weight."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from ..core.client import Part, overrides

_SAMPLE = 1 << 16  # in a larger input, this many entries decide what the largest are


class PrunedInputs:
    """Changes the convolutions and linear layers of a model whose weights have one of these names.

    The output stays what it was. Its gradient reaches the weight through the largest entries of the input only, and the
    input through all of the weight. Other layers keep their whole input.
    """

    def __init__(self, module: nn.Module, weights: Collection[str]) -> None:
        self.part: Part | None = None
        self._layers = [
            m
            for name, m in module.named_modules()
            if type(m) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and f"{name}.weight".lstrip(".") in weights
        ]
        self._own = [m.forward for m in self._layers]

    def use(self, parts: Sequence[Part]) -> None:
        """Follow the last of these parts that prunes inputs; without any, the model is as it was."""
        part = next((part for part in reversed(parts) if overrides(part, "inputs")), None)
        if part == self.part:
            return
        self.part = part
        for m, own in zip(self._layers, self._own, strict=True):
            m.forward = own if part is None else functools.partial(_forward, m, part)  # type: ignore[method-assign]


def _forward(m: nn.Linear | nn.Conv2d, part: Part, x: Tensor) -> Tensor:
    """The layer's output. The terms that are added are 0, and bring the gradient of the weight and the bias."""
    share = part.inputs(m.weight.detach())
    if share is None:
        return _apply(m, x, m.weight, m.bias)
    kept = _apply(m, largest(x.detach(), share), m.weight, m.bias)
    bias = None if m.bias is None else m.bias.detach()
    return _apply(m, x, m.weight.detach(), bias) + (kept - kept.detach())


def _apply(m: nn.Linear | nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if isinstance(m, nn.Linear):
        return nn.functional.linear(x, weight, bias)
    output: Tensor = m._conv_forward(x, weight, bias)
    return output


def largest(x: Tensor, share: Tensor) -> Tensor:
    """`x` with zeros in the place of all but this share of its entries, those of the largest magnitude.

    In an input of more than 65,536 entries, regularly spaced ones decide where the largest begin.
    """
    sizes = x.abs().flatten()
    ranked = sizes[:: max(1, sizes.numel() // _SAMPLE)].sort().values
    at = ((1 - share) * ranked.numel()).floor().clamp(0, ranked.numel() - 1).long()
    return torch.where(x.abs() >= ranked.gather(0, at.reshape(1)), x, 0.0)
