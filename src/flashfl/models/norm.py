"""What follows a convolution: BatchNorm, perhaps an addition, ReLU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.kernel import kernel

fused = False  # whether a GPU does all of it in kernels of our own; see LOG.md


def norm_relu(norm: nn.BatchNorm2d, x: Tensor, add: Tensor | None = None) -> Tensor:
    """relu(norm(x) + add)."""
    if fused and x.is_cuda and norm.training and _plain(norm, x, add):
        ours = kernel("norm", "norm_relu")
        if ours is not None:
            out: Tensor = ours(
                x, add, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps
            )
            return out
    y: Tensor = norm(x)
    return (y if add is None else y + add).relu()


def _plain(norm: nn.BatchNorm2d, x: Tensor, add: Tensor | None) -> bool:
    """Whether the kernels can do it: an ordinary layer, images with their channels last, more than one value each."""
    ordinary = norm.affine and norm.track_running_stats and norm.momentum is not None
    alike = add is None or (add.shape == x.shape and add.dtype == x.dtype and _last(add))
    return ordinary and alike and _last(x) and x.numel() > x.shape[1] and not torch.compiler.is_compiling()


def _last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)
