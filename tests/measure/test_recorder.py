"""What a run writes down: it is true, it is small, and a resumed run neither loses nor doubles any of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashfl as fl
from flashfl.data.task import Task
from flashfl.measure.flops import sample_flops, task_costs
from flashfl.measure.mismatch import pairwise
from flashfl.run.observe import MOST_SNAPSHOTS, SNAPSHOTS, snapshot_every, snapshots
from flashfl.run.results import read_run

SETTINGS: dict[str, Any] = {"per_round": 3, "batch": 4, "workers": 1, "eval_every": 2, "device": "cpu"}


def lines(folder: Path) -> list[dict[str, Any]]:
    """The rounds of a run without the one thing that never repeats."""
    return [{**line, "seconds": set(line["seconds"])} for line in read_run(folder)["rounds"]]


def test_mismatch_in_the_record_is_that_of_the_masks_kept(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.JMWST(density=0.3, warmup_clients=2, warmup_epochs=2), small_task, 6, folder=tmp_path, **SETTINGS)
    rounds = [line for line in read_run(tmp_path)["rounds"] if line["stage"] == 2]
    layout = small_task.layout
    store = snapshots(tmp_path, [(layer.name, layer.shape) for layer in layout.prunable])
    masks = [store[line["snapshot"]].bits.numpy() for line in rounds]
    found = pairwise(masks, layout.sizes)
    for i, line in enumerate(rounds[1:], start=1):
        assert line["mismatch"] == pytest.approx(found[0, i - 1, i])
        assert line["layer_mismatch"] == pytest.approx(found[1:, i - 1, i], abs=1e-5)
        assert line["density"] == pytest.approx(masks[i].mean())
    assert any(line["mismatch"] > 0 for line in rounds)


def test_a_frozen_mask_is_kept_once_and_never_mismatches(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.PDST(density=0.3), small_task, 5, folder=tmp_path, **SETTINGS)
    rounds = read_run(tmp_path)["rounds"]
    assert {line["mismatch"] for line in rounds} == {0.0}
    assert len({line["snapshot"] for line in rounds}) == 1 == len(list((tmp_path / SNAPSHOTS).iterdir()))


def test_a_dense_run_keeps_no_masks_and_counts_every_flop(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.Dense(), small_task, 2, folder=tmp_path, **SETTINGS)
    costs, layout = task_costs(small_task), small_task.layout
    each = sample_flops(layout, costs, [1.0] * len(layout.prunable))
    for line in read_run(tmp_path)["rounds"]:
        samples = sum(small_task.clients[c].n for c in line["cohort"])
        assert line["flops"] == pytest.approx(samples * each, rel=1e-5)
        assert line["paper_bytes"]["up"] == line["paper_bytes"]["down"] == 3 * 4 * layout.trained_size
        assert line["paper_bytes"]["dense"] == 6 * 4 * layout.trained_size
    assert not (tmp_path / SNAPSHOTS).exists()


def test_stage_one_records_what_clients_learned(small_task: Task, tmp_path: Path) -> None:
    method = fl.SPDST(density=0.3, warmup_clients=4, warmup_epochs=3)
    fl.simulate(method, small_task, 1, folder=tmp_path, **SETTINGS)
    first, second = read_run(tmp_path)["rounds"]
    assert first["stage"] == 1
    assert len(first["cohort_densities"]) == len(small_task.layout.prunable)
    assert first["flops"] > second["flops"]
    assert first["paper_bytes"]["up"] == 4 * 4 * len(small_task.layout.prunable)


def test_clients_that_dropped_out_spend_no_flops(small_task: Task, tmp_path: Path) -> None:
    fl.simulate(fl.PDST(density=0.3), small_task, 6, folder=tmp_path, dropout=0.5, **SETTINGS)
    rounds = read_run(tmp_path)["rounds"]
    costs, layout = task_costs(small_task), small_task.layout
    assert any(line["failures"] for line in rounds)
    for line in rounds:
        samples = sum(small_task.clients[c].n for c in line["cohort"] if str(c) not in line["failures"])
        assert line["flops"] == pytest.approx(samples * sample_flops(layout, costs, line["layer_densities"]), rel=1e-4)


def test_a_resumed_run_has_the_record_of_an_undisturbed_one(small_task: Task, tmp_path: Path) -> None:
    method = fl.JMWST(density=0.3, warmup_clients=2, warmup_epochs=2)

    def stop(state: Any, line: dict[str, Any]) -> None:
        if state.stage == 2 and state.round == 5:
            raise KeyboardInterrupt

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fl.simulate(method, small_task, 8, folder=whole, **SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        fl.simulate(method, small_task, 8, folder=parts, watch=stop, checkpoint_every=2, **SETTINGS)
    fl.simulate(method, small_task, 8, folder=parts, resume=True, checkpoint_every=2, **SETTINGS)
    assert lines(whole) == lines(parts)
    names = [sorted(p.name for p in (folder / SNAPSHOTS).iterdir()) for folder in (whole, parts)]
    assert names[0] == names[1]


def test_snapshots_are_bounded(small_task: Task) -> None:
    from flashfl.run.config import TrainConfig, plan_of

    plan = plan_of(TrainConfig(rounds=1000), small_task, small_task.clients)
    state = fl.PDST(density=0.3).init(plan)
    assert 1000 / snapshot_every(state) <= MOST_SNAPSHOTS


def test_a_model_that_cannot_be_tried_has_no_flops_and_goes_on(small_task: Task, tmp_path: Path) -> None:

    class Broken:
        layout, evaluation, train = small_task.layout, small_task.evaluation, small_task.train

        def build(self) -> Any:
            raise RuntimeError("not here")

    recorder: Any = Recorder(Broken(), small_task.clients)  # type: ignore[arg-type]
    with pytest.warns(RuntimeWarning, match="FLOPs are not counted"):
        assert recorder.costs == {}
    assert np.isfinite(sample_flops(small_task.layout, recorder.costs, [1.0] * len(small_task.layout.prunable)))
