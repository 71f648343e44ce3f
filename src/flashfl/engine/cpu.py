"""The CPU engine: clients are trained in parallel processes, every message is really encoded and decoded."""

from __future__ import annotations

import itertools
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..aggregate import add
from ..core.errors import FlashError
from ..core.exchange import DROPPED, Client, Evaluation, Order, Outcome, Sums, Traffic
from ..core.mask import Mask, Weights
from ..core.state import State
from ..data.task import Task
from ..wire import decode
from ..wire.trust import Trust
from ..wire.values import Form
from .client import ClientSide, Memory, Reply, said
from .memories import Memories
from .pool import Died, InProcess, Pool
from .server import Inbox, ServerSide
from .store import MaskStore
from .train import ClientFailed, Trainer, evaluation_batches


class CPUEngine:
    """Server and clients on one machine, joined by bytes alone."""

    device = torch.device("cpu")

    def __init__(
        self,
        task: Task,
        workers: int = 0,
        threads: int = 1,
        values: Form = "fp32",
        dropout: float = 0.0,
        trust: Trust | None = None,
        folder: Path | None = None,
    ) -> None:
        self.task, self.dropout = task, dropout
        # Simulated clients are honest: whatever is finite is believed, however far one has moved.
        self.server = ServerSide(task.layout, values, trust or Trust(factor=0))
        self.memory = Memories(MaskStore(task.layout, folder), self.server)
        # What models are judged by is written here, where every worker sees it.
        self._board = torch.zeros(task.layout.size).share_memory_()
        count = workers or max(1, (os.cpu_count() or 1) // threads)
        make = _Make(task, self.memory.store, values, self._board)
        self.pool: Pool | InProcess = Pool(make, count, threads) if count > 1 else InProcess(make, threads)

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        self.memory.begin()
        with closing(Inbox(self.server, self.memory.store.folder)) as inbox:
            return self._round(s, orders, inbox)

    def _round(self, s: State, orders: Iterable[tuple[Client, Order]], inbox: Inbox) -> Outcome:
        waiting: dict[int, tuple[Client, Order]] = {}  # by the number of the job
        new: dict[int, Memory] = {}
        lacking: list[tuple[Client, Order]] = []
        died: list[tuple[Client, Order]] = []

        def heard(client: Client, order: Order, result: Any) -> None:
            if isinstance(result, Reply) and result.lacks:
                inbox.traffic += self._lack(result)
                lacking.append((client, order))
            else:
                self._take(inbox, client.id, result, new)

        # In whatever order they come: updates are added in that of their clients, once all are there.
        for number, result in self.pool.each(self._jobs(s, orders, inbox, waiting)):
            client, order = waiting.pop(number)
            if isinstance(result, Died):
                died.append((client, order))
            else:
                heard(client, order, result)
        # A pool does one thing at a time, so these are asked again when all others have answered.
        for number, result in self.pool.each(self._once_more(died)):
            heard(*died[number], result)
        for number, result in self.pool.each(self._again(inbox, lacking)):
            self._take(inbox, lacking[number][0].id, result, new)
        sums = Sums(self.task.layout)
        for update in inbox.updates():
            add(sums, update)
        self.memory.update({c: m for c, m in new.items() if c not in inbox.failures})
        return Outcome(sums, inbox.traffic, dict(sorted(inbox.failures.items())))

    def _jobs(
        self, s: State, orders: Iterable[tuple[Client, Order]], inbox: Inbox,
        waiting: dict[int, tuple[Client, Order]],
    ) -> Iterator[Any]:  # fmt: skip
        numbers = itertools.count()
        for client, order in orders:
            message = self.server.message(client, order)
            encoded = self.server.encode(message)
            inbox.sent(message, encoded)
            if self.dropout and drops(s, client.id, self.dropout):
                inbox.failed(client.id, DROPPED)
                continue
            waiting[next(numbers)] = (client, order)
            yield _Work(client.id, encoded.data, self.memory.clients.get(client.id, []))

    def _once_more(self, died: Iterable[tuple[Client, Order]]) -> Iterator[Any]:
        """The same order for clients whose process ended: the machine may have had its reasons, a lack of memory say.

        Nothing travels a second time: no real client died.
        """
        for client, order in died:
            encoded = self.server.encode(self.server.message(client, order))
            yield _Work(client.id, encoded.data, self.memory.clients.get(client.id, []))

    def _lack(self, reply: Reply) -> Traffic:
        """What it costs a client to say that it lacks a mask."""
        parts = decode(reply.data, self.task.layout).parts
        assert parts is not None
        return parts.traffic("lack")

    def _again(self, inbox: Inbox, lacking: Iterable[tuple[Client, Order]]) -> Iterator[Any]:
        """Clients that lack a mask are sent the full one, within the round."""
        for client, order in lacking:
            message, encoded = self.server.remind(client, order)
            inbox.sent(message, encoded)
            yield _Work(client.id, encoded.data, [])

    def _take(self, inbox: Inbox, client: int, result: Any, new: dict[int, Memory]) -> None:
        if isinstance(result, Reply):
            new[client] = result.memory
            inbox.arrived(client, result.data)
        elif isinstance(result, ClientFailed | Died):
            inbox.failed(client, str(result))
        else:
            raise result

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all judging samples."""
        self._board.copy_(weights.vector)
        jobs = [
            (which, start, stop, statistics)
            for which, data in enumerate(self.task.evaluation)
            for start, stop in evaluation_batches(len(data))
        ]
        results = list(self.pool.run(jobs))
        for i, result in enumerate(results):
            if isinstance(result, Died):  # the machine may have had its reasons to end that process: once more
                [results[i]] = self.pool.run([jobs[i]])
        for result in results:
            if isinstance(result, Exception) and not isinstance(result, ClientFailed):
                raise FlashError(f"evaluation failed: {result}") if isinstance(result, Died) else result
        return self._verdict([job[0] for job in jobs], results)

    def _verdict(self, judges: Sequence[int], results: Sequence[Any]) -> Evaluation:
        """Means over what was judged; a client whose samples cannot be judged is left out. A loss that is not finite
        stays: it is the model's."""
        why = {which: str(r) for which, r in zip(judges, results, strict=True) if isinstance(r, ClientFailed)}
        good = [r for which, r in zip(judges, results, strict=True) if which not in why]
        for which, reason in sorted(why.items()):
            client = self.task.evaluators[which]
            warnings.warn(f"client {client} is left out of evaluations: {reason}", RuntimeWarning)
        if not good:
            raise FlashError(f"evaluation failed: no client could judge the model ({next(iter(why.values()))})")
        n = sum(len(data) for which, data in enumerate(self.task.evaluation) if which not in why)
        return Evaluation(sum(r[0] for r in good) / n, sum(r[1] for r in good) / n)

    def close(self) -> None:
        self.pool.close()


@dataclass
class _Work:
    """An order on its way to whoever plays the client."""

    client: int
    data: bytes
    memory: Memory

    def take(self) -> bytes:
        """The order's bytes, for whoever asks first: nothing here keeps them from being freed."""
        data, self.data = self.data, b""
        return data

    def __reduce__(self) -> tuple[Any, ...]:
        return _Work, (self.client, pickle.PickleBuffer(self.data), self.memory)


class _Make:
    """What a worker does, made where it works."""

    def __init__(self, task: Task, store: MaskStore, values: Form, board: torch.Tensor) -> None:
        self.task, self.store, self.values, self.board = task, store, values, board

    def __call__(self) -> Any:
        trainer = Trainer(self.task)
        side = ClientSide(trainer, self.store, self.values)
        full = Mask.full(self.task.layout)

        def work(job: Any) -> Any:
            if isinstance(job, _Work):
                try:
                    return side.work(job.client, self.task.train[job.client], job.take(), job.memory)
                except ClientFailed as error:
                    return error
            which, start, stop, statistics = job
            index = torch.arange(start, stop)
            try:
                return trainer.evaluate(Weights(full, self.board), self.task.evaluation[which], index, statistics)
            except Exception as error:
                if self.task.test is not None:
                    raise
                return ClientFailed(said(error))  # of one client's samples: the others may still do

        return work


def drops(s: State, client: int, share: float) -> bool:
    """Whether a client fails in this round: keyed, so that a repeated run loses the same ones."""
    return s.key("dropout", client) % 1_000_000 < share * 1_000_000
