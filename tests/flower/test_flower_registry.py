"""Which node is which client: ids, refusals, nodes that join and leave."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import PATIENT, QUICK, assert_equal, federation, node_of, only, train
from flwr.app import Error, Message

from flashfl.core.errors import ConfigError, RunStopped
from flashfl.core.state import State
from flashfl.data.task import Task
from flashfl.flower import FlowerOptions, client_app, records, server_task
from flashfl.flower.registry import Registry
from tests.conftest import NormNet, blobs, make_task
from tests.test_every_method import small


def registry_of(grid: Any, task: Any, need: int = 1, rebind: bool = False) -> Registry:
    options = FlowerOptions(wait=0.1, poll=0.01, rebind=rebind)
    return Registry(grid, task, options, need)


def test_clients_are_known_by_their_own_ids() -> None:
    task = make_task("norm")
    registry = registry_of(federation(task), task)
    assert [c.id for c in registry.present()] == list(range(8))
    assert [c.n for c in registry.present()] == [c.n for c in task.clients]
    assert all(registry.entries[c.id].node == node_of(c.id) for c in task.clients)


def test_node_with_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    task, other = make_task("norm"), make_task("dropout")
    grid = federation(task)
    grid.join(node_of(5), client_app(other), {"partition-id": 5})
    with caplog.at_level(logging.ERROR, "flwr.flashfl"):
        registry = registry_of(grid, task)
        assert [c.id for c in registry.present()] == [0, 1, 2, 3, 4, 6, 7]
    assert "client 5 has another model" in registry.refused[node_of(5)]
    assert other.layout.hash in caplog.text


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"wire": 99}, "speaks version 99"),
        ({"n": 0}, "with 0 samples"),
        ({"client": -1}, "registers as client -1"),
        ({"client": "three"}, "cannot be read"),
        ({"density": "thick"}, "cannot be read"),
    ],
)
def test_impossible_registration_is_refused(said: dict[str, Any], why: str) -> None:
    task = make_task("norm")

    def lie(message: Message, reply: Message) -> Iterable[Message]:
        reply.content = records.fields("client", {**records.read_fields(reply.content, "client"), **said})
        return [reply]

    registry = registry_of(federation(task, only(node_of(1), "query", lie)), task)
    assert 1 not in [c.id for c in registry.present()]
    assert why in registry.refused[node_of(1)]


def test_other_package_version_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    task = make_task("norm")

    def old(message: Message, reply: Message) -> Iterable[Message]:
        reply.content = records.fields("client", {**records.read_fields(reply.content, "client"), "package": "0.0.1"})
        return [reply]

    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        assert len(registry_of(federation(task, only(node_of(1), "query", old)), task).present()) == 8
    assert "client 1 runs flashfl 0.0.1" in caplog.text
    assert "Install the same version" in caplog.text


def test_node_without_partition_id_is_told_what_to_set() -> None:
    task = make_task("norm")
    grid = federation(task)
    grid.join(11, client_app(task), {})
    registry = registry_of(grid, task)
    assert len(registry.present()) == 8
    assert "--node-config 'partition-id=N'" in registry.refused[11]


def test_node_whose_app_fails_is_asked_three_times() -> None:
    task = make_task("norm")
    grid = federation(task)

    def broken(context: Any) -> Any:
        raise OSError("no data here")

    grid.join(11, client_app(broken), {"partition-id": 11})
    registry = registry_of(grid, task)
    for _ in range(6):
        registry.refresh()
    assert "no data here" in registry.refused[11]
    assert grid.pushed.count((11, "query")) == 3


def test_density_the_method_does_not_offer_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    task = make_task("norm")
    grid = federation(task, nodes={4: {"density": 0.77}})
    run = train(small("hetero-spdst"), task, grid, per_round=4, options=replace(PATIENT, clients=7))
    assert run.state is not None
    assert all(4 not in line.cohort for line in run.history)
    assert "client 4 states density 0.77" in caplog.text


def test_nodes_can_join_and_leave() -> None:
    task = make_task("norm")
    grid = federation(task)
    late = {c: grid.apps[node_of(c)] for c in (6, 7)}
    for c in late:
        grid.leave(node_of(c))

    def change(state: State, line: Any) -> None:
        if line.round == 1:
            for c, app in late.items():
                grid.join(node_of(c), app, {"partition-id": c})
            grid.leave(node_of(0))

    run = train(small("dense"), task, grid, watch=change, per_round=6, rounds=4)
    cohorts = [set(line.cohort) for line in run.history]
    assert cohorts[:2] == [set(range(6))] * 2
    assert all(0 not in cohort for cohort in cohorts[2:])
    assert {6, 7} & (cohorts[2] | cohorts[3])


def test_fewer_clients_than_asked_for_are_a_warning_that_says_what_happens(caplog: pytest.LogCaptureFixture) -> None:
    task = make_task("norm")
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        registry_of(federation(task), task).gather(9)
    assert "only 8 of 9 clients registered within 0.1 s, and the server waits no longer" in caplog.text
    assert "raise flower.wait" in caplog.text


def test_too_few_clients_stop_the_run_with_the_reason() -> None:
    task = make_task("norm")
    grid = federation(task)
    for c in range(1, 8):
        grid.join(node_of(c), client_app(make_task("dropout")), {"partition-id": c})
    with pytest.raises(RunStopped, match=r"1 clients registered within.*another model"):
        train(small("dense"), task, grid, min_replies=2, per_round=4, options=QUICK)


def test_per_round_above_the_number_of_clients_raises_before_training() -> None:
    task = make_task("norm")
    with pytest.raises(ConfigError, match="per_round = 9: must be at least 1 and at most 8"):
        train(small("dense"), task, federation(task), per_round=9)


def test_resumed_run_keeps_its_plan_with_fewer_clients(tmp_path: Any) -> None:
    """Clients keep the densities they were given."""
    task = make_task("norm")
    run = train(small("hetero-spdst"), task, federation(task), tmp_path, rounds=2)
    grid = federation(task)
    grid.leave(node_of(0))
    resumed = train(small("hetero-spdst"), task, grid, tmp_path, resume=True, rounds=2)
    assert resumed.state is not None
    assert run.state is not None
    assert resumed.state.plan.clients == run.state.plan.clients == 8
    assert_equal(run, resumed)


def of_size(n: int, net: Any = NormNet, client: int = 2) -> Any:
    """An app with so many samples of its own."""
    return client_app(Task(net, [blobs(n, (1, 5, 5), 100 + client)], holdout=0))


def after(grid: Any, number: int, node: int, app: Any, **config: Any) -> Any:
    """Restarts a node with another app after a round."""

    def change(state: State, line: Any) -> None:
        if line.round == number:
            grid.join(node, app, {"partition-id": 2, **config})

    return change


@pytest.mark.parametrize(("app", "why"), [
    (of_size(33), "registers 33 samples, but flower.max_samples = 20"),
    (client_app(make_task("dropout")), "has another model"),
])  # fmt: skip
def test_node_restarted_with_an_unfit_app_is_refused(app: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    task, options = make_task("norm"), replace(PATIENT, max_samples=20)
    grid = federation(task)
    server = server_task(NormNet, blobs(30, (1, 5, 5), 7))
    run = train(small("pdst"), server, grid, watch=after(grid, 1, node_of(2), app), options=options, per_round=7)
    assert f"node {node_of(2)} is refused: client 2 {why}" in caplog.text
    assert 2 not in run.history[-1].cohort


def test_refused_node_is_asked_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    task = make_task("norm")
    grid = federation(task)
    grid.join(node_of(2), client_app(make_task("dropout")), {"partition-id": 2})
    registry = registry_of(grid, task)
    assert len(registry.present()) == 7
    registry.refresh()
    assert grid.pushed.count((node_of(2), "query")) == 1, "not all the time"
    monkeypatch.setattr("flashfl.flower.registry._AGAIN", 0.0)
    registry.refresh()
    assert grid.pushed.count((node_of(2), "query")) == 2
    assert caplog.text.count("has another model") == 1, "what is known is not said again"
    grid.join(node_of(2), client_app(task), {"partition-id": 2})
    registry.refresh()
    assert [c.id for c in registry.present()] == list(range(8))
    assert not registry.refused
    registry.refresh()
    assert grid.pushed.count((node_of(2), "query")) == 3


def test_unreachable_client_stays_registered() -> None:
    task = make_task("norm")
    grid = federation(task)
    registry = registry_of(grid, task)
    assert len(registry.present()) == 8
    grid.tamper = lambda node, message, reply: [
        Message(Error(2, "no way there"), reply_to=message) if node == node_of(2) else reply
    ]
    for _ in range(12):
        registry.doubt([2])
        registry.refresh()
    assert grid.pushed.count((node_of(2), "query")) > 4, "more often than an unknown one would be"
    assert [c.id for c in registry.present()] == list(range(8))
    assert not registry.refused


def test_server_waits_for_needed_clients() -> None:
    task = make_task("norm")
    grid = federation(task)
    apps = {c.id: grid.apps[node_of(c.id)] for c in task.clients}
    for c in range(1, 8):
        grid.leave(node_of(c))
    looks = iter(range(1, 8))

    def ids() -> Iterable[int]:
        if (c := next(looks, None)) is not None and c > 3:
            grid.join(node_of(c), apps[c], {"partition-id": c})
        return list(grid.apps)

    grid.get_node_ids = ids  # type: ignore[method-assign]
    run = train(small("pdst"), task, grid, options=replace(PATIENT, clients=1), per_round=1, min_replies=2, rounds=1)
    assert len(run.history) == 1
