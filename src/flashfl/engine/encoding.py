"""A server that makes real bytes: orders are encoded, updates are decoded once and checked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..aggregate import add
from ..core.exchange import Client, Extra, Local, Order, Outcome, Traffic, Update
from ..core.mask import Mask, Weights
from ..sparsity import recipe_mask
from ..wire import Encoded, Limits, Message, WireError, decode, encode, size_with
from ..wire.values import Form
from .account import Account
from .held import Held
from .memory import ClientMemory
from .robust import Start, add_updates
from .trust import Cohort, Trust, check_update

OWN = "own mask"  # the extra that gives a client back the mask it kept and lost


class Server:
    """Knows which masks each client holds, sends what it lacks, and checks what comes back."""

    def __init__(self, memory: ClientMemory, values: Form = "fp32", trust: Trust | None = None) -> None:
        self.memory, self.layout, self.values, self.trust = memory, memory.layout, values, trust or Trust()
        self._packed: tuple[Weights, Tensor] | None = None

    def open(self) -> Encoding:
        """The account of a new round."""
        return Encoding(self)

    def message(self, client: Client, order: Order) -> Message:
        """An order for a client as it will travel."""
        return Message(
            "order", self.layout, order.tag, client.id, client.n, order.key, start=self.memory.start(client.id),
            own=self.memory.own_hash(client.id), local=order.local, mask=order.weights.mask,
            values=self._pack(order), carries="all" if order.local.statistics else "weights", extra=order.extra,
        )  # fmt: skip

    def _pack(self, order: Order) -> Tensor:
        """Packed once for all clients that get the same weights."""
        if self._packed is None or self._packed[0] is not order.weights:
            self._packed = (order.weights, order.weights.packed().cpu())
        values, tail = self._packed[1], self.layout.size - self.layout.trained_size
        return values if order.local.statistics else values[: len(values) - tail]

    def encode(self, message: Message) -> Encoded:
        """An order as bytes; its mask leans on the one that the client acknowledged last."""
        base = self.memory.base(message.client)
        return encode(message, () if base is None else (base,), values=self.values)

    def decode(self, data: bytes, order: Message) -> Message:
        """The update that answers `order`, or the WireError that says why this is none."""
        own = self.memory.own(order.client) if order.own is not None else None
        known = {mask.hash: mask for mask in (order.mask, own) if mask is not None}
        update = decode(data, self.layout, known=known, limits=_limits(order))
        check_update(update, order, self.trust.factor > 0, self._frozen(order))
        return update

    def _frozen(self, order: Message) -> Mask | None:
        """The mask that the client must return; None if it may move its mask, or if its own is unknown here."""
        local = order.local
        if local is None or local.adapt is not None:
            return None
        if "mask" in local.keep and order.start is not None:
            return self.memory.own(order.client)
        if local.start is not None:
            return recipe_mask(self.layout, local.start)
        return order.mask


class Encoding(Account):
    """The account of a round whose messages are real bytes.

    Each update is decoded once, when it arrives, and then added in ascending client id: as soon as all clients before
    it have answered or failed, or at the end if the whole cohort must be known first. Until then it waits in `Held`.
    Orders must be sent in ascending client id.
    """

    def __init__(self, server: Server) -> None:
        super().__init__(server.memory, server.trust)
        self.server = server
        self._orders: dict[int, Message] = {}  # of clients that have not answered yet, in ascending id
        self._held = Held(self.layout, server.memory.store.folder)
        self._cohort = Cohort(server.trust)
        self._starts: dict[int, Start] = {}  # the models that clients were sent, where changes may be clipped
        self._reminded: set[int] = set()

    def sent(self, client: Client, order: Order) -> bytes:
        """The bytes of an order that is sent now."""
        message = self.server.message(client, order)
        self._orders[client.id] = message
        return self._count(self.server.encode(message))

    def largest_update(self, client: int) -> int:
        """Bytes of the largest update that can answer an order: no mask takes more than a bit for each weight."""
        order = self._orders[client]
        start, k = order.local.start if order.local else None, self.layout.prunable_size
        active = max(sum(start.budgets) if start else 0, order.mask.active if order.mask else 0)
        plain = size_with(replace(order, extra={}), active, k // 8 + 2, self.server.values).total
        extras = max([k, *(extra.value.numel() for extra in order.extra.values())])
        return plain + 8 * extras * len(order.extra)

    def again(self, client: int) -> bytes:
        """The bytes of an order once more. Nothing is counted: it does not travel again."""
        return self.server.encode(self._orders[client]).data

    def lacking(self, client: int, data: bytes) -> bytes:
        """A client says that it lacks a mask: the order with the full mask, and with its own if it is known here.

        Raises a WireError if this is not what the client says, or if it says so a second time.
        """
        lack, order = decode(data, self.layout), self._orders[client]
        if lack.kind != "lack" or lack.parts is None or lack.client != client or client in self._reminded:
            raise WireError("the client reports a missing mask and has no reason to")
        self._reminded.add(client)
        self.traffic += lack.parts.traffic("lack")
        own = self.memory.own(client)
        if own is None:
            self.memory.forget(client)
        order = replace(order, start=self.memory.start(client), own=None if own is None else own.hash)
        self._orders[client] = order
        if own is not None:
            order = replace(order, extra={**order.extra, OWN: Extra("bits", own.bits)})
        return self._count(encode(order, (), values=self.server.values))

    def _count(self, encoded: Encoded) -> bytes:
        self.traffic += encoded.parts.traffic("order")
        return encoded.data

    def failed(self, client: int, why: str) -> None:
        super().failed(client, why)
        self._orders.pop(client, None)
        self._add_ready()

    def received(self, client: int, data: bytes) -> None:
        """An answer. If it is not a good one, its client is dropped."""
        order = self._orders[client]
        try:
            update = self.server.decode(data, order)
        except WireError as error:
            self.traffic += Traffic(up=len(data), overhead=len(data))
            self.failed(client, f"{type(error).__name__}: {error}")
            return
        assert update.parts is not None
        assert order.mask is not None
        self.traffic += update.parts.traffic("update")
        self._cohort.see(update, order)
        keeps = order.local is not None and "mask" in order.local.keep
        self.accepted(client, order.tag, order.mask, update.mask if keeps else None)
        if self.trust.clip and update.mask is not None and update.values is not None:
            self._starts[client] = order.weights
        in_turn = next(iter(self._orders)) == client
        del self._orders[client]
        if in_turn and not self.trust.needs_cohort:
            add(self.sums, _update(update, order))
        else:
            self._held.put(_update(update, order), order.mask)
        self._add_ready()

    def _add_ready(self) -> None:
        """Add the updates of all clients before the first one that has not answered."""
        first = next(iter(self._orders), None)
        for client in () if self.trust.needs_cohort else self._held.clients():
            if first is not None and client > first:
                break
            add(self.sums, self._held.pop(client))

    def close(self) -> Outcome:
        for client in list(self._orders):
            self.failed(client, "no answer")
        if self.trust.needs_cohort:
            for client, why in self._cohort.rejected().items():
                self.failed(client, f"{type(why).__name__}: {why}")
            updates = (self._held.pop(client) for client in self._held.clients() if client not in self.failures)
            if self.trust.clip or self.trust.trim:
                add_updates(self.sums, updates, self._starts, self.trust, self.memory.store.folder)
            else:
                for update in updates:
                    add(self.sums, update)
        self._held.close()
        return super().close()


def _limits(order: Message) -> Limits:
    """Reject more or larger extras than the order has, and a recipe unless the order allows one."""
    most = max([order.layout.prunable_size, *(extra.value.numel() for extra in order.extra.values())])
    local = order.local or Local()
    # The mask that a client kept may have been a recipe, and be unknown here by now.
    kept = "mask" in local.keep and order.start is not None and order.own is None
    return Limits(extras=len(order.extra), elements=most, recipes=local.start is not None or kept)


def _update(message: Message, order: Message) -> Update:
    """A decoded update. What did not travel of its values counts as zero."""
    layout, mask, values = message.layout, message.mask, message.values
    if values is not None and message.carries == "statistics":
        mask = order.mask
        assert mask is not None
        values = torch.cat([values.new_zeros(mask.active + layout.trained_size - layout.prunable_size), values])
    elif values is not None and message.carries == "weights":
        values = torch.cat([values, values.new_zeros(layout.size - layout.trained_size)])
    counts = message.counts if message.counts is not None else (0,) * len(layout.prunable)
    return Update(message.client, message.n, mask, values, counts, dict(message.metrics), dict(message.extra))
