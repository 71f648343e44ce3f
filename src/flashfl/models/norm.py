"""What follows a convolution: BatchNorm, then an addition and ReLU if they are asked for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.kernel import kernel

fused = True  # whether a GPU does all of it in one of our kernels; bench/gpu_round.py --plain measures without
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def batch_norm(norm: nn.Module, x: Tensor, add: Tensor | None = None, relu: bool = True) -> Tensor:
    """norm(x) + add, with or without ReLU."""
    if fused and x.is_cuda and type(norm) is nn.BatchNorm2d and norm.training and _plain(norm, x, add):
        ours = kernel("norm", "batch_norm")
        if ours is not None:
            if norm.num_batches_tracked is not None:
                norm.num_batches_tracked.add_(1)
            settings = (norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.momentum, norm.eps)
            out: Tensor = ours(x, add, *settings, relu)
            return out
    y: Tensor = norm(x)
    y = y if add is None else y + add
    return y.relu() if relu else y


def _plain(norm: nn.BatchNorm2d, x: Tensor, add: Tensor | None) -> bool:
    """Whether the kernel can do it: a plain layer, channels-last images, more than one value a channel."""
    hooks = (norm._forward_hooks, norm._forward_pre_hooks, norm._backward_hooks, norm._backward_pre_hooks)
    here = x.device.index == torch.cuda.current_device()  # where kernels are launched
    watched = any(hooks) or torch.compiler.is_compiling()
    ordinary = norm.affine and norm.track_running_stats and norm.momentum is not None
    alike = add is None or (add.shape == x.shape and add.dtype == x.dtype and _last(add))
    return ordinary and alike and here and not watched and x.dtype in _TYPES and _last(x) and x.numel() > x.shape[1]


def _last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)
