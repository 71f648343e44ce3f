"""Worker processes: order, bounds, deaths, errors, abandoned work, no orphans, and the model they share."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.core.errors import ConfigError, FlashError
from flashfl.core.mask import Weights
from flashfl.data.sources import Arrays, Subset, source
from flashfl.data.task import Task
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.pool import Died, InProcess, Pool, _ending
from tests.conftest import DropoutNet, blobs

KILLED = "its process was killed by signal 9, most likely for lack of memory: lower workers or batch"


class Awkward(Exception):
    """An exception that pickles, and cannot be unpickled."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def make() -> Callable[[Any], Any]:
    def work(job: Any) -> Any:
        kind, value = job
        if kind == "sleep":
            time.sleep(value)
        elif kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise value
        elif kind == "awkward":
            raise Awkward("this", "that")
        elif kind == "lambda":
            raise ValueError(lambda: value)
        elif kind == "threads":
            return torch.get_num_threads()
        return value

    return work


def results(pool: Pool, jobs: Any) -> list[Any]:
    """All results, in the order of the jobs."""
    found = dict(pool.each(enumerate(jobs)))
    return [found[number] for number in range(len(found))]


def test_worker_killed_while_sending_is_reported_as_died() -> None:
    def make() -> Callable[[Any], Any]:
        def work(job: int) -> Any:
            if job == 1:
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return b"x" * (50 << 20) if job == 1 else job

        return work

    def jobs() -> Iterator[int]:
        yield from range(3)
        time.sleep(1)  # the parent is busy elsewhere while an answer is half sent

    made = Pool(make, 2, 1)
    first, second, third = results(made, jobs())
    made.close()
    assert (first, third) == (0, 2)
    assert isinstance(second, Died)


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(make, 2, 1)
    yield made
    made.close()


def test_results_come_as_they_are_ready(pool: Pool) -> None:
    naps = [0.5, 0.0, 0.05, 0.0, 0.1, 0.0]
    found = list(pool.each(enumerate([("sleep", nap) for nap in naps])))
    assert sorted(found) == list(enumerate(naps))
    assert found[-1] == (0, 0.5)


def test_one_job_per_worker_is_out_at_a_time(pool: Pool) -> None:
    given, most, got = 0, 0, 0

    def jobs() -> Iterator[Any]:
        nonlocal given
        for i in range(30):
            given += 1
            yield ("sleep", 0.1 if i == 0 else 0.0)

    for _ in pool.each(enumerate(jobs())):
        most = max(most, given - got)
        got += 1
    assert got == given == 30
    assert most <= 2, "a job for each worker, however slow the first one is"


@pytest.mark.parametrize(
    ("code", "said"), [(3, "its process ended with code 3"), (-11, "its process was killed by signal 11")]
)
def test_death_for_another_reason_does_not_blame_memory(code: int, said: str) -> None:
    assert _ending(code) == said


def test_no_jobs(pool: Pool) -> None:
    assert results(pool, []) == []


def test_large_jobs_and_results(pool: Pool) -> None:
    blocks = [bytes([i]) * 3_000_000 for i in range(5)]
    assert results(pool, [("echo", block) for block in blocks]) == blocks


def test_killed_worker_loses_only_its_job(pool: Pool) -> None:
    jobs = [("echo", 0), ("kill", 1), ("echo", 2), ("kill", 3), ("echo", 4)]
    found = results(pool, jobs)
    assert [r for r in found if not isinstance(r, Died)] == [0, 2, 4]
    assert str(found[1]) == KILLED
    assert results(pool, [("echo", 7)] * 4) == [7] * 4, "and is replaced"


def test_worker_killed_while_idle_is_replaced(pool: Pool) -> None:
    results(pool, [("echo", 0)] * 2)
    for process, _ in pool._workers:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    found = results(pool, [("echo", bytes(5 << 20))] * 4)
    assert [type(each) for each in found].count(Died) == 2
    assert results(pool, [("echo", i) for i in range(4)]) == [0, 1, 2, 3]


def test_run_goes_on_if_workers_are_killed_while_idle() -> None:
    task = task_with(Arrays)
    engine = CPUEngine(task, fl.TrainConfig(workers=2))
    weights = Weights.dense(task.layout, task.draw(0))
    try:
        before = engine.evaluate(weights)
        for process, _ in engine.pool._workers:  # type: ignore[union-attr]
            process.kill()
        assert engine.evaluate(weights) == before
    finally:
        engine.close()


def test_error_in_a_worker_is_raised_and_says_where_it_happened(pool: Pool) -> None:
    with pytest.raises(KeyError) as caught:
        results(pool, [("sleep", 60), ("raise", KeyError("gone"))])
    assert "test_pool.py" in caught.value.__notes__[0]
    assert results(pool, [("echo", i) for i in range(4)]) == [0, 1, 2, 3]


