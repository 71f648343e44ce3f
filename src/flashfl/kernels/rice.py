"""What Rice coding depends on, for the masks of many clients at once: no list is ever made and nothing is waited for.

For each row three sorted lists are looked at: the active weights; those dropped from a base, among the base's; those
grown, among all others. Masks are packed to words of 32 places first: what a list holds, counts and skips within a word
is bit arithmetic, and running totals go over words. The encoder's plain way is `wire.rice.code`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.layout import Layout
from .blocks import Blocks, blocks

WORDS = 256  # a block is this many words of one layer


class Gaps(NamedTuple):
    """For each list, row and layer: how many it holds, of how many places, and the sums of gap >> k, k first."""

    counts: Tensor  # [lists, rows, layers]
    room: Tensor
    sums: Tensor  # [k, lists, rows, layers]


@triton.jit
def _pack(bits, out, start_of, stop_of, K, WORDS: tl.constexpr):
    """A byte a place to a bit a place."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    word, place = tl.arange(0, WORDS), tl.arange(0, 32)
    at = tl.load(start_of + block) + word[:, None] * 32 + place[None, :]
    found = tl.load(bits + row * K + at, mask=at < tl.load(stop_of + block), other=0) != 0
    packed = tl.sum(found.to(tl.uint32) << place[None, :].to(tl.uint32), 1)
    out += (row * tl.num_programs(0) + block) * WORDS
    tl.store(out + word, packed.to(tl.int32, bitcast=True))


