"""Sizes of masks for many clients at once, without writing a byte. They equal what the encoder writes.

With Triton they are counted on the GPU and nothing here waits for it. Elsewhere the encoder counts, mask by mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..core.kernel import kernel
from ..core.layout import Layout
from ..core.mask import Mask
from . import rice
from .geometry import geometry
from .masks import mask_to_bytes


def mask_sizes(layout: Layout, bits: Tensor, bases: Sequence[Tensor] = ()) -> Tensor:
    """Bytes of the mask section of each row of `bits` under the smallest form, given the masks its receiver holds.

    `bits` and each base are [K], [1, K] (the same for all rows) or [rows, K]: many clients' masks against one base, or
    one mask against what each client holds. Equals the length of `mask_to_bytes` for a mask without a recipe.
    """
    bits, *others = (x[None] if x.dim() == 1 else x for x in (bits, *bases))
    gap_sums = kernel("rice", "gap_sums") if bits.is_cuda and layout.prunable_size else None
    if gap_sums is not None and len(bits):
        return count_sizes(layout, bits, others, gap_sums)
    rows = max(len(x) for x in (bits, *others)) if len(bits) else 0
    masks = [[Mask(layout, row) for row in x.cpu()] * (rows if len(x) == 1 else 1) for x in (bits, *others)]
    sizes = [len(mask_to_bytes(mask, held)) for mask, *held in zip(*masks, strict=True)]
    return torch.tensor(sizes, dtype=torch.int64).to(bits.device)


def count_sizes(
    layout: Layout, bits: Tensor, bases: Sequence[Tensor], gap_sums: Callable[..., tuple[Tensor, Tensor, Tensor]]
) -> Tensor:
    """`mask_sizes` as tensor reductions, from what `kernels.rice.gap_sums` finds for each list."""
    geo = geometry(layout)
    found = [gap_sums(layout, bits, base, active=i == 0) for i, base in enumerate(bases)]
    counts, low, unary = zip(*map(_streams, found or [gap_sums(layout, bits, None)]), strict=True)
    best: Tensor = geo.rice_size(low[0][0], unary[0][0]).clamp(max=geo.bitmap_size)
    for i in range(len(bases)):
        moved, low_bits, unary_bits = (x[i][-2:].sum(0) for x in (counts, low, unary))  # dropped and grown
        best = torch.minimum(best, geo.difference_size(low_bits, unary_bits))
        best = torch.where(moved.sum(-1) == 0, geo.known_size, best)
    return best


def _streams(gaps: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """For each list and row the counts of its layers and the bits of its two streams."""
    counts, room, sums = gaps
    coded = torch.minimum(counts, room - counts)
    k, quotients = rice.best_of(sums, coded)
    return counts, (coded * k).sum(-1), (coded + quotients).sum(-1)
