"""Sorted sets as Rice-coded gaps: unary quotients and low bits in two streams, whole lists at a time.

A list is a set of `count` ranks out of a universe of `universe` places. If it holds more than half of them, its
complement is coded instead, so a full or empty list costs nothing. A gap is the number of places skipped before a rank.
With parameter k a gap takes 1 + k + (gap >> k) bits. Each list uses the smallest k that gives it the least size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .errors import BadCount, BadField, BadLength, OutOfRange
from .reader import Array, byte_length

MAX_K = 31


def coded_counts(counts: Array, universe: Array) -> Array:
    """How many ranks each list really codes: the smaller of the set and its complement."""
    out: Array = np.minimum(counts, universe - counts)
    return out


def sums(values: Array, counts: Array) -> Array:
    """The sum of each list's values; `values` holds the lists one after another."""
    out = np.zeros(len(counts), np.int64)
    some = np.flatnonzero(counts)
    if some.size:
        starts = (np.cumsum(counts) - counts)[some]
        out[some] = np.add.reduceat(values, starts, dtype=np.int64)
    return out


def best_k(gaps: Array, coded: Array) -> tuple[Array, Array]:
    """The smallest k of least size for each list, and its sum of gap >> k.

    Raising k by one adds n bits and saves S(k) - S(k+1), where S(k) is the sum of gap >> k. The saving never grows with
    k, so the first k that does not pay is the best.
    """
    k = np.zeros(len(coded), np.int64)
    total = sums(gaps, coded)
    now, rest = total.copy(), gaps
    growing = coded > 0
    for step in range(1, MAX_K + 1):
        rest = rest >> 1
        after = sums(rest, coded)
        growing = growing & (now - after > coded)
        if not growing.any():
            break
        k[growing], total[growing] = step, after[growing]
        now = after
    return k, total


class Streams(NamedTuple):
    """The two streams of a block of lists, padded with zero bits to whole bytes."""

    low: bytes
    unary: bytes


@dataclass(frozen=True)
class Lists:
    """Lists with their best parameters: all that their size and their streams depend on."""

    coded: Array
    gaps: Array
    k: Array
    quotients: Array  # for each list the sum of gap >> k

    @property
    def low_bits(self) -> int:
        return int((self.coded * self.k).sum())

    @property
    def unary_bits(self) -> int:
        return int((self.coded + self.quotients).sum())

    @staticmethod
    def of(ranks: Array, counts: Array, universe: Array) -> Lists:
        """`ranks`: the lists one after another, each ascending and counted from its own universe's start."""
        coded = coded_counts(counts, universe)
        if not np.array_equal(coded, counts):
            ranks = complement(ranks, counts, universe, coded != counts)
        return Lists.coding(ranks, coded)

    @staticmethod
    def coding(ranks: Array, coded: Array) -> Lists:
        """Lists of exactly these ranks, none of which holds more than half of its universe."""
        gaps = ranks.astype(np.int32)
        gaps[1:] -= gaps[:-1].copy()
        some = np.flatnonzero(coded)
        starts = (np.cumsum(coded) - coded)[some]
        gaps -= 1
        gaps[starts] = ranks[starts]
        return Lists(coded, gaps, *best_k(gaps, coded))

    def streams(self) -> Streams:
        low = np.empty(self.low_bits, np.uint8)
        at = 0
        for plane, start, stop in _planes(self.coded, self.k):
            low[at : at + stop - start] = (self.gaps[start:stop] >> plane) & 1
            at += stop - start
        ends = np.cumsum((self.gaps >> np.repeat(self.k.astype(np.int32), self.coded)) + 1, dtype=np.int64) - 1
        unary = np.zeros(self.unary_bits, np.uint8)
        unary[ends] = 1
        return Streams(_pack(low), _pack(unary))


def complement(ranks: Array, counts: Array, universe: Array, which: Array) -> Array:
    """The lists again, those in `which` replaced by the ranks they leave out."""
    stops = np.cumsum(counts)
    parts = []
    for index, stop in enumerate(stops.tolist()):
        part = ranks[stop - int(counts[index]) : stop]
        if which[index]:
            left = np.ones(int(universe[index]), bool)
            left[part] = False
            part = np.flatnonzero(left)
        parts.append(part)
    return np.concatenate(parts) if parts else ranks


def read(counts: Array, universe: Array, k: Array, low: Array, unary: memoryview) -> Array:
    """The coded ranks of all lists (of the complement where that was coded). `low`: the bits of the low stream."""
    coded = coded_counts(counts, universe)
    if bool((k > MAX_K).any()) or bool((k[coded == 0] != 0).any()):
        raise BadField(f"mask: a Rice parameter is out of range; it must be 0 to {MAX_K}, and 0 for an empty list")
    slack = universe - coded
    gaps = _quotients(coded, slack >> k, unary)
    quotients = sums(gaps, coded)
    if bool((quotients > slack >> k).any()):
        raise OutOfRange("mask: a Rice-coded position lies outside its layer")
    half = sums(gaps >> 1, coded)
    gaps <<= np.repeat(k.astype(np.int32), coded)
    at = 0
    for plane, start, stop in _planes(coded, k):
        gaps[start:stop] |= low[at : at + stop - start].astype(np.int32) << plane
        at += stop - start
    if bool((sums(gaps, coded) > slack).any()):
        raise OutOfRange("mask: a Rice-coded position lies outside its layer")
    below = sums(gaps >> np.repeat(np.maximum(k - 1, 0).astype(np.int32), coded), coded)
    if bool((quotients - half > coded).any()) or bool(((below - quotients <= coded) & (k > 0)).any()):
        raise BadField("mask: a Rice parameter is not the smallest of those that give the least size")
    gaps += 1
    ranks = np.cumsum(gaps, dtype=np.int64)  # counted from the first list's start, and one too high
    before = np.append(0, ranks)[np.cumsum(coded) - coded] + 1
    ranks -= np.repeat(before, coded)
    return ranks


def _planes(coded: Array, k: Array) -> list[tuple[int, int, int]]:
    """(bit, start, stop): plane by plane, the spans of items whose list has that low bit."""
    stops = np.cumsum(coded).tolist()
    spans = [(stop - n, stop, p) for stop, n, p in zip(stops, coded.tolist(), k.tolist(), strict=True) if n and p]
    deepest = max((p for _, _, p in spans), default=0)
    return [(plane, start, stop) for plane in range(deepest) for start, stop, p in spans if p > plane]


def _quotients(coded: Array, most: Array, unary: memoryview) -> Array:
    """The gaps' quotients (int32): runs of zeros, each ended by a one. The bound is checked before anything unfolds."""
    items = int(coded.sum())
    if len(unary) > byte_length(items + int(most.sum())):
        raise BadLength("mask: the unary stream is longer than its lists allow")
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(unary, np.uint8), bitorder="little").view(bool))
    if len(ends) != items:
        raise BadCount(f"mask: the unary stream has {len(ends)} gaps, its lists have {items}")
    if len(unary) != (byte_length(int(ends[-1]) + 1) if items else 0):
        raise BadLength("mask: the unary stream goes on after its last gap")
    gaps = ends.astype(np.int32)
    gaps[1:] -= gaps[:-1].copy() + 1
    return gaps


def _pack(bits: Array) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()
