"""The kernels as differentiable functions of tensors in their layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .library import Conv, Shape, Window, call
from .weight import Lists, SparseWeight

Pair = tuple[int, int]


def conv(
    x: Tensor, weight: SparseWeight, bias: Tensor | None, s: Shape, stride: Pair, padding: Pair, dilation: Pair,
    groups: int,
) -> Tensor | None:  # fmt: skip
    """A convolution, or a linear layer if planes are single pixels. None if the input is too small or not float32."""
    out, kernel = weight.shape[0], weight.shape[2:] if len(weight.shape) == 4 else (1, 1)
    sides = [
        (side + 2 * p - d * (k - 1) - 1) // step + 1
        for side, p, d, k, step in zip((s.h, s.w), padding, dilation, kernel, stride, strict=True)
    ]
    if min(sides) < 1 or x.dtype != torch.float32:
        return None
    shape = Conv(
        s.blocks, s.planes, out, s.h, s.w, *sides, s.pad, s.pad, *kernel, *stride, *padding, *dilation, groups,
        weight.members(groups), s.threads,
    )  # fmt: skip
    result: Tensor = _Conv.apply(x, weight.values, bias, weight, shape)
    return result


def _reach(c: Conv) -> tuple[int, int]:
    """The border that the input needs, and that the gradient of the output needs."""
    forward, backward = [0], [0]
    sides = ((c.h, c.oh, c.kh, c.sh, c.ph, c.dh), (c.w, c.ow, c.kw, c.sw, c.pw, c.dw))
    for side, out, k, step, pad, gap in sides:
        last = (k - 1) * gap
        forward += [pad, (out - 1) * step + last - pad - (side - 1)]
        backward += [-((pad - last) // step), (side - 1 + pad) // step - (out - 1)]
    return max(forward), max(backward)


def _widened(x: Tensor, conv: Conv, border: str, needed: int) -> tuple[Tensor, Conv]:
    """x with a border of at least the width that is needed, and the convolution with it as `in_pad` or `out_pad`."""
    more = needed - getattr(conv, border)
    if more <= 0:
        return x, conv
    wider = Conv.from_buffer_copy(conv)
    setattr(wider, border, needed)
    return F.pad(x, (0, 0, more, more, more, more)), wider


def _packed(lists: Lists, values: Tensor, members: int, identity: bool) -> Tensor:
    """Values in the order of a list. The forward list of single planes has the order of the values themselves."""
    if identity and members == 1:
        return values
    out = values.new_zeros(len(lists.off) * members) if members > 1 else torch.empty_like(values)
    call("pack", values, lists.slot, len(values), out)
    return out


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor, bias: Tensor | None, weight: SparseWeight, conv: Conv) -> Tensor:
        ctx.save_for_backward(x, values)
        ctx.weight, ctx.conv, ctx.needs = weight, conv, _reach(conv)
        wide, c = _widened(x, conv, "in_pad", ctx.needs[0])
        forward = weight.forward_list(c)
        out = x.new_empty(c.blocks, c.out, c.oh + 2 * c.out_pad, c.ow + 2 * c.out_pad, x.shape[-1])
        weights = _packed(forward, values, c.members, identity=True)
        call("forward", c, forward.ptr, forward.off, weights, bias, wide, out)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, values = ctx.saved_tensors
        conv, weight, grad = ctx.conv, ctx.weight, gradients[0].contiguous()
        (dx, dvalues, dbias), needed = (None, None, None), ctx.needs_input_grad
        if needed[0]:
            wide, c = _widened(grad, conv, "out_pad", ctx.needs[1])
            backward = weight.input_list(c)
            dx = torch.empty_like(x)
            weights = _packed(backward, values, c.members, identity=False)
            call("input_gradient", c, backward.ptr, backward.off, weights, wide, dx)
        if needed[1]:
            wide, c = _widened(x, conv, "in_pad", ctx.needs[0])
            forward = weight.forward_list(c)
            dvalues = torch.empty_like(values)
            args = (forward.ptr, forward.off, forward.slot, len(values), wide, grad, dvalues)
            call("weight_gradient", c, *args)
        if needed[2]:
            dbias = grad.sum((0, 2, 3, 4))  # borders and lanes without a sample are zero
        return dx, dvalues, dbias, None, None


@dataclass(frozen=True)
class Norm:
    """A BatchNorm that was asked for and waits: perhaps an addition and ReLU follow, which its kernel does as well."""

    x: Tensor
    shape: Shape
    mean: Tensor | None
    variance: Tensor | None
    weight: Tensor
    bias: Tensor
    training: bool
    momentum: float
    epsilon: float
    counted: list[bool]  # whether the running statistics have followed this batch
    add: Tensor | None = None
    relu: bool = False

    def apply(self) -> Tensor:
        mean, variance, training = self.mean, self.variance, self.training
        if training or mean is None or variance is None:  # those of the batch
            training, mean, variance = True, self.x.new_empty(self.shape.planes), self.x.new_empty(self.shape.planes)
        y: Tensor = _Norm.apply(
            self.x, self.weight, self.bias, self.add, mean, variance, self.shape, self.relu, training, self.epsilon
        )
        if self.training and self.mean is not None and self.variance is not None and not self.counted:
            n = self.shape.samples * self.shape.h * self.shape.w
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.variance.lerp_(variance * (n / (n - 1)), self.momentum)
            self.counted.append(True)
        return y


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, add: Tensor | None, mean: Tensor, variance: Tensor,
        shape: Shape, relu: bool, training: bool, epsilon: float,
    ) -> Tensor:  # fmt: skip
        y = torch.empty_like(x)
        call("norm", shape, x, weight, bias, add, relu, training, epsilon, mean, variance, y)
        ctx.save_for_backward(x, weight, y if relu else None)
        kept = (mean, variance) if training else (mean.clone(), variance.clone())  # running ones may change
        ctx.rest = (*kept, shape, training, epsilon)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, y), (mean, variance, shape, training, epsilon) = ctx.saved_tensors, ctx.rest
        dy, added = gradients[0].contiguous(), ctx.needs_input_grad[3]
        dx, dweight, dbias = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)
        dadd = torch.empty_like(x) if added and y is not None else None
        args = (dy, x, y, weight, mean, variance, training, epsilon, dx, dweight, dbias, dadd)
        call("norm_gradient", shape, *args)
        return dx, dweight, dbias, dadd if dadd is not None else dy if added else None, *(None,) * 6


def pool(x: Tensor, s: Shape, kernel: Pair, stride: Pair, padding: Pair) -> Tensor | None:
    """Maxima over windows. None if the input is too small."""
    h, w = (
        (side + 2 * p - k) // step + 1 for side, p, k, step in zip((s.h, s.w), padding, kernel, stride, strict=True)
    )
    if min(h, w) < 1:
        return None
    out = Shape(s.blocks, s.planes, h, w, s.pad, s.samples, s.threads)
    result: Tensor = _Pool.apply(x, s, out, Window(*kernel, *stride, *padding))
    return result


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, s: Shape, out: Shape, window: Window) -> Tensor:
        y = x.new_empty(out.blocks, out.planes, out.h + 2 * out.pad, out.w + 2 * out.pad, x.shape[-1])
        call("pool", s, out, window, x, y)
        ctx.save_for_backward(x, y)
        ctx.rest = (s, out, window)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        dx = torch.empty_like(x)
        call("pool_gradient", *ctx.rest, x, y, gradients[0].contiguous(), dx)
        return dx, None, None, None
