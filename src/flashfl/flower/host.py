"""What plays a client: its data, a replica of the model, and one function for each kind of message.

Everything that comes in and goes out is plain data, so it does not matter in which process a host lives.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .. import __version__
from ..core.errors import ConfigError, FlashError
from ..core.mask import Mask, Weights
from ..data.sources import Source
from ..data.task import Task
from ..engine.client import ClientSide
from ..engine.replica import warn_of_buffers
from ..engine.store import MaskStore
from ..engine.train import Trainer
from ..wire import Message, UnknownMask, decode, encode
from ..wire.frame import VERSION
from .exchange import Answer, Held, Seat
from .fixed import fingerprint


class Host:
    """One task and one replica of its model, for as long as the process lives."""

    def __init__(self, task: Task, threads: int = 1) -> None:
        self.task, self.threads = task, threads
        warn_of_buffers(task)
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
            "layout": self.task.layout.hash, "fixed": fingerprint(self.task), "wire": VERSION, "package": __version__,
        }  # fmt: skip
        density = seat.node.get("density", self.task.clients[self._at(seat)].density)
        return Answer("client", fields=fields | ({} if density is None else {"density": float(density)}))

    def train(self, seat: Seat, data: bytes, held: Held) -> Answer:
        """Carry out an order."""
        masks = dict(held.masks)
        side = ClientSide(self.trainer, MaskStore(self.task.layout, masks), values=None)
        reply = side.work(seat.client, self._samples(seat), data, held.memory)
        names = {name for _, *names in reply.memory for name in names if name is not None}
        kept = Held(reply.memory, {name: masks[name] for name in sorted(names)})
        return Answer("lack" if reply.lacks else "update", reply.data, held=kept)

    def judge(self, seat: Seat, data: bytes, held: Held) -> Answer:
        """Loss and metric of a model on the samples this client holds back, times their number."""
        samples, layout = self._judges(seat), self.task.layout
        if samples is None:
            raise ConfigError(f"client {seat.client} holds no samples back to judge on")
        store = MaskStore(layout, dict(held.masks))
        try:
            order = decode(
                data, layout, known={name: mask for name in held.masks if (mask := store.find(name)) is not None}
            )
        except UnknownMask as error:
            return Answer("lack", encode(Message("lack", layout, (0, 0, 0), seat.client, lacks=error.hash)).data)
        statistics = order.local is None or order.local.statistics
        weights = Weights(Mask.full(layout), order.weights().vector)
        loss, metric = self.trainer.evaluate_all(weights, samples, statistics)
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
        return next((h for h in self.task.evaluation if getattr(h, "source", None) is whole), None)


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Results depend on the number of threads in their last bits; a simulation trains with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


TaskFn = Callable[[Any], Task]  # called with anything that has `node_config`, `run_config` and `run_id`


# What a process keeps between messages. Flower may hand an app to a process anew for every message (Ray does), so it
# is kept here and not in the app: by the function that makes a task, and by the task. Both are bounded, as each task
# may hold all of a data set. Another run reads its data anew, as they may have changed.
_MOST = 8
_TASKS: OrderedDict[tuple[Any, int, str], Task] = OrderedDict()
_HOSTS: OrderedDict[int, Host] = OrderedDict()


def find(make: Task | TaskFn, seat: Seat, context: Any) -> Host:
    """The host for a message: a task is made once for each node and run, its replica once for each task."""
    task = make if isinstance(make, Task) else _task(make, seat, context)
    host = _HOSTS.get(id(task))
    if host is None or host.task is not task:
        host = Host(task, int(seat.node.get("threads", 1)))
    _keep(_HOSTS, id(task), host)
    return host


def _task(make: TaskFn, seat: Seat, context: Any) -> Task:
    key = (make, seat.run_id, repr((sorted(seat.node.items()), sorted(seat.run.items()))))
    task = _TASKS.get(key)
    if task is None:
        for old in [k for k in _TASKS if k[0] == make and k[1] != seat.run_id]:
            _HOSTS.pop(id(_TASKS.pop(old)), None)
        task = make(context)
    _keep(_TASKS, key, task)
    return task


def _keep(cache: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    cache[key] = value
    cache.move_to_end(key)
    while len(cache) > _MOST:
        cache.popitem(last=False)
