"""Tables from eight-weight vectors to the exact mask expected."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from flashfl.core import rng
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe
from flashfl.sparsity import mismatch, pattern_budgets, recipe_mask, select, top_mask
from flashfl.sparsity.select import lowest, magnitude

EIGHT = Layout.build({"prunable": [("w", (2, 4))], "dense": [("b", (1,))]})


def bits(mask: torch.Tensor) -> str:
    return "".join(str(int(b)) for b in mask.flatten())


@pytest.mark.parametrize(
    ("keys", "count", "candidates", "expected"),
    [
        ([5, 3, 8, 1, 9, 2, 7, 4], 3, None, "01010100"),
        ([5, 3, 8, 1, 9, 2, 7, 4], 0, None, "00000000"),
        ([5, 3, 8, 1, 9, 2, 7, 4], 8, None, "11111111"),
        ([4, 4, 4, 4, 4, 4, 4, 4], 3, None, "11100000"),  # ties: the lower index first
        ([1, 4, 4, 0, 4, 4, 4, 4], 4, None, "11110000"),
        ([5, 3, 8, 1, 9, 2, 7, 4], 2, "10101010", "10000010"),
        ([1, 1, 1, 1, 1, 1, 1, 1], 2, "00110011", "00110000"),
    ],
)
def test_lowest(keys: list[int], count: int, candidates: str | None, expected: str) -> None:
    among = None if candidates is None else torch.tensor([c == "1" for c in candidates])
    assert bits(lowest(torch.tensor(keys, dtype=torch.int32), count, among)) == expected
    rows = torch.tensor([keys, keys], dtype=torch.int32)
    both = None if among is None else torch.stack([among, among])
    assert bits(lowest(rows, torch.tensor([count, 0]), both)) == expected + "00000000"


def test_the_largest_possible_key_is_still_a_candidate() -> None:
    top = torch.iinfo(torch.int32).max
    keys = torch.tensor([top, top, 1, top], dtype=torch.int32)
    assert bits(lowest(keys, 2, torch.tensor([False, True, True, True]))) == "0110"


@given(st.data())
def test_long_rows_are_selected_from_with_the_same_result(data: st.DataObject) -> None:
    """With few distinct keys there are ties."""
    n = data.draw(st.integers(1, 300))
    spread = data.draw(st.sampled_from([1, 3, 50, 1 << 30]))
    keys = (rng.hashes(data.draw(st.integers(0, 99)), 0, n).long() % (2 * spread) - spread).to(torch.int32)
    if data.draw(st.booleans()):
        keys = keys.sort(descending=data.draw(st.booleans())).values
    among = rng.uniform(7, n) < data.draw(st.sampled_from([0.0, 0.05, 0.5, 1.0]))
    count = data.draw(st.integers(0, int(among.sum())))
    ranked = sorted((int(keys[i]), i) for i in range(n) if among[i])
    expected = {i for _, i in ranked[:count]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(select, "_LONG", data.draw(st.sampled_from([1, 1 << 30])))
        found = lowest(torch.stack([keys, keys]), count, torch.stack([among, among]))
    assert [set(row.nonzero().flatten().tolist()) for row in found] == [expected] * 2


@pytest.mark.parametrize(
    ("weights", "budget", "expected"),
    [
        ([1, -9, 3, 0, -2, 8, 0, 5], 3, "01000101"),
        ([1, -9, 3, 0, -2, 8, 0, 5], 8, "11111111"),
        ([2, -2, 2, 2, -2, 2, 2, 2], 3, "11100000"),  # ties by magnitude: the lower index first
        ([0, 0, 0, 0, 0, 0, 0, 1], 2, "10000001"),  # zeros can be active
        ([1, 2, 3, 4, 5, 6, 7, 8], 0, "00000000"),
    ],
)
def test_top_mask(weights: list[float], budget: int, expected: str) -> None:
    vector = torch.tensor([*weights, 99.0])
    mask = top_mask(EIGHT, vector, [budget])
    assert bits(mask.bits) == expected
    assert Mask(EIGHT, mask.bits).counts == (budget,)


def test_magnitude_ranks_like_the_absolute_value() -> None:
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-20, 0.5, -0.5, 3e38, float("inf")])
    key = magnitude(x)
    assert key[0] == key[1]
    assert key[4] == key[5]
    assert (key[1:].diff() >= 0).all()


def test_random_masks_rank_the_hash_of_the_index() -> None:
    key = rng.fold(3, "m")
    order = rng.hashes(key, 0, 8).argsort()
    expected = torch.zeros(8, dtype=torch.bool)
    expected[order[:3]] = True
    assert torch.equal(recipe_mask(EIGHT, Recipe(key, (3,))).bits, expected)


@given(st.integers(0, 2**64 - 1), st.integers(0, 8), st.integers(0, 8))
def test_random_masks_have_their_budget_and_nest(key: int, a: int, b: int) -> None:
    small, large = (recipe_mask(EIGHT, Recipe(key, (k,))) for k in sorted((a, b)))
    assert Mask(EIGHT, small.bits).counts == (min(a, b),)
    assert not (small.bits & ~large.bits).any()


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=8, max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_top_masks_have_their_budget_and_nest(weights: list[float], a: int, b: int) -> None:
    vector = torch.tensor([*weights, 0.0])
    small, large = (top_mask(EIGHT, vector, [k]) for k in sorted((a, b)))
    assert Mask(EIGHT, small.bits).counts == (min(a, b),)
    assert not (small.bits & ~large.bits).any()


def test_mismatch_by_hand() -> None:
    layout = Layout.build({"prunable": [("a", (4,)), ("b", (4,))]})
    one = Mask(layout, torch.tensor([1, 1, 0, 0, 1, 0, 0, 0], dtype=torch.bool))
    two = Mask(layout, torch.tensor([1, 0, 1, 0, 1, 0, 0, 0], dtype=torch.bool))
    assert mismatch(one, two) == pytest.approx(1 - 2 / 4)
    assert mismatch(one, one) == 0.0
    empty = Mask(layout, torch.zeros(8, dtype=torch.bool))
    assert mismatch(empty, empty) == 0.0


def test_a_pattern_keeps_n_of_every_m_along_the_input_dimension() -> None:
    layout = Layout.build({"prunable": [("conv", (2, 10, 3, 3)), ("narrow", (8, 3))]})
    budgets = pattern_budgets(layout, [45, 6], 4)
    # 180 weights at density 1/4: 1 of 4 in 2*9*2 groups, and a quarter of the remaining 36; the narrow layer as it was.
    assert budgets == (36 + 9, 6)
    for mask in (
        recipe_mask(layout, Recipe(5, tuple(budgets), 4)),
        top_mask(layout, torch.randn(layout.size), budgets, nm=4),
    ):
        assert Mask(layout, mask.bits).counts == budgets
        conv = mask.bits[:180].view(2, 10, 9).movedim(1, 2)  # input dimension last
        assert (conv[..., :8].reshape(-1, 4).sum(-1) == 1).all()


def test_a_pattern_follows_the_inputs_of_a_transposed_convolution() -> None:
    layout = Layout.of(nn.Sequential(nn.ConvTranspose2d(8, 16, 3), nn.Conv2d(16, 2, 1)), prunable=["0.weight"])
    budgets = pattern_budgets(layout, [288], 4)
    for mask in (
        recipe_mask(layout, Recipe(5, tuple(budgets), 4)),
        top_mask(layout, torch.randn(layout.size), budgets, nm=4),
    ):
        groups = mask.bits.view(2, 4, 16 * 9)  # inputs first
        assert (groups.sum(1) == 1).all()


def test_a_pattern_takes_vectors_and_numbers_as_they_are() -> None:
    layout = Layout.build({"prunable": [("scale", ()), ("bias", (6,))]})
    assert recipe_mask(layout, Recipe(5, (1, 3), 4)).bits.sum() == 4


def test_a_pattern_never_empties_a_group() -> None:
    layout = Layout.build({"prunable": [("fc", (4, 8))]})
    assert pattern_budgets(layout, [1], 4) == (8,)
