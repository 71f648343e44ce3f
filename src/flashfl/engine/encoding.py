"""The account of a round with real bytes: orders are encoded, updates are decoded once and checked."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..aggregate import add
from ..core.client import active_range, fields_of, moves_mask, overrides
from ..core.exchange import Carries, Client, Extra, Order, Outcome, Traffic, Update
from ..core.mask import Mask, repacked
from ..core.precision import EXACT, Precision
from ..sparsity import recipe_mask
from ..wire import Encoded, Limits, Message, WireError, decode, encode, size_with
from ..wire.errors import NonFinite, WrongContent
from .account import Account
from .change import start_of
from .held import Held
from .memory import ClientMemory, Kept
from .pipeline import tallied
from .robust import PLAIN, Robust
from .trust import check_update

OWN = "own mask"  # the extra that gives a client back the mask it kept and lost


class Encoding(Account):
    """The account of a round whose messages are real bytes.

    Each update is decoded once, when it arrives, and then added in ascending client id: as soon as all clients before
    it have answered or failed, or at the end if the whole cohort must be known first. Until then it waits in `Held`.
    Orders must be sent in ascending client id.
    """

    def __init__(self, memory: ClientMemory, values: Precision = EXACT, robust: Robust = PLAIN) -> None:
        super().__init__(memory, values, robust)
        self._orders: dict[int, Message] = {}  # of clients that have not answered yet, in ascending id
        self._held = Held(self.layout, memory.store.folder)

    def sent(self, client: Client, order: Order) -> bytes:
        """The bytes of an order that is sent now."""
        message = self.message(client, self.personal(client, order))
        self._orders[client.id] = message
        return self._count(self.encode(message))

    def largest_update(self, client: int) -> int:
        """Bytes of the largest update that can answer an order: no mask takes more than a bit for each weight."""
        order = self._orders[client]
        local, k = order.work, self.layout.prunable_size
        active = max(sum(local.start.budgets) if local.start else 0, order.mask.active if order.mask else 0)
        active = max(active, active_range(local.parts, self.layout, active)[1])
        values, limits = local.sends(self.values), _limits(order)
        plain = size_with(replace(order, extra={}), active, k // 8 + 2, values).total
        return plain + (300 + 8 * limits.elements) * limits.extras

    def again(self, client: int) -> bytes:
        """The bytes of an order once more. Nothing is counted: it does not travel again."""
        return self.encode(self._orders[client]).data

    def lacking(self, client: int, data: bytes) -> bytes:
        """A client says that it lacks a mask: the order with the full mask, and with its own if it is known here.

        Raises a WireError if this is not what the client says, or if it says so a second time.
        """
        self.reminded(client, data)
        order = self._orders[client]
        own = self.memory.own(client)
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
            update = self.decode(data, order)
        except WireError as error:
            self.traffic += Traffic(up=len(data), overhead=len(data))
            self.failed(client, f"{type(error).__name__}: {error}")
            return
        assert update.parts is not None
        assert order.mask is not None
        assert order.values is not None
        self.traffic += update.parts.traffic("update")
        keeps = "mask" in order.work.keep
        kept = None if notes is None else Kept(notes)
        self.accepted(client, order.tag, order.mask, update.mask if keeps else None, kept)
        del self._orders[client]
        found = _update(update, order)
        if self.cohort is not None:
            found = replace(found, start=start_of(found, order.work, order.mask, order.values))
            self.cohort.see(found)
        self._held.put(found, order.mask)
        self._add_ready()

    def decode(self, data: bytes, order: Message) -> Message:
        """The update that answers `order`, or the WireError that says why this is none."""
        own = self.memory.own(order.client) if order.own is not None else None
        known = {mask.hash: mask for mask in (order.mask, own) if mask is not None}
        update = decode(data, self.layout, known=known, limits=_limits(order))
        update = _restored(update, order)
        check_update(update, order, self._frozen(order))
        return update

    def _frozen(self, order: Message) -> Mask | None:
        """The mask that the client must return; None if it may move its mask, or if its own is unknown here."""
        local = order.work
        if local.adapt is not None or moves_mask(local.parts):
            return None
        if "mask" in local.keep and order.start is not None:
            return self.memory.own(order.client)
        if local.start is not None:
            return recipe_mask(self.layout, local.start)
        return order.mask

    def _add_ready(self) -> None:
        """Add the updates of all clients before the first one that has not answered."""
        if self.cohort is None:
            for update in self._held.take(before=next(iter(self._orders), None)):
                add(self.sums, update)

    def close(self) -> Outcome:
        for client in list(self._orders):
            self.failed(client, "no answer")
        if self.cohort is not None:
            self.cohort.add(self.sums, self._held)
        return super().close()


def _limits(order: Message) -> Limits:
    """Reject more or larger extras than the order has, and a recipe unless the order allows one."""
    local = order.work
    declared = fields_of(local.parts, "reports", order.layout)
    sizes = [extra.value.numel() for extra in order.extra.values()] + [one.size for one in declared.values()]
    most, count = max([order.layout.prunable_size, *sizes]), len(declared.keys() | order.extra.keys())
    # The mask that a client kept may have been a recipe, and be unknown here by now.
    kept = "mask" in local.keep and order.start is not None and order.own is None
    return Limits(extras=count, elements=most, recipes=local.start is not None or kept)


def base_values(order: Message, mask: Mask, carries: Carries) -> Tensor:
    """What an order's model has at the places of an update's values; 0 for statistics, which are never changes."""
    assert order.values is not None
    assert order.mask is not None
    layout, values = order.layout, repacked(order.values, order.mask, mask)
    weights = values[: mask.active + layout.trained_size - layout.prunable_size]
    return torch.cat([weights, values.new_zeros(layout.size - layout.trained_size)]) if carries == "all" else weights


def _restored(update: Message, order: Message) -> Message:
    """The update with weights, if it carries changes. They are added to the server's values, not to rounded ones."""
    asked, coding = order.work.sends(EXACT).changes, update.coding
    if update.values is None or update.mask is None or coding is None:
        return update
    if coding.values.changes != asked:
        sent, wanted = ("changes", "weights") if coding.values.changes else ("weights", "changes")
        raise WrongContent(f"client {update.client} sent {sent} and was asked for {wanted}")
    if not coding.values.changes:
        return update
    values = update.values + base_values(order, update.mask, update.carries)
    if not bool(values.isfinite().all()):
        raise NonFinite(f"the changes of client {update.client} lead to weights that are not finite")
    return replace(update, values=values)


def _update(message: Message, order: Message) -> Update:
    """A decoded update. What did not travel of its values counts as zero."""
    layout, mask, values = message.layout, message.mask, message.values
    if values is not None and message.carries != "all":
        mask = order.mask if message.carries == "statistics" else mask
        assert mask is not None
        missing = values.new_zeros(mask.active + layout.size - layout.prunable_size - len(values))
        values = torch.cat([values, missing] if message.carries == "weights" else [missing, values])
    counts = message.counts if message.counts is not None else (0,) * len(layout.prunable)
    update = Update(message.client, message.n, mask, values, counts, dict(message.metrics), dict(message.extra))
    parts = order.work.parts
    if any(overrides(part, "tally") for part in parts) and (weights := update.weights) is not None:
        extra = {**update.extra, **tallied(parts, layout, weights.vector, weights.mask.bits)}
        update = replace(update, extra=extra)
    return update
