"""What Rice coding depends on, for the masks of many clients at once: no list is ever made and nothing is waited for.

For each row three sorted lists are looked at: the active weights; those dropped from a base, among the base's; those
grown, among all others. The torch twin is `wire.sizes.rice_bits`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.layout import Layout
from .blocks import BLOCK, blocks


class Gaps(NamedTuple):
    """For each list, row and layer: how many it holds, of how many places, and the sums of gap >> k, k first."""

    counts: Tensor  # [lists, rows, layers]
    room: Tensor
    sums: Tensor  # [k, lists, rows, layers]


@triton.jit
def _sets(bits, base, which, row, at, inside, bits_step, base_step, HAS_BASE: tl.constexpr):
    """The places a list counts, and those it holds."""
    here = tl.load(bits + row * bits_step + at, mask=inside, other=0) != 0
    universe = inside
    chosen = here
    if HAS_BASE:
        old = tl.load(base + row * base_step + at, mask=inside, other=0) != 0
        universe = tl.where(which == 0, inside, tl.where(which == 1, old, inside & (old == 0)))
        chosen = tl.where(which == 1, universe & (here == 0), universe & here)
    return universe, chosen


@triton.jit
def _survey(bits, base, out, layer_of, start_of, stop_of, bits_step, base_step, FIRST: tl.constexpr,
            HAS_BASE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Of each block: its places, how many are held, and the rank of the last one held and of the last one not."""
    block, row, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    place = tl.arange(0, BLOCK)
    at = tl.load(start_of + block) + place
    inside = at < tl.load(stop_of + block)
    universe, chosen = _sets(bits, base, which + FIRST, row, at, inside, bits_step, base_step, HAS_BASE)
    count = universe.to(tl.int32)
    held = tl.max(tl.where(chosen, place, -1), 0)
    free = tl.max(tl.where(universe & (chosen == 0), place, -1), 0)
    each = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    out += (which * tl.num_programs(1) + row) * tl.num_programs(0) + block
    tl.store(out, tl.sum(count, 0))
    tl.store(out + each, tl.sum(chosen.to(tl.int32), 0))
    tl.store(out + 2 * each, tl.where(held < 0, -1, tl.sum(tl.where(place < held, count, 0), 0)))
    tl.store(out + 3 * each, tl.where(free < 0, -1, tl.sum(tl.where(place < free, count, 0), 0)))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _add_up(bits, base, survey, offset, carry, flip, sums, layer_of, start_of, stop_of, bits_step, base_step, L,
            FIRST: tl.constexpr, HAS_BASE: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Add a block's gaps, shifted by every k, to its list's sums."""
    block, row, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    here = (which * tl.num_programs(1) + row) * tl.num_programs(0) + block
    slot = (which * tl.num_programs(1) + row) * L + tl.load(layer_of + block)
    turned = tl.load(flip + slot) != 0
    each = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    held = tl.load(survey + each + here)
    if tl.where(turned, tl.load(survey + here) - held, held) > 0:
        start = tl.load(start_of + block)
        at = start + tl.arange(0, BLOCK)
        stop = tl.load(stop_of + block)
        universe, chosen = _sets(bits, base, which + FIRST, row, at, at < stop, bits_step, base_step, HAS_BASE)
        chosen = tl.where(turned, universe & (chosen == 0), chosen)
        # The same one place earlier: running totals over it leave out the place itself.
        past = (at > start) & (at <= stop)
        before, earlier = _sets(bits, base, which + FIRST, row, at - 1, past, bits_step, base_step, HAS_BASE)
        earlier = tl.where(turned, before & (earlier == 0), earlier)
        rank = tl.cumsum(before.to(tl.int32), 0)
        last = tl.associative_scan(tl.where(earlier, rank - 1, -1), 0, _larger)
        behind = tl.load(offset + here).to(tl.int32)
        last = tl.where(last >= 0, last + behind, tl.load(carry + here).to(tl.int32))
        gap = tl.where(chosen, rank + behind - last - 1, 0)
        depth = tl.arange(0, 32)
        found = tl.zeros([32], dtype=tl.int64)
        for k in tl.static_range(DEPTH):
            found = tl.where(depth == k, tl.sum(gap >> k, 0).to(tl.int64), found)
        tl.atomic_add(sums + slot * 32 + depth, found, mask=found > 0)


def gap_sums(layout: Layout, bits: Tensor, base: Tensor | None, active: bool = True) -> Gaps:
    """bits and base are [rows, K], or [1, K] for one that is the same in all rows.

    The lists are: active (unless told not to), and with a base dropped and grown.
    """
    rows, device, n = max(len(bits), 1 if base is None else len(base)), bits.device, len(layout.prunable)
    work = blocks(layout, device)
    first, lists = (0 if active else 1), int(active) + (0 if base is None else 2)
    grid = (len(work), rows, lists)
    bits = bits.contiguous()
    other = bits if base is None else base.contiguous()
    steps = [0 if len(x) == 1 else layout.prunable_size for x in (bits, other)]
    shape = (lists, rows, len(work))
    survey = torch.empty(4, *shape, dtype=torch.int32, device=device)
    with_base = base is not None
    _survey[grid](bits, other, survey, *work.spans, *steps, first, with_base, BLOCK, num_warps=8)
    places, held, last, last_free = survey.long()
    layer = work.layer.long()
    room, counts = (torch.zeros(lists, rows, n, dtype=torch.int64, device=device) for _ in range(2))
    room.index_add_(-1, layer, places)
    counts.index_add_(-1, layer, held)
    flip = 2 * counts > room
    offset = work.before(places)
    last = torch.where(flip[..., layer], last_free, last)
    # The last one before a block: a running maximum over blocks that starts anew with every layer.
    far = layer << 32
    running = (torch.where(last >= 0, last + offset, -1) + far).cummax(-1).values
    carry = torch.full_like(running, -1)
    carry[..., 1:] = (running[..., :-1] - far[1:]).clamp(min=-1)
    sums = torch.zeros(lists, rows, n, 32, dtype=torch.int64, device=device)
    depth = min(32, max(layout.sizes, default=0).bit_length() + 1)
    _add_up[grid](
        bits,
        other,
        survey,
        offset,
        carry,
        flip,
        sums,
        *work.spans,
        *steps,
        n,
        first,
        with_base,
        depth,
        BLOCK,
        num_warps=8,
    )
    return Gaps(counts, room, sums[..., :depth].movedim(-1, 0))
