"""Plays a client: holds its data and a replica of the model, and answers each kind of message.

What a client remembers from round to round is in its context's state, so a host can live in any process.
"""

from __future__ import annotations

import functools
import json
import pkgutil
from collections.abc import Callable
from typing import cast

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict, UserConfigValue

from .. import __version__
from ..core.errors import ConfigError, FlashError
from ..core.mask import Weights
from ..data.sources import Source
from ..data.task import Task
from ..engine.client import ClientSide, Reply
from ..engine.memory import Rounds
from ..engine.replica import warn_of_buffers
from ..engine.store import MaskStore
from ..engine.train import Trainer
from ..wire import Message as WireMessage
from ..wire import UnknownMask, decode, encode
from ..wire.frame import VERSION
from . import records
from .registration import fingerprint

TaskFn = Callable[[Context], Task]
Work = Callable[[ClientSide, int, Source, bytes, Rounds], Reply]  # a client's samples, its message, what it remembers
_ROUNDS, _MASKS = "flashfl.rounds", "flashfl.masks"  # the names of our records in a context's state


class Host:
    """One task and one replica of its model, for as long as the process lives."""

    def __init__(self, task: Task, threads: int = 1) -> None:
        self.task, self.threads = task, threads
        warn_of_buffers(task)
        self.trainer = Trainer(task)

    def serve(self, message: Message, context: Context) -> RecordDict:
        """The content of the reply to a message. The server is told about errors that a user can fix."""
        kind = message.metadata.message_type
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)  # the last bits of results depend on it; a simulation trains with one
        try:
            if "private" in message.content:
                from .private import answer  # only here, as it needs an extra

                request = records.read_blob(message.content, "private")[1]
                return self.train(context, request, functools.partial(answer, context), "answer")
            if kind == "query":
                return self.about(context)
            if "identity" in context.node_config:  # it reveals nothing about its samples but in secure rounds
                raise ConfigError(
                    "this node has an identity key, so it takes part in secure rounds only: set secure = true on the "
                    "server"
                )
            order = records.read_blob(message.content, "order")[1]
            self.trainer.sparse = bool(records.read_fields(message.content, "compute").get("sparse"))
            return self.train(context, order) if kind == "train" else self.evaluate(context, order)
        except FlashError as error:
            return records.fields("failed", {"why": f"{type(error).__name__}: {error}"})
        finally:
            torch.set_num_threads(before)

    def about(self, context: Context) -> RecordDict:
        """Who this client is and what it runs. A client of secure rounds does not tell how many samples it has."""
        secret, at = "identity" in context.node_config, self._at(context)
        fields: dict[str, str | int | float] = {
            "client": _client_id(context), "n": 1 if secret else len(self.task.train[at]),
            "held": 0 if secret else len(self._evaluation_samples(context) or ()), "layout": self.task.layout.hash,
            "fixed": fingerprint(self.task), "wire": VERSION, "package": __version__,
        }  # fmt: skip
        density = context.node_config.get("density", self.task.clients[at].density)
        if density is not None:
            fields["density"] = float(density)
        return records.fields("client", fields)

    def train(self, context: Context, order: bytes, work: Work = ClientSide.work, reply: str = "update") -> RecordDict:
        """Carry out an order. What the client remembers goes into its context.

        work: what it does, and reply: the name of its answer, in a private round.
        """
        memory, masks = _recall(context.state)
        side = ClientSide(self.trainer, MaskStore(self.task.layout, masks))
        found = work(side, _client_id(context), self.task.train[self._at(context)], order, memory)
        names = {name for _, *names in found.memory for name in names if name in masks}  # a mask may be lost
        context.state[_ROUNDS] = ConfigRecord({"rounds": json.dumps(found.memory)})
        context.state[_MASKS] = ArrayRecord({name: records.to_array(masks[name]) for name in sorted(names)})
        return records.blob("lack" if found.lacks else reply, found.data)

    def evaluate(self, context: Context, data: bytes) -> RecordDict:
        """Loss and metric of a model on the samples this client holds back, times their number."""
        samples, layout, client = self._evaluation_samples(context), self.task.layout, _client_id(context)
        assert samples is not None  # others register that they hold none back, and are not asked
        masks = _recall(context.state)[1]
        store = MaskStore(layout, masks)
        try:
            order = decode(data, layout, known={name: mask for name in masks if (mask := store.find(name)) is not None})
        except UnknownMask as error:
            return records.blob("lack", encode(WireMessage("lack", layout, (0, 0, 0), client, lacks=error.hash)).data)
        weights = Weights.dense(layout, order.weights().vector)
        loss, metric = self.trainer.evaluate_all(weights, samples, order.work.statistics)
        return records.fields("evaluated", {"n": len(samples), "loss": loss, "metric": metric})

    def _at(self, context: Context) -> int:
        """Which of the task's clients this node plays: the only one, or the one its partition names."""
        clients = len(self.task.train)
        at = 0 if clients == 1 else int(context.node_config.get("partition-id", _client_id(context)))
        if not 0 <= at < clients:
            raise ConfigError(
                f"partition-id = {at}: must be from 0 to {clients - 1}, as the task has {clients} clients. Set it in "
                "--node-config. Without partition-id, the node's client-id is used."
            )
        return at

    def _evaluation_samples(self, context: Context) -> Source | None:
        if self.task.test is not None:
            return self.task.test if len(self.task.train) == 1 else None
        at, evaluators = self._at(context), self.task.evaluators
        return self.task.evaluation[evaluators.index(at)] if at in evaluators else None


