"""Mismatch and snapshots, against numbers counted by hand and the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashfl.core.layout import Layout
from flashfl.core.mask import Mask
from flashfl.measure.mismatch import pairwise
from flashfl.sparsity import common, jaccard, mismatch

LAYOUT = Layout.build({"prunable": [("a", (2, 2)), ("b", (4,))]})


def mask(*bits: int) -> Mask:
    return Mask(LAYOUT, torch.tensor(bits, dtype=torch.bool))


def test_common_counts_weights_active_in_both_masks() -> None:
    before, after = mask(1, 1, 0, 0, 1, 0, 1, 0), mask(1, 0, 1, 0, 1, 1, 1, 0)
    assert common(before, after) == (1, 2)
    assert after.counts == (2, 3)
    assert jaccard(3, 4, 5) == pytest.approx(0.5) == pytest.approx(mismatch(before, after))


def test_two_empty_masks_do_not_differ() -> None:
    assert jaccard(0, 0, 0) == 0.0
    assert pairwise([np.zeros(8, bool)] * 2).max() == 0.0


@given(st.lists(st.lists(st.booleans(), min_size=8, max_size=8), min_size=1, max_size=4))
def test_pairwise_is_the_definition_for_every_pair(rows: list[list[bool]]) -> None:
    found = pairwise([np.array(row) for row in rows])
    for i, a in enumerate(rows):
        for j, b in enumerate(rows):
            first, second = mask(*map(int, a)), mask(*map(int, b))
            assert found[i, j] == pytest.approx(mismatch(first, second))
