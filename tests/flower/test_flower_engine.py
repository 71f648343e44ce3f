"""Flower is another engine: its results are bit-identical to a simulation's."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import PATIENT, ROUNDS, SETTINGS, assert_equal, federation, node_of, train
from flwr.app import ArrayRecord, ConfigRecord
from flwr.serverapp.strategy import Strategy

import flashfl as fl
from flashfl.core.errors import CheckpointError, ConfigError
from flashfl.core.record import RoundRecord
from flashfl.core.state import State
from flashfl.data.task import Task
from flashfl.flower import FlashStrategy, client_app, server_task
from flashfl.run.config import TrainConfig
from flashfl.run.results import Results
from tests.conftest import DropoutNet, NormNet, blobs, make_task
from tests.engine.test_parts import custom
from tests.test_every_method import VARIANTS, small

methods = pytest.mark.parametrize("name", list(fl.METHODS))
variants = pytest.mark.parametrize(
    ("name", "changes"), VARIANTS, ids=["-".join([n, *map(str, c)]) for n, c in VARIANTS]
)


@variants
def test_every_method_is_bit_identical_to_the_cpu_engine(name: str, changes: dict[str, Any], small_task: Task) -> None:
    method = small(name, **changes)
    here = fl.simulate(method, small_task, ROUNDS, **SETTINGS)
    there = train(method, small_task, federation(small_task))
    assert_equal(here, there)
    assert here.traffic == there.traffic
    assert here.accuracy == there.accuracy
    assert [r.cohort for r in here.history] == [r.cohort for r in there.history]


def test_custom_part_is_bit_identical_to_the_cpu_engine(tmp_path: Path) -> None:
    """A user's file has the powers of ours: memory in `context.state`, reports, downloads, a mask of its own."""
    task, method = make_task("norm"), custom()
    here = fl.simulate(method, task, ROUNDS, **SETTINGS)
    grid = federation(task)
    there = train(method, task, grid, folder=tmp_path)
    assert_equal(here, there)
    assert here.traffic == there.traffic


@pytest.mark.parametrize(
    "settings",
    [
        {"values": "fp16"},
        {"values": "int8"},
        {"values": "int8", "values_up": "int4", "rest": "fp16", "upload": "changes", "average": 0.9},
        {"values": "int4", "upload": "changes", "rounding": "nearest", "feedback": True},
    ],
)
def test_lossy_values_are_bit_identical_to_the_cpu_engine(settings: dict[str, Any]) -> None:
    task, method = make_task("norm"), small("jmwst")
    here = fl.simulate(method, task, ROUNDS, **settings, **SETTINGS)
    there = train(method, task, federation(task), **settings)
    assert_equal(here, there)
    assert here.traffic == there.traffic
    assert here.history[-1].metrics == there.history[-1].metrics  # of the average too


def test_static_batch_norm_is_bit_identical_to_the_cpu_engine() -> None:
    task, method = make_task("norm"), small("spdst")
    here = fl.simulate(method, task, ROUNDS, static_bn=True, **SETTINGS)
    assert_equal(here, train(method, task, federation(task), static_bn=True))


def test_flower_hooks_for_single_steps_say_what_to_call_instead() -> None:
    strategy, grid = FlashStrategy(small("pdst"), make_task("norm"), options=PATIENT), federation(make_task("norm"))
    calls: list[Callable[[], Any]] = [
        lambda: strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid),
        lambda: strategy.aggregate_train(1, []),
        lambda: strategy.configure_evaluate(1, ArrayRecord(), ConfigRecord(), grid),
        lambda: strategy.aggregate_evaluate(1, []),
        lambda: Strategy.start(strategy, grid, ArrayRecord(), num_rounds=1),  # Flower's own loop calls them
    ]
    for call in calls:
        with pytest.raises(NotImplementedError, match=r"Call strategy.start\(grid\)"):
            call()
    assert not grid.pushed


def own_parts(task: Task) -> list[Any]:
    return [blobs(11 + i, (6,), 100 + i) for i in range(len(task.clients))]


