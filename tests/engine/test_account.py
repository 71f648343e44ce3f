"""The account of a round: whatever a client sends, the rest of the cohort is aggregated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.aggregate import average
from flashfl.core.errors import CheckpointError, FlashError
from flashfl.core.exchange import Client, Extra, Local, Order, Sums, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe, Weights
from flashfl.core.state import State
from flashfl.data.task import Task
from flashfl.engine.client import ClientSide, Reply, update_message
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.encoding import OWN, Encoding, Held
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.memory import ClientMemory
from flashfl.engine.robust import PLAIN, Robust
from flashfl.engine.store import MaskStore
from flashfl.engine.train import ClientFailed, Trainer
from flashfl.engine.trust import frozen_mask, read_update, start_of
from flashfl.methods.topk import LargestChanges
from flashfl.run.config import TrainConfig
from flashfl.run.config import plan_of as plan_from
from flashfl.sparsity import PruneRegrow, recipe_mask
from flashfl.wire import Message, encode, seal
from flashfl.wire.errors import WireError, WrongContent
from tests.conftest import make_task

STATISTICS = [("bn.running_mean", (1,)), ("bn.running_var", (1,))]
LAYOUT = Layout.build({"prunable": [("w", (4, 2))], "dense": [("b", (2,))], "statistic": STATISTICS})
MASK = Mask(LAYOUT, torch.tensor([1, 0, 1, 0, 1, 0, 1, 0], dtype=torch.bool))
OTHER = Mask(LAYOUT, torch.tensor([0, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool))  # as many, elsewhere
MADE = recipe_mask(LAYOUT, Recipe(7, (4,)))
TAG = (2, 4, 0)
PACKED = Weights.masked(MADE, torch.zeros(LAYOUT.size)).packed()
RECIPE = Message("update", LAYOUT, TAG, 1, n=10, mask=MADE, values=PACKED)


def plan_of(task: Task, rounds: int, per_round: int) -> Any:
    return plan_from(TrainConfig(rounds=rounds, per_round=per_round, batch=4), task, len(task.clients))


def make_server(layout: Layout = LAYOUT, robust: Robust = PLAIN) -> Encoding:
    return Encoding(ClientMemory(MaskStore(layout, {})), robust=robust)


def started(clients: int = 4, local: Local | None = None, robust: Robust = PLAIN) -> tuple[Encoding, Order]:
    """A round in which every client has been sent the same order."""
    account = make_server(robust=robust)
    order = Order(Weights(MASK, torch.zeros(LAYOUT.size)), local or Local(), 1, TAG)
    for client in range(clients):
        account.sent(Client(client, 10), order)
    return account, order


def answer(
    order: Order, client: int, value: float = 1.0, mask: Mask = MASK, n: int = 10, base: Mask | None = None
) -> bytes:
    vector = torch.full((LAYOUT.size,), value)
    update = Update.of(client, n, Weights.masked(mask, vector), mask.counts, {"loss": value})
    message = update_message(update, order, LAYOUT)
    return encode(message, (base or MASK,), form="difference" if base else None).data


def finished(account: Encoding) -> tuple[Sums, Mapping[int, str]]:
    outcome = account.close()
    return outcome.sums, outcome.failures


def bad(order: Order, kind: str) -> bytes:
    """What client 1 sends instead of an answer."""
    good = answer(order, 1)
    other = Layout.build({"prunable": [("w", (4, 2))]})
    if kind == "nan":
        at = good.rindex(b"\x00\x00\x80\x3f")  # the last 1.0 among the values
        return seal(good[:at] + b"\x00\x00\xc0\x7f" + good[at + 4 :])
    return {
        "garbage": b"hello, server",
        "nothing": b"",
        "cut": good[:-3],
        "damaged": good[:40] + bytes([good[40] ^ 1]) + good[41:],
        "another model": encode(Message("update", other, TAG, 1, n=10, counts=(4,))).data,
        "another round": answer(replace(order, tag=(2, 3, 0)), 1),
        "another client": answer(order, 2),
        "no update": encode(Message("lack", LAYOUT, TAG, 1, lacks="00" * 8)).data,
        "too dense": answer(order, 1, mask=Mask.full(LAYOUT)),
        "only counts": encode(Message("update", LAYOUT, TAG, 1, n=10, counts=(4,))).data,
        "more samples": answer(order, 1, n=10**9),
        "negative variance": answer(order, 1, value=-1.0),
        "moved mask": answer(order, 1, mask=OTHER),
        "recipe": encode(RECIPE, form="recipe").data,
        "unknown mask": answer(order, 1, base=Mask(LAYOUT, ~MASK.bits)),
    }[kind]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("garbage", "BadMagic"),
        ("nothing", "BadMagic"),
        ("cut", "BadLength"),
        ("damaged", "BadChecksum"),
        ("another model", "WrongLayout"),
        ("another round", "WrongTag"),
        ("another client", "WrongTag"),
        ("no update", "WrongTag"),
        ("too dense", "WrongDensity"),
        ("only counts", "WrongContent"),
        ("more samples", "WrongContent"),
        ("negative variance", "NegativeVariance"),
        ("nan", "NonFinite"),
        ("moved mask", "WrongContent"),
        ("recipe", "BadField"),
        ("unknown mask", "UnknownMask"),
    ],
)
def test_bad_answer_is_dropped_and_the_rest_aggregated(kind: str, named: str) -> None:
    account, order = started()
    before = account.traffic
    data = bad(order, kind)
    account.received(1, data)
    assert account.traffic.up - before.up == len(data), "bytes that travelled are counted, good or bad"
    for client in (3, 0, 2):
        account.received(client, answer(order, client, value=client + 1.0))
    sums, failures = finished(account)
    assert list(failures) == [1]
    assert failures[1].startswith(named + ": ")
    assert (sums.clients, sums.n) == (3, 30)
    expected = (1 + 3 + 4) / 3
    assert average("fedavg", sums).tolist() == pytest.approx(
        [expected if bit else 0.0 for bit in MASK.bits.tolist()] + [expected] * 4
    )


def test_dropped_clients_hold_nothing_new() -> None:
    account, order = started(2)
    account.received(0, answer(order, 0))
    account.received(1, b"garbage")
    finished(account)
    memory, server = account.memory, Encoding(account.memory)
    assert memory.start(0) == TAG
    base = memory.base(0)
    assert base is not None
    assert base.equal(MASK)
    assert memory.start(1) is None
    message = server.message(Client(0, 10), order)
    assert server.encode(message).traffic.mask == 9  # the hash of a known mask, and a byte that says so
    assert server.encode(replace(message, client=1, start=None)).traffic.mask != 9


COHORT = Robust(clip=1e6)  # updates wait for the whole cohort, and are not changed


@pytest.mark.parametrize("robust", [PLAIN, COHORT], ids=["streaming", "cohort"])
@pytest.mark.parametrize("arrival", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (4, 3, 2, 1, 0)])
def test_sums_do_not_depend_on_arrival_order(
    arrival: tuple[int, ...], robust: Robust, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashfl.engine import encoding
    from flashfl.engine import robust as robust_sums

    added: list[int] = []
    real = encoding.add
    for module in (encoding, robust_sums):
        monkeypatch.setattr(module, "add", lambda sums, update: added.append(update.client) or real(sums, update))
    account, order = started(5, robust=robust)
    for client in arrival:
        account.received(client, answer(order, client, value=0.1 * (client + 1)))
    sums, _ = finished(account)
    assert added == [0, 1, 2, 3, 4]
    assert sums.weights is not None
    expected = torch.zeros(LAYOUT.size, dtype=torch.float64)
    for client in range(5):
        expected += 10 * Weights.masked(MASK, torch.full((LAYOUT.size,), 0.1 * (client + 1))).vector.double()
    assert torch.equal(sums.weights, expected)


def test_updates_are_added_as_soon_as_lower_ids_are_settled() -> None:
    account, order = started(4)
    account.received(2, answer(order, 2))
    account.received(1, answer(order, 1))
    assert account.sums.clients == 0
    account.failed(0, "gone")
    assert account.sums.clients == 2
    assert account.memory.start(1) is None, "accepted when the round is closed"
    account.received(3, answer(order, 3))
    assert account.sums.clients == 3
    outcome = account.close()
    assert outcome.failures == {0: "gone"}
    assert account.memory.start(1) == TAG


def test_each_update_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashfl.engine import trust

    calls, real = [], trust.decode
    monkeypatch.setattr(trust, "decode", lambda *a, **k: calls.append(1) or real(*a, **k))
    account, order = started(4)
    for client in (3, 1, 0, 2):
        account.received(client, answer(order, client))
    finished(account)
    assert len(calls) == 4


def test_client_without_an_answer_is_dropped_at_the_end() -> None:
    account, order = started(2)
    account.received(1, answer(order, 1))
    assert finished(account)[1] == {0: "no answer"}


@pytest.mark.parametrize("room", [1 << 20, 100, 0])
def test_held_updates_come_back_from_memory_or_file(room: int, tmp_path: Path) -> None:
    held, updates = Held(LAYOUT, tmp_path, room), {}
    for client in (5, 1, 9, 0, 3):
        mask = OTHER if client % 2 else MASK
        update = Update.of(client, 10, Weights.masked(mask, torch.rand(LAYOUT.size)), mask.counts, {"loss": 2.0})
        updates[client] = replace(update, extra={"x": Extra("dense", torch.rand(2, 3))}, start=torch.rand(3))
        held.put(updates[client], MASK)
    held.put(Update(7, 3, None, None, (2,)), MASK)
    assert [update.client for update in held] == [0, 1, 3, 5, 7, 9]
    assert [update.client for update in held.take(before=1)] == [0, 1]
    for client in (0, 1):
        held.put(updates[client], MASK)
    found_all = {update.client: update for update in held.take(before=None)}
    assert not list(held)
    assert found_all.pop(7) == Update(7, 3, None, None, (2,))
    for client, update in sorted(updates.items(), reverse=True):
        found = found_all[client]
        assert (found.n, found.counts, found.metrics) == (update.n, update.counts, update.metrics)
        assert found.mask is not None
        assert found.mask.equal(update.mask)  # type: ignore[arg-type]
        assert (found.mask is MASK) == (client % 2 == 0), "the order's mask is not copied"
        assert torch.equal(found.values, update.values)  # type: ignore[arg-type]
        assert torch.equal(found.start, update.start)  # type: ignore[arg-type]
        assert torch.equal(found.extra["x"].value, update.extra["x"].value)
    assert not list(tmp_path.glob("*")), "the file has no name, so it cannot be left behind"
    assert held.room == room


def test_extras_take_room_too(tmp_path: Path) -> None:
    """A control variate is as large as the model. Some clients send extras and no weights."""
    held = Held(LAYOUT, tmp_path, room=100)
    update = Update(1, 10, None, None, (4,), extra={"x": Extra("dense", torch.arange(26.0))})
    held.put(update, MASK)
    assert held._waiting[1].place is not None
    [found] = held.take(before=None)
    assert (found.mask, found.values, found.counts) == (None, None, (4,))
    assert torch.equal(found.extra["x"].value, torch.arange(26.0))


def test_start_of_clients_that_report_changes_takes_no_room() -> None:
    """They all start from 0. Otherwise a cohort of dense clients would need a model's memory for each of them."""
    mask, values = Mask.full(LAYOUT), torch.ones(LAYOUT.size)
    update = Update(0, 10, mask, values, mask.counts)
    start = start_of(update, Local(parts=(LargestChanges(0.5),)), mask, values)
    assert start is not None
    assert start.tolist() == [0.0] * 10
    assert start.untyped_storage().nbytes() == 4


