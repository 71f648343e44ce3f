"""Sizes of mask forms on any device, many clients at once, without writing a byte.

The same closed forms as `rice` and `masks`, as tensor reductions: what an engine that keeps masks on a GPU counts is to
the byte what an encoder would write. A device is waited for only where set bits are found and complements decided.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.layout import Layout
from .geometry import HASH, geometry


class RiceBits(NamedTuple):
    """For each row the bits of its low and of its unary stream; for each row and layer its count and parameter."""

    low: Tensor
    unary: Tensor
    counts: Tensor
    k: Tensor

    @property
    def bytes(self) -> Tensor:
        return _bytes(self.low) + _bytes(self.unary)


class MaskSizes(NamedTuple):
    """For each row: active weights of each layer, and bytes of the mask section under the smallest form."""

    counts: Tensor  # [rows, layers]
    bytes: Tensor  # [rows]


class _Places:
    """Where each list of each row begins, and how many places of its universe lie before any position."""

    def __init__(self, layout: Layout, rows: int, universe: Tensor | None, device: torch.device) -> None:
        self.rows, self.total, self.layers = rows, layout.prunable_size, len(layout.sizes)
        self.sizes = torch.tensor(layout.sizes, device=device)
        starts = self.sizes.cumsum(0) - self.sizes
        self.edges = (torch.arange(rows, device=device)[:, None] * self.total + starts).flatten()
        self.stops = self.edges + self.sizes.repeat(rows)
        self.universe = universe
        if universe is not None:
            flat = universe.flatten()
            self.before = torch.cat([flat.new_zeros(1, dtype=torch.int32), flat.cumsum(0, dtype=torch.int32)])

    def rank(self, at: Tensor) -> Tensor:
        """Places of the universe before each position, counted from anywhere."""
        if self.universe is None:
            return at
        shared = self.universe.shape[0] == 1 < self.rows
        return self.before[at - at.div(self.total, rounding_mode="floor") * self.total if shared else at].long()

    def room(self) -> Tensor:
        """[rows, layers]: the size of each list's universe."""
        if self.universe is None:
            return self.sizes.expand(self.rows, -1)
        shared = self.universe.shape[0] == 1
        edges, stops = (x[: self.layers] if shared else x for x in (self.edges, self.stops))
        return (self.before[stops] - self.before[edges]).long().view(-1, self.layers).expand(self.rows, -1)

    def find(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The set positions, ascending, and where among them each list begins (and the last one ends)."""
        at = chosen.flatten().nonzero().squeeze(1)
        return at, torch.searchsorted(at, torch.cat([self.edges, self.stops[-1:]]))


def rice_bits(layout: Layout, chosen: Tensor, universe: Tensor | None = None) -> RiceBits:
    """The size of `chosen` [rows, K] as Rice-coded lists, one for each row and layer.

    `universe` ([rows, K] or one row for all) says which places a list counts; None: all of them.
    """
    rows, total = chosen.shape
    places = _Places(layout, rows, universe, chosen.device)
    at, slots = places.find(chosen)
    counts = slots.diff().view(rows, -1)
    flip = 2 * counts > places.room()
    if bool(flip.any()):
        turned = flip.repeat_interleave(places.sizes, 1, output_size=total)
        at, slots = places.find(chosen ^ (turned if universe is None else turned & universe))
    gaps = _gaps(at, slots, places)
    small = 2 * rows * total < 1 << 31  # all sums together stay below this, so half the memory will do
    return _best(gaps.int() if small else gaps, slots, max(layout.sizes).bit_length(), counts)


def _gaps(at: Tensor, slots: Tensor, places: _Places) -> Tensor:
    """Places of the universe skipped before each position, counted from its list's start."""
    rank, first = places.rank(at), places.rank(places.edges)
    mine = torch.searchsorted(places.edges, at, right=True) - 1
    # Empty layers share their edge with the next one; whichever is found, the list's first slot is the same.
    gaps = rank.clone()
    gaps[1:] -= rank[:-1] + 1
    opens = slots[mine] == torch.arange(len(at), device=at.device)
    return torch.where(opens, rank - first[mine], gaps)


def _best(gaps: Tensor, slots: Tensor, deepest: int, counts: Tensor) -> RiceBits:
    """The smallest best k of each list and the stream sizes; see `rice.best_k` for why the first that fails is best."""
    steps = torch.arange(deepest + 2, dtype=gaps.dtype, device=gaps.device)
    running = (gaps[None] >> steps[:, None]).flatten().cumsum(0, dtype=gaps.dtype)  # one long scan is the fast one
    running = torch.cat([running.new_zeros(1), running])
    ends = running[slots[None] + steps[:, None].long() * len(gaps)].long()
    quotients, coded = ends[:, 1:] - ends[:, :-1], slots.diff()
    best = (quotients[:-1] - quotients[1:] > coded).sum(0)
    chosen = quotients.gather(0, best[None])[0]
    low, unary = (coded * best).view(counts.shape).sum(1), (coded + chosen).view(counts.shape).sum(1)
    return RiceBits(low, unary, counts, best.view(counts.shape))


def _bytes(bits: Tensor) -> Tensor:
    return (bits + 7) // 8


def mask_sizes(layout: Layout, bits: Tensor, bases: Sequence[Tensor] = ()) -> MaskSizes:
    """The mask section of each row of `bits` [rows, K], given the masks its receiver holds.

    Each base is [K] or [1, K] (the same for all rows) or [rows, K]. Equals `masks.plan(...).piece.size` for a mask
    without a recipe.
    """
    geo, rows = geometry(layout), len(bits)
    if not rows or not layout.prunable_size:
        counts = torch.zeros((rows, geo.layers), dtype=torch.int64, device=bits.device)
        return MaskSizes(counts, torch.full((rows,), geo.bitmap_size, device=bits.device))
    full = rice_bits(layout, bits)
    best = (geo.rice_fixed + full.bytes).clamp(max=geo.bitmap_size)
    for base in bases:
        base = base.view(-1, layout.prunable_size)
        dropped, grown = rice_bits(layout, base & ~bits, base), rice_bits(layout, bits & ~base, ~base)
        moved = _bytes(dropped.low + grown.low) + _bytes(dropped.unary + grown.unary)
        best = torch.minimum(best, geo.difference_fixed + moved)
        equal = (dropped.counts + grown.counts).sum(1) == 0
        best = torch.where(equal, best.clamp(max=1 + HASH), best)
    return MaskSizes(full.counts, best)
