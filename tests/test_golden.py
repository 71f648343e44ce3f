"""Every method on the digits still does what the golden records say, round by round.

`tests/golden/make_golden.py` made the records and describes the cases. Cohorts, failures, bytes and masks must be
equal. Weights and losses may differ in their last bits, as other instructions round differently.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.golden.make_golden import CASES, COUNTED, load, round_facts, run_case, state_facts, values_at

GOLDEN = load()["cases"]
EXACT = ("stage", "round", "attempt", "cohort", "failures", "missed", "bytes", "mask", "active")


def test_golden_file_has_every_case() -> None:
    assert sorted(GOLDEN) == sorted(CASES)


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    golden = GOLDEN[name]
    found: list[dict[str, Any]] = []

    def watch(state: Any, line: Any) -> None:
        then = golden[len(found)]
        found.append({**round_facts(line), **state_facts(state), "values": values_at(state, then["at"])})

    run_case(CASES[name], watch)
    assert len(found) == len(golden)
    for i, (now, then) in enumerate(zip(found, golden, strict=True)):
        first = i <= len(golden) - COUNTED  # the first counted round and the stage before it
        compare(now, then, 1e-6 if first else 1e-4, f"{name}, round {i}", exact_metric=first)


def compare(now: dict[str, Any], then: dict[str, Any], weights: float, where: str, exact_metric: bool) -> None:
    """Hold one round against its record; `weights` is their tolerance, absolute plus relative."""
    for name in EXACT:
        assert now[name] == then[name], f"{where}: {name}"
    assert now["loss"] == pytest.approx(then["loss"], rel=1e-5, abs=1e-5), f"{where}: training loss"
    assert now["metrics"].keys() == then["metrics"].keys(), f"{where}: views"
    for view, judged in then["metrics"].items():
        assert now["metrics"][view]["loss"] == pytest.approx(judged["loss"], rel=1e-5, abs=1e-5), f"{where}: {view}"
        metric = judged["metric"] if exact_metric else pytest.approx(judged["metric"], rel=1e-5, abs=1e-5)
        assert now["metrics"][view]["metric"] == metric, f"{where}: metric of {view}"
    assert now["norm"] == pytest.approx(then["norm"], rel=weights, abs=weights), f"{where}: norm of the weights"
    for place, a, b in zip(then["at"], now["values"], map(float.fromhex, then["values"]), strict=True):
        assert abs(a - b) <= weights * (1 + abs(b)), f"{where}: weight {place} is {a}, not {b}"
