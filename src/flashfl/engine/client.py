"""The client's half of a round: read an order, train, write the update, remember what it was told to.

`ClientSide` does this wherever a client runs. `Worker` plays all clients of a simulation in one process.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core.errors import FlashError
from ..core.exchange import Order, Tag, Update
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from ..data.sources import Source
from ..data.task import Task
from ..wire import Message, UnknownMask, WireError, decode, encode
from ..wire.errors import BadField
from ..wire.frame import read_frame
from .encoding import OWN
from .memory import Rounds
from .pipeline import Notes
from .store import MaskStore
from .train import ClientFailed, Trainer
from .trust import shifted

if TYPE_CHECKING:
    from .party import Simulated

log = logging.getLogger("flashfl")
Pack = Callable[[Update, Message, Tensor], bytes]  # an update, its order, and the packed values that were sent
_TORCH = Path(torch.__file__).parent


@dataclass(frozen=True)
class Reply:
    """An answer in bytes and what the client remembers now; `lacks` if it needs the full mask first."""

    data: bytes
    memory: Rounds
    lacks: bool = False


class Remembered(NamedTuple):
    """What a client remembers of one round: the order's mask, its own, and the notes of its parts."""

    order: Mask | None = None
    own: Mask | None = None
    notes: Notes = {}  # noqa: RUF012 (never written to)


class ClientSide:
    """Plays one client at a time on one replica. The masks it remembers lie in a store, by hash.

    A client keeps the round it worked on last, and the one before it until an order starts from the newer one. So an
    update that gets lost leaves client and server agreeing.
    """

    def __init__(self, trainer: Trainer, store: MaskStore) -> None:
        self.trainer, self.layout, self.store = trainer, trainer.layout, store

    def work(self, client: int, data: Source, order_bytes: bytes, memory: Rounds, pack: Pack | None = None) -> Reply:
        """Carry out an order. Raises ClientFailed if training fails.

        pack: makes the answer's bytes, in a private round. The traceback of what training raised goes to the logger
        `flashfl`, at level debug.
        """
        try:
            message, held = self._read(order_bytes, memory)
        except UnknownMask as error:
            return self._lack(client, order_bytes, error)
        except WireError as error:
            raise ClientFailed(f"it cannot read the server's message ({type(error).__name__}: {error})") from None
        local = message.work
        how, own = local.sends(message.precision), held.own if "mask" in local.keep else None
        orders = [Order(message.weights(), local, message.key, message.tag, message.extra)]
        # Values and weights may each be as large as the model: those that the answer does not need are released now.
        start = message if how.changes or pack is not None else None
        message = replace(message, values=None)
        update = self._train(orders, client, data, own, held.notes)
        if pack is not None and start is not None and start.values is not None:
            data_up = pack(update, message, start.values)
        else:
            answer = update_message(update, message, self.layout)
            if start is not None:
                answer = shifted(answer, start, -1)
            known = (message.mask, held.own if message.own is not None else None)  # to the server too
            data_up = encode(answer, tuple(mask for mask in known if mask is not None), how).data
        now = Remembered(message.mask, update.mask if "mask" in local.keep else None, update.notes)
        return Reply(data_up, self._keep({message.start: held, message.tag: now}))

    def _train(self, orders: list[Order], client: int, data: Source, own: Mask | None, notes: Notes) -> Update:
        """Train on the one order, which is taken from its list so that nobody else holds it."""
        try:
            return self.trainer.train(orders.pop(), client, data, own, notes)
        except (FlashError, MemoryError):
            raise
        except Exception as error:  # most likely in the user's model, loss or data: other clients may still work
            log.debug("client %d failed", client, exc_info=True)
            raise ClientFailed(said(error)) from error

    def _read(self, order_bytes: bytes, memory: Rounds) -> tuple[Message, Remembered]:
        """The order, and what the client holds from the round that it starts from.

        A mask that is lost or damaged is as good as none: it raises UnknownMask if the order needs it. So do notes.
        """
        find, notes_of = self.store.find, self.store.find_notes
        rounds = {tag: Remembered(find(order), find(own), notes_of(notes)) for tag, order, own, notes in memory}
        masks = [mask for one in rounds.values() for mask in one[:2] if mask is not None]
        order = decode(order_bytes, self.layout, known={mask.hash: mask for mask in masks})
        held = rounds.get(order.start, Remembered()) if order.start is not None else Remembered()
        extra = dict(order.extra)
        given = extra.pop(OWN, None)  # the server gives back the client's own mask
        if order.kind != "order" or order.mask is None or order.values is None or order.carries == "statistics":
            raise BadField("the message must be an order with a mask and weights")
        if given is not None and order.start is not None:
            if given.form != "bits" or given.value.shape != order.mask.bits.shape:
                raise BadField("the client's own mask must have one bit for each prunable weight")
            held = Remembered(order.mask, Mask(self.layout, given.value), held.notes)
        if order.own is not None and (held.own is None or held.own.hash != order.own):
            raise UnknownMask(order.own)
        for tag, _, _, notes in memory:
            if tag == order.start and notes is not None and not held.notes:
                raise UnknownMask(notes)
        return replace(order, extra=extra), held

    def _keep(self, rounds: Mapping[Tag | None, Remembered]) -> Rounds:
        """Store what the client holds of these rounds, and name it by hash."""
        return [
            (tag, self._put(held.order), self._put(held.own), self.store.put_notes(held.notes) if held.notes else None)
            for tag, held in rounds.items()
            if tag is not None and any(held)
        ]

    def _put(self, mask: Mask | None) -> str | None:
        return None if mask is None else self.store.put(mask)

    def _lack(self, client: int, order_bytes: bytes, error: UnknownMask) -> Reply:
        tag = read_frame(memoryview(order_bytes), self.layout, len(order_bytes))[0].tag
        lack = encode(Message("lack", self.layout, tag, client, lacks=error.hash))
        return Reply(lack.data, [], lacks=True)


