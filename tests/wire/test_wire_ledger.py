"""Both sides agree on who holds which mask: after lost updates, after restarts, after a resume."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from wire_support import changed, mask_of, small_layout, values_for

from flashfl.core.errors import CheckpointError
from flashfl.core.exchange import Local, Tag
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask
from flashfl.wire import ClientLedger, Message, ServerLedger, UnknownMask, decode, encode

LAYOUT = small_layout((2000, 5000))


def mask(seed: int) -> Mask:
    return mask_of(LAYOUT, [0.1, 0.05], seed)


class Play:
    """A server and its clients over real bytes; a client may lose its update or its memory."""

    def __init__(self, layout: Layout, **bounds: int) -> None:
        self.layout, self.server = layout, ServerLedger(layout, **bounds)
        self.clients: dict[int, ClientLedger] = {}
        self.sizes: list[int] = []
        self.lacks: list[tuple[str | None, str]] = []  # what the server was told, what was meant

    def order(self, client: int, tag: Tag, given: Mask, local: Local) -> Message:
        own = self.server.own(client)
        return Message(
            "order", self.layout, tag, client, key=1, local=local, mask=given, values=values_for(given),
            start=self.server.start(client), own=own.hash if own else None,
        )  # fmt: skip

    def turn(
        self, client: int, tag: Tag, given: Mask, move: float = 0.0, keep: bool = False, lost: bool = False
    ) -> Mask:
        """One order and its update; returns the mask the client ended with."""
        held = self.clients.setdefault(client, ClientLedger(self.layout))
        local = Local(keep=("mask",) if keep else ())
        try:
            found = self._send(held, client, self.order(client, tag, given, local))
        except UnknownMask as lack:
            word = encode(Message("lack", self.layout, tag, client, lacks=lack.hash))
            self.lacks.append((decode(word.data, self.layout).lacks, lack.hash))
            self.server.forget(client)
            found = self._send(held, client, self.order(client, tag, given, local))
        start = held.own(found.start) or found.mask
        new = changed(start, move, sum(tag) + client) if move else start
        report = Message("update", self.layout, tag, client, 10, mask=new, values=values_for(new))
        up = encode(report, held.bases(found))
        self.sizes.append(len(up.data))
        held.finish(found, new if keep else None)
        if not lost:
            update = decode(up.data, self.layout, self.server.known(client, given))
            self.server.accept(client, tag, given, update.mask if keep else None)
        return new

    def _send(self, held: ClientLedger, client: int, order: Message) -> Message:
        sent = encode(order, self.server.bases(client))
        self.sizes.append(len(sent.data))
        found = decode(sent.data, self.layout, held.known())
        held.begin(found)
        return found


def small_message(play: Play, given: Mask) -> bool:
    """Whether the last order said its mask by hash."""
    return play.sizes[-2] < 4 * values_for(given).numel() + 200


def test_a_frozen_mask_is_sent_once() -> None:
    play, given = Play(LAYOUT), mask(1)
    play.turn(1, (2, 0, 0), given)
    assert not small_message(play, given)
    play.turn(1, (2, 1, 0), Mask(LAYOUT, given.bits.clone()))
    assert small_message(play, given)


def test_a_lost_update_leaves_both_sides_agreeing() -> None:
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


def test_own_masks() -> None:
    """A client that keeps its mask tells the change to it; what it starts from is its last accepted one."""
    play, given = Play(LAYOUT), Mask.full(LAYOUT)
    new = play.turn(3, (2, 0, 0), given, move=0.0, keep=True)
    mine = play.turn(3, (2, 1, 0), mask(5), move=0.1, keep=True)
    assert new.equal(given)
    play.turn(3, (2, 2, 0), given, move=0.1, keep=True, lost=True)
    again = play.turn(3, (2, 2, 1), given, move=0.1, keep=True)
    assert play.server.own(3).hash == again.hash  # type: ignore[union-attr]
    assert changed(mine, 0.1, 2 + 2 + 1 + 3).equal(again)


def test_a_client_without_memory_is_sent_the_full_mask() -> None:
    play, given = Play(LAYOUT), mask(1)
    play.turn(1, (2, 0, 0), given, move=0.1, keep=True)
    play.clients.clear()
    before = len(play.sizes)
    play.turn(1, (2, 1, 0), given, move=0.1, keep=True)
    assert len(play.sizes) == before + 3  # the order, the order again in full, the update
    assert play.sizes[before] < play.sizes[before + 1]
    assert play.lacks == [(given.hash, given.hash)]
    assert play.server.start(1) == (2, 1, 0)


def test_lost_own_mask_is_noticed() -> None:
    held, given = ClientLedger(LAYOUT), mask(1)
    order = Message("order", LAYOUT, (2, 1, 0), 1, local=Local(), mask=given, start=(2, 0, 0), own=given.hash)
    with pytest.raises(UnknownMask):
        held.begin(order)


def test_history_is_bounded() -> None:
    each = (LAYOUT.prunable_size + 7) // 8
    for bounds in ({"masks": 3}, {"bytes": 3 * each}):
        ledger = ServerLedger(LAYOUT, **bounds)
        for client in range(5):
            ledger.accept(client, (2, client, 0), mask(client))
        assert [ledger.base(client) is not None for client in range(5)] == [False, False, True, True, True]
        assert ledger.start(0) == (2, 0, 0)
        ledger.accept(2, (2, 9, 0), mask(2))  # acknowledged again: now the newest
        ledger.accept(6, (2, 9, 0), mask(6))
        assert [ledger.base(client) is not None for client in (2, 3, 4, 6)] == [True, False, True, True]


def test_masks_nobody_holds_are_dropped() -> None:
    ledger = ServerLedger(LAYOUT)
    for round in range(5):
        ledger.accept(1, (2, round, 0), mask(round), own=mask(100 + round))
    record, tensors = ledger.state()
    assert len(tensors) == len(record["own"]) == 2


def rounds(play: Play, first: int, last: int) -> None:
    for round in range(first, last):
        server = changed(mask(1), 0.1, round // 2)
        for client in (round % 4, 4 + round % 3):
            play.turn(client, (2, round, 0), server, move=0.1, keep=client > 3, lost=(round + client) % 5 == 0)


def test_bytes_after_a_resume_are_those_of_the_undisturbed_run() -> None:
    whole, halted = Play(LAYOUT, masks=6), Play(LAYOUT, masks=6)
    rounds(whole, 0, 20)
    rounds(halted, 0, 9)
    resumed = Play(LAYOUT, masks=6)
    record, tensors = halted.server.state()
    resumed.server.restore((json.loads(json.dumps(record)), {k: v.clone() for k, v in tensors.items()}))
    for client, held in halted.clients.items():
        record, tensors = held.state()
        resumed.clients[client] = ClientLedger(LAYOUT)
        resumed.clients[client].restore((json.loads(json.dumps(record)), tensors))
    rounds(resumed, 9, 20)
    assert halted.sizes + resumed.sizes == whole.sizes
    again = ServerLedger(LAYOUT, masks=6)
    again.restore(resumed.server.state())
    one, two = whole.server.state(), again.state()
    assert one[0] == two[0]
    assert all(torch.equal(one[1][name], two[1][name]) for name in one[1])


def test_a_damaged_checkpoint_is_named() -> None:
    ledger = ServerLedger(LAYOUT)
    ledger.accept(1, (2, 0, 0), mask(1))
    record, _ = ledger.state()
    with pytest.raises(CheckpointError):
        ServerLedger(LAYOUT).restore((record, {}))
    with pytest.raises(CheckpointError):
        ClientLedger(LAYOUT).restore(({}, {}))


def test_held_is_what_a_client_holds() -> None:
    play, given = Play(LAYOUT), mask(1)
    play.turn(1, (2, 0, 0), given, move=0.2, keep=True)
    assert set(play.server.held(1)) == set(play.clients[1].known())
    order = dataclasses.replace(play.order(1, (2, 1, 0), given, Local()))
    assert order.start == (2, 0, 0)
