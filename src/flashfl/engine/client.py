"""The client's half of a round: read an order, train, write the update, remember what it was told to."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..core.errors import FlashError
from ..core.exchange import Extra, Order, Tag, Update
from ..core.layout import Layout
from ..core.mask import Mask
from ..data.sources import Source
from ..wire import Message, UnknownMask, WireError, decode, encode
from ..wire.errors import WrongContent
from ..wire.values import Carries
from .encoding import OWN, base_values
from .memory import Rounds
from .pipeline import Notes
from .store import MaskStore
from .train import ClientFailed, Trainer

log = logging.getLogger("flashfl")
Pack = Callable[[Update, Message, Tensor], bytes]  # an update, its order, and the packed values that were sent
_TORCH = Path(torch.__file__).parent


@dataclass(frozen=True)
class Reply:
    """An answer in bytes and what the client remembers now; `lacks` if it needs the full mask first."""

    data: bytes
    memory: Rounds
    lacks: bool = False


class ClientLedger:
    """The masks one client holds: of the round its orders start from, and of the round it worked on last.

    It keeps the older round until an order starts from the newer one. So an update that gets lost leaves client and
    server agreeing.
    """

    def __init__(self) -> None:
        # The order's mask, the client's own, and the notes of its parts.
        self.rounds: dict[Tag, tuple[Mask | None, Mask | None, Notes]] = {}

    def known(self) -> dict[str, Mask]:
        """The masks that an order may lean on, by hash."""
        return {mask.hash: mask for one in self.rounds.values() for mask in one[:2] if mask is not None}

    def own(self, start: Tag | None) -> Mask | None:
        """The mask kept from the round `start`."""
        return self.rounds[start][1] if start in self.rounds else None

    def notes(self, start: Tag | None) -> Notes:
        """What the client's parts remember from the round `start`."""
        return self.rounds[start][2] if start in self.rounds else {}

    def begin(self, order: Message) -> None:
        """An order has come: only the round it starts from still counts. Raises UnknownMask if that is lost."""
        mine = self.own(order.start)
        if order.own is not None and (mine is None or mine.hash != order.own):
            raise UnknownMask(order.own)
        self.rounds = {tag: masks for tag, masks in self.rounds.items() if tag == order.start}

    def bases(self, order: Message) -> tuple[Mask, ...]:
        """The masks that the update may lean on: the order's and, if the server knows it, the client's own."""
        mine = self.own(order.start) if order.own is not None else None
        return tuple(mask for mask in (order.mask, mine) if mask is not None)

    def finish(self, order: Message, own: Mask | None = None, notes: Notes | None = None) -> None:
        """The update is ready; `own` is the mask to keep, if the order says so, `notes` what its parts remember."""
        self.rounds[order.tag] = (order.mask, own, notes or {})


