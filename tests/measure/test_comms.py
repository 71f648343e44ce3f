"""The paper's byte formula by hand, and its published savings."""

from __future__ import annotations

import pytest

from flashfl.core.exchange import Local
from flashfl.core.layout import Layout
from flashfl.measure.comms import csr_bytes, dense_bytes, paper_bytes
from flashfl.models import build_model
from flashfl.sparsity import PruneRegrow, allocate

LAYOUT = Layout.build({"prunable": [("w", (2, 4))], "dense": [("b", (3,))], "statistic": [("s", (5,))]})


def test_sizes_by_hand() -> None:
    assert dense_bytes(LAYOUT) == 4 * 11  # without statistics
    assert csr_bytes(LAYOUT, [2], frozen=True) == 4 * (3 + 2)
    assert csr_bytes(LAYOUT, [2], frozen=False) == 4 * (3 + 2 + 2 + 3)  # and two indices, three row pointers


def test_moving_mask_costs_indices_and_counts_cost_four_bytes() -> None:
    assert paper_bytes(LAYOUT, Local(), [2], [2]) == (20, 20)
    assert paper_bytes(LAYOUT, Local(adapt=PruneRegrow()), [4], [2]) == (56, 40)
    assert paper_bytes(LAYOUT, Local(adapt=PruneRegrow(), report="counts"), [2], [2]) == (40, 4)
    assert paper_bytes(LAYOUT, Local(adapt=PruneRegrow()), [8], [8]) == (44, 44)


@pytest.mark.parametrize(("density", "saving"), [(0.1, 9.88), (0.05, 19.5)])
def test_resnet18_saves_what_the_paper_says(density: float, saving: float) -> None:
    layout = Layout.of(build_model("resnet18", classes=10, channels=3, size=32))
    counts = allocate(layout, "uniform", density)
    assert dense_bytes(layout) / csr_bytes(layout, counts, frozen=True) == pytest.approx(saving, rel=0.003)
