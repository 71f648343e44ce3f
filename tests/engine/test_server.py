"""The server's half of a round: whatever a client sends, the rest of the cohort is aggregated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.aggregate import add, average
from flashfl.core.errors import FlashError
from flashfl.core.exchange import Client, Extra, Local, Order, Sums, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe, Weights
from flashfl.core.method import Method
from flashfl.core.state import State
from flashfl.data.task import Task
from flashfl.engine.client import ClientSide, Reply, update_message
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.server import OWN, Inbox, ServerSide
from flashfl.engine.store import MaskStore
from flashfl.engine.train import ClientFailed, Trainer
from flashfl.run.config import TrainConfig, plan_of
from flashfl.sparsity import PruneRegrow, random_mask
from flashfl.wire import Message, encode, seal
from flashfl.wire.errors import WireError, WrongContent
from tests.conftest import make_task

STATISTICS = [("bn.running_mean", (1,)), ("bn.running_var", (1,))]
LAYOUT = Layout.build({"prunable": [("w", (4, 2))], "dense": [("b", (2,))], "statistic": STATISTICS})
MASK = Mask(LAYOUT, torch.tensor([1, 0, 1, 0, 1, 0, 1, 0], dtype=torch.bool))
OTHER = Mask(LAYOUT, torch.tensor([0, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool))  # as many, elsewhere
MADE = random_mask(LAYOUT, (4,), 7)
TAG = (2, 4, 0)
PACKED = Weights.masked(MADE, torch.zeros(LAYOUT.size)).packed()
RECIPE = Message("update", LAYOUT, TAG, 1, n=10, mask=MADE, values=PACKED)


def started(clients: int = 4, local: Local | None = None) -> tuple[Inbox, Order]:
    """A round in which every client has been sent the same order."""
    inbox = Inbox(ServerSide(LAYOUT))
    order = Order(Weights(MASK, torch.zeros(LAYOUT.size)), local or Local(), 1, TAG)
    for client in range(clients):
        message = inbox.server.message(Client(client, 10), order)
        inbox.sent(message, inbox.server.encode(message))
    return inbox, order


def answer(
    order: Order, client: int, value: float = 1.0, mask: Mask = MASK, n: int = 10, base: Mask | None = None
) -> bytes:
    vector = torch.full((LAYOUT.size,), value)
    update = Update(client, n, Weights.masked(mask, vector), mask.counts, {"loss": value})
    message = update_message(update, order, LAYOUT)
    return encode(message, (base or MASK,), form="difference" if base else None).data


def finished(inbox: Inbox) -> tuple[Sums, Mapping[int, str]]:
    sums = Sums(LAYOUT)
    for update in inbox.updates():
        add(sums, update)
    inbox.close()
    return sums, inbox.failures


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
        "too large": answer(order, 1, value=1e6),
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
        ("too large", "ChangeTooLarge"),
        ("moved mask", "WrongContent"),
        ("recipe", "BadField"),
        ("unknown mask", "UnknownMask"),
    ],
)
def test_a_bad_answer_is_left_out_by_name_and_the_rest_aggregated(kind: str, named: str) -> None:
    inbox, order = started()
    before = inbox.traffic
    data = bad(order, kind)
    inbox.arrived(1, data)
    assert inbox.traffic.up - before.up == len(data), "bytes that travelled are counted, good or bad"
    for client in (3, 0, 2):
        inbox.arrived(client, answer(order, client, value=client + 1.0))
    sums, failures = finished(inbox)
    assert list(failures) == [1]
    assert failures[1].startswith(named + ": ")
    assert (sums.clients, sums.n) == (3, 30)
    expected = (1 + 3 + 4) / 3
    assert average("fedavg", sums).tolist() == pytest.approx(
        [expected if bit else 0.0 for bit in MASK.bits.tolist()] + [expected] * 4
    )


def test_clients_left_out_are_not_taken_to_hold_anything() -> None:
    inbox, order = started(2)
    inbox.arrived(0, answer(order, 0))
    inbox.arrived(1, b"garbage")
    finished(inbox)
    ledger = inbox.server.ledger
    assert ledger.start(0) == TAG
    base = ledger.base(0)
    assert base is not None
    assert base.equal(MASK)
    assert ledger.start(1) is None
    message = inbox.server.message(Client(0, 10), order)
    assert inbox.server.encode(message).coding.mask == "known"
    assert inbox.server.encode(replace(message, client=1, start=None)).coding.mask != "known"


def test_updates_come_in_ascending_order_whenever_they_arrived() -> None:
    inbox, order = started(5)
    for client in (4, 2, 0, 3, 1):
        inbox.arrived(client, answer(order, client))
    assert [u.client for u in inbox.updates()] == [0, 1, 2, 3, 4]
    inbox.close()


def test_of_two_clients_none_is_too_far_from_the_other() -> None:
    """A cohort that small has no median worth the name."""
    inbox, order = started(2)
    inbox.arrived(0, answer(order, 0, value=1.0))
    inbox.arrived(1, answer(order, 1, value=1e6))
    _, failures = finished(inbox)
    assert not failures


def test_extras_nobody_asked_for_are_refused_before_they_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashfl.wire import tensors

    inbox, order = started(1)
    update = Update(0, 10, Weights.masked(MASK, torch.ones(LAYOUT.size)), MASK.counts)
    large = replace(update, extra={"x": Extra("bits", torch.ones(1 << 16, dtype=torch.bool))})
    data = encode(update_message(large, order, LAYOUT), (MASK,)).data
    monkeypatch.setattr(tensors, "_read_bits", lambda *_: pytest.fail("it was unpacked"))
    inbox.arrived(0, data)
    assert finished(inbox)[1][0].startswith("TooLarge: 1 extras, at most 0")


def test_extras_of_the_order_may_be_answered_and_a_mask_given_back_may_not() -> None:
    server = ServerSide(LAYOUT)
    asked = {"a": Extra("dense", torch.zeros(3)), OWN: Extra("bits", MASK.bits)}
    order = Order(Weights(MASK, torch.zeros(LAYOUT.size)), Local(), 1, TAG, asked)
    message = server.message(Client(0, 10), order)

    def sent(**extra: Extra) -> bytes:
        update = Update(0, 10, Weights.masked(MASK, torch.ones(LAYOUT.size)), MASK.counts, extra=extra)
        return encode(update_message(update, order, LAYOUT), (MASK,)).data

    assert server.decode(sent(a=Extra("dense", torch.ones(3))), message).extra["a"].value.tolist() == [1.0] * 3
    with pytest.raises(WrongContent, match="shape"):
        server.decode(sent(a=Extra("dense", torch.ones(4))), message)
    with pytest.raises(WrongContent, match=OWN):
        server.decode(sent(**{OWN: Extra("bits", MASK.bits)}), message)


def test_counts_are_held_against_the_recipe_a_client_starts_from() -> None:
    """NST's server model is denser than any client's mask."""
    inbox, order = started(1, Local(start=Recipe(5, (3,)), keep=("mask",)))
    inbox.arrived(0, answer(order, 0))
    _, failures = finished(inbox)
    assert failures[0].startswith("WrongDensity: client 0 has 4 active weights, expected 3")


# -- a client that lost what it held ------------------------------------------------------------------------------


class Forgetful(CPUEngine):
    """An engine that loses its clients' memories before the second round."""

    lose = "memories"

    def train(self, s: State, orders: Any) -> Any:
        if (s.stage, s.round, s.attempt) == (2, 1, 0):
            if self.lose == "memories":
                self.memories.clients.clear()
            elif self.lose == "masks":
                self.memories.store.keep_only([])
            elif self.lose == "damaged":
                for path in self.memories.store.folder.glob("*.mask"):
                    path.write_bytes(b"\0" * len(path.read_bytes()))
        return super().train(s, orders)


