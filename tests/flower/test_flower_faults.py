"""Clients that die or misbehave are dropped with a reason and do not change the model."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from flower_support import (
    PATIENT,
    QUICK,
    assert_equal,
    federation,
    marked,
    node_of,
    only,
    rogue,
    scaled,
    train,
    with_nan,
)
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

import flashfl as fl
from flashfl.core.errors import RunStopped
from flashfl.core.exchange import Order, Update
from flashfl.core.state import State
from flashfl.flower import records
from flashfl.run.checkpoint import load
from tests.conftest import make_task
from tests.test_every_method import small

BAD = 2
EVERY = {"per_round": 8}


def silent(message: Message, reply: Message) -> Iterable[Message]:
    return []


def garbage(message: Message, reply: Message) -> Iterable[Message]:
    reply.content = records.blob("update", b"FLSH" + bytes(range(200)))
    return [reply]


def damaged(message: Message, reply: Message) -> Iterable[Message]:
    name, data = records.read_blob(reply.content, "update")
    reply.content = records.blob(name, data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    return [reply]


def foreign(message: Message, reply: Message) -> Iterable[Message]:
    reply.content = RecordDict({"arrays": ArrayRecord({"w": Array("float32", (1,), "numpy.ndarray", b"1234")})})
    return [reply]


def crashed(message: Message, reply: Message) -> Iterable[Message]:
    return [Message(Error(8, "the app crashed"), reply_to=message)]


def babbling(message: Message, reply: Message) -> Iterable[Message]:
    reply.content = records.blob("lack", records.read_blob(reply.content, "update")[1])
    return [reply]


TAMPERED = {
    "silent": (silent, "no reply within"),
    "garbage": (garbage, "BadLength|BadVersion|BadChecksum|BadField"),
    "damaged": (damaged, "BadChecksum"),
    "foreign": (foreign, "BadRecord"),
    "crashed": (crashed, "error 8"),
    "babbling": (babbling, "for no good reason|UnknownMask"),
}


def many_samples(update: Update, order: Order) -> Update:
    return replace(update, n=10**9)


def other_client(update: Update, order: Order) -> Update:
    return replace(update, client=5)


CHEATING = {
    "many samples": (many_samples, "1000000000 samples"),
    "another's name": (other_client, "WrongTag"),
}


def without_bad(name: str, seed: int = 0) -> fl.Run:
    """A run in which no reply of the bad client arrives."""
    task = make_task("norm")
    grid = federation(task, only(node_of(BAD), "train", crashed))
    return train(small(name), task, grid, seed=seed, **EVERY)


@pytest.mark.parametrize("name", ["spdst", "nst"])
@pytest.mark.parametrize("fault", TAMPERED)
def test_bad_reply_is_dropped(fault: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    act, why = TAMPERED[fault]
    task = make_task("norm")
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        grid = federation(task, only(node_of(BAD), "train", act))
        run = train(small(name), task, grid, options=QUICK if fault == "silent" else PATIENT, **EVERY)
    assert_equal(run, without_bad(name))
    reasons = {line.failures.get(BAD) for line in run.history if BAD in line.cohort}
    assert reasons
    for reason in reasons:
        assert reason is not None
        assert any(part in reason for part in why.split("|")), reason
    assert f"client {BAD} is dropped" in caplog.text


@pytest.mark.parametrize("cheat", CHEATING)
def test_well_formed_lie_is_dropped(cheat: str) -> None:
    change, why = CHEATING[cheat]
    task = make_task("norm")
    grid = federation(task)
    grid.join(node_of(BAD), rogue(task, change), {"partition-id": BAD})
    run = train(small("jmwst"), task, grid, **EVERY)
    left_out = [line.failures.get(BAD, "") for line in run.history if line.counts]
    assert left_out
    assert all(why in reason for reason in left_out), left_out
    assert_equal(run, without_bad("jmwst"))


def test_nan_is_dropped() -> None:
    task = make_task("norm")
    grid = federation(task, only(node_of(BAD), "train", lambda message, reply: [with_nan(reply)]))
    grid.join(node_of(BAD), rogue(task, marked), {"partition-id": BAD})
    run = train(small("pdst"), task, grid, **EVERY)
    assert all("NonFinite" in line.failures[BAD] for line in run.history)
    assert_equal(run, without_bad("pdst"))


def test_second_reply_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    task = make_task("norm")
    whole = train(small("spdst"), task, federation(task), **EVERY)
    grid = federation(task, only(node_of(BAD), "train", lambda message, reply: [reply, reply]))
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        assert_equal(whole, train(small("spdst"), task, grid, **EVERY))
    assert f"node {node_of(BAD)} sent a reply that this round does not wait for" in caplog.text


def test_message_that_the_superlink_refuses_costs_no_waiting() -> None:
    task = make_task("norm")
    grid = federation(task)
    push = grid.push_messages
    grid.push_messages = lambda messages: [  # type: ignore[method-assign]
        "" if message.metadata.message_type == "train" and message.metadata.dst_node_id == node_of(BAD) else taken
        for message, taken in zip(messages, push(messages), strict=True)
    ]
    run = train(small("pdst"), task, grid, **EVERY)
    assert all("did not accept the message" in line.failures[BAD] for line in run.history)
    assert_equal(run, without_bad("pdst"))


def test_reply_for_an_old_round_is_dropped() -> None:
    task, kept = make_task("norm"), list[bytes]()

    def stale(message: Message, reply: Message) -> Iterable[Message]:
        kept.append(records.read_blob(reply.content, "update")[1])
        reply.content = records.blob("update", kept[0])
        return [reply]

    run = train(small("pdst"), task, federation(task, only(node_of(BAD), "train", stale)), **EVERY)
    assert not run.history[0].failures
    assert all("WrongTag" in line.failures[BAD] for line in run.history[1:])


def test_late_reply_is_dropped_and_its_client_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    task, kept = make_task("norm"), list[Message]()

    def late(message: Message, reply: Message) -> Iterable[Message]:
        kept.append(reply)
        return [] if len(kept) == 1 else [kept[0], reply] if len(kept) == 2 else [reply]

    options = replace(PATIENT, grace=0.2)
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        run = train(small("pdst"), task, federation(task, only(node_of(BAD), "train", late)), options=options, **EVERY)
    assert "no reply within" in run.history[0].failures[BAD]
    assert BAD not in run.history[1].cohort, "passed over for a round"
    assert all(BAD in record.cohort and not record.failures for record in run.history[2:])
    assert f"client {BAD} replied after" in caplog.text


def failing_first(times: int) -> Any:
    """Everybody's replies of the first rounds are lost."""
    seen: dict[str, int] = {}

    def tamper(node: int, message: Message, reply: Message) -> Iterable[Message]:
        if message.metadata.message_type != "train":
            return [reply]
        seen.setdefault(message.metadata.group_id, len(seen))
        return crashed(message, reply) if seen[message.metadata.group_id] < times else [reply]

    return tamper