def test_clients_evaluate_if_the_server_has_no_test_samples() -> None:
    whole = Task(DropoutNet, own_parts(make_task("dropout")), name="held")
    here = fl.simulate(small("spdst"), whole, ROUNDS, **SETTINGS)
    server = server_task(DropoutNet, example=blobs(1, (6,), 0)[0], name="held")
    grid = federation(whole)
    there = train(small("spdst"), server, grid)
    assert_equal(here, there)
    assert there.accuracy == pytest.approx(here.accuracy)
    assert any(kind == "evaluate" for _, kind in grid.pushed)
    # Evaluation bytes are recorded beside those of training, which are the same as in the simulation.
    assert there.traffic == here.traffic
    assert [r.evaluation_bytes > 0 for r in there.history] == [bool(r.metrics) for r in there.history]
    assert there.results.end is not None
    assert there.results.end["evaluation_bytes"] == there.bytes_evaluation > 0
    assert here.bytes_evaluation == 0


def test_missing_evaluation_samples_raise_before_training() -> None:
    task = make_task("norm")  # whose clients hold nothing back, as it has test samples
    grid = federation(task)
    with pytest.raises(ConfigError, match="nobody has samples to evaluate the model on"):
        train(small("pdst"), server_task(NormNet), grid)
    assert all(kind == "query" for _, kind in grid.pushed)


@pytest.mark.parametrize("setting", [{"dropout": 0.5}, {"device": "cuda"}])
def test_settings_of_simulations_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} = .*[Ss]et it to"):
        FlashStrategy(small("pdst"), make_task("norm"), TrainConfig(**setting))


def test_client_that_joins_during_a_round_can_evaluate() -> None:
    whole = Task(DropoutNet, own_parts(make_task("dropout")), name="held")
    grid = federation(whole)
    late = grid.apps[node_of(7)]
    grid.leave(node_of(7))

    def joins(node: int, message: Any, reply: Any) -> Any:
        if message.metadata.message_type == "train" and node_of(7) not in grid.apps:
            grid.join(node_of(7), late, {"partition-id": 7})
        return [reply]

    grid.tamper = joins
    server = server_task(DropoutNet, example=blobs(1, (6,), 0)[0], name="held")
    assert len(train(small("pdst"), server, grid, eval_every=1).history) == ROUNDS
    assert (node_of(7), "evaluate") in grid.pushed


def test_late_client_with_new_classes_is_accepted() -> None:
    """Clients that have converged hardly move; one with a class nobody had moves a hundred times as far."""
    torch.manual_seed(0)
    centers = 3 * torch.randn(4, 6)

    def data(classes: list[int], n: int = 40) -> Any:
        y = torch.tensor(classes).repeat(n)[:n]
        return centers[y] + 0.3 * torch.randn(n, 6), y

    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    parts = [*(data([0, 1, 2]) for _ in range(4)), data([3])]
    grid = federation(Task(net, parts[:4], data([0, 1, 2, 3])))

    def joins(s: Any, line: Any) -> None:
        if line.round == 12:
            grid.join(7, client_app(Task(net, [parts[4]], holdout=0)), {"client-id": 4})

    server = server_task(net, data([0, 1, 2, 3], 80))
    run = train(fl.Dense(), server, grid, rounds=24, per_round=4, watch=joins, options=replace(PATIENT, clients=4))
    assert not any(line.failures for line in run.history)


def test_each_node_can_have_its_own_task() -> None:
    """Each node has only its own samples, and the server has none."""
    task = make_task("norm")
    here = fl.simulate(small("jmwst"), task, ROUNDS, **SETTINGS)
    grid = federation(task)
    made: list[int] = []

    def mine(context: Any) -> Task:
        i = int(context.node_config["partition-id"])
        made.append(i)
        return Task(NormNet, [blobs(11 + i, (1, 5, 5), 100 + i)], test=blobs(5, (1, 5, 5), i))

    for c in task.clients:
        grid.join(node_of(c.id), client_app(mine), {"partition-id": c.id})
    there = train(small("jmwst"), server_task(NormNet, blobs(30, (1, 5, 5), 7), name="norm"), grid)
    assert_equal(here, there)
    assert sorted(made) == list(range(8)), "a task is made once in a process, not for every message"


def test_clients_state_their_own_densities() -> None:
    densities = [0.2, 0.2, 0.3, 0.3, 0.4, 0.4, 0.4, 0.2]
    task = make_task("norm")
    stated = make_task("norm")
    stated.densities = densities
    here = fl.simulate(small("hetero-jmwst"), stated, ROUNDS, **SETTINGS)
    nodes = {i: {"density": d} for i, d in enumerate(densities)}
    assert_equal(here, train(small("hetero-jmwst"), task, federation(task, nodes=nodes)))