def _client_id(context: Context) -> int:
    """The node's setting `client-id`, else `partition-id`."""
    config = context.node_config
    if (client := config.get("client-id", config.get("partition-id"))) is None:
        raise ConfigError(
            "this node does not say which client it is: start its SuperNode with --node-config 'partition-id=N'"
        )
    return int(client)


def _recall(state: RecordDict) -> tuple[Rounds, dict[str, bytes]]:
    """A client's last rounds, each with the hashes of the order's mask, its own mask and its notes; and those, packed.

    Both are empty if the records are damaged.
    """
    try:
        saved = json.loads(str(state.config_records[_ROUNDS]["rounds"]))
        memory = [((tag[0], tag[1], tag[2]), order, own, notes) for tag, order, own, notes in saved]
        return memory, {name: records.read_array(array) for name, array in state.array_records[_MASKS].items()}
    except (LookupError, ValueError, TypeError, records.BadRecord):
        return [], {}


_MOST = 8
Settings = tuple[tuple[str, UserConfigValue], ...]


@functools.lru_cache(1)
def _kept(run_id: int) -> tuple[Callable[[TaskFn, Settings, Settings], Task], Callable[[Task, int], Host]]:
    """What a process keeps between messages of one run: the tasks, by their function and node, and a host for each.

    It is kept here and not in the app, because Flower may make a new app for every message, as Ray does. It is bounded,
    because a task may hold a whole data set. Another run reads its data again: they may have changed.
    """

    def made(make: TaskFn, node: Settings, run: Settings) -> Task:
        return make(Context(run_id, 0, dict(node), RecordDict(), dict(run)))

    return functools.lru_cache(_MOST)(made), functools.lru_cache(_MOST)(Host)


def find(make: Task | TaskFn | str, context: Context) -> Host:
    """The host for a message: a task is made once for each node and run, its replica once for each task.

    make: the task, the function that makes it, or `module:function`.
    """
    task_of, host_of = _kept(context.run_id)
    if isinstance(make, str):
        make = cast(TaskFn, pkgutil.resolve_name(make))
    if not isinstance(make, Task):
        node, run = (tuple(sorted(config.items())) for config in (context.node_config, context.run_config))
        make = task_of(make, node, run)
    return host_of(make, int(context.node_config.get("threads", 1)))