def test_too_few_replies_repeat_the_round_with_another_cohort() -> None:
    task = make_task("norm")
    run = train(small("nst"), task, federation(task, failing_first(2)), min_replies=2, retries=2)
    assert run.history[0].attempt == 2
    assert len(run.history) >= 4
    plain = train(small("nst"), task, federation(task))
    assert run.history[0].cohort != plain.history[0].cohort


def test_run_stops_with_a_checkpoint_after_the_last_attempt(tmp_path: Path) -> None:
    task, good = make_task("norm"), federation(make_task("norm"))
    method = small("spdst")

    def gone(state: State, line: Any) -> None:
        if line.counts and line.round == 1:
            good.tamper = lambda node, message, reply: []

    with pytest.raises(RunStopped, match=r"failed 2 times.*no reply within"):
        train(method, task, good, tmp_path, watch=gone, retries=1, checkpoint_every=0, options=QUICK)
    assert list((tmp_path / "checkpoints").glob("checkpoint-*.json"))
    resumed = train(method, task, federation(task), tmp_path, resume=True, retries=1, checkpoint_every=0)
    assert_equal(resumed, train(method, task, federation(task)))


def test_lost_reply_does_not_change_the_clients_memory() -> None:
    """NST's clients move their own masks: a lost reply must not affect the next update."""
    task = make_task("norm")
    grid = federation(task)
    seen = {"lost": 0}

    def lose_once(node: int, message: Message, reply: Message) -> Iterable[Message]:
        if message.metadata.message_type == "train" and node == node_of(BAD) and not seen["lost"]:
            seen["lost"] += 1
            return crashed(message, reply)
        return [reply]

    grid.tamper = lose_once
    stepped = train(small("nst"), task, grid, **EVERY)
    other = federation(task)
    crashing = {"left": 1}
    real = other.apps[node_of(BAD)]

    def app(message: Message, context: Any) -> Message:
        if message.metadata.message_type == "train" and crashing["left"]:
            crashing["left"] -= 1
            raise RuntimeError("it never worked on this round")
        return real(message, context)

    other.apps[node_of(BAD)] = app  # type: ignore[assignment]
    assert_equal(stepped, train(small("nst"), task, other, **EVERY))


