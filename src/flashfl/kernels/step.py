"""The masked SGD step in one pass: master weights, their half-precision copy, gradient and mask."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _step(master, half, grad, mask, lr, decay, n, DECAY: tl.constexpr, COPY: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    active = tl.load(mask + at, mask=at < n, other=0) != 0
    g = tl.load(grad + at, mask=active, other=0.0).to(tl.float32)
    w = tl.load(master + at, mask=active, other=0.0)
    if DECAY:
        g += decay * w
    w -= tl.load(lr) * g
    tl.store(master + at, w, mask=active)
    if COPY:
        tl.store(half + at, w.to(half.dtype.element_ty), mask=active)


def masked_step(
    master: Tensor, half: Tensor | None, grad: Tensor, mask: Tensor, lr: Tensor, decay: float = 0.0
) -> None:
    """master -= lr * (grad + decay * master) where mask; half follows it.

    Inactive weights are neither read nor written: they are 0.
    """
    n, copy = master.numel(), half is not None
    _step[(triton.cdiv(n, 2048),)](
        master, master if half is None else half, grad, mask, lr, decay, n, decay != 0, copy, 2048
    )