def test_unexpected_extras_are_rejected_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashfl.wire import tensors

    account, order = started(1)
    update = Update.of(0, 10, Weights.masked(MASK, torch.ones(LAYOUT.size)), MASK.counts)
    large = replace(update, extra={"x": Extra("bits", torch.ones(1 << 16, dtype=torch.bool))})
    data = encode(update_message(large, order, LAYOUT), (MASK,)).data
    monkeypatch.setattr(tensors, "_read_bits", lambda *_: pytest.fail("it was unpacked"))
    account.received(0, data)
    assert finished(account)[1][0].startswith("TooLarge: 1 extras, at most 0")


def test_extras_must_match_those_of_the_order() -> None:
    server = make_server()
    asked = {"a": Extra("dense", torch.zeros(3))}
    order = Order(Weights(MASK, torch.zeros(LAYOUT.size)), Local(), 1, TAG, asked)
    message = server.message(Client(0, 10), order)

    def sent(**extra: Extra) -> bytes:
        update = Update.of(0, 10, Weights.masked(MASK, torch.ones(LAYOUT.size)), MASK.counts)
        return encode(update_message(replace(update, extra=extra), order, LAYOUT), (MASK,)).data

    assert read_update(sent(a=Extra("dense", torch.ones(3))), message, None)[0].extra["a"].value.tolist() == [1.0] * 3
    with pytest.raises(WrongContent, match="shape"):
        read_update(sent(a=Extra("dense", torch.ones(4))), message, None)
    with pytest.raises(WrongContent, match=OWN):
        read_update(sent(**{OWN: Extra("bits", MASK.bits)}), message, None)