@pytest.mark.parametrize(("kind", "said"), [("awkward", "Awkward: this and that"), ("lambda", "ValueError: <function")])
def test_errors_that_cannot_be_pickled_are_sent_as_text(pool: Pool, kind: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        results(pool, [(kind, 1)])
    assert results(pool, [("echo", 1)]) == [1]


def test_abandoned_run_leaves_nothing_behind(pool: Pool) -> None:
    running = pool.each(enumerate([("echo", "old"), ("sleep", 60), ("sleep", 61), ("sleep", 62)]))
    assert next(running) == (0, "old")
    running.close()  # type: ignore[attr-defined]
    assert results(pool, [("echo", i) for i in range(5)]) == [0, 1, 2, 3, 4]


def test_pool_survives_an_error_while_jobs_are_made(pool: Pool) -> None:
    def jobs() -> Iterator[Any]:
        yield ("sleep", 60)
        raise LookupError("no second job")

    with pytest.raises(LookupError, match="no second job"):
        results(pool, jobs())
    assert results(pool, [("echo", 1)]) == [1]


def test_workers_have_a_fixed_number_of_threads(pool: Pool) -> None:
    assert results(pool, [("threads", 0)] * 2) == [1, 1]
    alone = InProcess(make, 2)
    before = torch.get_num_threads()
    assert results(alone, [("threads", 0)]) == [2]
    assert torch.get_num_threads() == before
    with pytest.raises(KeyError):
        results(alone, [("raise", KeyError("x"))])
    assert torch.get_num_threads() == before


def test_close_ends_busy_workers() -> None:
    made = Pool(make, 2, 1)
    processes = [process for process, _ in made._workers]
    running = made.each(enumerate([("echo", 1), ("sleep", 60)]))
    next(running)
    running.close()  # type: ignore[attr-defined]
    processes += [process for process, _ in made._workers]
    made.close()
    assert not any(process.is_alive() for process in processes)


def test_threads_need_a_task_that_can_be_pickled() -> None:
    with pytest.raises(ConfigError, match="threads = 2: with more than one thread, workers are new Python processes"):
        Pool(lambda: print, 2, 2)


SCRIPT = """
import torch
import flashfl as fl

def run(samples):
    data = [(torch.rand(samples, 6), torch.arange(samples) % 3) for _ in range(3)]
    net = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    task = fl.Task(net, data, data[0])
    print(len(fl.simulate(fl.Dense(), task, 1, per_round=3, workers=2, threads=2).history), "round")

"""


@pytest.mark.parametrize("samples", [9, 9_000])  # the second does not fit into the pipe that a process is started with
def test_script_without_a_main_guard_is_told_in_one_sentence(samples: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SCRIPT}run({samples})\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: threads = 2: with more than one thread" in last
    assert 'Put the call under `if __name__ == "__main__":`' in last


def test_script_with_a_main_guard_may_use_threads(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f'{SCRIPT}if __name__ == "__main__":\n    run(9)\n')
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "1 round\n")


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    """`kill -9` on a run must not leave processes that hold its memory for ever."""
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import time
        from flashfl.engine.pool import Pool
        pool = Pool(lambda: time.sleep, 3, 1)
        pool._replace(0)
        print(*(process.pid for process, _ in pool._workers), flush=True)
        time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        parent.kill()
    assert len(workers) == 3
    end = time.monotonic() + 20
    while any(_runs(pid) for pid in workers) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in workers)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# -- in a whole run -----------------------------------------------------------------------------------------------


class Deadly(Arrays):
    """Samples that kill whichever worker reads them."""

    def fetch(self, *given: Any) -> Any:
        if os.getpid() != PARENT:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(*given)


class Faulty(Arrays):
    def fetch(self, *given: Any) -> Any:
        raise OSError("the disk with these samples is gone")


PARENT, ONCE = os.getpid(), Path()


def task_with(odd: type[Arrays]) -> Task:
    x, y = blobs(9, (6,), 5)
    good = [blobs(9 + i, (6,), i) for i in range(4)]
    return Task(DropoutNet, [*good, odd((x,), y)], blobs(9, (6,), 9))


def test_run_goes_on_without_a_client_whose_process_is_killed() -> None:
    run = fl.simulate(fl.Dense(), task_with(Deadly), 3, workers=2, per_round=5)
    assert [record.failures for record in run.history] == [{4: KILLED}] * 3
    assert len(run.history) == 3


class DeadlyOnce(Arrays):
    """Samples that kill the first worker to read them, as a machine short of memory would."""

    def fetch(self, *given: Any) -> Any:
        if os.getpid() != PARENT and not ONCE.exists():
            ONCE.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(*given)


