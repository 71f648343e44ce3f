"""What one round costs and what its updates add up to; and the account that does it with real bytes."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from ..aggregate import add
from ..core.client import active_range, moves_mask
from ..core.exchange import Client, Extra, Order, Outcome, Sums, Traffic, Update
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..core.precision import EXACT, Precision
from ..sparsity import recipe_mask
from ..wire import Encoded, Message, WireError, decode, encode, size_with
from .memory import ClientMemory
from .robust import PLAIN, Cohort, Robust
from .store import Kept
from .trust import limits_of, read_update

OWN = "own mask"  # the extra that gives a client back the mask it kept and lost
_ROOM = 1 << 30  # bytes of memory for updates that wait


class Account:
    """The account of one round, from the first order to the sums of the accepted updates.

    An engine reports each order by `sent`, each answer by `received` and each client that gives none by `failed`. Then
    `close` settles the round. `Encoding` makes real bytes; `Counting` works out on the device what they would take.
    """

    def __init__(self, memory: ClientMemory, values: Precision = EXACT, robust: Robust = PLAIN) -> None:
        """values: how the values of orders travel."""
        self.memory, self.layout, self.values, self.robust = memory, memory.layout, values, robust
        # Without a cohort, updates are added as they come.
        self.cohort = Cohort(robust, memory.store.folder) if robust != PLAIN else None
        memory.heard = {}  # a round that was interrupted is forgotten
        self.traffic = Traffic()
        self.failures: dict[int, str] = {}
        self.sums = Sums(self.layout, counts=[0] * len(self.layout.prunable))

    def personal(self, client: Client, order: Order) -> Order:
        """A personal order as it is sent: with the weights that the client's own mask covers.

        A client whose mask is no longer known here is sent the whole model, and covers it itself.
        """
        own, start = self.memory.own(client.id).mask, order.local.start
        fresh = "mask" not in order.local.keep or self.memory.start(client.id) is None
        if own is None and start is not None and fresh:
            own = recipe_mask(self.layout, start, order.weights.vector.device)
        return order if own is None else replace(order, weights=order.weights.restrict(own))

    def failed(self, client: int, why: str) -> None:
        """A client is dropped from this round."""
        self.failures[client] = why
        self.memory.heard.pop(client, None)

    def settle(self) -> None:
        """Every client has answered or will not: add up what is left."""
        raise NotImplementedError

    def close(self) -> Outcome:
        """What the round came to. Only now clients are known to hold what this round gave them."""
        self.settle()
        self.memory.accept()
        return Outcome(self.sums, self.traffic, dict(sorted(self.failures.items())))


class Encoding(Account):
    """The account of a round whose messages are real bytes.

    Each update is decoded once, when it arrives, and then added in ascending client id: as soon as all clients before
    it have answered or failed, or at the end if the whole cohort must be known first. Until then it waits in `Held`.
    Orders must be sent in ascending client id.
    """

    def __init__(self, memory: ClientMemory, values: Precision = EXACT, robust: Robust = PLAIN) -> None:
        super().__init__(memory, values, robust)
        self._orders: dict[int, Message] = {}  # of clients that have not answered yet, in ascending id
        self._reminded: set[int] = set()  # clients that were sent a mask which they had lost
        self._packed: tuple[Weights, Tensor] | None = None
        self._held = Held(self.layout, memory.store.folder)

    def messages(self, orders: Iterable[tuple[Client, Order]]) -> Iterator[tuple[int, bytes]]:
        """What each client is sent. Orders are made as they are needed."""
        for client, order in orders:
            yield client.id, self.sent(client, order)

    def sent(self, client: Client, order: Order) -> bytes:
        """The bytes of an order that is sent now."""
        message = self.message(client, self.personal(client, order) if order.local.personal else order)
        self._orders[client.id] = message
        return self._count(self.encode(message))

    def message(self, client: Client, order: Order) -> Message:
        """An order for a client as it will travel."""
        return Message(
            "order", self.layout, order.tag, client.id, client.n, order.key, start=self.memory.start(client.id),
            own=self.memory.own_hash(client.id), local=order.local, mask=order.weights.mask,
            values=self._pack(order), carries=order.local.order_carries, extra=order.extra,
        )  # fmt: skip

    def _pack(self, order: Order) -> Tensor:
        """Packed once for all clients that get the same weights."""
        if self._packed is None or self._packed[0] is not order.weights:
            self._packed = (order.weights, order.weights.packed().cpu())
        values, tail = self._packed[1], self.layout.size - self.layout.trained_size
        return values if order.local.statistics else values[: len(values) - tail]

    def encode(self, message: Message) -> Encoded:
        """An order as bytes; its mask leans on the one that the client acknowledged last."""
        base = self.memory.base(message.client).mask
        return encode(message, () if base is None else (base,), values=self.values)

    def largest_update(self, client: int) -> int:
        """Bytes of the largest update that can answer an order: no mask takes more than a bit for each weight."""
        order = self._orders[client]
        local, k = order.work, self.layout.prunable_size
        active = max(sum(local.start.budgets) if local.start else 0, order.mask.active if order.mask else 0)
        active = max(active, active_range(local.parts, self.layout, active)[1])
        values = local.sends(self.values)
        plain = size_with(replace(order, extra={}), active, k // 8 + 2, values).total
        if not (order.extra or local.parts):
            return plain
        limits = limits_of(order)
        return plain + (300 + 8 * limits.elements) * limits.extras

    def again(self, client: int) -> bytes:
        """The bytes of an order once more. Nothing is counted: it does not travel again."""
        return self.encode(self._orders[client]).data

    def lacking(self, client: int, data: bytes) -> bytes:
        """A client says that it lacks a mask: the order with the full mask, and with its own if it is known here.

        Raises a WireError if this is not what the client says, or if it says so a second time.
        """
        lack, order = decode(data, self.layout), self._orders.get(client)
        asks = lack.kind == "lack" and lack.client == client and client not in self._reminded
        if not asks or order is None or lack.parts is None:  # in most steps of a private round there is no order
            raise WireError(
                "the client's request for a mask is not valid, or it asked again after it got the full mask"
            )
        self._reminded.add(client)
        self.traffic += lack.parts.traffic("lack")
        own = self.memory.own(client).mask
        if own is None:
            self.memory.forget(client)
        order = replace(order, start=self.memory.start(client), own=None if own is None else own.hash)
        self._orders[client] = order
        if own is not None:
            order = replace(order, extra={**order.extra, OWN: Extra("bits", own.bits)})
        return self.in_full(client, order)

    def in_full(self, client: int, order: Message | None = None) -> bytes:
        """The bytes of an order with its full mask."""
        return self._count(encode(order or self._orders[client], (), values=self.values))

    def _count(self, encoded: Encoded) -> bytes:
        self.traffic += encoded.parts.traffic("order")
        return encoded.data

    def failed(self, client: int, why: str) -> None:
        super().failed(client, why)
        self._orders.pop(client, None)
        self._add_ready()

    def received(self, client: int, data: bytes, notes: str | None = None) -> None:
        """An answer. If it is not a good one, its client is dropped. notes: the hash of what a simulated one keeps."""
        order = self._orders[client]
        try:
            update, traffic = self.decode(data, order)
        except WireError as error:
            self.traffic += Traffic(up=len(data), overhead=len(data))
            self.failed(client, f"{type(error).__name__}: {error}")
            return
        assert order.mask is not None
        self.traffic += traffic
        store = self.memory.store
        own = store.keep(update.mask, own=True) if update.mask is not None and "mask" in order.work.keep else None
        kept = None if notes is None else Kept(store, notes)
        self.memory.hear(client, order.tag, store.keep(order.mask), own, kept)
        del self._orders[client]
        if self.cohort is not None:
            self.cohort.see(update)
        self._held.put(update, order.mask)
        self._add_ready()

    def decode(self, data: bytes, order: Message) -> tuple[Update, Traffic]:
        """The update that answers `order` and what it took, or the WireError that says why this is none."""
        own = self.memory.own(order.client).mask if order.own is not None else None
        return read_update(data, order, own, self._frozen(order), compared=self.cohort is not None)

    def _frozen(self, order: Message) -> Mask | None:
        """The mask that the client must return; None if it may move its mask, or if its own is unknown here."""
        local = order.work
        if local.adapt is not None or moves_mask(local.parts):
            return None
        if "mask" in local.keep and order.start is not None:
            return self.memory.own(order.client).mask
        if local.start is not None:
            return recipe_mask(self.layout, local.start)
        return order.mask

    def _add_ready(self) -> None:
        """Add the updates of all clients before the first one that has not answered."""
        if self.cohort is None:
            for update in self._held.take(before=next(iter(self._orders), None)):
                add(self.sums, update)

    def settle(self) -> None:
        for client in list(self._orders):
            self.failed(client, "no answer")
        if self.cohort is not None:
            self.cohort.add(self.sums, self._held)


class Held:
    """Decoded updates by client. The file has no name, so nothing is left behind."""

    def __init__(self, layout: Layout, folder: Path | None = None, room: int = _ROOM) -> None:
        """folder: where the file would be. The system's temporary folder may be in memory."""
        self.layout, self.folder, self.room = layout, folder, room
        self._memory: dict[int, tuple[Update, int]] = {}  # client -> its update, and the room it takes
        # Client -> place in the file; its mask and start, if they are its order's.
        self._places: dict[int, tuple[int, Mask | None, Tensor | None]] = {}
        self._file: IO[bytes] | None = None

    def __iter__(self) -> Iterator[Update]:
        """The updates, in ascending client id."""
        return map(self._read, self._clients())

    def _clients(self) -> list[int]:
        return sorted([*self._memory, *self._places])

    def put(self, update: Update, order: Mask | None) -> None:
        """Hold an update; `order` is its order's mask."""
        values, mask, start = update.values, update.mask, update.start
        own = mask is not None and mask is not order
        need = (values.nbytes if values is not None else 0) + 2 * self.layout.prunable_size * own  # mask and places
        need += start.nbytes if own and start is not None else 0
        if need <= self.room:
            self.room -= need
            self._memory[update.client] = (update, need)
            return
        if self._file is None:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 (closed with this object)
            weakref.finalize(self, self._file.close)
        self._places[update.client] = (self._file.seek(0, 2), *((None, None) if own else (mask, start)))
        arrays = [
            values.numpy() if values is not None else None,
            mask.packed if own and mask is not None else None,
            start.numpy() if own and start is not None else None,
        ]
        pickle.dump((replace(update, mask=None, values=None, start=None), *arrays), self._file, protocol=5)

    def take(self, before: int | None) -> Iterator[Update]:
        """The updates of all clients before this one, in ascending client id. They are held no longer. None: all."""
        for client in self._clients():
            if before is not None and client > before:
                return
            update = self._read(client)
            self.room += self._memory.pop(client, (update, 0))[1]
            if self._places.pop(client, None) is not None and not self._places and self._file is not None:
                self._file.truncate(0)
            yield update

    def _read(self, client: int) -> Update:
        if client in self._memory:
            return self._memory[client][0]
        assert self._file is not None
        place, mask, start = self._places[client]
        self._file.seek(place)
        update: Update
        update, values, bits, began = pickle.load(self._file)
        if bits is not None:
            mask = Mask(self.layout, Mask.unpack(self.layout, bits).bits, update.counts)
        if began is not None:
            start = torch.from_numpy(began)
        return replace(update, mask=mask, values=None if values is None else torch.from_numpy(values), start=start)
