"""Centralised sparse learning and forced disagreement: the experiments behind the paper's observations 1 to 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.cli import main
from flashfl.core.errors import ConfigError
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask
from flashfl.core.record import RoundRecord
from flashfl.data.task import Task
from flashfl.methods import METHODS
from flashfl.run.results import Results

SETTINGS: dict[str, Any] = {"per_round": 3, "batch": 4, "workers": 1, "device": "cpu"}


def rounds(folder: Path) -> list[RoundRecord]:
    return [record for record in Results.read(folder).rounds if record.counts]


def test_masks_of_centralised_training_settle(tmp_path: Path) -> None:
    words = "--central --method sparse --rounds 6 --limit 200 --density 0.1 --workers 1 --device cpu --quiet --out"
    assert main(["run", *words.split(), str(tmp_path)]) == 0
    header = Results.read(tmp_path).header
    assert (header["task"]["clients"], header["task"]["samples"]) == (1, 200)
    moved = [record.mismatch or 0.0 for record in rounds(tmp_path)]
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < moved[0] / 3
    assert [record.density for record in rounds(tmp_path)] == pytest.approx([0.1] * 6, abs=1e-4)


@pytest.mark.parametrize("sm", [0.0, 0.5, 0.8, 1.0])
def test_masks_differ_exactly_as_asked(small_task: Task, tmp_path: Path, sm: float) -> None:
    method = METHODS["disagree"](density=0.2, sm=sm, first=2, warmup_clients=0)  # type: ignore[call-arg]
    fl.simulate(method, small_task, 4, folder=tmp_path, **SETTINGS)
    first, *others = rounds(tmp_path)
    assert first.mismatch == 0  # the first round trains the first mask
    sizes, densities = small_task.layout.sizes, first.layer_densities
    for record in others:
        assert record.layer_densities == densities
        shown = record.layer_mismatch or (0.0,) * len(sizes)
        assert shown[0] == 0
        for k, density, found in list(zip(sizes, densities, shown, strict=True))[1:]:
            b = round(k * density)
            i = round(2 * b * (1 - sm) / (2 - sm))  # the nearest a whole number of weights can come
            assert found == pytest.approx(1 - i / (2 * b - i), abs=1e-5)


def test_dense_layer_changes_as_much_as_it_can() -> None:
    from flashfl.core.mask import Weights
    from flashfl.core.state import Plan, State

    layout = Layout.build({"prunable": [("w", (10,))]})
    method: Any = METHODS["disagree"](sm=1.0)  # type: ignore[call-arg]
    plan = Plan(layout, lambda key: torch.zeros(10), 1, 2, 1, 1)
    bits = torch.arange(10) < 8
    state = State(plan, Weights(Mask(layout, bits), bits.float()))
    after = method.moved(state, state.mask)
    assert after.bits.sum() == 8
    assert (after.bits & bits).sum() == 6


@pytest.mark.parametrize("wrong", [{"sm": 1.5}, {"first": 0}, {"nm": 4}])
def test_impossible_settings_raise(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        METHODS["disagree"](**wrong)
