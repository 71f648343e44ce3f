"""Federations in one process, with honest and hostile clients."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from flwr.clientapp import ClientApp

import flashfl as fl
from flashfl.core.exchange import Order, Update
from flashfl.core.mask import Weights
from flashfl.core.method import Method
from flashfl.data.task import Task
from flashfl.engine.train import Trainer
from flashfl.flower import FlashStrategy, FlowerOptions, client_app, records
from flashfl.flower.client import app_around
from flashfl.flower.host import Host
from flashfl.flower.testing import InProcessGrid, Tamper
from flashfl.run.config import TrainConfig
from flashfl.wire import seal

ROUNDS = 4
# robust: the default on Flower, and here also for the simulations that runs on Flower are compared with.
SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "eval_every": 2, "workers": 1, "checkpoint_every": 1}
SETTINGS |= {"robust": "on"}
PATIENT = FlowerOptions(wait=60.0, timeout=60.0, poll=0.01)  # a machine that stalls must not fail a test
QUICK = FlowerOptions(wait=0.5, timeout=2.0, poll=0.01)  # where somebody is not going to answer


def node_of(client: int) -> int:
    """Node ids are nothing like client ids, and in another order."""
    return 90_000 - 17 * client


def federation(
    task: Task, tamper: Tamper | None = None, nodes: Mapping[int, Mapping[str, Any]] | None = None
) -> InProcessGrid:
    """A node for each client of a task, each with an app of its own; `nodes` adds to a client's node config."""
    grid = InProcessGrid({}, tamper=tamper)
    for c in task.clients:
        config = {"partition-id": c.id, **(nodes or {}).get(c.id, {})}
        grid.join(node_of(c.id), client_app(task), config)
    return grid


def train(
    method: Method,
    task: Task,
    grid: InProcessGrid,
    folder: Path | None = None,
    resume: bool = False,
    watch: Any = None,
    options: FlowerOptions = PATIENT,
    **settings: Any,
) -> fl.Run:
    config = TrainConfig(**{"rounds": ROUNDS, **method.recipe, **SETTINGS, **settings})
    options = replace(options, clients=options.clients or len(list(grid.get_node_ids())))
    strategy = FlashStrategy(method, task, config, options, folder=folder, resume=resume, watch=watch, quiet=True)
    strategy.start(grid)
    assert strategy.run is not None
    return strategy.run


class RogueTrainer(Trainer):
    """Trains as told, then changes what it reports."""

    def __init__(self, task: Task, change: Callable[[Update, Order], Update]) -> None:
        super().__init__(task)
        self.change = change

    def train(self, order: Order, *args: Any, **more: Any) -> Update:
        return self.change(super().train(order, *args, **more), order)


def rogue(task: Task, change: Callable[[Update, Order], Update]) -> ClientApp:
    """An app whose updates are well-formed lies."""
    host = Host(task)
    host.trainer = RogueTrainer(task, change)
    return app_around(host.serve)


def scaled(factor: float) -> Callable[[Update, Order], Update]:
    """Moves as an honest client does, `factor` times as far. Extra numbers are as many times too large."""

    def change(update: Update, order: Order) -> Update:
        if update.weights is None:
            return update
        mask, trained = update.weights.mask, update.weights.layout.trained_size
        start, vector = order.weights.restrict(mask).vector, update.weights.vector.clone()
        vector[:trained] = start[:trained] + (vector[:trained] - start[:trained]) * factor
        numbers = {name: e for name, e in update.extra.items() if e.value.dtype != torch.bool}
        extra = {name: replace(e, value=e.value * factor) for name, e in numbers.items()}
        return replace(update, values=Weights(mask, vector).packed(), extra={**update.extra, **extra})

    return change


MARK = struct.unpack("<f", struct.pack("<f", 1234.5678))[0]


def marked(update: Update, order: Order) -> Update:
    """A number that can be found again in the encoded bytes."""
    if update.weights is None:
        return update
    vector = update.weights.vector.clone()
    k = update.weights.layout.prunable_size
    vector[k] = MARK
    return Update.of(update.client, update.n, Weights(update.weights.mask, vector), update.counts, update.metrics)


def with_nan(reply: Message) -> Message:
    """The same reply with the marked number made a not-a-number, checksum and all."""
    name, data = records.read_blob(reply.content, "update")
    assert data.count(struct.pack("<f", MARK)) == 1
    data = seal(data.replace(struct.pack("<f", MARK), struct.pack("<f", float("nan"))))
    reply.content = records.blob(name, data)
    return reply


def only(node: int, kind: str, act: Callable[[Message, Message], Iterable[Message]]) -> Tamper:
    """Tampers with the replies of one node to one kind of message."""

    def tamper(at: int, message: Message, reply: Message) -> Iterable[Message]:
        return act(message, reply) if at == node and message.metadata.message_type == kind else [reply]

    return tamper


def assert_equal(a: fl.Run, b: fl.Run) -> None:
    assert torch.equal(a.weights.mask.bits, b.weights.mask.bits)
    assert torch.equal(a.weights.vector, b.weights.vector)
    assert a.checksum == b.checksum
