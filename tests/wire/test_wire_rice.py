"""Rice-coded lists round-trip, have the size that was counted, and use the best parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_support import layouts, masks, resnet_layout

from flashfl.core.layout import Layout
from flashfl.wire import rice
from flashfl.wire.errors import BadCount, BadField, BadLength, OutOfRange
from flashfl.wire.reader import Reader, byte_length
from flashfl.wire.sizes import rice_bits


@st.composite
def lists(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ranks, counts, universe = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        size = draw(st.integers(0, 300))
        chosen = draw(st.sets(st.integers(0, max(0, size - 1)), max_size=size)) if size else set()
        ranks += sorted(chosen)
        counts.append(len(chosen))
        universe.append(size)
    return np.array(ranks, np.int64), np.array(counts, np.int64), np.array(universe, np.int64)


def low_bits(low: bytes, count: int) -> np.ndarray:
    return Reader(memoryview(low), "low stream").bits(count)


def read_back(ranks: np.ndarray, counts: np.ndarray, universe: np.ndarray) -> np.ndarray:
    coded = rice.Lists.of(ranks, counts, universe)
    low, unary = coded.streams()
    assert (len(low), len(unary)) == (byte_length(coded.low_bits), byte_length(coded.unary_bits))
    found = rice.read(counts, universe, coded.k, low_bits(low, coded.low_bits), memoryview(unary))
    flipped = rice.coded_counts(counts, universe)
    return rice.complement(found, flipped, universe, flipped != counts)


@given(lists())
def test_rice_lists_round_trip(given: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    assert np.array_equal(read_back(*given), given[0])


@given(st.lists(st.integers(0, 100_000), min_size=1, max_size=50))
def test_parameter_is_the_smallest_of_the_best(gaps: list[int]) -> None:
    array = np.array(gaps, np.int32)
    k, total = rice.best_k(array, np.array([len(gaps)]))
    sizes = [len(gaps) * (1 + p) + int((array >> p).sum()) for p in range(rice.MAX_K + 1)]
    assert int(k[0]) == int(np.argmin(sizes))
    assert len(gaps) * (1 + int(k[0])) + int(total[0]) == min(sizes)


def test_rice_streams_by_hand() -> None:
    """Ranks 1, 4, 5, 12 of 20: gaps 1, 2, 0, 6; k = 1 takes 4 * 2 + (0 + 1 + 0 + 3) = 12 bits."""
    coded = rice.Lists.of(np.array([1, 4, 5, 12]), np.array([4]), np.array([20]))
    assert coded.gaps.tolist() == [1, 2, 0, 6]
    assert coded.k.tolist() == [1]
    low, unary = coded.streams()
    assert low == bytes([0b0001])  # the lowest bits 1 0 0 0
    assert unary == bytes([0b10001101])  # 1, 01, 1, 0001, read from the lowest bit


@pytest.mark.parametrize("count", [0, 20])
def test_empty_and_full_cost_nothing(count: int) -> None:
    coded = rice.Lists.of(np.arange(count), np.array([count]), np.array([20]))
    assert coded.streams() == (b"", b"")


def read(counts: int, universe: int, k: int, low: bytes, unary: bytes) -> np.ndarray:
    bits = low_bits(low, k * min(counts, universe - counts))
    return rice.read(np.array([counts]), np.array([universe]), np.array([k]), bits, memoryview(unary))


def test_invalid_rice_streams_are_refused() -> None:
    assert read(2, 8, 0, b"", bytes([0b101])).tolist() == [0, 2]
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


@settings(max_examples=60)
@given(st.data())
def test_device_size_is_the_encoded_size(data: st.DataObject) -> None:
    """The torch reduction agrees with the encoder for every row, and so for every layer's parameter."""
    layout = data.draw(layouts())
    rows = [data.draw(masks(layout)) for _ in range(2)]
    if not layout.sizes:
        return
    found = rice_bits(layout, torch.stack([mask.bits for mask in rows]))
    for row, mask in enumerate(rows):
        coded = _lists(layout, mask.bits.numpy())
        assert found.k[row].tolist() == coded.k.tolist()
        assert (int(found.low[row]), int(found.unary[row])) == (coded.low_bits, coded.unary_bits)


def _lists(layout: Layout, bits: np.ndarray) -> rice.Lists:
    ranks = [np.flatnonzero(bits[layer.start : layer.stop]) for layer in layout.prunable]
    counts = np.array([len(part) for part in ranks])
    return rice.Lists.of(np.concatenate(ranks), counts, np.array(layout.sizes))


def test_resnet_layout_is_the_papers() -> None:
    layout = resnet_layout()
    assert layout.prunable_size == 11_159_232
    assert layout.size - layout.trained_size == 9_600
