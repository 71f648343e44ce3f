"""Processes that carry out jobs; results come back as they are ready, or in the order the jobs were given."""

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
from typing import Any

import torch

from ..core.errors import ConfigError
from ..core.parts import modules_of_parts

Job = Any
Result = Any
Make = Callable[[], Callable[[Job], Result]]  # run once in each process: gives the function that does jobs


_IDLE = 0.2  # seconds without a job after which a worker makes itself small


class Died(Exception):
    """The process that had this job ended before it answered."""


class InProcess:
    """A pool of one: this process, held to the same number of threads as a worker would have."""

    def __init__(self, make: Make, threads: int) -> None:
        self._work, self._threads = make(), threads

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        for job in jobs:
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                result = self._work(job)
            finally:
                torch.set_num_threads(before)
            yield result

    def each(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Result]]:
        yield from enumerate(self.run(jobs))

    def close(self) -> None:
        pass


class Pool:
    """Worker processes, forked so that they share the task's data, each with a fixed number of threads."""

    def __init__(self, make: Make, workers: int, threads: int) -> None:
        # A forked child must not use the OpenMP threads its parent had; with one thread it never does.
        method = "fork" if threads == 1 and "fork" in mp.get_all_start_methods() else "spawn"
        self._context: Any = mp.get_context(method)
        self._make, self._threads = make, threads
        self._workers: list[tuple[Any, Connection]] = []
        for _ in range(workers):
            self._workers.append(self._start())

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = self._context.Pipe()
        # A forked child holds copies of our ends; while it does, it would never learn that we are gone.
        forked = self._context.get_start_method() == "fork"
        inherited = [ours, *(connection for _, connection in self._workers)] if forked else []
        # A process that was not forked knows rules defined elsewhere only once it has imported them too.
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

    def run(self, jobs: Iterable[Job]) -> Iterator[Result]:
        """Results in the order of the jobs; those that come early are held back."""
        early: dict[int, Result] = {}
        due = 0
        for number, result in self.each(jobs):
            early[number] = result
            while due in early:
                yield early.pop(due)
                due += 1

    def each(self, jobs: Iterable[Job]) -> Iterator[tuple[int, Result]]:
        """Results as they come, with the number of their job. A job is asked for when somebody can do it, and only one
        result is here at a time, so memory does not grow with the jobs."""
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
            for worker in busy:  # an abandoned job: its answer must not be taken for the next one's
                self._replace(worker)

    def _send(self, worker: int, job: Job) -> None:
        try:
            _post(self._workers[worker][1], job)
        except (BrokenPipeError, ConnectionResetError):
            self._replace(worker)
            _post(self._workers[worker][1], job)

    def _receive(self, busy: Mapping[int, int]) -> tuple[int, Result]:
        """The next answer of a worker, which is that it died if it did."""
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
    connection: Connection, make: Make, threads: int, inherited: Sequence[Connection], modules: Sequence[str] = ()
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # and so is whatever it made of this one
    for other in inherited:
        other.close()
    torch.set_num_threads(threads)
    for name in modules:
        with contextlib.suppress(Exception):  # an order that needs it will say what is missing
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
            result = work(job)
        except Exception as error:
            result = _portable(error)
        try:
            _post(connection, result)
        except (BrokenPipeError, OSError):
            return
        del job, result  # while we wait, nobody needs what may be a whole model each
        _give_back()


def _post(connection: Connection, thing: Any) -> None:
    """Send an object. Buffers it pickles as PickleBuffer go as they lie in memory, and are never copied for it."""
    large: list[pickle.PickleBuffer] = []
    head = pickle.dumps(thing, protocol=5, buffer_callback=large.append)
    connection.send_bytes(pickle.dumps((head, len(large))))
    for buffer in large:
        connection.send_bytes(buffer.raw())


def _collect(connection: Connection) -> Any:
    head, large = pickle.loads(connection.recv_bytes())
    return pickle.loads(head, buffers=[connection.recv_bytes() for _ in range(large)])


def _give_back() -> None:
    """Hand memory that is free but still ours back to the system, where its C library can be asked to."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _portable(error: Exception) -> Exception:
    """An error that survives the way to the parent, and where it happened."""
    error.add_note("in a worker process:\n" + "".join(traceback.format_tb(error.__traceback__)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a stranger's exception class does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
