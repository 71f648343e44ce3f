"""Server and clients agree on who holds which mask: after lost updates, after restarts, after a resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flashfl.core.errors import CheckpointError
from flashfl.core.exchange import Extra, Local, Order, Tag, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask
from flashfl.data.sources import Source
from flashfl.engine.client import ClientSide, Reply
from flashfl.engine.encoding import OWN
from flashfl.engine.memory import ClientMemory, Rounds
from flashfl.engine.store import MaskStore
from flashfl.engine.train import ClientFailed
from flashfl.wire import Message, decode, encode
from tests.wire.wire_support import changed, mask_of, small_layout, values_for

LAYOUT = small_layout((2000, 5000))
STATISTICS = torch.zeros(LAYOUT.size - LAYOUT.trained_size)
NO_MODEL = "must be an order with a mask and weights"
DATA: Source = None  # type: ignore[assignment]  # nobody looks at it


def mask(seed: int) -> Mask:
    return mask_of(LAYOUT, [0.1, 0.05], seed)


def memory(store: MaskStore | None = None, **bounds: Any) -> ClientMemory:
    return ClientMemory(store if store is not None else MaskStore(LAYOUT, {}), **bounds)


def accept(held: ClientMemory, client: int, tag: Tag, order: Mask, own: Mask | None = None) -> None:
    held.hear(client, tag, held.store.keep(order), None if own is None else held.store.keep(own, own=True))
    held.accept()


class Moves:
    """Stands for a trainer: a client ends with its mask moved by this share."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.share, self.ended = layout, 0.0, Mask.full(layout)

    def train(self, order: Order, client: int, data: object, own: Mask | None, notes: object) -> Update:
        start = own or order.weights.mask
        self.ended = changed(start, self.share, sum(order.tag) + client) if self.share else start
        return Update(client, 10, self.ended, values_for(self.ended), self.ended.counts)


class Play:
    """A server and its clients over real bytes; a client may lose its update or its memory."""

    def __init__(self, layout: Layout, **bounds: int) -> None:
        self.layout, self.server, self.trainer = layout, memory(**bounds), Moves(layout)
        self.side = ClientSide(self.trainer, MaskStore(layout, {}))  # type: ignore[arg-type]
        self.clients: dict[int, Rounds] = {}
        self.sizes: list[int] = []
        self.lacks: list[str | None] = []  # what the server was told

    def turn(
        self, client: int, tag: Tag, given: Mask, move: float = 0.0, keep: bool = False, lost: bool = False
    ) -> Mask:
        """One order and its update; returns the mask the client ended with."""
        local, self.trainer.share = Local(keep=("mask",) if keep else ()), move
        reply = self._send(client, tag, given, local)
        if reply.lacks:
            self.lacks.append(decode(reply.data, self.layout).lacks)
            self.server.forget(client)
            reply = self._send(client, tag, given, local)
        self.sizes.append(len(reply.data))
        self.clients[client] = reply.memory
        if not lost:
            own = self.server.own(client)
            known = {one.hash: one for one in (given, own) if one is not None}
            update = decode(reply.data, self.layout, known)
            accept(self.server, client, tag, given, update.mask if keep else None)
        return self.trainer.ended

    def _send(self, client: int, tag: Tag, given: Mask, local: Local) -> Reply:
        order = Message(
            "order", self.layout, tag, client, key=1, local=local, mask=given, values=values_for(given),
            start=self.server.start(client), own=self.server.own_hash(client),
        )  # fmt: skip
        base = self.server.base(client)
        sent = encode(order, () if base is None else (base,))
        self.sizes.append(len(sent.data))
        return self.side.work(client, DATA, sent.data, self.clients.get(client, []))


def small_message(play: Play, given: Mask) -> bool:
    """Whether the last order said its mask by hash."""
    return play.sizes[-2] < 4 * values_for(given).numel() + 200


def test_frozen_mask_is_sent_once() -> None:
    play, given = Play(LAYOUT), mask(1)
    play.turn(1, (2, 0, 0), given)
    assert not small_message(play, given)
    play.turn(1, (2, 1, 0), Mask(LAYOUT, given.bits.clone()))
    assert small_message(play, given)


def test_both_sides_agree_after_a_lost_update() -> None:
    play, first, second = Play(LAYOUT), mask(1), mask(2)
    play.turn(1, (2, 0, 0), first)
    play.turn(1, (2, 1, 0), second, lost=True)
    assert play.server.start(1) == (2, 0, 0)
    play.turn(1, (2, 1, 1), first)
    assert small_message(play, first)
    play.turn(1, (2, 2, 0), second, lost=True)
    play.turn(1, (2, 3, 0), second, lost=True)
    play.turn(1, (2, 4, 0), first)
    assert small_message(play, first)


