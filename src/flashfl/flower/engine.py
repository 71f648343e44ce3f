"""Flower as an engine: orders become messages to SuperNodes, everything else is as in a simulation."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from flwr.serverapp import Grid

from ..core.exchange import Client, Evaluation, Local, Order, Outcome, Tag
from ..core.mask import Weights
from ..core.state import State
from ..data.task import Task, accuracy
from ..engine.encoding import Server
from ..engine.memory import ClientMemory
from ..engine.store import MaskStore
from ..engine.train import Trainer
from ..engine.trust import Trust
from ..wire.values import Form
from .jury import Jury
from .options import FlowerOptions
from .roster import Roster
from .round import Round

log = logging.getLogger("flwr.flashfl")
_TOGETHER = 8  # messages pushed at a time


class FlowerEngine:
    """The server's half of a federation whose clients are Flower nodes; they remember, it knows what they hold."""

    device = torch.device("cpu")

    def __init__(
        self,
        task: Task,
        grid: Grid,
        roster: Roster,
        options: FlowerOptions | None = None,
        values: Form = "fp32",
        folder: Path | None = None,
        clip: float = 0.0,
        trim: float = 0.0,
    ) -> None:
        self.task, self.grid, self.roster, self.options = task, grid, roster, options or FlowerOptions()
        self.memory = ClientMemory(MaskStore.in_folder(task.layout, folder), simulated=False)
        self.server = Server(self.memory, values, Trust(factor=self.options.trust, clip=clip, trim=trim))
        self._tag: Tag = (0, 0, 0)
        self._trainer: Trainer | None = None
        self._late: dict[str, str] = {}  # messages whose answer is no longer waited for

    def open(self) -> Round:
        """A round to be."""
        nodes = {client: entry.node for client, entry in self.roster.entries.items()}
        return Round(self.server, nodes, self.options.timeout)

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        """Send every order to its client and wait for all replies, or as long as a client has."""
        began, this = time.perf_counter(), self.open()
        self._tag = s.tag
        self._push(this.post(client, order) for client, order in orders)
        sent = time.perf_counter()
        self._exchange(lambda: this.waiting, this.take)
        for message, post in this.waiting.items():
            self._late[message] = f"client {post.client.id}, round {s.tag}"
        waited = time.perf_counter()
        outcome = self.finish(this)
        seconds = {"send": sent - began, "wait": waited - sent, "check": time.perf_counter() - waited}
        return Outcome(outcome.sums, outcome.traffic, outcome.failures, seconds)

    def finish(self, this: Round) -> Outcome:
        """What a round came to; the next look at the roster is a fresh one."""
        self.roster.stale = True
        outcome = this.close()
        self.roster.doubt(this.doubtful)
        return outcome

    def _push(self, messages: Iterable[Message]) -> None:
        """Send messages, a few at a time: together is faster than one by one, all at once may be too much to hold."""
        rest = iter(messages)
        while some := list(itertools.islice(rest, _TOGETHER)):
            if not all(self.grid.push_messages(some)):
                log.warning("the SuperLink did not take a message: its client will be left out")

    def _exchange(self, waiting: Callable[[], Mapping[str, Any]], take: Callable[[Message], Message | None]) -> None:
        """Pull replies until nothing is waited for or time is up. Flower's own loop looks every three seconds only."""
        end, pause = time.monotonic() + self.options.timeout, min(0.05, self.options.poll)
        while (left := [i for i in waiting() if i]) and time.monotonic() < end:
            replies = list(self.grid.pull_messages([*left, *self._late]))
            for reply in replies:
                if (late := self._late.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    log.warning("a late reply is left out (%s)", late)
                elif (follow := take(reply)) is not None:
                    self._push([follow])
            if not replies:
                time.sleep(pause)
                pause = min(self.options.poll, 2 * pause)

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over the server's test samples, or over those that clients hold back."""
        if self.task.test is None:
            return self._ask_clients(weights, statistics)
        self._trainer = self._trainer or Trainer(self.task)
        loss, metric = self._trainer.evaluate_all(weights, self.task.test, statistics)
        return Evaluation(loss / len(self.task.test), metric / len(self.task.test))

    def _ask_clients(self, weights: Weights, statistics: bool) -> Evaluation:
        order = Order(weights, Local(statistics=statistics), 0, self._tag)
        share = self.task.metric is accuracy and self.task.metric_known
        present = self.roster.present()  # first of all, as this look may find others than the last
        jury = Jury(self.server, order, dict(self.roster.entries), self.options.timeout, share)
        self._push(jury.post(client) for client in present if jury.entries[client.id].held)
        self._exchange(lambda: jury.waiting, jury.take)
        self.roster.doubt(jury.out)
        return jury.verdict()

    def close(self) -> None:
        pass