class ClientSide:
    """Plays one client at a time on one replica. The masks it remembers lie in a store, by hash."""

    def __init__(self, trainer: Trainer, store: MaskStore) -> None:
        self.trainer, self.layout, self.store = trainer, trainer.layout, store

    def work(self, client: int, data: Source, order_bytes: bytes, memory: Rounds, pack: Pack | None = None) -> Reply:
        """Carry out an order. Raises ClientFailed if training fails.

        pack: makes the answer's bytes, in a private round. The traceback of what training raised goes to the logger
        `flashfl`, at level debug.
        """
        ledger = self._recall(memory)
        try:
            message = decode(order_bytes, self.layout, known=ledger.known())
            extra = self._given_back(ledger, message)
            ledger.begin(message)
        except UnknownMask as error:
            return self._lack(client, order_bytes, error)
        except WireError as error:
            raise ClientFailed(f"it cannot read the server's message ({type(error).__name__}: {error})") from None
        local, coding = message.local, message.coding
        assert local is not None
        assert coding is not None
        # Values and weights may each be as large as the model: release them before training.
        orders, how = [Order(message.weights(), local, message.key, message.tag, extra)], local.sends(coding.values)
        start = message if how.changes or pack is not None else None
        message = replace(message, values=None)
        own = ledger.own(message.start) if "mask" in local.keep else None
        try:
            update = self.trainer.train(orders.pop(), client, data, own, ledger.notes(message.start))
        except (FlashError, MemoryError):
            raise
        except Exception as error:  # most likely in the user's model, loss or data: other clients may still work
            log.debug("client %d failed", client, exc_info=True)
            raise ClientFailed(said(error)) from error
        if pack is not None and start is not None and start.values is not None:
            data_up = pack(update, message, start.values)
        else:
            answer = update_message(update, message, self.layout)
            if start is not None and answer.mask is not None and answer.values is not None:
                answer = replace(answer, values=answer.values - base_values(start, answer.mask, answer.carries))
            data_up = encode(answer, ledger.bases(message), how).data
        ledger.finish(message, update.mask if "mask" in local.keep else None, update.notes)
        return Reply(data_up, self._keep(ledger))

    def _recall(self, memory: Rounds) -> ClientLedger:
        ledger = ClientLedger()
        for tag, order, own, notes in memory:
            # A mask that is lost or damaged is as good as none: the server will be told.
            found = [None if digest is None else self.store.find(digest) for digest in (order, own)]
            ledger.rounds[tag] = (found[0], found[1], {} if notes is None else self.store.find_notes(notes))
        return ledger

    def _given_back(self, ledger: ClientLedger, order: Message) -> dict[str, Extra]:
        """Take over the client's own mask if the server gives it back; the other extras."""
        extra = dict(order.extra)
        own = extra.pop(OWN, None)
        if own is not None and order.start is not None and order.mask is not None:
            if own.value.numel() != self.layout.prunable_size:
                raise WrongContent(f"a mask of {own.value.numel()} weights, expected {self.layout.prunable_size}")
            ledger.rounds[order.start] = (order.mask, Mask(self.layout, own.value), ledger.notes(order.start))
        return extra

    def _keep(self, ledger: ClientLedger) -> Rounds:
        return [
            (tag, self._put(order), self._put(own), self.store.put_notes(notes) if notes else None)
            for tag, (order, own, notes) in ledger.rounds.items()
        ]

    def _put(self, mask: Mask | None) -> str | None:
        return None if mask is None else self.store.put(mask)

    def _lack(self, client: int, order_bytes: bytes, error: UnknownMask) -> Reply:
        from ..wire.frame import read_frame

        tag = read_frame(memoryview(order_bytes), self.layout, len(order_bytes))[0].tag
        lack = encode(Message("lack", self.layout, tag, client, lacks=error.hash))
        return Reply(lack.data, [], lacks=True)


def said(error: Exception) -> str:
    """An error in one line, with the innermost line of code outside torch that it passed."""
    passed = [(Path(frame.f_code.co_filename), line) for frame, line in traceback.walk_tb(error.__traceback__)]
    file, line = next(place for place in reversed(passed) if _TORCH not in place[0].parents)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({file.name}, line {line})"


def update_message(update: Update, order: Order | Message, layout: Layout) -> Message:
    """An update as it will travel, in answer to an order or to the message that was one."""
    local = order.local
    assert local is not None
    mask, values = update.mask, update.values
    tail = layout.size - layout.trained_size
    carries: Carries = "all" if local.statistics else "weights"
    if local.report == "statistics":
        mask, carries = None, "statistics"
        values = values[len(values) - tail :] if values is not None else None
    elif local.report == "mask" and values is not None and mask is not None:
        carries, values = "rest", values[mask.active :]
    elif values is not None and not local.statistics:
        values = values[: len(values) - tail]
    return Message(
        "update", layout, order.tag, update.client, n=update.n, key=order.key, mask=mask, values=values,
        carries=carries, counts=update.counts if mask is None and local.report == "counts" else None,
        metrics=dict(update.metrics), extra=dict(update.extra),
    )  # fmt: skip
