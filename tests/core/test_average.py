"""The running average of the server's model: what it holds, where it shows, and that it survives a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights
from flashfl.core.state import TRAINING, Phase, Plan, State
from flashfl.run.results import Results
from flashfl.run.summary import numbers_of, summarise
from flashfl.run.table import summary_table
from tests.conftest import make_task
from tests.run.run_support import After, Killed, killed
from tests.test_every_method import SETTINGS, methods, small

KEEP = 0.15


def go(method: fl.Method, folder: Path | None = None, **more: Any) -> fl.Run:
    return fl.simulate(method, make_task("dropout"), 4, folder=folder, **{**SETTINGS, "average": KEEP, **more})


def states_of(method: fl.Method, **more: Any) -> list[State]:
    states: list[State] = []
    go(method, watch=lambda state, record: states.append(state), **more)
    return [s for s in states if s.counted]


@methods
def test_average_of_every_method_follows_its_definition(name: str) -> None:
    """ema = b * ema + (1 - b) * w inside both masks; what enters starts at its value; what leaves is 0.

    b is 1/11 in the second round and 2/12 in the third, but at most what was asked for.
    """
    states = states_of(small(name), eval_every=1)
    expected, last = states[0].weights.vector, states[0].mask
    for s, keep in zip(states[1:], (1 / 11, KEEP, KEEP), strict=True):
        k, new = s.layout.prunable_size, s.weights.vector
        mixed = keep * expected + (1 - keep) * new
        stayed = torch.cat([last.bits & s.mask.bits, torch.ones(s.layout.size - k, dtype=torch.bool)])
        expected, last = torch.where(stayed, mixed, new), s.mask
        assert s.average is not None
        assert s.average.mask is s.mask
        assert s.average.is_masked()
        torch.testing.assert_close(s.average.vector, expected)


def test_weights_that_leave_and_enter_the_mask() -> None:
    """Three weights: the first leaves the mask, the second stays, the third enters."""
    layout = Layout.build({"prunable": [("w", (3,))]})
    plan = Plan(layout, lambda key: torch.zeros(3), 0, 2, 1, 1, average=0.5)

    def model(bits: list[bool], values: list[float]) -> Weights:
        return Weights(Mask(layout, torch.tensor(bits)), torch.tensor(values))

    start = State(plan, model([True, True, False], [8.0, 4.0, 0.0]), round=20)
    first = start.next(model([True, True, False], [4.0, 2.0, 0.0])).averaged(start)
    assert first.average is not None
    assert first.average.vector.tolist() == [4.0, 2.0, 0.0]
    second = first.next(model([False, True, True], [0.0, 6.0, 5.0])).averaged(first)
    assert second.average is not None
    assert second.average.vector.tolist() == [0.0, 4.0, 5.0]
    other = Phase("other", 3)
    entered = second.enter(other, model([True, True, True], [1.0, 1.0, 1.0])).averaged(second)
    assert entered.average is None


def test_average_is_reported_first_and_the_plain_model_beside_it(tmp_path: Path) -> None:
    method = small("jmwst")
    run, plain = go(method, tmp_path), go(method, average=0.0)
    record = run.history[-1]
    assert list(record.metrics) == ["average", "after", "before"]
    assert record.metrics["after"] == plain.history[-1].metrics["after"]  # averaging changes no training
    assert run.metric == record.metrics["average"].metric
    assert run.traffic == plain.traffic
    assert run.state is not None
    assert run.state.average is not None
    assert torch.equal(run.weights.vector, run.state.average.vector)
    exported = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in run.model().state_dict().items())
    found = run.model("after").state_dict()
    assert all(torch.equal(tensor, found[name]) for name, tensor in plain.model().state_dict().items())
    stored = Results.read(tmp_path)
    numbers = numbers_of(stored.header, stored.rounds)
    assert (numbers.accuracy, numbers.plain) == (run.metric, plain.metric)
    table = summary_table({"jmwst": summarise([numbers])}, ("accuracy %", "density"))
    assert table.head == ("method", "accuracy %", "not averaged %", "density")
    for shown in (table.markdown(), table.terminal()):
        assert '"not averaged" is the metric of the model itself.' in shown.replace("\n", " ")
    without = numbers_of(plain.results.header, plain.history)
    assert "not averaged %" not in summary_table({"jmwst": summarise([without])}, ("accuracy %",)).head


@methods
def test_resume_with_average_is_bit_identical(name: str, tmp_path: Path) -> None:
    method = small(name)
    whole = go(method)
    with killed():
        go(method, tmp_path, watch=After(2 + ("sensitivity" in {p.name for p in method.phases}), Killed()))
    again = go(method, tmp_path, resume=True)
    assert again.checksum == whole.checksum
    assert again.state is not None
    assert whole.state is not None
    assert again.state.average is not None
    assert whole.state.average is not None
    assert torch.equal(again.state.average.vector, whole.state.average.vector)


def test_average_takes_the_statistics_gathered_with_static_batchnorm() -> None:
    run = fl.simulate(small("spdst"), make_task("norm"), 4, **SETTINGS, average=KEEP, static_bn=True)
    assert run.state is not None
    assert run.state.average is not None
    assert torch.equal(run.state.average.statistics, run.state.weights.statistics)
    assert set(run.history[-1].metrics) == {"average", "after"}


@pytest.mark.parametrize("share", [-0.1, 1.0, 2.0])
def test_impossible_average_is_refused_before_round_1(share: float) -> None:
    with pytest.raises(ConfigError, match=r"average = .*: must be at least 0 and below 1"):
        go(small("dense"), average=share)


def test_average_starts_anew_in_the_training_phase() -> None:
    states: list[State] = []
    go(small("spdst"), watch=lambda state, record: states.append(state))
    assert states[0].phase == TRAINING  # its weights were drawn just now, and have not been trained
    assert states[0].average is None
    assert states[1].average is states[1].weights
