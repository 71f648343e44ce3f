"""The CPU engine: clients are trained in parallel processes, every message is really encoded and decoded."""

from __future__ import annotations

import os
import pickle
import tempfile
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.errors import CheckpointError, FlashError
from ..core.exchange import DROPPED, Client, Evaluation, Order, Outcome
from ..core.mask import Mask, Weights
from ..core.state import State
from ..data.task import Task
from ..wire.values import Form
from .client import ClientSide, Reply, said
from .encoding import Encoding, Server
from .memory import ClientMemory, Rounds
from .pool import Died, InProcess, Pool
from .store import MaskStore
from .train import ClientFailed, Trainer, evaluation_batches
from .trust import Trust


@dataclass
class Training:
    """An order on its way to the process that plays the client."""

    client: int
    data: bytes
    memory: Rounds

    def take(self) -> bytes:
        """The order's bytes, once: this object does not keep them from being freed."""
        data, self.data = self.data, b""
        return data

    def __reduce__(self) -> tuple[type[Training], tuple[int, pickle.PickleBuffer, Rounds]]:
        return Training, (self.client, pickle.PickleBuffer(self.data), self.memory)


@dataclass(frozen=True)
class Evaluating:
    """Some samples, [start, stop) of evaluation set `which`, on which the model on the board is evaluated."""

    which: int
    start: int
    stop: int
    statistics: bool


Scored = tuple[float, float]  # loss and metric, summed over samples
Job = Training | Evaluating
Result = Reply | Scored | Exception


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
        """trust: by default every finite update is accepted, as simulated clients are honest."""
        self.task, self.dropout = task, dropout
        self.memory = ClientMemory(MaskStore.in_folder(task.layout, folder))
        self.server = Server(self.memory, values, trust or Trust(factor=0))
        count = workers or max(1, (os.cpu_count() or 1) // threads)
        self._board = Board(task.layout.size, shared=count > 1)
        make = _Make(task, self.memory.store, values, self._board)
        self.pool: Pool[Job, Result] | InProcess[Job, Result]
        self.pool = Pool(make, count, threads) if count > 1 else InProcess(make, threads)

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        account, asked, died = self.server.open(), list[int](), list[int]()
        for number, result in self.pool.each(self._jobs(s, orders, account, asked)):
            if isinstance(result, Died):
                died.append(asked[number])
            else:
                _take(account, asked[number], result)
        # A worker may have died for lack of memory, so its client gets a second try when the others are done. No real
        # client died, so nothing is counted twice.
        again = (Training(client, account.again(client), self.memory.rounds(client)) for client in died)
        for number, result in self.pool.each(again):
            _take(account, died[number], result)
        return account.close()

    def _jobs(
        self, s: State, orders: Iterable[tuple[Client, Order]], account: Encoding, asked: list[int]
    ) -> Iterator[Job]:
        for client, order in orders:
            data = account.sent(client, order)
            if self.dropout and drops(s, client.id, self.dropout):
                account.failed(client.id, DROPPED)
                continue
            asked.append(client.id)
            yield Training(client.id, data, self.memory.rounds(client.id))

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all evaluation samples."""
        self._board.vector.copy_(weights.vector)
        jobs = [
            Evaluating(which, start, stop, statistics)
            for which, data in enumerate(self.task.evaluation)
            for start, stop in evaluation_batches(len(data))
        ]
        results = list(self.pool.run(jobs))
        for i, result in enumerate(results):
            if isinstance(result, Died):  # perhaps for lack of memory: try once more
                [results[i]] = self.pool.run([jobs[i]])
        return self._mean([job.which for job in jobs], results)

    def _mean(self, sets: Sequence[int], results: Sequence[Result]) -> Evaluation:
        """Means over all samples of clients that could be evaluated. A loss that is not finite stays."""
        why: dict[int, str] = {}
        scores: list[tuple[int, Scored]] = []
        for which, result in zip(sets, results, strict=True):
            if isinstance(result, ClientFailed):
                why[which] = str(result)
            elif isinstance(result, Exception):
                raise FlashError(f"evaluation failed: {result}") if isinstance(result, Died) else result
            else:
                assert isinstance(result, tuple)
                scores.append((which, result))
        for which, reason in sorted(why.items()):
            client = self.task.evaluators[which]
            warnings.warn(f"client {client} is dropped from this evaluation: {reason}", RuntimeWarning)
        good = [score for which, score in scores if which not in why]
        if not good:
            raise FlashError(f"evaluation failed: no client could evaluate the model ({next(iter(why.values()))})")
        n = sum(len(data) for which, data in enumerate(self.task.evaluation) if which not in why)
        return Evaluation(sum(loss for loss, _ in good) / n, sum(metric for _, metric in good) / n)

    def close(self) -> None:
        self.pool.close()


def _take(account: Encoding, client: int, result: Result) -> None:
    """Hand a client's answer, or the lack of one, to the account of the round."""
    if isinstance(result, Reply) and result.lacks:
        raise CheckpointError(
            f"a mask that client {client} keeps is gone from {account.memory.store.folder}; resume from a checkpoint"
        )
    if isinstance(result, Reply):
        account.received(client, result.data)
    elif isinstance(result, ClientFailed | Died):
        account.failed(client, str(result))
    else:
        assert isinstance(result, Exception)
        raise result


class Board:
    """The model being evaluated, where every worker sees it.

    With one worker it is plain memory. Else it is a memory-mapped temporary file: shared memory is often too small for
    a large model, Docker's /dev/shm has 64 MB.
    """

    def __init__(self, size: int, shared: bool) -> None:
        self.vector = torch.zeros(size)
        if shared:
            handle, self.path = tempfile.mkstemp(prefix="flashfl-")
            weakref.finalize(self, Path(self.path).unlink, missing_ok=True)
            with open(handle, "wb") as file:
                self.vector.numpy().tofile(file)  # a full disk is noticed now, not when the mapping is written to
            self.vector = torch.from_file(self.path, shared=True, size=size)

    def __reduce__(self) -> tuple[Callable[[str, int], Board], tuple[str, int]]:
        return _open_board, (self.path, len(self.vector))


def _open_board(path: str, size: int) -> Board:
    """The board of another process."""
    board = Board(0, shared=False)
    board.vector = torch.from_file(path, shared=True, size=size)
    return board


class _Make:
    """Makes, in each worker, the function that does its jobs."""

    def __init__(self, task: Task, store: MaskStore, values: Form, board: Board) -> None:
        self.task, self.store, self.values, self.board = task, store, values, board

    def __call__(self) -> Callable[[Job], Result]:
        trainer = Trainer(self.task)
        side = ClientSide(trainer, self.store, self.values)
        model = Weights(Mask.full(self.task.layout), self.board.vector)

        def work(job: Job) -> Result:
            if isinstance(job, Training):
                try:
                    return side.work(job.client, self.task.train[job.client], job.take(), job.memory)
                except ClientFailed as error:
                    return error
            try:
                index = torch.arange(job.start, job.stop)
                return trainer.evaluate(model, self.task.evaluation[job.which], index, job.statistics)
            except Exception as error:
                if self.task.test is not None:
                    raise
                return ClientFailed(said(error))  # the samples of one client: others may still work

        return work


def drops(s: State, client: int, share: float) -> bool:
    """Whether a client fails in this round: keyed, so that a repeated run loses the same ones."""
    return s.key("dropout", client) % 1_000_000 < share * 1_000_000