@triton.jit
def _ones(x):
    """How many bits of each word are set."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _below_highest(x):
    """The bits below the highest one set."""
    x = x | (x >> 1)
    x = x | (x >> 2)
    x = x | (x >> 4)
    x = x | (x >> 8)
    x = x | (x >> 16)
    return x >> 1


@triton.jit
def _sets(bits, base, which, row, block, word, places, bits_step, base_step, HAS_BASE: tl.constexpr,
          WORDS: tl.constexpr):  # fmt: skip
    """Words of the places a list counts, and of those it holds; `places` is how many its block has."""
    there = (word >= 0) & (word * 32 < places)
    width = tl.minimum(places - word * 32, 32)
    every = tl.full([WORDS], 0xFFFFFFFF, tl.uint32)
    universe = tl.where(there, every >> (32 - width).to(tl.uint32), 0)
    at = block.to(tl.int64) * WORDS + word
    chosen = tl.load(bits + row * bits_step + at, mask=there, other=0).to(tl.uint32, bitcast=True)
    if HAS_BASE:
        old = tl.load(base + row * base_step + at, mask=there, other=0).to(tl.uint32, bitcast=True)
        new = chosen
        universe = tl.where(which == 0, universe, tl.where(which == 1, old, universe & (old ^ every)))
        chosen = universe & tl.where(which == 1, new ^ every, new)
    return universe, chosen


@triton.jit
def _last(universe, chosen, count, word):
    """The rank of the last place held, -1 if there is none."""
    at = tl.max(tl.where(chosen != 0, word, -1), 0)
    within = _ones(universe & _below_highest(chosen))
    rank = tl.sum(tl.where(word < at, count, 0), 0) + tl.sum(tl.where(word == at, within, 0), 0)
    return tl.where(at < 0, -1, rank)


@triton.jit
def _survey(bits, base, out, start_of, stop_of, bits_step, base_step, FIRST: tl.constexpr, HAS_BASE: tl.constexpr,
            WORDS: tl.constexpr):  # fmt: skip
    """Of each block: its places, how many are held, and the rank of the last one held and of the last one not."""
    block, row, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    word = tl.arange(0, WORDS)
    places = tl.load(stop_of + block) - tl.load(start_of + block)
    universe, chosen = _sets(bits, base, which + FIRST, row, block, word, places, bits_step, base_step, HAS_BASE, WORDS)
    count = _ones(universe)
    each = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    out += (which * tl.num_programs(1) + row) * tl.num_programs(0) + block
    tl.store(out, tl.sum(count, 0))
    tl.store(out + each, tl.sum(_ones(chosen), 0))
    tl.store(out + 2 * each, _last(universe, chosen, count, word))
    tl.store(out + 3 * each, _last(universe, universe ^ chosen, count, word))


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _add_up(bits, base, survey, offset, carry, room, counts, sums, layer_of, start_of, stop_of, bits_step, base_step, L,
            FIRST: tl.constexpr, HAS_BASE: tl.constexpr, WORDS: tl.constexpr):  # fmt: skip
    """Add a block's gaps, shifted by every k that may be the best, to its list's sums."""
    block, row, which = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    here = (which * tl.num_programs(1) + row) * tl.num_programs(0) + block
    slot = (which * tl.num_programs(1) + row) * L + tl.load(layer_of + block)
    all_held, all_places = tl.load(counts + slot), tl.load(room + slot)
    turned = 2 * all_held > all_places  # coded as what it does not hold
    each = tl.num_programs(0).to(tl.int64) * tl.num_programs(1) * tl.num_programs(2)
    held = tl.load(survey + each + here)
    if tl.where(turned, tl.load(survey + here) - held, held) > 0:
        word = tl.arange(0, WORDS)
        places = tl.load(stop_of + block) - tl.load(start_of + block)
        universe, chosen = _sets(
            bits, base, which + FIRST, row, block, word, places, bits_step, base_step, HAS_BASE, WORDS
        )
        chosen = tl.where(turned, universe ^ chosen, chosen)
        # The same one word earlier: running totals over it leave out the word itself.
        before, earlier = _sets(
            bits, base, which + FIRST, row, block, word - 1, places, bits_step, base_step, HAS_BASE, WORDS
        )
        earlier = tl.where(turned, before ^ earlier, earlier)
        step = _ones(before)
        rank = tl.cumsum(step, 0)
        last = tl.where(earlier != 0, rank - step + _ones(before & _below_highest(earlier)), -1)
        last = tl.associative_scan(last, 0, _larger)
        behind = tl.load(offset + here).to(tl.int32)
        last = tl.where(last >= 0, last + behind, tl.load(carry + here).to(tl.int32))
        rank += behind
        # All gaps of a list are fewer places than it has, so once 2**k times its length is that much, k is the last
        # that can be the best: see `rice.best_k`.
        ratio = all_places // tl.maximum(tl.where(turned, all_places - all_held, all_held), 1)
        depth = 1
        while ratio > 0:
            ratio = ratio >> 1
            depth += 1
        ks = tl.arange(0, 32)
        found = tl.zeros([32], dtype=tl.int64)
        while tl.max((chosen != 0).to(tl.int32), 0) > 0:
            lowest = chosen & (0 - chosen)
            at = rank + _ones(universe & (lowest - 1))
            gap = tl.where(chosen != 0, at - last - 1, 0)
            last = tl.where(chosen != 0, at, last)
            chosen = chosen ^ lowest
            for k in range(depth):
                found += tl.where(ks == k, tl.sum(gap >> k, 0).to(tl.int64), 0)
        tl.atomic_add(sums + slot * 32 + ks, found, mask=found > 0)


def _packed(bits: Tensor, work: Blocks) -> Tensor:
    """[rows, blocks * WORDS] words of 32 places each."""
    bits = bits.contiguous()
    out = torch.empty(len(bits), len(work) * WORDS, dtype=torch.int32, device=bits.device)
    _pack[(len(work), len(bits))](bits, out, work.start, work.stop, bits.shape[1], WORDS, num_warps=4)
    return out


def gap_sums(layout: Layout, bits: Tensor, base: Tensor | None, active: bool = True) -> Gaps:
    """bits and base are [rows, K], or [1, K] for one that is the same in all rows.

    The lists are: active (unless told not to), and with a base dropped and grown.
    """
    rows, device, n = max(len(bits), 1 if base is None else len(base)), bits.device, len(layout.prunable)
    work = blocks(layout.spans, device, 32 * WORDS)
    first, lists, with_base = (0 if active else 1), int(active) + (0 if base is None else 2), base is not None
    grid = (len(work), rows, lists)
    mine = _packed(bits, work)
    other = mine if base is None else _packed(base, work)
    steps = [0 if len(x) == 1 else x.shape[1] for x in (mine, other)]
    survey = torch.empty(4, lists, rows, len(work), dtype=torch.int32, device=device)
    _survey[grid](mine, other, survey, work.start, work.stop, *steps, first, with_base, WORDS, num_warps=4)
    places, held, last, last_free = survey.long()
    layer = work.layer.long()
    room, counts = (torch.zeros(lists, rows, n, dtype=torch.int64, device=device) for _ in range(2))
    room.index_add_(-1, layer, places)
    counts.index_add_(-1, layer, held)
    offset = work.before(places)
    last = torch.where((2 * counts > room)[..., layer], last_free, last)
    # The last one before a block: a running maximum over blocks that starts anew with every layer.
    far = layer << 32
    running = (torch.where(last >= 0, last + offset, -1) + far).cummax(-1).values
    carry = torch.full_like(running, -1)
    carry[..., 1:] = (running[..., :-1] - far[1:]).clamp(min=-1)
    sums = torch.zeros(lists, rows, n, 32, dtype=torch.int64, device=device)
    _add_up[grid](
        mine, other, survey, offset, carry, room, counts, sums, *work.spans, *steps, n, first, with_base, WORDS,
        num_warps=4,
    )  # fmt: skip
    depth = min(32, max(layout.sizes, default=0).bit_length() + 1)
    return Gaps(counts, room, sums[..., :depth].movedim(-1, 0))