@pytest.mark.parametrize("statistics", [True, False])
def test_changes_are_compared_over_all_trained_weights(statistics: bool) -> None:
    """With static BatchNorm no statistics travel, so none must be cut off."""
    order = Order(Weights.masked(MASK, torch.ones(LAYOUT.size)), Local(statistics=statistics), 1, TAG)
    message = make_server().message(Client(0, 10), order)
    update, _ = read_update(answer(order, 0, value=2.0), message, None, compared=True)
    assert update.start is not None
    assert update.start.tolist() == [1.0] * (4 + 2)


def test_density_is_checked_against_the_recipe_a_client_starts_from() -> None:
    """NST's server model is denser than any client's mask."""
    account, order = started(1, Local(start=Recipe(5, (3,)), keep=("mask",)))
    account.received(0, answer(order, 0))
    _, failures = finished(account)
    assert failures[0].startswith("WrongDensity: client 0 has 4 active weights, expected 3")


# -- a client that lost what it held ------------------------------------------------------------------------------


def play(method: fl.Method, task: Task, lose: str = "", masks: int = 1024) -> tuple[list[Any], list[dict[str, int]]]:
    """Three rounds between a server and clients that may lose their memory before the second; sums and bytes."""
    server = ClientMemory(MaskStore(task.layout, {}), simulated=False, masks=masks)
    side = ClientSide(Trainer(task), MaskStore(task.layout, {}))
    memory: dict[int, Any] = {}
    state, lines, sums = method.init(plan_of(task, 3, 8)), [], []
    for number in range(3):
        account = Encoding(server)
        if number == 1:
            lose_all(lose, memory, side.store)
        for client, order in method.orders(state, task.clients):
            data = account.sent(client, order)
            reply = side.work(client.id, task.train[client.id], data, memory.get(client.id, []))
            if reply.lacks:
                full = account.lacking(client.id, reply.data)
                reply = side.work(client.id, task.train[client.id], full, [])
            account.received(client.id, reply.data)
            memory[client.id] = reply.memory
        outcome = account.close()
        assert not outcome.failures
        lines.append({"up": outcome.traffic.up, "down": outcome.traffic.down})
        sums.append(outcome.sums.weights)
        state = method.aggregate(state, outcome.sums)
    return sums, lines


