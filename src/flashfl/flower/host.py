"""What plays a client: its data, a replica of the model, and one function for each kind of message.

Everything that comes in and goes out is plain data, so it does not matter in which process a host lives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import __version__
from ..core.errors import ConfigError, FlashError
from ..core.state import Mask, Weights
from ..data.examples import Source
from ..data.task import Task
from ..engine.client import ClientSide, Memory
from ..engine.train import Trainer
from ..wire import Message, UnknownMask, decode, encode
from ..wire.frame import VERSION
from .memory import HeldMasks

_EVAL_BATCH = 250


@dataclass(frozen=True)
class Seat:
    """What a message says of whom it is for: the node's settings and the run's."""

    node: Mapping[str, Any]
    run: Mapping[str, Any] = field(default_factory=dict)

    @property
    def client(self) -> int:
        """The client's id: `client-id` of the node's settings, else `partition-id`."""
        for name in ("client-id", "partition-id"):
            if name in self.node:
                return int(self.node[name])
        raise ConfigError(
            "this node does not say which client it is: start its SuperNode with --node-config 'partition-id=N'"
        )


@dataclass(frozen=True)
class Held:
    """What a client remembers: its last rounds, and the masks they name, packed."""

    memory: Memory = field(default_factory=list)
    masks: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Answer:
    """A reply: an update, a verdict, a registration, or why there is none; and what to remember, if that changed."""

    kind: str  # update, lack, judged, client, failed
    data: bytes = b""
    fields: Mapping[str, Any] = field(default_factory=dict)
    held: Held | None = None


class Host:
    """One task and one replica of its model, for as long as the process lives."""

    def __init__(self, task: Task, threads: int = 1) -> None:
        self.task, self.threads = task, threads
        self.trainer = Trainer(task)

    def serve(self, kind: str, seat: Seat, data: bytes = b"", held: Held | None = None) -> Answer:
        """The answer to a message of this kind; what the user can mend is said to the server too."""
        try:
            with _threads(self.threads):
                return {"query": self.about, "train": self.train, "evaluate": self.judge}[kind](
                    seat, data, held or Held()
                )
        except FlashError as error:
            return Answer("failed", fields={"why": f"{type(error).__name__}: {error}"})

    def about(self, seat: Seat, data: bytes, held: Held) -> Answer:
        """Who this client is and what it runs."""
        fields = {
            "client": seat.client, "n": len(self._samples(seat)), "held": len(self._judges(seat) or ()),
            "layout": self.task.layout.hash, "wire": VERSION, "package": __version__,
        }  # fmt: skip
        density = seat.node.get("density", self.task.clients[self._at(seat)].density)
        return Answer("client", fields=fields | ({} if density is None else {"density": float(density)}))

    def train(self, seat: Seat, data: bytes, held: Held) -> Answer:
        """Carry out an order."""
        store = HeldMasks(self.task.layout, held.masks)
        side = ClientSide(self.trainer, store, values=None)
        reply = side.work(seat.client, self._samples(seat), data, held.memory)
        kept = Held(reply.memory, store.only(h for _, *named in reply.memory for h in named if h is not None))
        return Answer("lack" if reply.lacks else "update", reply.data, held=kept)

    def judge(self, seat: Seat, data: bytes, held: Held) -> Answer:
        """Loss and metric of a model on the samples this client holds back, times their number."""
        samples, layout = self._judges(seat), self.task.layout
        if samples is None:
            raise ConfigError(f"client {seat.client} holds no samples back to judge on")
        store = HeldMasks(layout, held.masks)
        try:
            order = decode(data, layout, known={h: store[h] for h in held.masks})
        except UnknownMask as error:
            return Answer("lack", encode(Message("lack", layout, (0, 0, 0), seat.client, lacks=error.hash)).data)
        statistics = order.local is None or order.local.statistics
        weights = Weights(Mask.full(layout), order.weights().vector)
        loss = metric = 0.0
        for start in range(0, len(samples), _EVAL_BATCH):
            index = torch.arange(start, min(start + _EVAL_BATCH, len(samples)))
            part = self.trainer.evaluate(weights, samples, index, statistics)
            loss, metric = loss + part[0], metric + part[1]
        return Answer("judged", fields={"n": len(samples), "loss": loss, "metric": metric})

    def _at(self, seat: Seat) -> int:
        """Which of the task's clients this is: a task of one client is that client's own."""
        at = 0 if len(self.task.train) == 1 else int(seat.node.get("partition-id", seat.client))
        if not 0 <= at < len(self.task.train):
            raise ConfigError(f"this node is partition {at}, the task has {len(self.task.train)}")
        return at

    def _samples(self, seat: Seat) -> Source:
        return self.task.train[self._at(seat)]

    def _judges(self, seat: Seat) -> Source | None:
        if self.task.test is not None:
            return self.task.test if len(self.task.train) == 1 else None
        whole = getattr(self._samples(seat), "source", None)
        return next((h for h in self.task.held if getattr(h, "source", None) is whole), None)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Results depend on the number of threads in their last bits; a simulation trains with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


TaskFn = Callable[[Any], Task]  # called with the seat: anything that has `node_config` and `run_config`


class Hosts:
    """The hosts of a process: one for each task, and one task for each node unless the maker shares it."""

    def __init__(self, make: Task | TaskFn, most: int = 8) -> None:
        self.make = make
        self._tasks = functools.lru_cache(most)(self._task)
        self._hosts: dict[int, Host] = {}

    def find(self, seat: Seat, context: Any) -> Host:
        """The host for a message; what is made for it is kept for the next."""
        self._context = context
        key = repr((sorted(seat.node.items()), sorted(seat.run.items())))
        task = self.make if isinstance(self.make, Task) else self._tasks(key)
        if id(task) not in self._hosts:
            if len(self._hosts) > 8:
                self._hosts.clear()
            self._hosts[id(task)] = Host(task, int(seat.node.get("threads", 1)))
        return self._hosts[id(task)]

    def _task(self, key: str) -> Task:
        assert not isinstance(self.make, Task)
        return self.make(self._context)
