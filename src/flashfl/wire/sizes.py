"""Sizes of mask forms on any device, for many clients at once, without writing a byte.

The sizes are those of `rice` and `geometry`, as tensor reductions. They equal what the encoder writes, to the byte.
With Triton nothing here waits for the GPU; without it, finding set bits does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core.kernel import kernel
from ..core.layout import Layout
from .geometry import geometry

if TYPE_CHECKING:
    from ..kernels.rice import Gaps


class RiceBits(NamedTuple):
    """For each row the bits of its low and of its unary stream; for each row and layer its count and parameter."""

    low: Tensor
    unary: Tensor
    counts: Tensor
    k: Tensor


class MaskSizes(NamedTuple):
    """For each row: active weights of each layer, and bytes of the mask section under the smallest form."""

    counts: Tensor  # [rows, layers]
    bytes: Tensor  # [rows]


class _Places:
    """Where each list of each row begins, and how many places of its universe lie before any position."""

    def __init__(self, layout: Layout, rows: int, universe: Tensor | None, which: Tensor | None, like: Tensor) -> None:
        self.rows, self.total, self.layers = rows, layout.prunable_size, len(layout.sizes)
        self.sizes = torch.tensor(layout.sizes, device=like.device)
        starts = self.sizes.cumsum(0) - self.sizes
        self.edges = (torch.arange(rows, device=like.device)[:, None] * self.total + starts).flatten()
        self.universe, self.which = universe, which
        if universe is not None:
            flat = universe.flatten()
            self.before = torch.cat([flat.new_zeros(1, dtype=torch.int32), flat.cumsum(0, dtype=torch.int32)])
            # What to add to a position in a row to stand at the same place of that row's universe.
            self.shift = (which - torch.arange(rows, device=like.device)) * self.total if which is not None else None

    def rank(self, at: Tensor, row: Tensor) -> Tensor:
        """Places of the universe before each position, counted from anywhere."""
        if self.universe is None:
            return at
        return self.before[at if self.shift is None else at + self.shift[row]].long()

    def room(self) -> Tensor:
        """[rows, layers]: the size of each list's universe."""
        if self.universe is None:
            return self.sizes.expand(self.rows, -1)
        row = torch.arange(self.rows, device=self.edges.device).repeat_interleave(
            self.layers, output_size=len(self.edges)
        )
        ends = self.rank(self.edges + self.sizes.repeat(self.rows), row)
        return (ends - self.rank(self.edges, row)).view(self.rows, -1)

    def find(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The set positions, ascending, and where among them each list begins (and the last one ends)."""
        at = chosen.flatten().nonzero().squeeze(1)
        ends = torch.full((1,), self.rows * self.total, device=at.device)
        return at, torch.searchsorted(at, torch.cat([self.edges, ends]))


def rice_bits(layout: Layout, chosen: Tensor, universe: Tensor | None = None, which: Tensor | None = None) -> RiceBits:
    """The size of `chosen` [rows, K] as Rice-coded lists, one for each row and layer.

    `universe` [n, K] says which places a list counts (None: all of them); row i goes by universe[which[i]], or by
    universe[i] where `which` is not given.
    """
    rows, total = chosen.shape
    places = _Places(layout, rows, universe, which, chosen)
    at, slots = places.find(chosen)
    counts = slots.diff().view(rows, -1)
    flip = 2 * counts > places.room()
    if bool(flip.any()):
        turned = flip.repeat_interleave(places.sizes, 1, output_size=total)
        if universe is not None:
            turned &= universe if which is None else universe[which]
        at, slots = places.find(turned.logical_xor_(chosen))
    gaps = _gaps(at, slots, places)
    small = 2 * rows * total < 1 << 31  # all sums together stay below this, so half the memory will do
    deepest = int(gaps.max()).bit_length() if len(gaps) else 0  # beyond it all quotients are 0
    return _best(gaps.int() if small else gaps, slots, deepest, counts)


def _gaps(at: Tensor, slots: Tensor, places: _Places) -> Tensor:
    """Places of the universe skipped before each position, counted from its list's start."""
    mine = torch.searchsorted(places.edges, at, right=True) - 1
    row = mine.div(places.layers, rounding_mode="floor")
    rank, first = places.rank(at, row), places.rank(places.edges[mine], row)
    gaps = rank.clone()
    gaps[1:] -= rank[:-1] + 1
    opens = slots[mine] == torch.arange(len(at), device=at.device)
    return torch.where(opens, rank - first, gaps)


def _best(gaps: Tensor, slots: Tensor, deepest: int, counts: Tensor) -> RiceBits:
    """The smallest best k of each list and the stream sizes; see `rice.best_k` for why the first that fails is best."""
    steps = torch.arange(deepest + 2, dtype=gaps.dtype, device=gaps.device)
    shifted = torch.cat([gaps.new_zeros(1), (gaps[None] >> steps[:, None]).flatten()])
    running = shifted.cumsum(0, dtype=gaps.dtype)  # one long scan is faster than a row each
    ends = running[slots[None] + steps[:, None].long() * len(gaps)].long()
    quotients = (ends[:, 1:] - ends[:, :-1]).view(-1, *counts.shape)
    return _settle(quotients, slots.diff().view(counts.shape), counts)


def _settle(quotients: Tensor, coded: Tensor, counts: Tensor) -> RiceBits:
    """Given the sums of gap >> k, [k, rows, layers], and how many each list codes."""
    best = (quotients[:-1] - quotients[1:] > coded).sum(0)
    chosen = quotients.gather(0, best[None])[0]
    return RiceBits((coded * best).sum(1), (coded + chosen).sum(1), counts, best)


def mask_sizes(layout: Layout, bits: Tensor, bases: Sequence[Tensor] = ()) -> MaskSizes:
    """The mask section of each row of `bits`, given the masks its receiver holds.

    `bits` and each base are [K], [1, K] (the same for all rows) or [rows, K]: many clients' masks against one base, or
    one mask against what each client holds. Equals `masks.plan(...).piece.size` for a mask without a recipe.
    """
    geo, total = geometry(layout), layout.prunable_size
    bits, *others = (x[None] if x.dim() == 1 else x for x in (bits, *bases))
    rows = max(len(x) for x in (bits, *others)) if len(bits) else 0
    if not rows or not total:
        counts = torch.zeros((rows, geo.layers), dtype=torch.int64, device=bits.device)
        only = geo.known_size if others else geo.bitmap_size  # masks of no weights are all the same
        return MaskSizes(counts, torch.full((rows,), only, device=bits.device))
    found = _all_lists(layout, bits, others)
    best = geo.rice_size(found[0].low, found[0].unary).clamp(max=geo.bitmap_size).expand(rows)
    held: Tensor | None = None
    for dropped, grown in zip(found[1::2], found[2::2], strict=True):
        best = torch.minimum(best, geo.difference_size(dropped.low + grown.low, dropped.unary + grown.unary))
        equal = (dropped.counts + grown.counts).sum(1) == 0
        held = equal if held is None else held | equal
    if held is not None:
        best = torch.where(held, geo.known_size, best)
    return MaskSizes(found[0].counts.expand(rows, -1), best)


def _all_lists(layout: Layout, bits: Tensor, bases: Sequence[Tensor]) -> list[RiceBits]:
    """The active of `bits`, then for each base the dropped and the grown."""
    if bits.is_cuda and (gap_sums := kernel("rice", "gap_sums")) is not None:
        found = [gap_sums(layout, bits, base, active=i == 0) for i, base in enumerate(bases)]
        return [each for gaps in found or [gap_sums(layout, bits, None)] for each in _of_lists(gaps)]
    # Measured in one go, to start few kernels.
    chosen, universes = [bits], [torch.ones_like(bits[:1])]
    for base in bases:
        chosen += [base & ~bits, bits & ~base]
        universes += [base, ~base]
    which, at = [], 0
    for part, universe in zip(chosen, universes, strict=True):
        steps = torch.arange(len(part), device=bits.device)
        which.append(at + (steps if len(universe) == len(part) else steps * 0))
        at += len(universe)
    both = rice_bits(layout, torch.cat(chosen), torch.cat(universes), torch.cat(which))
    parts = [torch.split(field, [len(part) for part in chosen]) for field in both]
    return [RiceBits(*each) for each in zip(*parts, strict=True)]


def _of_lists(gaps: Gaps) -> list[RiceBits]:
    """What a kernel found, list by list."""
    return [
        _settle(sums, torch.minimum(counts, room - counts), counts)
        for counts, room, sums in zip(gaps.counts, gaps.room, gaps.sums.movedim(1, 0), strict=True)
    ]
