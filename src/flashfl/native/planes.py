"""A batch in the kernels' layout. It passes through a model in place of a tensor.

`Planes` answers torch's functions itself where there is a kernel (convolution, linear, BatchNorm, ReLU, addition,
max-pool, flatten, mean). For every other function it turns into an ordinary tensor. So any model runs, and only the
layers that have no kernel pay for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from . import ops
from .library import SAMPLES, Shape
from .ops import Norm
from .standin import StandIn, plain
from .weight import SparseWeight


class Planes(StandIn):
    """`n` samples of shape (planes, h, w), or (planes,) if `flat`, with a border of `pad` zeros around each plane."""

    def __init__(self, data: Tensor | Norm, n: int, pad: int, flat: bool = False) -> None:
        self._data, self.n, self.pad, self.flat = data, n, pad, flat
        _, planes, h, w, _ = self._tensor.shape
        self.shape = torch.Size((n, planes) if flat else (n, planes, h - 2 * pad, w - 2 * pad))

    @staticmethod
    def of(x: Tensor, pad: int) -> Planes:
        """A batch of images [n, planes, h, w], or of vectors [n, planes]."""
        flat = x.dim() == 2
        x = x[:, :, None, None] if flat else x
        n, planes, h, w = x.shape
        x = F.pad(x, (0,) * 6 + (0, -n % SAMPLES)).view(-1, SAMPLES, planes, h, w).permute(0, 2, 3, 4, 1)
        pad = 0 if flat else pad
        return Planes(F.pad(x, (0, 0, pad, pad, pad, pad)).contiguous(), n, pad, flat)

    @property
    def data(self) -> Tensor:
        """[blocks, planes, h + 2 pad, w + 2 pad, 16]."""
        if isinstance(self._data, Norm):
            self._data = self._data.apply()
        return self._data

    @property
    def _tensor(self) -> Tensor:
        return self._data.x if isinstance(self._data, Norm) else self._data

    @property
    def kernel_shape(self) -> Shape:
        """The shape as kernels are told it."""
        blocks, planes, h, w, _ = self._tensor.shape
        return Shape(blocks, planes, h - 2 * self.pad, w - 2 * self.pad, self.pad, self.n, torch.get_num_threads())

    @property
    def inside(self) -> Tensor:
        """The data without borders."""
        p, data = self.pad, self.data
        return data[:, :, p : data.shape[2] - p, p : data.shape[3] - p]

    def dense(self) -> Tensor:
        x = self.inside.permute(0, 4, 1, 2, 3).flatten(0, 1)[: self.n]
        return x.flatten(1) if self.flat else x.contiguous()

    def _like(self, data: Tensor | Norm) -> Planes:
        return Planes(data, self.n, self.pad, self.flat)

    def _become(self, other: Planes | Tensor) -> Planes:
        """What an operation in place leaves behind."""
        assert isinstance(other, Planes)
        vars(self).update(vars(other))
        return self

    def relu(self) -> Planes:
        d = self._data
        if isinstance(d, Norm) and not d.relu:
            return self._like(replace(d, relu=True))
        return self._like(torch.relu(self.data))

    def relu_(self) -> Planes:
        return self._become(self.relu())

    def __add__(self, other: object) -> Planes | Tensor:
        if not isinstance(other, Planes) or (other.shape, other.pad) != (self.shape, self.pad):
            return torch.add(self.dense(), plain(other))
        for a, b in ((self, other), (other, self)):
            d = a._data
            if isinstance(d, Norm) and d.add is None and not d.relu:
                return self._like(replace(d, add=b.data))
        return self._like(self.data + other.data)

    __radd__ = __add__

    def __iadd__(self, other: object) -> Planes | Tensor:
        result = self + other
        return self._become(result) if isinstance(result, Planes) else result

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Planes | Tensor:
        if start_dim != 1 or end_dim not in (-1, self.dim() - 1):
            return self.dense().flatten(start_dim, end_dim)
        if self.flat:
            return self
        inside = self.inside
        return Planes(inside.reshape(len(inside), -1, 1, 1, SAMPLES), self.n, 0, True)

    def view(self, *shape: Any) -> Planes | Tensor:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple | list | torch.Size) else shape
        if sizes in ((self.n, -1), (self.n, self.shape[1:].numel())):
            return self.flatten(1)
        return self.dense().reshape(*shape)

    reshape = view

    def mean(self, dim: Any = None, keepdim: bool = False, **more: Any) -> Tensor:
        if self.flat or more or not isinstance(dim, tuple | list) or sorted(d % 4 for d in dim) != [2, 3]:
            return self.dense().mean(dim, keepdim, **more)
        means = self.inside.mean((2, 3)).transpose(1, 2).flatten(0, 1)[: self.n]
        return means[:, :, None, None] if keepdim else means

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "device", "requires_grad", "is_cuda", "layout", "is_sparse"):
            return getattr(self._tensor, name)
        return super().__getattr__(name)


def _falling_back(name: str) -> Callable[..., Any]:
    def method(self: Planes, *args: Any) -> Any:
        return getattr(self.dense(), name)(*(plain(a) for a in args))

    return method


_ARITHMETIC = "sub rsub mul rmul truediv rtruediv pow rpow matmul rmatmul neg abs getitem len iter lt le gt ge"
for _name in _ARITHMETIC.split():
    setattr(Planes, f"__{_name}__", _falling_back(f"__{_name}__"))


def _two(value: int | Sequence[int]) -> tuple[int, int]:
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return (sizes[0], sizes[-1])


def _conv2d(
    input: Planes | Tensor, weight: SparseWeight | Tensor, bias: Tensor | None = None, stride: Any = 1,
    padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Any:  # fmt: skip
    if not isinstance(weight, SparseWeight) or isinstance(padding, str) or input.dim() != 4:
        return NotImplemented
    step, pad, gap = _two(stride), _two(padding), _two(dilation)
    x = input if isinstance(input, Planes) else Planes.of(input, max(pad))
    if x.shape[1] != weight.shape[1] * groups or x.n == 0:
        return NotImplemented  # torch says what is wrong
    out = ops.conv(x.data, weight, bias, x.kernel_shape, step, pad, gap, groups)
    return NotImplemented if out is None else Planes(out, x.n, x.pad)


def _linear(input: Planes | Tensor, weight: SparseWeight | Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, SparseWeight) or input.dim() != 2 or input.shape[1] != weight.shape[1]:
        return NotImplemented
    x = input if isinstance(input, Planes) else Planes.of(input, 0)
    if x.n == 0:
        return NotImplemented
    out = ops.conv(x.data, weight, bias, x.kernel_shape, (1, 1), (0, 0), (1, 1), 1)
    return NotImplemented if out is None else Planes(out, x.n, 0, True)


def _batch_norm(
    input: Planes, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Any:  # fmt: skip
    s = input.kernel_shape
    if input.dtype != torch.float32 or (training and s.samples * s.h * s.w < 2):
        return NotImplemented
    weight = input._tensor.new_ones(s.planes) if weight is None else weight
    bias = input._tensor.new_zeros(s.planes) if bias is None else bias
    norm = Norm(input.data, s, running_mean, running_var, weight, bias, training, momentum, eps, [])
    return input._like(norm)


def _relu(input: Planes, inplace: bool = False) -> Any:
    return input.relu_() if inplace else input.relu()


def _max_pool(
    input: Planes, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    if input.flat or ceil_mode or return_indices or _two(dilation) != (1, 1):
        return NotImplemented
    kernel, pad = _two(kernel_size), _two(padding)
    step = _two(stride) if stride not in (None, [], ()) else kernel
    if any(2 * p > k for p, k in zip(pad, kernel, strict=True)):
        return NotImplemented
    out = ops.pool(input.data, input.kernel_shape, kernel, step, pad)
    return NotImplemented if out is None else Planes(out, input.n, input.pad)


def _mean_of_planes(input: Planes, output_size: Any) -> Any:
    return input.mean((2, 3), keepdim=True) if output_size in (1, (1, 1), [1, 1]) else NotImplemented


def _add(a: Any, b: Any, **more: Any) -> Any:
    if more:
        return NotImplemented
    return a + b if isinstance(a, Planes) else b + a


_PRODUCTS: dict[Any, Callable[..., Any]] = {F.conv2d: _conv2d, F.linear: _linear}
SparseWeight.handlers = _PRODUCTS
Planes.handlers = {
    **_PRODUCTS, F.batch_norm: _batch_norm, F.relu: _relu, torch.relu: _relu, torch.relu_: Planes.relu_,
    torch.max_pool2d: _max_pool, F.max_pool2d: _max_pool, F.adaptive_avg_pool2d: _mean_of_planes,
    torch.flatten: Planes.flatten, torch.mean: Planes.mean, torch.reshape: Planes.reshape, torch.add: _add,
}  # fmt: skip
