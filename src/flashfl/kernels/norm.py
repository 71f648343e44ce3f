"""BatchNorm, an addition and ReLU in one piece, forward and back, for channels-last images as rows of channels.

Forward a block of rows gives its count, mean and sum of squares about it; those of all blocks are joined; a last pass
normalises, adds and cuts off. Back it is the same with the two sums a gradient needs. Nothing is added atomically, so
the same numbers give the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_ROWS, _COLUMNS = 64, 64  # of a tile
_PARTS = 64  # blocks of rows at most that are added up by themselves


@triton.jit
def _moments(x, parts, rows, C, each, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Mean and sum of squares about it, of `each` rows; sums are taken about the first row, to lose no digits."""
    part, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, inside = part * each, column < C
    stop = tl.minimum(first + each, rows)
    middle = tl.load(x + first.to(tl.int64) * C + column, mask=inside, other=0.0).to(tl.float32)
    total, squares = tl.zeros([ROWS, COLUMNS], dtype=tl.float32), tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for at in range(first, stop, ROWS):
        row = at + tl.arange(0, ROWS)
        good = (row < stop)[:, None] & inside[None, :]
        value = tl.load(x + row.to(tl.int64)[:, None] * C + column[None, :], mask=good, other=0.0).to(tl.float32)
        value = tl.where(good, value - middle[None, :], 0.0)
        total += value
        squares += value * value
    off = tl.sum(total, 0) / (stop - first)
    tl.store(parts + part * 2 * C + column, middle + off, mask=inside)
    about = tl.sum(squares, 0) - off * off * (stop - first)
    tl.store(parts + part * 2 * C + C + column, tl.where(about < 0, 0.0, about), mask=inside)