def test_client_starts_from_its_last_accepted_mask() -> None:
    """A client that keeps its mask tells the change to it; what it starts from is its last accepted one."""
    play, given = Play(LAYOUT), Mask.full(LAYOUT)
    new = play.turn(3, (2, 0, 0), given, move=0.0, keep=True)
    mine = play.turn(3, (2, 1, 0), mask(5), move=0.1, keep=True)
    assert new.equal(given)
    play.turn(3, (2, 2, 0), given, move=0.1, keep=True, lost=True)
    again = play.turn(3, (2, 2, 1), given, move=0.1, keep=True)
    assert play.server.own(3).hash == again.hash  # type: ignore[union-attr]
    assert changed(mine, 0.1, 2 + 2 + 1 + 3).equal(again)


def test_client_without_memory_is_sent_the_full_mask() -> None:
    play, given = Play(LAYOUT), mask(1)
    play.turn(1, (2, 0, 0), given, move=0.1, keep=True)
    play.clients.clear()
    before = len(play.sizes)
    play.turn(1, (2, 1, 0), given, move=0.1, keep=True)
    assert len(play.sizes) == before + 3  # the order, the order again in full, the update
    assert play.sizes[before] < play.sizes[before + 1]
    assert play.lacks == [given.hash]
    assert play.server.start(1) == (2, 1, 0)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (Message("order", LAYOUT, (2, 1, 0), 1, local=Local(), mask=mask(1)), NO_MODEL),
        (
            Message(
                "order", LAYOUT, (2, 1, 0), 1, local=Local(), mask=mask(1), values=STATISTICS, carries="statistics"
            ),
            NO_MODEL,
        ),
        (Message("lack", LAYOUT, (2, 1, 0), 1, lacks="0" * 16), NO_MODEL),
        (
            Message(
                "order", LAYOUT, (2, 1, 0), 1, local=Local(), mask=mask(1), values=values_for(mask(1)), start=(2, 0, 0),
                extra={OWN: Extra("bits", torch.ones(5, dtype=torch.bool))},
            ),
            "own mask must have one bit for each prunable weight",
        ),
    ],
    ids=["no values", "statistics", "no order", "own mask of another size"],
)  # fmt: skip
def test_client_says_that_it_cannot_use_an_order_of_a_hostile_server(message: Message, why: str) -> None:
    with pytest.raises(ClientFailed, match=rf"it cannot read the server's message .BadField: the .*{why}"):
        Play(LAYOUT).side.work(1, DATA, encode(message).data, [])


def test_lost_own_mask_is_noticed() -> None:
    play, given, lost = Play(LAYOUT), mask(1), mask(2).hash
    order = Message(
        "order", LAYOUT, (2, 1, 0), 1, local=Local(), mask=given, values=values_for(given), start=(2, 0, 0), own=lost
    )
    reply = play.side.work(1, DATA, encode(order).data, [])
    assert reply.lacks
    assert decode(reply.data, LAYOUT).lacks == lost


