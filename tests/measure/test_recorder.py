"""What a run records about its rounds: correct, small, and the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashfl as fl
from flashfl.core.record import RoundRecord
from flashfl.data.task import Task
from flashfl.measure.flops import sample_flops, task_costs
from flashfl.measure.mismatch import pairwise
from flashfl.run.observe import MOST_SNAPSHOTS, SNAPSHOTS, Observer, snapshot_every, snapshots
from flashfl.run.results import Results

SETTINGS: dict[str, Any] = {"per_round": 3, "batch": 4, "workers": 1, "eval_every": 2, "device": "cpu"}


class Stopped(Exception):
    """Ends a run in the middle."""


def records(folder: Path) -> list[RoundRecord]:
    """The rounds of a run without their times."""
    return [replace(record, seconds=dict.fromkeys(record.seconds, 0.0)) for record in Results.read(folder).rounds]


def test_recorded_mismatch_is_that_of_the_stored_masks(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.JMWST(density=0.3, warmup_clients=2, warmup_epochs=2), small_task, 6, folder=tmp_path, **SETTINGS)
    rounds = [record for record in Results.read(tmp_path).rounds if record.counts]
    layout = small_task.layout
    store = snapshots(tmp_path, [(layer.name, layer.shape) for layer in layout.prunable])
    masks = [store[record.snapshot].bits.numpy() for record in rounds]
    found = pairwise(masks)
    ends = np.cumsum(layout.sizes)
    layers = [
        pairwise([mask[end - size : end] for mask in masks]) for end, size in zip(ends, layout.sizes, strict=True)
    ]
    for i, record in enumerate(rounds[1:], start=1):
        assert record.mismatch == pytest.approx(found[i - 1, i])
        assert record.layer_mismatch == pytest.approx([one[i - 1, i] for one in layers], abs=1e-5)
        assert record.density == pytest.approx(masks[i].mean())
    assert any(record.mismatch for record in rounds)


def test_frozen_mask_is_stored_once_and_has_no_mismatch(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.PDST(density=0.3), small_task, 5, folder=tmp_path, **SETTINGS)
    rounds = Results.read(tmp_path).rounds
    assert {record.mismatch for record in rounds} == {0.0}
    assert len({record.snapshot for record in rounds}) == 1 == len(list((tmp_path / SNAPSHOTS).iterdir()))


def test_dense_run_stores_no_masks_and_counts_every_flop(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.Dense(), small_task, 2, folder=tmp_path, **SETTINGS)
    costs, layout = task_costs(small_task), small_task.layout
    each = sample_flops(layout, costs, [1.0] * len(layout.prunable))
    for record in Results.read(tmp_path).rounds:
        samples = sum(small_task.clients[c].n for c in record.cohort)
        assert record.flops == pytest.approx(samples * each, rel=1e-5)
        assert record.paper_bytes.up == record.paper_bytes.down == 3 * 4 * layout.trained_size
        assert record.paper_bytes.dense == 6 * 4 * layout.trained_size
    assert not (tmp_path / SNAPSHOTS).exists()


def test_first_stage_records_client_densities(small_task: Task, tmp_path: Path) -> None:
    method = fl.SPDST(density=0.3, warmup_clients=4, warmup_epochs=3)
    fl.simulate(method, small_task, 1, folder=tmp_path, **SETTINGS)
    first, second = Results.read(tmp_path).rounds
    assert not first.counts
    assert len(first.cohort_densities) == len(small_task.layout.prunable)
    assert first.flops > second.flops
    assert first.paper_bytes.up == 4 * 4 * len(small_task.layout.prunable)


def test_dropped_clients_spend_no_flops(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.PDST(density=0.3), small_task, 6, folder=tmp_path, dropout=0.5, **SETTINGS)
    rounds = Results.read(tmp_path).rounds
    costs, layout = task_costs(small_task), small_task.layout
    assert any(record.failures for record in rounds)
    for record in rounds:
        samples = sum(small_task.clients[c].n for c in record.cohort if c not in record.failures)
        assert record.flops == pytest.approx(samples * sample_flops(layout, costs, record.layer_densities), rel=1e-4)


def test_resumed_run_has_the_same_records(small_task: Task, tmp_path: Path) -> None:
    method = fl.JMWST(density=0.3, warmup_clients=2, warmup_epochs=2)

    def stop(state: fl.State, record: RoundRecord) -> None:
        if state.counted == 5:
            raise Stopped

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fl.simulate(method, small_task, 8, folder=whole, **SETTINGS)
    with pytest.raises(Stopped):
        fl.simulate(method, small_task, 8, folder=parts, watch=stop, checkpoint_every=2, **SETTINGS)
    fl.simulate(method, small_task, 8, folder=parts, resume=True, checkpoint_every=2, **SETTINGS)
    assert records(whole) == records(parts)
    names = [sorted(p.name for p in (folder / SNAPSHOTS).iterdir()) for folder in (whole, parts)]
    assert names[0] == names[1]


def test_snapshots_are_bounded(small_task: Task) -> None:
    from flashfl.run.config import TrainConfig, plan_of

    plan = plan_of(TrainConfig(rounds=1000), small_task, len(small_task.clients))
    state = fl.PDST(density=0.3).init(plan)
    assert 1000 / snapshot_every(state) <= MOST_SNAPSHOTS


def test_model_that_fails_on_one_sample_has_no_flops(small_task: Task, tmp_path: Path) -> None:
    from flashfl.run.config import TrainConfig, plan_of

    class Broken:
        layout, evaluation, train = small_task.layout, small_task.evaluation, small_task.train

        def build(self) -> Any:
            raise RuntimeError("not here")

    method = fl.PDST(density=0.3)
    state = method.init(plan_of(TrainConfig(), small_task, len(small_task.clients)))
    observer = Observer(method, Broken(), state)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="FLOPs are not counted, because .* Training is not affected"):
        assert observer.costs == {}
    assert sample_flops(small_task.layout, observer.costs, [1.0] * len(small_task.layout.prunable)) == 0
