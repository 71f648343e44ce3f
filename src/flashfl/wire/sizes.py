"""Sizes of mask forms on any device, many clients at once, without writing a byte.

The same closed forms as `rice` and `masks`, as tensor reductions: what an engine that keeps masks on a GPU counts is to
the byte what an encoder would write. The only wait for the device is the one that finding set bits implies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout
from .geometry import HASH, geometry


class RiceBits(NamedTuple):
    """For each row the bits of its low and of its unary stream; for each row and layer the parameter chosen."""

    low: Tensor
    unary: Tensor
    k: Tensor

    def __add__(self, other: object) -> RiceBits:
        """Two groups of lists in one block."""
        assert isinstance(other, RiceBits)
        return RiceBits(self.low + other.low, self.unary + other.unary, torch.cat([self.k, other.k], 1))

    @property
    def bytes(self) -> Tensor:
        return (self.low + 7) // 8 + (self.unary + 7) // 8


class MaskSizes(NamedTuple):
    """For each row: active weights of each layer, and bytes of the mask section under the smallest form."""

    counts: Tensor  # [rows, layers]
    bytes: Tensor  # [rows]


def layer_counts(layout: Layout, bits: Tensor) -> Tensor:
    """[rows, K] booleans -> [rows, layers] counts."""
    rows = [bits[:, layer.start : layer.stop].sum(1) for layer in layout.prunable]
    return torch.stack(rows, 1) if rows else bits.new_zeros((len(bits), 0), dtype=torch.int64)


def rice_bits(layout: Layout, chosen: Tensor, universe: Tensor | None = None) -> RiceBits:
    """The size of `chosen` [rows, K] as Rice-coded lists, one for each row and layer.

    `universe` ([rows, K] or one row for all) says which places a list counts; None: all of them.
    """
    rows, total = chosen.shape
    counts = layer_counts(layout, chosen)
    sizes = counts.new_tensor(layout.sizes).expand(rows, -1) if universe is None else layer_counts(layout, universe)
    flip = 2 * counts > sizes
    coded = chosen.clone()
    for index, layer in enumerate(layout.prunable):
        part = flip[:, index : index + 1]
        if universe is not None:
            part = part & universe[:, layer.start : layer.stop]
        coded[:, layer.start : layer.stop] ^= part
    at = coded.flatten().nonzero().squeeze(1)
    starts = torch.tensor([layer.start for layer in layout.prunable], device=at.device)
    edges = (torch.arange(rows, device=at.device)[:, None] * total + starts).flatten()
    slots = torch.searchsorted(at, torch.cat([edges, edges.new_tensor([rows * total])]))
    gaps = _gaps(at, edges, slots, universe, total)
    return _best(gaps, slots, max(layout.sizes, default=1).bit_length(), rows)


def _gaps(at: Tensor, edges: Tensor, slots: Tensor, universe: Tensor | None, total: int) -> Tensor:
    """Places of the universe skipped before each position, counted from its list's start."""
    if universe is None:
        rank, first = at, edges
    else:
        before = universe.flatten().cumsum(0, dtype=torch.int32) - universe.flatten().to(torch.int32)
        shared = universe.shape[0] == 1
        rank = before[at % total if shared else at].to(torch.int64)
        first = before[(edges % total if shared else edges).clamp(max=max(0, len(before) - 1))].to(torch.int64)
    mine = torch.searchsorted(edges, at, right=True) - 1
    gaps = rank.clone()
    gaps[1:] -= rank[:-1] + 1
    opens = slots[mine] == torch.arange(len(at), device=at.device)
    return torch.where(opens, rank - first[mine], gaps)


def _best(gaps: Tensor, slots: Tensor, deepest: int, rows: int) -> RiceBits:
    """The smallest best k of each list and the stream sizes; see `rice.best_k` for why the first that fails is best."""
    table = []
    for k in range(deepest + 2):
        running = torch.cat([gaps.new_zeros(1), (gaps >> k).cumsum(0)])
        table.append(running[slots[1:]] - running[slots[:-1]])
    quotients, coded = torch.stack(table), slots.diff()
    best = (quotients[:-1] - quotients[1:] > coded).sum(0)
    chosen = quotients.gather(0, best[None])[0]
    low, unary = (coded * best).view(rows, -1).sum(1), (coded + chosen).view(rows, -1).sum(1)
    return RiceBits(low, unary, best.view(rows, -1))


def mask_sizes(layout: Layout, bits: Tensor, bases: Sequence[Tensor] = ()) -> MaskSizes:
    """The mask section of each row of `bits` [rows, K], given the masks its receiver holds.

    Each base is [K] or [1, K] (the same for all rows) or [rows, K]. Equals `masks.plan(...).piece.size` for a mask
    without a recipe.
    """
    geo, rows = geometry(layout), len(bits)
    counts = layer_counts(layout, bits)
    if not rows or not layout.prunable_size:
        return MaskSizes(counts, torch.full((rows,), geo.bitmap_size, device=bits.device))
    best = geo.rice_fixed + rice_bits(layout, bits).bytes
    best = best.clamp(max=geo.bitmap_size)
    for base in bases:
        base = base.view(-1, layout.prunable_size)
        moved = rice_bits(layout, base & ~bits, base) + rice_bits(layout, bits & ~base, ~base)
        best = torch.minimum(best, geo.difference_fixed + moved.bytes)
        equal = (bits == base).all(1)
        best = torch.where(equal, best.clamp(max=1 + HASH), best)
    return MaskSizes(counts, best)
