"""Sorted sets as Rice-coded gaps: unary quotients and low bits in two streams, many sets to a block.

A list is a set of places out of a universe. If it holds more than half of them, its complement is coded instead, so a
full or empty list costs nothing. A gap is the number of places skipped before a rank. With parameter k a gap takes
1 + k + (gap >> k) bits. Each list uses the smallest k that gives it the least size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from torch import Tensor

from .errors import BadCount, BadField, BadLength, OutOfRange
from .reader import Array, Bits, Reader, byte_length

MAX_K = 31


def best_k(gaps: Array) -> int:
    """The smallest k of least size.

    Raising k by one adds n bits and saves S(k) - S(k+1), where S(k) is the sum of gap >> k. The saving never grows with
    k, so the first k that does not pay is the best.
    """
    total = int(gaps.sum())
    for k in range(MAX_K):
        after = int((gaps >> (k + 1)).sum())
        if total - after <= len(gaps):
            return k
        total = after
    return MAX_K


def best_of(sums: Tensor, counts: Tensor | int) -> tuple[Tensor, Tensor]:
    """`best_k` of many lists at once, and the sum of gap >> k. sums: of gap >> k, k first. counts: of the gaps."""
    k = (sums[:-1] - sums[1:] > counts).sum(0)
    return k, sums.gather(0, k[None])[0]


@dataclass(frozen=True)
class Coded:
    """A list with its best parameter: all that its bits depend on."""

    count: int  # places it holds
    gaps: Array  # between them, or between those it leaves out if they are fewer
    k: int

    @staticmethod
    def of(flags: Array) -> Coded:
        """The list of the places that are set."""
        count = int(np.count_nonzero(flags))
        return Coded.at(count, np.flatnonzero(flags if 2 * count <= len(flags) else ~flags))

    @staticmethod
    def at(count: int, ranks: Array) -> Coded:
        """A list of `count` places. ranks: these places, or those left out if they are fewer; ascending."""
        gaps = (np.diff(ranks, prepend=-1) - 1).astype(np.int32)
        return Coded(count, gaps, best_k(gaps))


def block_size(lists: int, low: Bits, unary: Bits) -> Bits:
    """Bytes of a block: a parameter for each list, the unary stream's length, the streams of so many bits."""
    return byte_length(low) + byte_length(unary) + (lists + 4)


def write(lists: Sequence[Coded]) -> bytes:
    """A block: the parameters, the unary stream's length, the low stream, the unary stream."""
    low = [_low(x.gaps, plane) for plane in range(MAX_K) for x in lists if x.k > plane]
    runs = [(x.gaps >> x.k) + 1 for x in lists]  # zeros and a one
    unary = np.zeros(sum(int(run.sum()) for run in runs), np.uint8)
    if lists:
        unary[np.cumsum(np.concatenate(runs), dtype=np.int64) - 1] = 1
    streams = [np.packbits(bits, bitorder="little").tobytes() for bits in (np.concatenate([unary[:0], *low]), unary)]
    return bytes(x.k for x in lists) + len(streams[1]).to_bytes(4, "little") + b"".join(streams)


def _low(gaps: Array, plane: int) -> Array:
    """One bit of each gap, as 0 and 1."""
    bits: Array = ((gaps >> plane) & 1).astype(np.uint8)
    return bits


def read_flags(reader: Reader, counts: Sequence[int], sizes: Sequence[int]) -> Array:
    """The flags of some lists, one list after another. counts, sizes: how many places each holds, of how many."""
    coded = [min(count, size - count) for count, size in zip(counts, sizes, strict=True)]
    ks = list(reader.take(len(coded)))
    if any(k > (MAX_K if n else 0) for n, k in zip(coded, ks, strict=True)):
        raise BadField(f"mask: a Rice parameter is out of range; it must be 0 to {MAX_K}, and 0 for an empty list")
    most = [(size - n) >> k for size, n, k in zip(sizes, coded, ks, strict=True)]
    lists = zip(read_gaps(reader, reader.number(4), coded, ks, most), ks, counts, sizes, accumulate(sizes), strict=True)
    flags = np.zeros(sum(sizes), bool)
    for gaps, k, count, size, stop in lists:
        if int(gaps.sum()) > size - len(gaps):
            raise OutOfRange(f"{reader.what}: a Rice-coded position lies outside its layer")
        if best_k(gaps) != k:
            raise BadField(
                f"{reader.what}: a Rice parameter is not the best one. Use the one with the smallest size; if several "
                "tie, the lowest"
            )
        own = flags[stop - size : stop]
        if len(gaps) != count:  # else they are left alone: zeros that nobody touched take no memory
            own[:] = True
        own[np.cumsum(gaps + 1, dtype=np.int64) - 1] = len(gaps) == count
    return flags


def read_gaps(
    reader: Reader, length: int, counts: Sequence[int], ks: Sequence[int], most: Sequence[int]
) -> list[Array]:
    """The gaps of each list (int32). length: of the unary stream. most: what a list's gap >> k may add up to."""
    low = reader.bits(sum(n * k for n, k in zip(counts, ks, strict=True)))
    found = _quotients(reader, length, sum(counts), sum(most))
    gaps = [found[stop - n : stop] for n, stop in zip(counts, accumulate(counts), strict=True)]
    for part, k, limit in zip(gaps, ks, most, strict=True):
        if int(part.sum()) > limit:
            raise OutOfRange(f"{reader.what}: a Rice-coded number lies outside its range")
        part <<= k
    at = 0
    for plane in range(max(ks, default=0)):
        for part, k in zip(gaps, ks, strict=True):
            if k > plane:
                part |= low[at : at + len(part)].astype(np.int32) << plane
                at += len(part)
    return gaps


def _quotients(reader: Reader, length: int, items: int, most: int) -> Array:
    """What each gap >> k is: runs of zeros, each ended by a one. The bound is checked before anything unfolds."""
    if length > byte_length(items + most):
        raise BadLength(f"{reader.what}: the unary stream is longer than its lists allow")
    ends = np.flatnonzero(reader.bits(8 * length))
    if len(ends) != items:
        raise BadCount(f"{reader.what}: the unary stream has {len(ends)} gaps, its lists have {items}")
    if length != (byte_length(int(ends[-1]) + 1) if items else 0):
        raise BadLength(f"{reader.what}: the unary stream goes on after its last gap")
    return (np.diff(ends, prepend=-1) - 1).astype(np.int32)
