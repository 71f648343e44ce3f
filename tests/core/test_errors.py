"""The interval that a setting must lie in."""

from __future__ import annotations

import math

import pytest

from flashfl.core.errors import ConfigError, check_range


@pytest.mark.parametrize(("allowed", "value"), [("[0, 1)", 0), ("[0, 1]", 1), ("(0, 1]", 0.5), ("[1, inf)", 10**9)])
def test_a_value_inside_its_range_passes(allowed: str, value: float) -> None:
    check_range(allowed, rate=value)


@pytest.mark.parametrize(
    ("allowed", "value", "says"),
    [
        ("[1, inf)", 0, "rate = 0: must be at least 1"),
        ("(0, 1]", 0, "rate = 0: must be above 0 and at most 1"),
        ("[0, 1)", 1, "rate = 1: must be at least 0 and below 1"),
        ("[0, inf)", math.nan, "rate = nan: must be a finite number, at least 0"),
        ("(0, inf)", math.inf, "rate = inf: must be a finite number, above 0"),
        ("[0, inf)", "many", "rate = 'many': must be a finite number, at least 0"),
    ],
)
def test_a_value_outside_its_range_is_refused(allowed: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_range(allowed, rate=value)
    assert str(error.value) == says


def test_a_refused_range_adds_its_hint() -> None:
    with pytest.raises(ConfigError, match=r"must be above 0 and at most 1\. 0\.05 keeps 5 % of the weights$"):
        check_range("(0, 1]", "0.05 keeps 5 % of the weights", density=2)