Result = Reply | tuple[float, float] | ClientFailed  # of evaluating: loss and metric, summed over samples
Job = Callable[["Worker"], Result]  # a method of the worker that does it, and its arguments


class Worker:
    """Plays clients in one process."""

    def __init__(self, task: Task, store: MaskStore, path: str, simulated: Simulated | None) -> None:
        """path: of the model that is evaluated."""
        self.task, self.trainer, self.model, self.simulated = task, Trainer(task), shared_model(task, path), simulated
        self.side = ClientSide(self.trainer, store)

    def __call__(self, job: Job) -> Result:
        try:
            return job(self)
        except ClientFailed as error:
            return error

    def train(self, client: int, order: bytes, memory: Rounds, sparse: bool) -> Reply:
        """Carry out an order. sparse: compute active weights only, where possible."""
        self.trainer.sparse = sparse
        return self.side.work(client, self.task.train[client], order, memory)

    def answer(self, client: int, request: bytes, memory: Rounds) -> Reply:
        """Answer a request of a private round."""
        assert self.simulated is not None
        return self.simulated.side(self.side, client).answer(self.task.train[client], request, memory)

    def evaluate(self, which: int, start: int, stop: int, statistics: bool) -> tuple[float, float]:
        """Loss and metric of the shared model on the samples [start, stop) of evaluation set `which`."""
        index = torch.arange(start, stop)
        try:
            return self.trainer.evaluate(self.model, self.task.evaluation[which], index, statistics)
        except Exception as error:
            if self.task.test is not None:
                raise
            raise ClientFailed(said(error)) from error  # the samples of one client: others may still work


def shared_model(task: Task, path: str) -> Weights:
    """The model in a file that several processes map into memory."""
    return Weights.dense(task.layout, torch.from_file(path, shared=True, size=task.layout.size))


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
    mask, values, carries = update.mask, update.values, local.update_carries
    if values is not None and mask is not None:
        statistics = len(values) - (layout.size - layout.trained_size)
        first = {"rest": mask.active, "statistics": statistics}.get(carries, 0)
        values = values[first : statistics if carries == "weights" else None]
    return Message(
        "update", layout, order.tag, update.client, n=update.n, key=order.key,
        mask=None if local.report == "statistics" else mask, values=values, carries=carries,
        counts=update.counts if mask is None and local.report == "counts" else None,
        metrics=dict(update.metrics), extra=dict(update.extra),
    )  # fmt: skip
