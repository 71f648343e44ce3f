"""Training samples that are held out to choose settings on."""

from __future__ import annotations

import pytest

from flashfl.core.errors import ConfigError
from flashfl.data.tasks import TaskConfig, build_task


def test_held_out_samples_replace_the_test_samples_and_reach_no_client() -> None:
    plain, held = (build_task(TaskConfig(dataset="digits", clients=10, held_out=n), 1) for n in (0, 100))
    assert held.test is not None
    assert len(held.test) == 100
    assert sum(c.n for c in held.clients) == sum(c.n for c in plain.clients) - 100
    seeds = [build_task(TaskConfig(dataset="digits", clients=10, held_out=100), seed).test for seed in (1, 2)]
    a, b = (one.fetch(one.index.new_tensor(range(100)))[0][0] for one in seeds)  # type: ignore[union-attr]
    assert a.equal(b), "the same samples for every seed"


def test_holding_out_too_much_says_so() -> None:
    with pytest.raises(ConfigError, match="hold out fewer"):
        build_task(TaskConfig(dataset="digits", clients=100, held_out=1400), 1)
