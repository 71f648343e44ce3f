import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashfl.core.errors import ConfigError
from flashfl.core.layout import Layout
from flashfl.sparsity import allocate, calibrate, nested, share_out, weight_budget


def layers(*shapes: tuple[int, ...]) -> Layout:
    return Layout.build({"prunable": [(f"w{i}", s) for i, s in enumerate(shapes)]})


@pytest.mark.parametrize(
    ("wishes", "caps", "total", "expected"),
    [
        ([1, 1], [8, 8], 4, (2, 2)),
        ([1, 1], [8, 8], 5, (3, 2)),  # a tie in remainders goes to the earlier
        ([3, 1], [8, 8], 4, (3, 1)),
        ([9, 1], [4, 8], 8, (4, 4)),  # the first is full; what it cannot take goes on
        ([9, 9, 1], [2, 8, 8], 12, (2, 8, 2)),  # filling one makes the next pass its cap
        ([0, 0], [3, 1], 2, (2, 0)),  # no wishes left: by room (1.5 and 0.5, the earlier tie)
        ([5, 0], [2, 8], 4, (2, 2)),
        ([1, 2], [0, 5], 5, (0, 5)),
        ([1.0], [7], 0, (0,)),
    ],
)
def test_share_out(wishes: list[float], caps: list[int], total: int, expected: tuple[int, ...]) -> None:
    assert share_out(wishes, caps, total) == expected


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.integers(0, 1000)), min_size=1, max_size=20),
    st.floats(0, 1),
)
def test_share_out_is_exact_within_caps_and_monotone_in_wishes(rows: list[tuple[float, int]], part: float) -> None:
    wishes, caps = [w for w, _ in rows], [c for _, c in rows]
    total = round(part * sum(caps))
    out = share_out(wishes, caps, total)
    assert sum(out) == total
    assert all(0 <= x <= cap for x, cap in zip(out, caps, strict=True))
    for (a, x, cap_a), (b, y, _) in (
        (p, q) for p in zip(wishes, out, caps, strict=True) for q in zip(wishes, out, caps, strict=True)
    ):
        assert not (a > b and x < cap_a and x < y - 1) or sum(wishes) == 0 or total > sum(c for w, c in rows if w > 0)


def test_calibration_refuses_what_cannot_be_placed() -> None:
    with pytest.raises(ValueError, match="must lie between 0 and the sum of caps"):
        share_out([1], [3], 4)


@given(
    st.lists(st.integers(1, 400), min_size=1, max_size=8),
    st.lists(st.floats(0.001, 1), min_size=8, max_size=8),
    st.floats(0.01, 1),
)
def test_budgets_sum_to_exactly_round_d_k(sizes: list[int], rho: list[float], density: float) -> None:
    layout = layers(*((k,) for k in sizes))
    if round(density * sum(sizes)) < 1:
        return
    assert sum(calibrate(layout, rho[: len(sizes)], density)) == round(density * sum(sizes))


def test_a_layer_that_would_pass_one_is_full_and_the_rest_is_rescaled() -> None:
    layout = layers((10,), (90,))
    # Wishes 9 and 9 of a budget of 40: the first layer would get 20 of its 10.
    assert calibrate(layout, [0.9, 0.1], 0.4) == (10, 30)


@given(st.lists(st.floats(0.01, 1), min_size=3, max_size=3), st.lists(st.floats(0.05, 1), min_size=1, max_size=4))
def test_nested_budgets_nest(rho: list[float], targets: list[float]) -> None:
    layout = layers((20,), (300,), (7,))
    budgets = nested(layout, rho, targets)
    ordered = [budgets[d] for d in sorted(budgets)]
    for small, large in itertools.pairwise(ordered):
        assert all(a <= b for a, b in zip(small, large, strict=True))
    assert all(sum(b) == weight_budget(layout, d) for d, b in budgets.items())


def test_allocations() -> None:
    layout = layers((8, 4, 3, 3), (64, 64, 3, 3))
    total = round(0.1 * (288 + 36864))
    uniform, erk, plus = (allocate(layout, a, 0.1) for a in ("uniform", "erk", "erk+"))
    assert uniform == (29, total - 29)
    # ERK: 18/288 = 0.0625 a weight against 134/36864 = 0.00364; wishes 18 and 134.
    assert erk == (288, total - 288)
    assert sum(uniform) == sum(erk) == sum(plus) == total
    wide = layers((10, 20), (500, 600))
    assert allocate(wide, "erk+", 0.02)[0] >= allocate(wide, "erk", 0.02)[0]


@pytest.mark.parametrize("density", [0, -0.1, 1.1, float("nan")])
def test_a_density_outside_its_range_is_refused(density: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        weight_budget(layers((10,)), density)


def test_a_density_that_keeps_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="keeps none"):
        weight_budget(layers((10,)), 0.01)


def test_an_unknown_allocation_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'uniform'"):
        allocate(layers((10,)), "unifrom", 0.5)