def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for bounds in ({"masks": 3}, {}):
        held = memory(**bounds)
        monkeypatch.setattr("flashfl.engine.memory.HISTORY_BYTES", 3 * ((LAYOUT.prunable_size + 7) // 8))
        for client in range(5):
            accept(held, client, (2, client, 0), mask(client))
        assert [held.base(client) is not None for client in range(5)] == [False, False, True, True, True]
        assert held.start(0) == (2, 0, 0)
        accept(held, 2, (2, 9, 0), mask(2))  # acknowledged again: now the newest
        accept(held, 6, (2, 9, 0), mask(6))
        assert [held.base(client) is not None for client in (2, 3, 4, 6)] == [True, False, True, True]


def test_own_mask_beyond_the_history_is_kept_for_a_simulated_client() -> None:
    held = memory(masks=1)
    for client in range(3):
        accept(held, client, (2, 0, 0), mask(9), own=mask(client))
    assert [held.own(client) is not None for client in range(3)] == [False, False, True]
    assert [held.own_hash(client) for client in range(3)] == [None, None, mask(2).hash]
    for client in range(3):
        found = held.remembered(client)
        assert found is not None
        assert found.equal(mask(client))
        assert held.rounds(client) == [((2, 0, 0), None, mask(client).hash, None)]
    held.snapshot()
    held.keep_only(set())
    again = memory(held.store, masks=1)
    again.load(json.loads(json.dumps(held.save())))
    assert again.save() == held.save()
    assert [again.rounds(client) for client in range(3)] == [held.rounds(client) for client in range(3)]
    assert [again.own(client) is not None for client in range(3)] == [False, False, True]
    held.store.keep_only([])
    with pytest.raises(CheckpointError, match=r"client 0 needs a file .* missing or damaged in .*\. If you have"):
        held.rounds(0)


def test_masks_that_no_client_holds_are_dropped() -> None:
    held = memory()
    for round in range(5):
        accept(held, 1, (2, round, 0), mask(round), own=mask(100 + round))
    held.snapshot()
    saved = held.save()
    assert saved["masks"] == [mask(4).hash, mask(104).hash]
    assert saved["known"] == 2
    held.rollback()
    held.keep_only(set())
    assert set(held.store.backend) == {mask(4).hash, mask(104).hash}


def rounds(play: Play, first: int, last: int) -> None:
    for round in range(first, last):
        server = changed(mask(1), 0.1, round // 2)
        for client in (round % 4, 4 + round % 3):
            play.turn(client, (2, round, 0), server, move=0.1, keep=client > 3, lost=(round + client) % 5 == 0)


def test_bytes_after_resume_equal_those_of_an_undisturbed_run() -> None:
    whole, halted = Play(LAYOUT, masks=6), Play(LAYOUT, masks=6)
    rounds(whole, 0, 20)
    rounds(halted, 0, 9)
    resumed = Play(LAYOUT, masks=6)
    halted.server.snapshot()
    resumed.server = memory(halted.server.store, masks=6)
    resumed.server.load(json.loads(json.dumps(halted.server.save())))
    resumed.clients, resumed.side = halted.clients, halted.side
    resumed.trainer = halted.trainer
    rounds(resumed, 9, 20)
    assert halted.sizes + resumed.sizes == whole.sizes
    for play in (whole, resumed):
        play.server.snapshot()
    assert whole.server.save() == resumed.server.save()


def test_save_describes_the_last_snapshot() -> None:
    """A run interrupted in the middle of a round is saved as it was before that round."""
    held = memory()
    accept(held, 0, (2, 0, 0), mask(1), own=mask(2))
    held.snapshot()
    before = held.save()
    accept(held, 0, (2, 1, 0), mask(3), own=mask(4))
    assert held.save() == before
    held.keep_only(set())
    assert mask(2).hash in held.store, "the snapshot needs it"
    held.rollback()
    assert held.start(0) == (2, 0, 0)
    held.snapshot()
    assert held.save() == before
    own = held.own(0)
    assert own is not None
    assert own.equal(mask(2))


def test_lost_masks_of_real_clients_are_a_warning(tmp_path: Path) -> None:
    held = memory(MaskStore.in_folder(LAYOUT, tmp_path), simulated=False)
    accept(held, 0, (2, 0, 0), mask(1), mask(1))
    held.snapshot()
    saved = held.save()
    for path in tmp_path.glob("*.mask"):
        path.unlink()
    other = memory(MaskStore.in_folder(LAYOUT, tmp_path), simulated=False)
    with pytest.warns(RuntimeWarning, match="continues and sends full masks again"):
        other.load(saved)
    assert other.start(0) is None
    with pytest.raises(CheckpointError, match=r"mask of a client cannot be read: /.*[0-9a-f]{16}\.mask is missing"):
        memory(MaskStore.in_folder(LAYOUT, tmp_path)).load(saved)


def test_memory_names_what_a_client_holds() -> None:
    play, given = Play(LAYOUT), mask(1)
    play.turn(1, (2, 0, 0), given, move=0.2, keep=True)
    [(tag, *named)] = play.server.rounds(1)
    assert tag == (2, 0, 0)
    assert [(tag, *named)] == play.clients[1]
    assert None not in named[:2]
    assert named[2] is None, "two masks and no notes"


@pytest.mark.gpu
def test_masks_on_a_gpu_stay_there_until_they_are_saved() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    held, order, own = memory(device="cuda"), mask(1).to("cuda"), mask(2).to("cuda")
    accept(held, 0, (2, 0, 0), order, own)
    assert held.base(0) is order
    assert held.remembered(0) is own
    assert not len(held.store.backend)
    held.snapshot()
    saved = held.save()
    assert set(held.store.backend) == {order.hash, own.hash}
    again = memory(held.store, device="cuda")
    again.load(saved)
    found = again.remembered(0)
    assert found is not None
    assert found.bits.is_cuda
    assert found.equal(own)