def go(engine: CPUEngine, method: Method, task: Task, folder: Path | None = None) -> fl.Run:
    train = TrainConfig(rounds=3, per_round=8, batch=4, device="cpu", eval_every=9)
    try:
        return drive(method, task, train, engine, task.clients, folder)
    finally:
        engine.close()


METHODS = [fl.NST(density=0.3), fl.JMWST(density=0.3, warmup_clients=2, warmup_epochs=2), fl.PDST(density=0.3)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
def test_a_client_that_lost_its_masks_is_sent_them_in_the_round(method: Method, workers: int) -> None:
    """It ends where it would have ended, and what the reminding took is counted."""
    task = make_task("dropout")
    whole = go(CPUEngine(task, workers), method, task)
    engine = Forgetful(task, workers)
    lost = go(engine, method, task)
    assert lost.checksum == whole.checksum
    assert not any(line["failures"] for line in lost.history)
    pairs = zip(whole.history, lost.history, strict=True)
    extra = [{k: b["bytes"][k] - a["bytes"][k] for k in ("up", "down")} for a, b in pairs]
    first = len(extra) - 3
    assert extra[first] == extra[-1] == {"up": 0, "down": 0}
    lack = len(encode(Message("lack", task.layout, TAG, 0, lacks="00" * 8)).data)
    assert extra[first + 1]["up"] == 8 * lack, "each of eight clients said so"
    assert extra[first + 1]["down"] > 8 * task.layout.prunable_size // 8


@pytest.mark.parametrize("lose", ["masks", "damaged"])
def test_a_store_that_lost_its_masks_is_the_same(lose: str, tmp_path: Path) -> None:
    task, method = make_task("dropout"), METHODS[0]
    whole = go(CPUEngine(task, 2), method, task)
    engine = Forgetful(task, 2, folder=tmp_path)
    engine.lose = lose
    for process, _ in engine.pool._workers:  # type: ignore[union-attr]
        assert process.is_alive()
    assert go(engine, method, task).checksum == whole.checksum


def test_a_history_too_short_for_the_cohort_costs_bytes_and_nothing_else() -> None:
    """The ledger drops masks while a round's updates are accepted, also those that later updates lean on."""
    task = make_task("dropout")
    whole, short = CPUEngine(task, 2), CPUEngine(task, 2)
    short.server.ledger.masks = 3
    runs = [go(engine, METHODS[0], task) for engine in (whole, short)]
    assert runs[0].checksum == runs[1].checksum
    assert runs[1].bytes_up > runs[0].bytes_up


def test_where_the_server_has_forgotten_too_a_client_starts_afresh() -> None:
    """No mask anywhere: the client takes the common one again, and the run goes on."""
    task = make_task("dropout")
    engine = Forgetful(task, 2)
    engine.server.ledger.masks = 1
    run = go(engine, METHODS[0], task)
    assert run.state is not None
    assert run.state.done
    assert not any(line["failures"] for line in run.history)


# -- the client's half --------------------------------------------------------------------------------------------


@pytest.fixture
def side(tmp_path: Path) -> ClientSide:
    task = make_task("dropout")
    return ClientSide(Trainer(task), MaskStore(task.layout, tmp_path))


def test_a_client_that_cannot_read_its_order_is_left_out(side: ClientSide) -> None:
    task = side.trainer.task
    with pytest.raises(ClientFailed, match="cannot read its order \\(BadMagic"):
        side.work(0, task.train[0], b"nonsense", [])


def test_what_a_client_remembers_is_told_by_hashes(side: ClientSide) -> None:
    task, server = side.trainer.task, ServerSide(side.layout)
    state = fl.NST(density=0.3).init(_plan(task))
    order = fl.NST(density=0.3).order(state, task.clients[0])
    message = server.message(task.clients[0], order)
    reply = side.work(0, task.train[0], server.encode(message).data, [])
    assert isinstance(reply, Reply)
    assert not reply.lacks
    [(tag, mask, own)] = reply.memory
    assert tag == (2, 0, 0)
    assert mask == order.weights.mask.hash
    update = server.decode(reply.data, message)
    assert update.mask is not None
    assert own == update.mask.hash
    assert side.store[own].equal(update.mask)


def _plan(task: Task) -> Any:
    from flashfl.run.config import plan_of

    return plan_of(TrainConfig(rounds=2, per_round=2), task, task.clients)


def test_errors_are_of_one_family() -> None:
    assert issubclass(ClientFailed, FlashError)


# -- rounds that do not count -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda task: CPUEngine(task, 1), lambda task: GPUEngine(task, "cpu", "fp32", 3)])
def test_a_round_that_is_repeated_leaves_no_trace_in_anybodys_memory(make: Any) -> None:
    task = make_task("norm")
    engine, method = make(task), fl.NST(density=0.3)
    state = method.init(plan_of(TrainConfig(rounds=3, per_round=8, batch=4), task, task.clients))

    def work(s: State) -> None:
        engine.train(s, ((c, method.order(s, c)) for c in task.clients))

    def held() -> Any:
        engine.mark()
        return engine.memory()

    nothing = held()
    work(state)
    engine.undo()
    assert held() == nothing
    work(state.again())
    first = held()
    assert first != nothing
    work(state.again().next(state.weights))
    engine.undo()
    assert held() == first


def test_a_mask_of_ones_own_is_held_to_what_the_server_knows_of_it() -> None:
    """A kept mask, or one made from a recipe, where nothing moves it: the very one is expected, if it is known."""
    server, recipe = ServerSide(LAYOUT), Recipe(7, (4,))
    order = Order(Weights(Mask.full(LAYOUT), torch.zeros(LAYOUT.size)), Local(start=recipe, keep=("mask",)), 1, TAG)
    first = server.message(Client(1, 10), order)
    made = server._frozen(first)
    assert made is not None
    assert made.equal(MADE)
    server.ledger.accept(1, TAG, order.weights.mask, own=OTHER)
    kept = server._frozen(server.message(Client(1, 10), order))
    assert kept is not None
    assert kept.equal(OTHER)
    moving = replace(first, local=replace(order.local, adapt=PruneRegrow()))
    assert server._frozen(moving) is None


def test_a_kept_mask_that_the_server_forgot_may_come_back_as_a_recipe() -> None:
    """As the writer of the page would send it: in the smallest form."""
    server = ServerSide(LAYOUT)
    order = Order(Weights(MASK, torch.zeros(LAYOUT.size)), Local(keep=("mask",)), 1, TAG)
    server.ledger.accept(1, (2, 3, 0), MASK, own=MADE)
    known = server.message(Client(1, 10), order)
    assert known.own == MADE.hash
    data = encode(RECIPE, form="recipe").data
    with pytest.raises(WireError, match="a recipe where none was asked for"):
        server.decode(data, known)
    assert server.decode(data, replace(known, own=None)).mask is not None
