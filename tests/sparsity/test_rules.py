"""Prune-regrow on eight weights: exact masks, exact counts, full layers, ties, few batches."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashfl.core.errors import ConfigError
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe, Weights
from flashfl.core.rng import fold, hashes
from flashfl.sparsity import PruneRegrow, pattern_budgets, recipe_mask
from flashfl.sparsity import move as moved

EIGHT = Layout.build({"prunable": [("w", (8,))]})
TWO = Layout.build({"prunable": [("a", (8,)), ("b", (8,))]})


def move(
    layout: Layout,
    weights: list[float],
    active: str,
    rate: float,
    rule: PruneRegrow | None = None,
    scores: list[float] | None = None,
) -> tuple[str, list[float], tuple[int, ...]]:
    vectors = torch.tensor([weights])
    masks = torch.tensor([[c == "1" for c in active]])
    ranked = None if scores is None else torch.tensor([scores])
    counts = Mask(layout, masks[0]).counts
    [new] = moved(rule or PruneRegrow(), layout, vectors, masks, ranked, rate, [1], [counts])
    assert new == Mask(layout, masks[0]).counts
    assert not vectors[0][: layout.prunable_size][~masks[0]].any()
    return "".join(str(int(b)) for b in masks[0]), vectors[0].tolist(), new


def first_hashed(among: str, count: int) -> set[int]:
    """The positions that random growth takes first."""
    rank = hashes(fold(1, "grow"), 0, 8).tolist()
    return set(sorted((i for i, c in enumerate(among) if c == "1"), key=lambda i: rank[i])[:count])


def test_the_smallest_active_weight_goes_and_a_random_inactive_one_comes() -> None:
    mask, values, _ = move(EIGHT, [5, 0, -1, 0, 3, 0, 0, 2], "10101001", 0.25)
    [grown] = first_hashed("01010110", 1)
    assert {i for i, b in enumerate(mask) if b == "1"} == {0, 4, 7, grown}
    assert values[grown] == 0
    assert values[2] == 0


@pytest.mark.parametrize(("rate", "dropped"), [(0.01, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.0, 0)])
def test_the_number_dropped_is_rounded_up(rate: float, dropped: int) -> None:
    mask, _, counts = move(EIGHT, [5, 0, -1, 0, 3, 0, 0, 2], "10101001", rate)
    assert counts == (4,)
    assert sum(a == "1" and b == "0" for a, b in zip("10101001", mask, strict=True)) == dropped


def test_of_equal_weights_the_lower_index_is_dropped() -> None:
    mask, _, _ = move(EIGHT, [2, 2, 2, 2, 0, 0, 0, 0], "11110000", 0.5)
    assert mask[:4] == "0011"


def test_growth_by_gradient_takes_the_largest_scores_ties_to_the_lower_index() -> None:
    rule = PruneRegrow(growth="gradient")
    mask, _, _ = move(EIGHT, [5, 1, 2, 6, 0, 0, 0, 0], "11110000", 0.5, rule, [9, 9, 9, 9, 1, -3, 3, 0])
    assert mask == "10010110"
    mask, _, _ = move(EIGHT, [5, 1, 2, 6, 0, 0, 0, 0], "11110000", 0.25, rule, [9, 9, 9, 9, 1, -3, 3, 0])
    assert mask == "10110100"


def test_a_full_layer_takes_back_its_largest_dropped_with_their_values() -> None:
    weights = [1, 2, 3, 4, 5, 6, 7, 8]
    mask, values, counts = move(EIGHT, weights, "11111111", 0.5)
    assert (mask, values, counts) == ("11111111", weights, (8,))


def test_when_inactive_positions_run_out_the_largest_dropped_come_back() -> None:
    # Seven active, four dropped (1 2 3 4), one inactive: it is grown, and of the dropped 4, 3 and 2 return.
    mask, values, _ = move(EIGHT, [1, 2, 3, 4, 5, 6, 7, 0], "11111110", 0.5)
    assert mask == "01111111"
    assert values == [0, 2, 3, 4, 5, 6, 7, 0]


def test_growth_goes_where_active_weights_are_large() -> None:
    weights = [9, 9, 9, 9, 0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    _, _, counts = move(TWO, weights, "1111000011110000", 0.5)
    # Two dropped in each; four regrown in shares 0.9 : 0.1 = 3.6 : 0.4.
    assert counts == (2 + 4, 2 + 0)


def test_a_layer_at_its_cap_passes_its_share_on() -> None:
    weights = [9] * 8 + [1, 1, 1, 1, 0, 0, 0, 0]
    _, _, counts = move(TWO, weights, "1111111111110000", 0.5)
    assert counts == (8, 4)


def test_layers_without_active_weights_or_with_zeros_only_do_not_matter() -> None:
    _, _, counts = move(TWO, [0.0] * 16, "1111000000000000", 0.5)
    assert sum(counts) == 4


@given(
    st.lists(st.tuples(st.floats(-10, 10, width=32), st.booleans()), min_size=16, max_size=16),
    st.floats(0, 0.99),
    st.sampled_from(["random", "gradient", "momentum"]),
)
@settings(max_examples=150)
def test_the_total_is_kept_whatever_happens(rows: list[tuple[float, bool]], rate: float, growth: str) -> None:
    active = "".join("1" if b else "0" for _, b in rows)
    weights = [w if b else 0.0 for w, b in rows]
    _, _, counts = move(TWO, weights, active, rate, PruneRegrow(growth=growth), [float(i) for i in range(16)])  # type: ignore[arg-type]
    assert sum(counts) == active.count("1")


def test_a_stack_of_clients_is_as_each_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = Layout.build({"prunable": [("a", (6, 7)), ("b", (30,))], "dense": [("c", (3,))]})
    masks = [recipe_mask(layout, Recipe(9 + i, (10, 5 + i))) for i in range(3)]
    models = [Weights.masked(m, torch.randn(layout.size, generator=generator)) for m in masks]
    rule, keys = PruneRegrow(), [1, 2, 3]
    stack, bits = torch.stack([w.vector for w in models]), torch.stack([m.bits for m in masks])
    counts = moved(rule, layout, stack, bits, None, 0.3, keys, [m.counts for m in masks])
    for i, model in enumerate(models):
        alone, own = model.vector[None].clone(), model.mask.bits[None].clone()
        assert moved(rule, layout, alone, own, None, 0.3, [keys[i]], [model.mask.counts]) == [counts[i]]
        assert torch.equal(alone[0], stack[i])
        assert torch.equal(own[0], bits[i])


def test_a_pattern_survives_prune_and_regrow() -> None:
    layout = Layout.build({"prunable": [("conv", (4, 9, 3, 3)), ("fc", (5, 16))]})
    budgets = pattern_budgets(layout, [90, 20], 4)
    mask = recipe_mask(layout, Recipe(3, tuple(budgets), 4))
    vector, bits = torch.randn(1, layout.size), mask.bits[None].clone()
    vector[0] *= bits[0]
    [counts] = moved(PruneRegrow(nm=4), layout, vector, bits, None, 0.4, [8], [mask.counts])
    assert counts == mask.counts == Mask(layout, bits[0]).counts
    assert not torch.equal(bits[0], mask.bits)
    groups = bits[0][:324].view(4, 9, 9).movedim(1, 2)[..., :8].reshape(-1, 4)
    assert (groups.sum(-1) == 1).all()
    assert (bits[0][324:].view(-1, 4).sum(-1) == 1).all()


@pytest.mark.parametrize(
    ("epochs", "batches", "expected"),
    [
        (1, 1, {1: 0.125}),
        (1, 2, {1: 0.125}),
        (1, 3, {2: 0.125}),
        (1, 16, {8: 0.125}),
        (2, 5, {5: 0.125}),
        (4, 3, {3: 0.1875, 6: 0.125, 9: 0.0625}),
    ],
)
def test_when_masks_move_and_at_what_rate(epochs: int, batches: int, expected: dict[int, float]) -> None:
    moments = PruneRegrow().moments(epochs, batches)
    assert moments.keys() == expected.keys()
    assert all(math.isclose(moments[k], expected[k]) for k in expected)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0])
def test_a_rate_outside_its_range_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="prune rate"):
        PruneRegrow(rate=rate)


def test_shares_to_drop_are_exact() -> None:
    """In floating point 0.25 * (1 - 7/10) * 40 is a little more than 3, and would drop 4."""
    for epochs in range(2, 21):
        for at, rate in PruneRegrow(rate=0.25).moments(epochs, 1).items():
            for count in range(1, 200):
                assert math.ceil(rate * count) == -(-(epochs - at) * count // (4 * epochs))
