"""Mismatch and snapshots, against numbers counted by hand and the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flashfl.measure.snapshots import Snapshots, pack, unpack
from hypothesis import given
from hypothesis import strategies as st

from flashfl.core.layout import Layout
from flashfl.core.mask import Mask
from flashfl.measure.mismatch import pairwise
from flashfl.sparsity import common, jaccard, layer_mismatch, mismatch

LAYOUT = Layout.build({"prunable": [("a", (2, 2)), ("b", (4,))]})


def mask(*bits: int) -> Mask:
    return Mask(LAYOUT, torch.tensor(bits, dtype=torch.bool))


def test_common_counts_weights_active_in_both_masks() -> None:
    before, after = mask(1, 1, 0, 0, 1, 0, 1, 0), mask(1, 0, 1, 0, 1, 1, 1, 0)
    assert common(before, after) == (1, 2)
    assert after.counts == (2, 3)
    assert jaccard(3, 4, 5) == pytest.approx(0.5) == pytest.approx(mismatch(before, after))
    assert [jaccard(1, 2, 2), jaccard(2, 2, 3)] == pytest.approx(layer_mismatch(before, after))


def test_two_empty_masks_do_not_differ() -> None:
    assert jaccard(0, 0, 0) == 0.0
    assert pairwise([np.zeros(8, bool)] * 2, [4, 4]).max() == 0.0


@given(st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=4))
def test_pairwise_is_the_definition_for_every_pair(rows: list[list[bool]]) -> None:
    found = pairwise([np.array(row) for row in rows], [4, 4])
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            first, second = mask(*map(int, a)), mask(*map(int, b))
            assert found[0, i, j] == pytest.approx(mismatch(first, second))
            assert found[1:, i, j] == pytest.approx(layer_mismatch(first, second))


@settings(deadline=None)
@given(st.integers(1, 3000), st.floats(0, 1), st.integers(0, 9))
def test_packed_mask_round_trips(size: int, density: float, seed: int) -> None:
    bits = np.random.default_rng(seed).random(size) < density
    assert np.array_equal(unpack(pack(bits), size), bits)


def test_snapshots_are_near_the_entropy_bound() -> None:
    bits = np.random.default_rng(0).random(1_000_000) < 0.05
    assert len(pack(bits)) < 1.02 * 1_000_000 * 0.2864 / 8


def test_unchanged_mask_is_written_once(tmp_path) -> None:
    store, bits = Snapshots(tmp_path / "s"), np.arange(100) % 7 == 0
    assert store.put(bits) == store.put(bits.copy())
    assert len(list((tmp_path / "s").iterdir())) == 1
    assert np.array_equal(store.get(store.put(bits), 100), bits)


@pytest.mark.parametrize("damage", [b"", b"x123", b"gnot zlib", b"b12"])
def test_damaged_snapshot_raises(tmp_path, damage: bytes) -> None:
    store = Snapshots(tmp_path)
    name = store.put(np.arange(100) % 7 == 0)
    store.path(name).write_bytes(damage)
    with pytest.raises(DataError, match="damaged"):
        store.get(name, 100)


def test_swapped_snapshot_raises(tmp_path) -> None:
    store = Snapshots(tmp_path)
    one, other = store.put(np.arange(100) % 7 == 0), store.put(np.arange(100) % 9 == 0)
    store.path(one).write_bytes(store.path(other).read_bytes())
    with pytest.raises(DataError, match="digest"):
        store.get(one, 100)


def test_snapshot_names_cannot_leave_the_folder(tmp_path) -> None:
    with pytest.raises(DataError, match="not the name"):
        Snapshots(tmp_path).get("../x", 8)