def test_client_whose_process_was_killed_gets_a_second_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ONCE", tmp_path / "killed")
    run = fl.simulate(fl.JMWST(density=0.5, warmup_clients=0), task_with(DeadlyOnce), 3, workers=2, per_round=5)
    assert [record.failures for record in run.history] == [{}] * 3
    assert (tmp_path / "killed").exists()
    plain = fl.simulate(fl.JMWST(density=0.5, warmup_clients=0), task_with(Arrays), 3, workers=2, per_round=5)
    assert (run.checksum, run.traffic) == (plain.checksum, plain.traffic)


@pytest.mark.parametrize("workers", [1, 2])
def test_client_that_cannot_evaluate_is_dropped_from_the_evaluation(workers: int) -> None:
    def evaluated(odd: Any) -> fl.Run:
        data = [blobs(10, (6,), i) for i in range(4)]
        task = Task(DropoutNet, [*data, odd], holdout=0.5)
        return fl.simulate(fl.Dense(), task, 1, workers=workers, per_round=4)

    x, y = blobs(10, (6,), 5)
    with pytest.warns(RuntimeWarning, match="client 4 is dropped from this evaluation: IndexError"):
        bad = evaluated((x, torch.full((10,), 99)))
    assert math.isfinite(bad.history[-1].metrics["after"].loss)
    # A loss that is not finite may be the model's fault: it is reported, and no client is dropped.
    nan = evaluated((x * float("nan"), y)).history[-1].metrics["after"]
    assert math.isnan(nan.loss)
    assert math.isfinite(nan.metric)


def test_evaluation_without_clients_is_an_error() -> None:
    x, _ = blobs(10, (6,), 5)
    task = Task(DropoutNet, [blobs(10, (6,), i) for i in range(3)], holdout=0.5)
    task.evaluation = [Subset(source((x, torch.full((10,), 99))), torch.arange(5)) for _ in range(3)]
    warnings.simplefilter("ignore")  # for this test: pytest puts filters back
    with pytest.raises(FlashError, match="evaluation failed: IndexError"):
        fl.simulate(fl.Dense(), task, 1, workers=1, per_round=3)


@pytest.mark.parametrize("workers", [1, 2])
def test_error_in_user_code_is_reported(workers: int) -> None:
    run = fl.simulate(fl.Dense(), task_with(Faulty), 1, workers=workers, per_round=5)
    [why] = run.history[0].failures.values()
    assert why.startswith("OSError: the disk with these samples is gone (test_pool.py, line ")


def test_worker_killed_while_evaluating_is_an_error() -> None:
    x, y = blobs(9, (6,), 5)
    task = Task(DropoutNet, [blobs(9, (6,), i) for i in range(2)], Deadly((x,), y))
    engine = CPUEngine(task, fl.TrainConfig(workers=2))
    try:
        with pytest.raises(FlashError, match=f"evaluation failed: {KILLED}"):
            engine.evaluate(fl.Weights(fl.Mask.full(task.layout), task.draw(1)))
    finally:
        engine.close()


# -- the shared model --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 1), (2, 2)], ids=["in process", "forked", "spawned"])
def test_run_needs_no_shared_memory(workers: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker's /dev/shm has 64 MB: a model of 17 million weights, or a spawned worker's data, does not fit."""

    def full(*_: Any) -> Any:
        raise RuntimeError("unable to allocate shared memory(shm): No space left on device (28)")

    monkeypatch.setattr(torch.UntypedStorage, "_share_fd_cpu_", full)
    task = task_with(Arrays)
    engine = CPUEngine(task, fl.TrainConfig(workers=workers, threads=threads))
    try:
        found = [engine.evaluate(Weights.dense(task.layout, task.draw(key))) for key in (0, 1, 0)]
    finally:
        engine.close()
    assert found[0] == found[2] != found[1]
    run = fl.simulate(fl.PDST(density=0.3), task, 1, per_round=5, workers=workers, threads=threads)
    assert [(len(record.cohort), record.failures) for record in run.history] == [(5, {})]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the file has a name")
@pytest.mark.parametrize(("workers", "threads"), [(1, 1), (2, 1), (2, 2)], ids=["in process", "forked", "spawned"])
def test_shared_model_leaves_no_file_behind(
    workers: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `kill -9` nobody would remove it. Workers that start later must still find it."""
    (shared := tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    task = task_with(Arrays)
    engine = CPUEngine(task, fl.TrainConfig(workers=workers, threads=threads), tmp_path / "masks")
    try:
        weights = Weights.dense(task.layout, task.draw(0))
        before = engine.evaluate(weights)
        for process, _ in getattr(engine.pool, "_workers", ()):
            process.kill()
        assert engine.evaluate(weights) == before
        assert list(shared.iterdir()) == []
    finally:
        engine.close()
