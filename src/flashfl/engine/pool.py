"""Processes that do jobs. Results come back as they are ready."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing as mp
import pickle
import signal
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from ..core.errors import ConfigError
from ..core.files import shared_file
from ..core.parts import modules_of_parts
from .heap import keep_freed_memory, return_freed_memory

J = TypeVar("J")  # a job
R = TypeVar("R")  # its result
Make = Callable[[], Callable[[J], R]]  # called once in each process; gives the function that does jobs

_NAME = "flashfl-worker"


class Died(Exception):
    """The process that had this job ended before it answered."""


class InProcess(Generic[J, R]):
    """A pool of one: this process, with as many threads as a worker would have."""

    def __init__(self, make: Make[J, R], threads: int) -> None:
        self._work, self._threads = make(), threads

    def each(self, jobs: Iterable[tuple[int, J]]) -> Iterator[tuple[int, R]]:
        """Results, each with its job's number."""
        for number, job in jobs:
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                result = self._work(job)
            finally:
                torch.set_num_threads(before)
            yield number, result

    def close(self) -> None:
        pass


class Pool(Generic[J, R]):
    """Worker processes, forked so that they share the task's data, each with a fixed number of threads.

    An error in a worker is raised here. A worker whose process ends is replaced.
    """

    def __init__(self, make: Make[J, R], workers: int, threads: int) -> None:
        if mp.current_process().name == _NAME:
            # A spawned worker imports the main script, and the script came here again: it has no `__main__` guard.
            raise SystemExit(1)  # the parent says what to do
        # A forked child must not use the OpenMP threads its parent had; with one thread it never does.
        self._forks = threads == 1 and "fork" in mp.get_all_start_methods()
        self._context: Any = mp.get_context("fork" if self._forks else "spawn")
        self._threads = threads
        self._make = make if self._forks else self._saved(make)
        self._workers = [self._start() for _ in range(workers)]

    def _saved(self, make: Make[J, R]) -> Make[J, R]:
        """`make` for spawned workers, in a file that they map into memory.

        If it were started with them, torch would put its tensors into shared memory, which may be too small.
        """
        self._file, path = shared_file()
        weakref.finalize(self, self._file.close)  # of a pool that nobody closes
        try:
            torch.save(make, self._file, pickle_protocol=pickle.HIGHEST_PROTOCOL)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise self._cannot_spawn(error) from None
        self._file.flush()
        return partial(_made, path)

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        args = (theirs, ours if self._forks else None, self._make, self._threads, modules_of_parts())
        process = self._context.Process(target=_serve, args=args, daemon=True, name=_NAME)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
            process.start()
        theirs.close()
        return process, ours

    def _cannot_spawn(self, why: object) -> ConfigError:
        return ConfigError(
            f"threads = {self._threads}: with more than one thread, workers are new Python processes, and one could "
            f'not start ({why}). Put the call under `if __name__ == "__main__":`, and define the task\'s model and '
            "functions at the top of a module. Or use threads = 1."
        )

    def each(self, jobs: Iterable[tuple[int, J]]) -> Iterator[tuple[int, R | Died]]:
        """Results as they come, each with its job's number.

        A job is taken from `jobs` when a worker is free, and one result is here at a time: memory does not grow with
        the jobs.
        """
        source, idle, busy = iter(jobs), list(range(len(self._workers))), dict[int, int]()
        try:
            while True:
                for number, job in itertools.islice(source, len(idle)):
                    worker = idle.pop()
                    busy[worker] = number
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_receive` finds it dead
                        _post(self._workers[worker][1], job)
                if not busy:
                    return
                worker, result = self._receive(list(busy))
                idle.append(worker)
                yield busy.pop(worker), result
        finally:
            for worker in busy:  # an abandoned job: its answer must not be taken for the next job's
                self._replace(worker)

    def _receive(self, busy: Sequence[int]) -> tuple[int, R | Died]:
        """The next answer of a worker, or that it died."""
        ready = wait([self._workers[worker][1] for worker in busy])
        worker = next(worker for worker in busy if self._workers[worker][1] in ready)
        process, connection = self._workers[worker]
        try:
            error, result = _collect(connection)
        except (EOFError, OSError):  # it ended, perhaps in the middle of its answer
            process.join(1)
            died = Died(_ending(process.exitcode))
            if process.exitcode == 1 and not self._forks:  # an error before its first job
                raise self._cannot_spawn(died) from None
            self._replace(worker)
            return worker, died
        if error is not None:
            raise error
        return worker, result

    def _replace(self, worker: int) -> None:
        _end(*self._workers[worker])
        self._workers[worker] = self._start()

    def close(self) -> None:
        for worker in self._workers:
            _end(*worker)
        self._workers = []


def _made(path: str) -> Callable[[Any], Any]:
    make: Make[Any, Any] = torch.load(path, mmap=True, weights_only=False)  # a file of this run's own
    return make()


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with code {code}"
    likely = ", most likely for lack of memory: lower workers or batch" if code == -signal.SIGKILL else ""
    return f"its process was killed by signal {-code}{likely}"


def _end(process: BaseProcess, connection: Connection) -> None:
    connection.close()
    process.kill()
    process.join()


def _serve(
    connection: Connection, parents: Connection | None, make: Make[J, R], threads: int, modules: Sequence[str]
) -> None:
    """Do jobs until the parent is gone. `parents`: a forked child's copy of the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not with the parent's handler
    if parents is not None:
        parents.close()  # else we would not notice when the parent is gone
    torch.set_num_threads(threads)
    keep_freed_memory()
    for name in modules:  # a spawned process knows custom rules only after it has imported their modules
        with contextlib.suppress(Exception):  # an order that needs the module will say so
            importlib.import_module(name)
    work = make()
    answer: tuple[Exception | None, R | None]
    with contextlib.suppress(EOFError, OSError):  # of the connection: the parent is gone
        while True:
            job = _collect(connection)
            try:
                answer = (None, work(job))
            except Exception as error:
                answer = (_portable(error), None)
            _post(connection, answer)
            del job, answer  # each may be as large as a model, and is not needed while we wait
            return_freed_memory()


def _post(connection: Connection, thing: object) -> None:
    connection.send_bytes(pickle.dumps(thing))  # not `send`: torch makes that put tensors into shared memory


def _collect(connection: Connection) -> Any:
    return pickle.loads(connection.recv_bytes())


def _portable(error: Exception) -> Exception:
    """An error that can be sent to the parent, with a note that says where it happened."""
    error.add_note("in a worker process:\n" + "".join(traceback.format_tb(error.__traceback__)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a custom exception class may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
