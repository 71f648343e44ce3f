"""Rice-coded lists round-trip, have the size that was counted, and use the best parameter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_support import resnet_layout

from flashfl.wire import rice
from flashfl.wire.errors import BadCount, BadField, BadLength, OutOfRange
from flashfl.wire.reader import Reader, byte_length


def code(ranks: list[int], size: int) -> rice.Coded:
    return rice.Coded.of(np.isin(np.arange(size), ranks))


@st.composite
def sets(draw: st.DrawFn) -> tuple[list[int], int]:
    """Some places, and out of how many."""
    size = draw(st.integers(0, 300))
    return sorted(draw(st.sets(st.integers(0, max(0, size - 1)), max_size=size)) if size else ()), size


@given(st.lists(sets(), max_size=4))
def test_rice_lists_round_trip(block: list[tuple[list[int], int]]) -> None:
    flags = [np.isin(np.arange(size), ranks) for ranks, size in block]
    lists = [rice.Coded.of(own) for own in flags]
    data = rice.write(lists)
    low, unary = sum(len(x.gaps) * x.k for x in lists), sum(len(x.gaps) + int((x.gaps >> x.k).sum()) for x in lists)
    assert (
        len(data) == rice.block_size(len(lists), low, unary) == len(lists) + 4 + byte_length(low) + byte_length(unary)
    )
    reader = Reader(memoryview(data), "mask")
    found = rice.read_flags(reader, [len(ranks) for ranks, _ in block], [size for _, size in block])
    reader.end()
    assert found.tolist() == [flag for own in flags for flag in own.tolist()]


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=50))
def test_parameter_is_the_smallest_of_the_best(gaps: list[int]) -> None:
    array = np.array(gaps, np.int32)
    sizes = [len(gaps) * (1 + p) + int((array >> p).sum()) for p in range(rice.MAX_K + 1)]
    assert rice.best_k(array) == int(np.argmin(sizes))


def test_rice_streams_by_hand() -> None:
    """Ranks 1, 4, 5, 12 of 20: gaps 1, 2, 0, 6; k = 1 takes 4 * 2 + (0 + 1 + 0 + 3) = 12 bits."""
    coded = code([1, 4, 5, 12], 20)
    assert coded.gaps.tolist() == [1, 2, 0, 6]
    assert coded.k == 1
    low = bytes([0b0001])  # the lowest bits 1 0 0 0
    unary = bytes([0b10001101])  # 1, 01, 1, 0001, read from the lowest bit
    assert rice.write([coded]) == b"\1" + b"\1\0\0\0" + low + unary


@pytest.mark.parametrize("count", [0, 20])
def test_empty_and_full_cost_nothing(count: int) -> None:
    assert rice.write([code(list(range(count)), 20)]) == b"\0" + bytes(4)


def read(count: int, universe: int, k: int, low: bytes, unary: bytes) -> list[int]:
    data = bytes([k]) + len(unary).to_bytes(4, "little") + low + unary
    places: list[int] = np.flatnonzero(rice.read_flags(Reader(memoryview(data), "mask"), [count], [universe])).tolist()
    return places


def test_invalid_rice_streams_are_refused() -> None:
    assert read(2, 8, 0, b"", bytes([0b101])) == [0, 2]
    with pytest.raises(BadCount):
        read(3, 8, 0, b"", bytes([0b101]))
    with pytest.raises(BadLength, match="longer"):
        read(2, 8, 0, b"", bytes([0b101, 0]))
    with pytest.raises(BadLength, match="goes on"):
        read(2, 20, 0, b"", bytes([0b101, 0]))
    with pytest.raises(OutOfRange):
        read(2, 4, 0, b"", bytes([0b10001]))
    with pytest.raises(OutOfRange):
        read(1, 6, 2, bytes([0b11]), bytes([0b10]))
    with pytest.raises(BadField, match="smallest"):
        read(2, 8, 1, bytes([0b00]), bytes([0b11]))
    with pytest.raises(BadField, match="padding"):
        read(1, 20, 3, bytes([0b1100]), bytes([0b1]))
    with pytest.raises(BadField, match="range"):
        read(1, 8, 32, b"\0\0\0\0", bytes([1]))


def test_resnet_layout_is_the_papers() -> None:
    layout = resnet_layout()
    assert layout.prunable_size == 11_159_232
    assert layout.size - layout.trained_size == 9_600
