"""A client's id and numbers of samples are bound to its node, and so to its key, for the whole run."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import PATIENT, QUICK, federation, node_of, train
from test_flower_registry import after, of_size, registry_of

from flashfl.core.errors import RunStopped
from flashfl.flower import client_app, server_task
from tests.conftest import NormNet, blobs, make_task
from tests.run.test_forged import mutations
from tests.test_every_method import small

SERVER = server_task(NormNet, blobs(30, (1, 5, 5), 7))


def test_second_node_with_the_same_client_id_is_refused_even_after_the_first_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    task = make_task("norm")
    grid = federation(task)
    registry = registry_of(grid, task)
    assert len(registry.present()) == 8
    grid.join(7, client_app(task), {"partition-id": 3})
    with caplog.at_level(logging.ERROR, "flwr.flashfl"):
        registry.refresh()
        registry.refresh()
    assert registry.entries[3].node == node_of(3)
    assert caplog.text.count(f"node 7 is refused: client 3 belongs to node {node_of(3)}") == 1
    app = grid.apps[node_of(3)]
    grid.leave(node_of(3))
    registry.refresh()
    assert 3 not in registry.entries
    assert f"client 3 belongs to node {node_of(3)}, which registered it first" in registry.refused[7]
    assert "flower.rebind=true" in registry.refused[7]
    grid.join(node_of(3), app, {"partition-id": 3})
    registry.refresh()
    assert registry.entries[3].node == node_of(3)


@pytest.mark.parametrize(
    ("app", "config"),
    [
        (of_size(33), {}),
        (of_size(2**9), {}),
        (of_size(11), {"partition-id": 0, "client-id": 5}),
        (of_size(11), {"partition-id": 0, "client-id": 3}),
        (of_size(13), {"density": 0.5}),
    ],
)
def test_restarted_node_must_register_what_it_registered_first(app: Any, config: dict[str, Any]) -> None:
    task = make_task("norm")
    grid = federation(task)
    registry = registry_of(grid, task)
    assert len(registry.present()) == 8
    grid.join(node_of(2), app, {"partition-id": 2, **config})
    registry.doubt([2])
    assert [c.id for c in registry.present()] == [0, 1, 3, 4, 5, 6, 7]
    assert "it was client 2 with 13 samples" in registry.refused[node_of(2)] or config.get("client-id") in (3, 5)
    grid.join(node_of(2), client_app(task), {"partition-id": 2})  # as it was before
    registry.nodes[node_of(2)].tries = 1
    registry.refresh()
    assert [(c.id, c.n) for c in registry.present()] == [(c.id, c.n) for c in task.clients]


def test_node_restarted_with_other_data_takes_no_further_part(caplog: pytest.LogCaptureFixture) -> None:
    grid = federation(make_task("norm"))
    restart = after(grid, 1, node_of(2), of_size(33))
    run = train(small("pdst"), SERVER, grid, watch=restart, per_round=8, rounds=5)
    assert [list(line.failures) for line in run.history] == [[], [], [2], [], []]
    assert [2 in line.cohort for line in run.history] == [True, True, True, False, False]
    assert f"node {node_of(2)} is refused: it registers as client 2 with 33 samples" in caplog.text


def test_rebind_accepts_other_data_and_new_nodes() -> None:
    task = make_task("norm", clients=3)
    grid = federation(task)
    registry = registry_of(grid, task, rebind=True)
    assert [c.id for c in registry.present()] == [0, 1, 2]
    grid.join(node_of(2), of_size(9), {"partition-id": 0, "client-id": 5})
    registry.doubt([2, 77])
    assert [(c.id, c.n) for c in registry.present()][2:] == [(5, 9)]
    assert set(registry.bound) == {0, 1, 5}
    grid.join(7, client_app(task), {"partition-id": 1})
    registry.refresh()
    assert registry.entries[1].node == node_of(1), "while a node is there, its client is taken"
    grid.leave(node_of(1))
    registry.refresh()
    assert registry.entries[1].node == 7


def test_rebind_is_not_undone_by_the_checkpoint() -> None:
    """A resumed run reads it twice: before clients register, and after."""
    task = make_task("norm", clients=3)
    grid = federation(task)
    before = registry_of(grid, task)
    before.refresh()
    saved: Any = json.loads(json.dumps(before.save()))
    app = grid.apps[node_of(2)]
    grid.leave(node_of(2))
    grid.join(node_of(1), client_app(task), {"partition-id": 2})
    registry = registry_of(grid, task, rebind=True)
    registry.load(saved)
    registry.refresh()
    registry.load(saved)
    grid.join(node_of(2), app, {"partition-id": 1})
    registry.refresh()
    assert {client: entry.node for client, entry in registry.bound.items()} == {0: 90000, 1: node_of(2), 2: node_of(1)}
    assert not registry.refused


@pytest.mark.filterwarnings("ignore:rounds changed")
def test_bindings_are_kept_when_the_server_is_restarted(tmp_path: Path) -> None:
    """A resumed run refuses nodes that registered as somebody else, or with other data, before."""
    task = make_task("norm")
    train(small("pdst"), SERVER, federation(task), tmp_path, rounds=2, per_round=8)
    grid = federation(task)
    grid.join(node_of(2), of_size(33), {"partition-id": 2})
    stranger = grid.apps[node_of(3)]
    grid.leave(node_of(3))
    grid.join(7, stranger, {"partition-id": 3})
    options = replace(PATIENT, clients=6)
    run = train(small("pdst"), SERVER, grid, tmp_path, resume=True, rounds=4, per_round=8, options=options)
    assert [sorted(line.cohort) for line in run.history[2:]] == [[0, 1, 4, 5, 6, 7]] * 2
    options = replace(PATIENT, clients=8, rebind=True)
    run = train(small("pdst"), SERVER, grid, tmp_path, resume=True, rounds=5, per_round=8, options=options)
    assert sorted(run.history[4].cohort) == list(range(8))
    bound = {e["client"]["id"]: e for e in _record(tmp_path)["clients"]["bound"]}
    assert (bound[2]["client"]["n"], bound[3]["node"]) == (33, 7)


def _record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(max((folder / "checkpoints").glob("*.json")).read_text())
    return found


@pytest.mark.filterwarnings("ignore:rounds changed")
def test_new_nodes_without_authentication_are_told_what_to_set(tmp_path: Path) -> None:
    task = make_task("norm", clients=2)
    train(small("pdst"), SERVER, federation(task), tmp_path, rounds=1, per_round=2)
    grid = federation(task)
    for client in (0, 1):
        grid.join(client + 1, grid.apps[node_of(client)], {"partition-id": client})
        grid.leave(node_of(client))
    with pytest.raises(RunStopped, match=r"belongs to node 90000, which registered it first.*flower\.rebind=true"):
        train(small("pdst"), SERVER, grid, tmp_path, resume=True, rounds=2, per_round=2, options=QUICK)


def test_forged_clients_of_a_checkpoint_change_nothing() -> None:
    """Whatever `load` raises, the checkpoint is not used."""
    task = make_task("norm", clients=2)
    registry = registry_of(federation(task), task)
    registry.gather(2)
    saved: Any = json.loads(json.dumps(registry.save()))
    odd: list[Any] = [None, True, -1, 2**64, 10**30, 0.5, float("nan"), "x", [], [None], {}, {"is": "Local"}]
    ends = []
    for mutate in mutations({**saved, "densities": {"0": 0.5}}, odd):
        fresh = registry_of(federation(task), task)
        try:
            fresh.load(mutate())
        except Exception:
            ends.append("refused")
            assert (fresh.size, fresh.bound, fresh.densities) == (0, {}, {})
        else:
            fresh.present()
            ends.append("went on")
    assert ends.count("refused") > 150, (len(ends), ends.count("refused"))