_REMEMBER = ("topk", "scaffold")  # their clients remember tensors, which the server does not have


@methods
def test_client_that_lost_its_memory_gets_its_mask_back(name: str) -> None:
    task, method = make_task("norm"), small(name)
    whole = train(method, task, federation(task))
    grid = federation(task)

    def forget(state: State, line: Any) -> None:
        for context in grid.contexts.values():
            context.state.clear()

    again = train(method, task, grid, watch=forget)
    if name in _REMEMBER:  # they start anew
        assert len(again.history) == len(whole.history)
        assert not again.history[-1].failures
    else:
        assert_equal(whole, again)


class _Stop(Exception):
    pass


@pytest.mark.parametrize("again", ["same nodes", "fresh nodes"])
@methods
def test_resume_after_kill_is_bit_identical(name: str, again: str, tmp_path: Path) -> None:
    """Clients trained after the last checkpoint; their memory must not advance twice."""
    task, method = make_task("norm"), small(name)
    whole = train(method, task, federation(task))
    for at in range(1, len(whole.history), 2):
        grid, folder, seen = federation(task), tmp_path / str(at), itertools.count(1)

        def kill(state: State, line: Any, at: int = at, seen: Any = seen) -> None:
            if next(seen) > at:
                raise _Stop

        with pytest.raises(_Stop):
            train(method, task, grid, folder, watch=kill)
        resumed = train(method, task, grid if again == "same nodes" else federation(task), folder, resume=True)
        if again == "same nodes" or name not in _REMEMBER:
            assert_equal(whole, resumed)
        assert len(resumed.history) == len(whole.history)


def test_results_file_has_the_fields_of_a_simulation(tmp_path: Path) -> None:
    task = make_task("norm")
    fl.simulate(small("spdst"), task, ROUNDS, folder=tmp_path / "here", **SETTINGS)
    train(small("spdst"), task, federation(task), tmp_path / "there")
    here, there = Results.read(tmp_path / "here"), Results.read(tmp_path / "there")
    assert here.end is not None
    assert there.end is not None
    assert here.end.keys() == there.end.keys()
    assert here.end["checksum"] == there.end["checksum"]
    assert set(here.rounds[0].to_json()) == set(there.rounds[0].to_json())


def test_unreadable_checkpoints_raise_and_are_kept(tmp_path: Path) -> None:
    task = make_task()
    train(small("pdst"), task, federation(task), tmp_path)
    kept = sorted((tmp_path / "checkpoints").glob("*.json"))
    for path in kept:
        path.write_text(path.read_text().replace('"flashfl checkpoint": ', '"flashfl checkpoint": 9'))
    with pytest.raises(CheckpointError, match="format"):
        train(small("pdst"), task, federation(task), tmp_path, resume=True)
    assert sorted((tmp_path / "checkpoints").glob("*.json")) == kept


def test_resume_refuses_another_trim_and_allows_another_max_samples(tmp_path: Path) -> None:
    task, method, trimmed = make_task("norm"), small("pdst"), {"trim": 0.3}

    def stop(state: State, record: RoundRecord) -> None:
        if state.round == 2:
            raise _Stop

    with pytest.raises(_Stop):
        train(method, task, federation(task), tmp_path, watch=stop, **trimmed)
    with pytest.raises(CheckpointError, match="trim"):
        train(method, task, federation(task), tmp_path, resume=True)
    more = replace(PATIENT, max_samples=100)
    resumed = train(method, task, federation(task), tmp_path, resume=True, options=more, **trimmed)
    assert_equal(resumed, train(method, task, federation(task), **trimmed))


def test_resume_without_a_checkpoint_starts_a_run(tmp_path: Path) -> None:
    task = make_task("norm")
    fresh = train(small("pdst"), task, federation(task), tmp_path, resume=True)
    assert_equal(train(small("pdst"), task, federation(task)), fresh)


def test_importing_flashfl_does_not_import_flower() -> None:
    code = "import sys, flashfl, flashfl.cli, flashfl.flower; sys.exit('flwr' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