@triton.jit
def _join(parts, saved, running_mean, running_var, rows, C, each, count, momentum, eps, PARTS: tl.constexpr,
          COLUMNS: tl.constexpr):  # fmt: skip
    """Mean and inverse deviation of all rows; running statistics follow them."""
    part, column = tl.arange(0, PARTS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < C
    good = (part < count)[:, None] & inside[None, :]
    at = parts + part[:, None] * 2 * C + column[None, :]
    n = tl.maximum(tl.minimum(rows - part * each, each), 0).to(tl.float32)[:, None]
    means = tl.load(at, mask=good, other=0.0)
    mean = tl.sum(means * n, 0) / rows
    apart = tl.where(good, means - mean[None, :], 0.0)
    squares = tl.sum(tl.load(at + C, mask=good, other=0.0) + apart * apart * n, 0)
    tl.store(saved + column, mean, mask=inside)
    tl.store(saved + C + column, 1.0 / tl.sqrt(squares / rows + eps), mask=inside)
    old = tl.load(running_mean + column, mask=inside)
    tl.store(running_mean + column, old + momentum * (mean - old), mask=inside)
    old = tl.load(running_var + column, mask=inside)
    tl.store(running_var + column, old + momentum * (squares / (rows - 1) - old), mask=inside)


@triton.jit
def _apply(x, add, y, saved, weight, bias, rows, C, ADD: tl.constexpr, CUT: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < C
    good = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * C + column[None, :]
    scale = tl.load(weight + column, mask=inside) * tl.load(saved + C + column, mask=inside)
    mean, shift = tl.load(saved + column, mask=inside), tl.load(bias + column, mask=inside)
    value = tl.load(x + at, mask=good, other=0.0).to(tl.float32)
    value = (value - mean[None, :]) * scale[None, :] + shift[None, :]
    if ADD:
        value += tl.load(add + at, mask=good, other=0.0).to(tl.float32)
    if CUT:
        value = tl.where(value > 0, value, tl.where(value == value, 0.0, value))  # a not-a-number stays one
    tl.store(y + at, value.to(y.dtype.element_ty), mask=good)


@triton.jit
def _through(off, y, dy, at, good, scale, shift, ADD: tl.constexpr, CUT: tl.constexpr):
    """The gradient where ReLU let the value through: seen from the output if something was added, else worked out."""
    grad = tl.load(dy + at, mask=good, other=0.0).to(tl.float32)
    if CUT:
        if ADD:
            passed = tl.load(y + at, mask=good, other=0.0).to(tl.float32) > 0
        else:
            passed = off * scale[None, :] + shift[None, :] > 0
        grad = tl.where(passed & good, grad, 0.0)
    return grad


@triton.jit
def _back_sums(x, y, dy, parts, saved, weight, bias, rows, C, each, ADD: tl.constexpr, CUT: tl.constexpr,
               ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Of `each` rows: the sum of the gradients that came through, and of those times the normalised values."""
    part, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first, inside = part * each, column < C
    stop = tl.minimum(first + each, rows)
    mean, inverse = tl.load(saved + column, mask=inside), tl.load(saved + C + column, mask=inside)
    scale = tl.load(weight + column, mask=inside) * inverse
    shift = tl.load(bias + column, mask=inside)
    plain, scaled = tl.zeros([ROWS, COLUMNS], dtype=tl.float32), tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(first, stop, ROWS):
        row = start + tl.arange(0, ROWS)
        good = (row < stop)[:, None] & inside[None, :]
        at = row.to(tl.int64)[:, None] * C + column[None, :]
        off = tl.load(x + at, mask=good, other=0.0).to(tl.float32) - mean[None, :]
        grad = _through(off, y, dy, at, good, scale, shift, ADD, CUT)
        plain += grad
        scaled += grad * off
    tl.store(parts + part * 2 * C + column, tl.sum(plain, 0), mask=inside)
    tl.store(parts + part * 2 * C + C + column, tl.sum(scaled, 0) * inverse, mask=inside)


@triton.jit
def _back_join(parts, sums, C, count, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """[bias gradient, weight gradient]: sums over all rows."""
    part, column = tl.arange(0, PARTS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    good = (part < count)[:, None] & (column < 2 * C)[None, :]
    found = tl.load(parts + part[:, None] * 2 * C + column[None, :], mask=good, other=0.0)
    tl.store(sums + column, tl.sum(found, 0), mask=column < 2 * C)


@triton.jit
def _back_apply(x, y, dy, dx, dadd, saved, sums, weight, bias, rows, C, ADD: tl.constexpr, CUT: tl.constexpr,
                ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < C
    good = (row < rows)[:, None] & inside[None, :]
    at = row.to(tl.int64)[:, None] * C + column[None, :]
    mean, inverse = tl.load(saved + column, mask=inside), tl.load(saved + C + column, mask=inside)
    plain, scaled = tl.load(sums + column, mask=inside) / rows, tl.load(sums + C + column, mask=inside) / rows
    scale = tl.load(weight + column, mask=inside) * inverse
    shift = tl.load(bias + column, mask=inside)
    off = tl.load(x + at, mask=good, other=0.0).to(tl.float32) - mean[None, :]
    grad = _through(off, y, dy, at, good, scale, shift, ADD, CUT)
    back = (grad - plain[None, :] - off * (scaled * inverse)[None, :]) * scale[None, :]
    tl.store(dx + at, back.to(dx.dtype.element_ty), mask=good)
    if ADD:
        tl.store(dadd + at, grad.to(dadd.dtype.element_ty), mask=good)


class _Shape:
    """Rows, channels, and how rows are divided."""

    def __init__(self, x: Tensor) -> None:
        self.rows, self.channels = x.numel() // x.shape[1], x.shape[1]
        self.each = max(_ROWS, triton.cdiv(triton.cdiv(self.rows, _PARTS), _ROWS) * _ROWS)
        self.parts = triton.cdiv(self.rows, self.each)
        self.across = triton.cdiv(self.channels, _COLUMNS)
        self.tiles = (triton.cdiv(self.rows, _ROWS), self.across)

    def new(self, x: Tensor, *size: int) -> Tensor:
        return torch.empty(*size, dtype=torch.float32, device=x.device)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, add: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor,
        momentum: float, eps: float, cut: bool,
    ) -> Tensor:  # fmt: skip
        s, adds = _Shape(x), add is not None
        y, parts, saved = torch.empty_like(x), s.new(x, s.parts, 2, s.channels), s.new(x, 2, s.channels)
        _moments[(s.parts, s.across)](x, parts, s.rows, s.channels, s.each, _ROWS, _COLUMNS)
        _join[(triton.cdiv(s.channels, 32),)](
            parts, saved, mean, var, s.rows, s.channels, s.each, s.parts, momentum, eps, _PARTS, 32
        )
        _apply[s.tiles](
            x, x if add is None else add, y, saved, weight, bias, s.rows, s.channels, adds, cut, _ROWS, _COLUMNS
        )
        ctx.save_for_backward(x, y if adds and cut else None, saved, weight, bias)
        ctx.adds, ctx.cut = adds, cut
        return y

    @staticmethod
    @once_differentiable  # type: ignore[misc, untyped-decorator]
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, y, saved, weight, bias = ctx.saved_tensors
        dy, s = grads[0].contiguous(memory_format=torch.channels_last), _Shape(x)
        y, flags = x if y is None else y, (ctx.adds, ctx.cut, _ROWS, _COLUMNS)
        dx, dadd = torch.empty_like(x), torch.empty_like(x) if ctx.adds else None
        parts, sums = s.new(x, s.parts, 2, s.channels), s.new(x, 2, s.channels)
        _back_sums[(s.parts, s.across)](x, y, dy, parts, saved, weight, bias, s.rows, s.channels, s.each, *flags)
        _back_join[(triton.cdiv(2 * s.channels, 32),)](parts, sums, s.channels, s.parts, _PARTS, 32)
        _back_apply[s.tiles](
            x, y, dy, dx, dx if dadd is None else dadd, saved, sums, weight, bias, s.rows, s.channels, *flags
        )
        return dx, dadd, sums[1], sums[0], None, None, None, None, None


def batch_norm(
    x: Tensor, add: Tensor | None, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor, momentum: float,
    eps: float, cut: bool,
) -> Tensor:  # fmt: skip
    """batch_norm(x) + add in training, with ReLU if `cut`: [N, C, H, W], channels last. Running mean and var follow."""
    out: Tensor = _Norm.apply(x, add, weight, bias, mean, var, momentum, eps, cut)
    return out
