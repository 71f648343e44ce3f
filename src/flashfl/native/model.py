"""A model whose prunable weights exist only where its mask is active."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.layout import Layer, Layout
from ..core.mask import Mask
from .planes import Planes
from .weight import SparseWeight


class SparseModel:
    """Runs a module with the native kernels. Weights and gradients are flat vectors of the active weights and the rest.

    vector: as `Weights.packed()` has it: active weights in the mask's order, dense weights, statistics. grad: the same
    without statistics. Both keep their place until another mask is loaded.
    """

    def __init__(self, module: nn.Module, layout: Layout, mask: Mask, packed: Tensor) -> None:
        """module: is changed; use it no more. packed: is copied."""
        self.module, self.layout, self.mask = module, layout, mask
        self.vector = self.grad = torch.empty(0)
        self._pad = _border(module)
        self._sparse: dict[str, SparseWeight] = {}
        self._dense: dict[str, nn.Parameter] = {}
        parameters = dict(module.named_parameters())
        for layer in layout.of_kind("prunable", "dense", "fixed"):
            p = parameters[layer.name]
            if layer.kind == "fixed":
                p.requires_grad_(False)
            elif layer.kind == "prunable":
                self._replace(p, layer, torch.empty(0, dtype=torch.int64))
            elif _is_kernel(module, p):  # the input is in the kernels' layout, so a dense convolution uses them as well
                self._replace(p, layer, torch.arange(layer.size))
            else:
                self._dense[layer.name] = p
        self._bind_all(mask, packed)

    def _replace(self, p: nn.Parameter, layer: Layer, places: Tensor) -> None:
        weight = self._sparse[layer.name] = SparseWeight(layer.shape, places, torch.empty(0))
        for part in self.module.modules():
            for name, other in list(part._parameters.items()):
                if other is p:
                    del part._parameters[name]
                    setattr(part, name, weight)

    def load(self, mask: Mask, packed: Tensor) -> None:
        """Put a mask and its weights in place. With another mask than before, all vectors are new."""
        if mask.equal(self.mask):
            self.mask = mask
            self.vector.copy_(packed)
        else:
            self._bind_all(mask, packed)

    def _bind_all(self, mask: Mask, packed: Tensor) -> None:
        self.mask, self.vector = mask, packed.clone()
        tail = self.layout.trained_size - self.layout.prunable_size
        self.grad = torch.zeros(mask.active + tail)
        at, active = 0, mask.places
        for layer, count in zip(self.layout.prunable, mask.counts, strict=True):
            self._sparse[layer.name].moved(active[at : at + count] - layer.start, self._leaf(slice(at, at + count)))
            at += count
        shift = self.layout.prunable_size - mask.active
        for layer in self.layout.of_kind("dense"):
            span = slice(layer.start - shift, layer.stop - shift)
            if layer.name in self._dense:
                p = self._dense[layer.name]
                p.data, p.grad = self.vector[span].view(layer.shape), self.grad[span].view(layer.shape)
            else:
                self._sparse[layer.name].values = self._leaf(span)
        for layer in self.layout.of_kind("statistic"):
            owner, _, leaf = layer.name.rpartition(".")
            view = self.vector[layer.start - shift : layer.stop - shift].view(layer.shape)
            self.module.get_submodule(owner)._buffers[leaf] = view

    def _leaf(self, span: slice) -> Tensor:
        """Some of the weights, with their gradient. `.data`: changes of others do not count as changes of these."""
        values = self.vector[span].data.requires_grad_()
        values.grad = self.grad[span]
        return values

    def __call__(self, *inputs: Tensor) -> Tensor:
        """What the module makes of its inputs, as an ordinary tensor."""
        out = self.module(*(Planes.of(x, self._pad) if _is_batch_of_images(x) else x for x in inputs))
        result: Tensor = out.dense() if isinstance(out, Planes) else out
        return result


def _is_batch_of_images(x: Tensor) -> bool:
    return x.dim() == 4 and x.dtype == torch.float32 and len(x) > 0


def _is_kernel(module: nn.Module, p: nn.Parameter) -> bool:
    """Whether a parameter is the weight of a plain 2D convolution."""
    return any(type(part) is nn.Conv2d and part.weight is p for part in module.modules())


def _border(module: nn.Module) -> int:
    """The border that planes carry: what most convolutions need. A convolution that needs more widens its input."""
    plain = [part for part in module.modules() if isinstance(part, nn.Conv2d) and not isinstance(part.padding, str)]
    pads = [int(max(part.padding)) for part in plain if part.padding_mode == "zeros"]
    return min(3, max(pads, default=0))