def test_checkpoint_holds_the_nodes_of_clients(tmp_path: Path) -> None:
    task = make_task("norm")
    run = train(small("hetero-spdst"), task, federation(task), tmp_path)
    assert run.state is not None
    point = load(tmp_path / "checkpoints", run.state.plan, run.results.header["identity"])
    saved: Any = point.clients
    assert [(e["client"]["id"], e["node"]) for e in saved["bound"]] == [(c.id, node_of(c.id)) for c in task.clients]
    assert saved["size"] == 8
    assert len(saved["densities"]) == 8


def test_wrong_evaluation_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    from flashfl.data.task import Task
    from flashfl.flower import server_task
    from tests.conftest import DropoutNet, blobs

    task = Task(DropoutNet, [blobs(11 + i, (6,), 100 + i) for i in range(8)], name="held")

    def lie(message: Message, reply: Message) -> Iterable[Message]:
        reply.content = records.fields("evaluated", {"n": 2, "loss": float("nan"), "metric": 1.0})
        return [reply]

    grid = federation(task, only(node_of(BAD), "evaluate", lie))
    server = server_task(DropoutNet, example=blobs(1, (6,), 0)[0], name="held")
    with caplog.at_level(logging.WARNING, "flwr.flashfl"):
        run = train(small("pdst"), server, grid)
    assert 0 <= run.accuracy <= 1
    assert f"client {BAD} is dropped from this evaluation" in caplog.text


def test_evaluation_without_any_reply_stops_the_run() -> None:
    from flashfl.data.task import Task
    from flashfl.flower import server_task
    from tests.conftest import DropoutNet, blobs

    def fails(node: int, message: Message, reply: Message) -> Iterable[Message]:
        return crashed(message, reply) if message.metadata.message_type == "evaluate" else [reply]

    task = Task(DropoutNet, [blobs(11 + i, (6,), 100 + i) for i in range(8)], name="held")
    server = server_task(DropoutNet, example=blobs(1, (6,), 0)[0], name="held")
    with pytest.raises(RunStopped, match="no client could evaluate the model"):
        train(small("pdst"), server, federation(task, fails))


# Clients of these choose which weights they hold or send. Where few hold a weight, there is nothing to trim.
_NOT_TRIMMED = ("feddst", "fedspa", "zerofl", "fjord")


@pytest.mark.parametrize("name", fl.METHODS)
def test_liars_are_bounded_in_every_method(name: str) -> None:
    """Two of eight clients send 40 times their change, backwards. The defaults, clip and trim limit the damage."""
    task = make_task("norm")
    one = train(small(name), task, federation(task), rounds=1, robust="off", **EVERY)
    off, far = {"robust": "off"}, {}
    for kind, robust in {
        "plain": off,
        "defaults": {},
        "trim": {**off, "trim": 0.3},
        "clip": {**off, "clip": 1.0},
    }.items():
        grid = federation(task)
        for bad in (2, 5):
            grid.join(node_of(bad), rogue(task, scaled(-40.0)), {"partition-id": bad})
        run = train(small(name), task, grid, rounds=1, **EVERY, **robust)
        assert not run.history[0].failures, "these lies are well-formed"
        trained = task.layout.trained_size
        far[kind] = float((run.weights.vector - one.weights.vector)[:trained].norm())
    # Where densities differ, some weights are held by few, and a rogue may be most of them.
    if name not in _NOT_TRIMMED:
        assert far["trim"] < far["plain"] / (1.2 if name.startswith("hetero") else 4)
    assert far["clip"] < far["plain"] / 4
    assert far["defaults"] < far["plain"] / 4
