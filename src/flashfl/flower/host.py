"""Plays a client: holds its data and a replica of the model, and has one function for each kind of message.

Everything that comes in and goes out is plain data, so a host can live in any process.
"""

from __future__ import annotations

import functools
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
from .messages import Answer, Held, NodeContext, Setting
from .registration import fingerprint


class Host:
    """One task and one replica of its model, for as long as the process lives."""

    def __init__(self, task: Task, threads: int = 1) -> None:
        self.task, self.threads = task, threads
        warn_of_buffers(task)
        self.trainer = Trainer(task)

    def serve(self, kind: str, node: NodeContext, data: bytes = b"", held: Held | None = None) -> Answer:
        """The answer to a message of this kind. The server is told about errors that a user can fix."""
        try:
            with _threads(self.threads):
                return {"query": self.about, "train": self.train, "evaluate": self.evaluate}[kind](
                    node, data, held or Held()
                )
        except FlashError as error:
            return Answer("failed", fields={"why": f"{type(error).__name__}: {error}"})

    def about(self, node: NodeContext, data: bytes, held: Held) -> Answer:
        """Who this client is and what it runs."""
        fields: dict[str, str | int | float] = {
            "client": node.client, "n": len(self._samples(node)), "held": len(self._evaluation_samples(node) or ()),
            "layout": self.task.layout.hash, "fixed": fingerprint(self.task), "wire": VERSION, "package": __version__,
        }  # fmt: skip
        density = node.node_config.get("density", self.task.clients[self._at(node)].density)
        if density is not None:
            fields["density"] = float(density)
        return Answer("client", fields=fields)

    def train(self, node: NodeContext, data: bytes, held: Held) -> Answer:
        """Carry out an order."""
        masks = dict(held.masks)
        side = ClientSide(self.trainer, MaskStore(self.task.layout, masks), values=None)
        reply = side.work(node.client, self._samples(node), data, held.memory)
        names = {name for _, *names in reply.memory for name in names if name is not None}
        kept = Held(reply.memory, {name: masks[name] for name in sorted(names)})
        return Answer("lack" if reply.lacks else "update", reply.data, held=kept)

    def evaluate(self, node: NodeContext, data: bytes, held: Held) -> Answer:
        """Loss and metric of a model on the samples this client holds back, times their number."""
        samples, layout = self._evaluation_samples(node), self.task.layout
        if samples is None:
            raise ConfigError(
                f"client {node.client} holds no samples back, so it cannot evaluate: give its task a `holdout` above 0"
            )
        store = MaskStore(layout, dict(held.masks))
        try:
            order = decode(
                data, layout, known={name: mask for name in held.masks if (mask := store.find(name)) is not None}
            )
        except UnknownMask as error:
            return Answer("lack", encode(Message("lack", layout, (0, 0, 0), node.client, lacks=error.hash)).data)
        statistics = order.local is None or order.local.statistics
        weights = Weights(Mask.full(layout), order.weights().vector)
        loss, metric = self.trainer.evaluate_all(weights, samples, statistics)
        return Answer("evaluated", fields={"n": len(samples), "loss": loss, "metric": metric})

    def _at(self, node: NodeContext) -> int:
        """Which of the task's clients this node plays: the only one, or the one its partition names."""
        at = 0 if len(self.task.train) == 1 else int(node.node_config.get("partition-id", node.client))
        if not 0 <= at < len(self.task.train):
            raise ConfigError(f"partition-id = {at}: the task has {len(self.task.train)} clients, numbered from 0")
        return at

    def _samples(self, node: NodeContext) -> Source:
        return self.task.train[self._at(node)]

    def _evaluation_samples(self, node: NodeContext) -> Source | None:
        if self.task.test is not None:
            return self.task.test if len(self.task.train) == 1 else None
        at, evaluators = self._at(node), self.task.evaluators
        return self.task.evaluation[evaluators.index(at)] if at in evaluators else None


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Results depend on the number of threads in their last bits; a simulation trains with one."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Makes a task from a context: a NodeContext, or Flower's own Context, which has the same fields and more.
TaskFn = Callable[[Any], Task]


# What a process keeps between messages: the tasks of one run, by the function that makes them and by node, and a host
# for each task. It is kept here and not in the app, because Flower may make a new app for every message, as Ray does.
# Both are bounded, because a task may hold a whole data set. Another run reads its data again: they may have changed.
_MOST = 8
_run: list[int] = []


@functools.lru_cache(_MOST)
def _task(
    make: TaskFn, run_id: int, node: tuple[tuple[str, Setting], ...], run: tuple[tuple[str, Setting], ...]
) -> Task:
    return make(NodeContext(dict(node), dict(run), run_id))


_host = functools.lru_cache(_MOST)(Host)


def find(make: Task | TaskFn, node: NodeContext) -> Host:
    """The host for a message: a task is made once for each node and run, its replica once for each task."""
    if _run != [node.run_id]:
        _run[:] = [node.run_id]
        _task.cache_clear()
        _host.cache_clear()
    if not isinstance(make, Task):
        make = _task(make, node.run_id, tuple(sorted(node.node_config.items())), tuple(sorted(node.run_config.items())))
    return _host(make, int(node.node_config.get("threads", 1)))