def lose_all(lose: str, memory: dict[int, Any], store: MaskStore) -> None:
    if lose == "memory":
        memory.clear()
    elif lose == "masks":
        store.keep_only([])
    elif lose == "damaged":
        store._cache.clear()
        store.backend.update(dict.fromkeys(store.backend, b"?"))


METHODS = [fl.NST(density=0.3), fl.PDST(density=0.3)]


@pytest.mark.parametrize("lose", ["memory", "masks", "damaged"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_client_that_lost_its_masks_is_reminded_within_the_round(method: fl.Method, lose: str) -> None:
    """The result is the same, and the bytes of the reminder are counted."""
    task = make_task("dropout")
    whole, plain = play(method, task)
    again, lost = play(method, task, lose)
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(a, b)
    extra = [{k: b[k] - a[k] for k in a} for a, b in zip(plain, lost, strict=True)]
    assert extra[0] == extra[2] == {"up": 0, "down": 0}
    lack = len(encode(Message("lack", task.layout, TAG, 0, lacks="00" * 8)).data)
    if lose == "memory":
        assert extra[1]["up"] == 8 * lack, "each of eight clients said so"
        assert extra[1]["down"] > 8 * task.layout.prunable_size // 8
    assert extra[1]["up"] >= lack


def test_short_history_costs_bytes_and_nothing_else() -> None:
    task = make_task("dropout")
    (whole, plain), (again, short) = (play(METHODS[0], task, masks=most) for most in (1024, 3))
    for a, b in zip(whole, again, strict=True):
        assert torch.equal(a, b)
    assert sum(line["up"] for line in short) > sum(line["up"] for line in plain)


def test_client_starts_afresh_if_the_server_forgot_its_mask_too() -> None:
    play(METHODS[0], make_task("dropout"), "memory", masks=1)


def test_client_may_report_a_missing_mask_once() -> None:
    account, _ = started(2)
    lack = encode(Message("lack", LAYOUT, TAG, 1, lacks="00" * 8)).data
    account.lacking(1, lack)
    for client in (0, 1):
        with pytest.raises(WireError, match="asked for a mask in a wrong way: it had just been sent the full mask"):
            account.lacking(client, lack)


def test_simulation_stops_if_masks_are_deleted_under_it(tmp_path: Path) -> None:
    task, method = make_task("dropout"), METHODS[0]
    engine = CPUEngine(task, TrainConfig(workers=1), tmp_path)
    state = method.init(plan_of(task, 3, 8))
    engine.train(state, method.orders(state, task.clients))
    for path in tmp_path.glob("*.mask"):
        path.unlink()
    engine.memory.store._cache.clear()
    with pytest.raises(CheckpointError, match="is missing"):
        engine.train(state.again(), method.orders(state.again(), task.clients))


def test_simulation_stops_if_what_clients_remember_is_damaged(tmp_path: Path) -> None:
    """Without their residuals, clients would go on and the result would be another."""
    task, method = make_task("dropout"), fl.METHODS["topk"](density=0.3)
    engine = CPUEngine(task, TrainConfig(workers=1), tmp_path)
    state = method.init(plan_of(task, 3, 8))
    engine.train(state, method.orders(state, task.clients))
    for path in tmp_path.glob("*.mask"):
        path.write_bytes(b"?")
    with pytest.raises(CheckpointError, match="is missing"):
        engine.train(state.again(), method.orders(state.again(), task.clients))


def test_client_that_lost_its_notes_says_so_once_and_starts_without_them(side: ClientSide) -> None:
    task, server, method = side.trainer.task, make_server(side.layout), fl.METHODS["topk"](density=0.3)
    state, client = method.init(plan_of(task, 2, 2)), task.clients[0]
    _, order = next(iter(method.orders(state, task.clients)))
    message = server.message(client, order)
    memory = side.work(0, task.train[0], server.encode(message).data, []).memory
    [(tag, _, _, notes)] = memory
    assert notes is not None
    assert side.store.folder is not None
    (side.store.folder / f"{notes}.mask").unlink()
    later = server.encode(replace(message, start=tag, tag=(2, 1, 0))).data
    reply = side.work(0, task.train[0], later, memory)
    assert (reply.lacks, reply.memory) == (True, [])
    assert not side.work(0, task.train[0], later, reply.memory).lacks


# -- the client's half --------------------------------------------------------------------------------------------


@pytest.fixture
def side(tmp_path: Path) -> ClientSide:
    task = make_task("dropout")
    return ClientSide(Trainer(task), MaskStore.in_folder(task.layout, tmp_path))


def test_unreadable_order_fails_the_client(side: ClientSide) -> None:
    task = side.trainer.task
    with pytest.raises(ClientFailed, match="cannot read the server's message \\(BadMagic"):
        side.work(0, task.train[0], b"nonsense", [])


def test_client_memory_is_a_list_of_hashes(side: ClientSide) -> None:
    task, server, method = side.trainer.task, make_server(side.layout), fl.NST(density=0.3)
    state = method.init(plan_of(task, 2, 2))
    _, order = next(iter(method.orders(state, task.clients)))
    message = server.message(task.clients[0], order)
    reply = side.work(0, task.train[0], server.encode(message).data, [])
    assert isinstance(reply, Reply)
    assert not reply.lacks
    [(tag, mask, own, _)] = reply.memory
    assert tag == (2, 0, 0)
    assert mask == order.weights.mask.hash
    update, _ = read_update(reply.data, message, None)
    assert update.mask is not None
    assert own == update.mask.hash
    assert own is not None
    assert side.store[own].equal(update.mask)


def test_errors_are_of_one_family() -> None:
    assert issubclass(ClientFailed, FlashError)


# -- rounds that do not count -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [CPUEngine, GPUEngine])
def test_rolled_back_round_leaves_no_trace(kind: Any) -> None:
    task, config = make_task("norm"), TrainConfig(workers=1, lanes=3)
    engine = CPUEngine(task, config) if kind is CPUEngine else GPUEngine(task, config, "cpu")
    method = fl.NST(density=0.3)
    state = method.init(plan_of(task, 3, 8))

    def work(s: State) -> None:
        engine.train(s, method.orders(s, task.clients))

    def held() -> Any:
        engine.memory.snapshot()
        return engine.memory.save()

    nothing = held()
    work(state)
    engine.memory.rollback()
    assert held() == nothing
    work(state.again())
    first = held()
    assert first != nothing
    work(state.again().next(state.weights))
    engine.memory.rollback()
    assert held() == first


def test_frozen_own_mask_must_be_returned_unchanged() -> None:
    """A mask that the client keeps, or makes from a recipe, and that nothing moves."""
    server, recipe = make_server(), Recipe(7, (4,))
    order = Order(Weights(Mask.full(LAYOUT), torch.zeros(LAYOUT.size)), Local(start=recipe, keep=("mask",)), 1, TAG)
    first = server.message(Client(1, 10), order)
    made = frozen_mask(first, None)
    assert made is not None
    assert made.equal(MADE)
    memory = server.memory
    memory.hear(1, TAG, memory.store.keep(order.weights.mask), memory.store.keep(OTHER, own=True))
    memory.accept()
    kept = frozen_mask(server.message(Client(1, 10), order), memory.own(1))
    assert kept is not None
    assert kept.equal(OTHER)
    moving = replace(first, local=replace(order.local, adapt=PruneRegrow()))
    assert frozen_mask(moving, None) is None


def test_forgotten_own_mask_may_return_as_a_recipe() -> None:
    server = make_server()
    order = Order(Weights(MASK, torch.zeros(LAYOUT.size)), Local(keep=("mask",)), 1, TAG)
    memory = server.memory
    memory.hear(1, (2, 3, 0), memory.store.keep(MASK), memory.store.keep(MADE, own=True))
    memory.accept()
    known = server.message(Client(1, 10), order)
    assert known.own == MADE.hash
    data = encode(RECIPE, form="recipe").data
    with pytest.raises(WireError, match="a recipe, but the order did not allow one"):
        read_update(data, known, MADE)
    assert read_update(data, replace(known, own=None), None)[0].mask is not None
