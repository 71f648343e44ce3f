"""Processes that do jobs. Results come back as they are ready, or in the order of the jobs."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import multiprocessing as mp
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import torch

from ..core.errors import ConfigError
from ..core.parts import modules_of_parts

J = TypeVar("J")  # a job
R = TypeVar("R")  # its result

_IDLE = 0.2  # seconds without a job after which a worker frees memory


class Died(Exception):
    """The process that had this job ended before it answered."""


class InProcess(Generic[J, R]):
    """A pool of one: this process, with as many threads as a worker would have.

    `make` gives the function that does jobs.
    """

    def __init__(self, make: Callable[[], Callable[[J], R]], threads: int) -> None:
        self._work, self._threads = make(), threads

    def run(self, jobs: Iterable[J]) -> Iterator[R]:
        for job in jobs:
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                result = self._work(job)
            finally:
                torch.set_num_threads(before)
            yield result

    def each(self, jobs: Iterable[J]) -> Iterator[tuple[int, R]]:
        yield from enumerate(self.run(jobs))

    def close(self) -> None:
        pass


class Pool(Generic[J, R]):
    """Worker processes, forked so that they share the task's data, each with a fixed number of threads.

    `make` is called once in each process and gives the function that does jobs. Its errors are results.
    """

    def __init__(self, make: Callable[[], Callable[[J], R]], workers: int, threads: int) -> None:
        # A forked child must not use the OpenMP threads its parent had; with one thread it never does.
        method = "fork" if threads == 1 and "fork" in mp.get_all_start_methods() else "spawn"
        self._context: Any = mp.get_context(method)
        self._make, self._threads = make, threads
        self._workers: list[tuple[BaseProcess, Connection]] = []
        for _ in range(workers):
            self._workers.append(self._start())

    def _start(self) -> tuple[BaseProcess, Connection]:
        ours, theirs = self._context.Pipe()
        # A forked child has copies of our ends. It must close them, or it would not notice when we are gone.
        forked = self._context.get_start_method() == "fork"
        inherited = [ours, *(connection for _, connection in self._workers)] if forked else []
        # A spawned process knows custom rules only after it has imported their modules.
        modules = [] if forked else modules_of_parts()
        process = self._context.Process(
            target=_serve, args=(theirs, self._make, self._threads, inherited, modules), daemon=True,
            name="flashfl-worker",
        )  # fmt: skip
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*multi-threaded", category=DeprecationWarning)
            try:
                process.start()
            except (AttributeError, TypeError, pickle.PicklingError) as error:
                raise ConfigError(
                    f"threads = {self._threads} with several workers needs a task that can be pickled ({error}): "
                    "define its model and functions at the top of a module, or use threads = 1 or workers = 1"
                ) from None
        theirs.close()
        return process, ours

    def run(self, jobs: Iterable[J]) -> Iterator[R | Exception]:
        """Results in the order of the jobs; those that come early are held back."""
        early: dict[int, R | Exception] = {}
        due = 0
        for number, result in self.each(jobs):
            early[number] = result
            while due in early:
                yield early.pop(due)
                due += 1

    def each(self, jobs: Iterable[J]) -> Iterator[tuple[int, R | Exception]]:
        """Results as they come, with the number of their job.

        A job is taken from `jobs` when a worker is free, and one result is here at a time: memory does not grow with
        the jobs.
        """
        source = enumerate(jobs)
        idle, busy, more = list(range(len(self._workers))), dict[int, int](), True
        try:
            while True:
                while more and idle:
                    try:
                        number, job = next(source)
                    except StopIteration:
                        more = False
                        break
                    worker = idle.pop()
                    self._send(worker, job)
                    busy[worker] = number
                if not busy:
                    return
                worker, result = self._receive(busy)
                number = busy.pop(worker)
                idle.append(worker)
                yield number, result
        finally:
            for worker in busy:  # an abandoned job: its answer must not be taken for the next job's
                self._replace(worker)

    def _send(self, worker: int, job: J) -> None:
        try:
            _post(self._workers[worker][1], job)
        except (BrokenPipeError, ConnectionResetError):
            self._replace(worker)
            _post(self._workers[worker][1], job)

    def _receive(self, busy: Mapping[int, int]) -> tuple[int, R | Exception]:
        """The next answer of a worker, or that it died."""
        owners = {self._workers[worker][1]: worker for worker in busy}
        connection = wait(list(owners))[0]
        worker = owners[connection]  # type: ignore[index]
        try:
            return worker, _collect(connection)  # type: ignore[arg-type]
        except (EOFError, OSError):  # it ended, perhaps in the middle of its answer
            process = self._workers[worker][0]
            process.join(1)
            self._replace(worker)
            return worker, Died(f"its process ended with code {process.exitcode}")

    def _replace(self, worker: int) -> None:
        process, connection = self._workers[worker]
        connection.close()
        process.kill()
        process.join()
        self._workers[worker] = self._start()

    def close(self) -> None:
        for _, connection in self._workers:
            with contextlib.suppress(OSError):
                _post(connection, None)
        for process, connection in self._workers:
            process.join(2)
            connection.close()
            if process.is_alive():
                process.kill()
                process.join()
        self._workers = []


def _serve(
    connection: Connection,
    make: Callable[[], Callable[[J], R]],
    threads: int,
    inherited: Sequence[Connection],
    modules: Sequence[str] = (),
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not with the parent's handler
    for other in inherited:
        other.close()
    torch.set_num_threads(threads)
    for name in modules:
        with contextlib.suppress(Exception):  # an order that needs the module will say so
            importlib.import_module(name)
    work = make()
    while True:
        try:
            if not connection.poll(_IDLE):
                _give_back()
            job = _collect(connection)
        except (EOFError, OSError):
            return
        if job is None:
            return
        try:
            result: R | Exception = work(job)
        except Exception as error:
            result = _portable(error)
        try:
            _post(connection, result)
        except (BrokenPipeError, OSError):
            return
        del job, result  # each may be as large as a model, and is not needed while we wait
        _give_back()


def _post(connection: Connection, thing: object) -> None:
    """Send an object. What it pickles as a PickleBuffer is sent without a copy."""
    large: list[pickle.PickleBuffer] = []
    head = pickle.dumps(thing, protocol=5, buffer_callback=large.append)
    connection.send_bytes(pickle.dumps((head, len(large))))
    for buffer in large:
        connection.send_bytes(buffer.raw())


def _collect(connection: Connection) -> Any:
    head, large = pickle.loads(connection.recv_bytes())
    return pickle.loads(head, buffers=[connection.recv_bytes() for _ in range(large)])


def _give_back() -> None:
    """Return freed memory to the system, if the C library can do that."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _portable(error: Exception) -> Exception:
    """An error that can be sent to the parent, with a note that says where it happened."""
    error.add_note("in a worker process:\n" + "".join(traceback.format_tb(error.__traceback__)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # a custom exception class may raise anything
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
