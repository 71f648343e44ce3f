"""What plus.py and recipe.py share: experiments by name, run a few at a time, each in a process of its own.

Every run adds one line to a file when it ends. A run that is there already is skipped, and one that was interrupted
continues from its checkpoint, so the same command can be given again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.core.method import Method
from flashfl.core.record import RoundRecord
from flashfl.core.state import State
from flashfl.data.task import Task
from flashfl.paper.results import commit
from flashfl.run.config import RunConfig, TrainConfig, make_config

Settings = dict[str, str]
Line = dict[str, Any]  # of the file: what is kept of a run
TAIL = 6  # evaluations whose mean is the tail


@dataclass(frozen=True)
class Bench:
    """A set of experiments, and what to do with each."""

    file: str  # gets a line for each run
    groups: Mapping[str, Mapping[str, Settings]]
    usual: str  # the group that runs without --only
    same: tuple[str, ...]  # options in which two runs of one name and seed differ
    carry_out: Callable[[str, int, Settings, argparse.Namespace], None]
    show: Callable[[list[Line]], None]

    def main(self, parser: argparse.ArgumentParser) -> None:
        args = parser.parse_args()
        args.words = [word for word in sys.argv[1:] if word]
        if args.list:
            for group, experiments in self.groups.items():
                for name, settings in experiments.items():
                    print(f"{group:<8} {name:<18} {' '.join(f'{k}={v}' for k, v in settings.items())}")
        elif args.child:
            name, seed, settings = json.loads(args.child)
            try:
                self.carry_out(name, seed, settings, args)
            except KeyboardInterrupt:  # before the first round
                sys.exit(3)
        else:
            self._run_all(args)

    def _run_all(self, args: argparse.Namespace) -> None:
        """Start the runs that are not done yet, a few at a time, until the budget is spent."""
        args.out.mkdir(parents=True, exist_ok=True)
        end = time.monotonic() + 60 * args.budget_minutes
        mine = [getattr(args, name) for name in self.same]
        done = [[x["name"], x["seed"], *(x[name] for name in self.same)] for x in lines(args.out / self.file)]
        todo = [
            (name, seed, settings)
            for name, settings in self._wanted(args).items()
            for seed in map(int, args.seeds.split(","))
            if [name, seed, *mine] not in done
        ]
        running: list[tuple[str, subprocess.Popen[bytes]]] = []
        waiting: Iterator[tuple[str, int, Settings]] = iter(todo)
        try:
            while True:
                running = [(name, process) for name, process in running if not _over(name, process)]
                while len(running) < args.processes and time.monotonic() < end and (item := next(waiting, None)):
                    running.append((item[0], _start(item, args)))
                if not running or time.monotonic() >= end:
                    break
                time.sleep(1)
        finally:
            for _, process in running:  # they write a checkpoint, from which the next call continues
                process.send_signal(signal.SIGINT)
            for _, process in running:
                process.wait()
        self.show(lines(args.out / self.file))
        left = sum(1 for _ in waiting) + len(running)
        print(f"{left} runs left; give the same command again" if left else "all runs done")

    def _wanted(self, args: argparse.Namespace) -> dict[str, Settings]:
        """The experiments to run, in their order."""
        every = {name: settings for group in self.groups.values() for name, settings in group.items()}
        chosen: dict[str, Settings] = {}
        for text in args.add:
            name, _, words = text.partition(":")
            chosen[name.strip()] = dict(word.split("=", 1) for word in words.split())
        for name in args.only.split(",") if args.only else () if chosen else (self.usual,):
            if name not in self.groups and name not in every:
                raise ConfigError(f"--only {name}: --list shows the groups and experiments")
            chosen |= self.groups.get(name, {name: every.get(name, {})})
        return chosen


def options(about: str | None, out: str, only: str) -> argparse.ArgumentParser:
    """The options that all benches of this kind have."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help=f"folder (default: {out})")
    said = f"groups or experiments, separated by commas (default: {only})"
    parser.add_argument("--only", default="", help=said)
    parser.add_argument("--add", action="append", default=[], metavar="'NAME: k=v ...'", help="another experiment")
    parser.add_argument("--set", action="append", default=[], metavar="k=v", help="a setting for all runs")
    parser.add_argument("--seeds", default="0", help="separated by commas (default: 0)")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=4, help="CPU threads of each run (default: 4)")
    parser.add_argument("--budget-minutes", type=float, default=1e6, help="stop after this time; runs can continue")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--root", default="", help="folder of data sets (default: FLASHFL_DATA, or ./data)")
    parser.add_argument("--list", action="store_true", help="show all experiments and their settings")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser


def config_of(
    settings: Settings, args: argparse.Namespace, seed: int, method: str, eval_every: int, **task: Any
) -> RunConfig:
    """The paper's settings for CIFAR-10, with changes."""
    paper: dict[str, dict[str, Any]] = {
        "task": {"dataset": args.dataset, "clients": 100, "alpha": args.alpha, "data_root": args.root or "", **task},
        "train": {"rounds": 600, "per_round": 10, "batch": 32, "lr": 0.1, "lr_end": 0.001, "eval_every": eval_every},
        "method": {"name": method},
    }
    paper["train"] |= {"seed": seed, "checkpoint_every": 100, "device": args.device}
    return make_config(paper, {**settings, **dict(word.split("=", 1) for word in args.set)})


def simulate(name: str, seed: int, method: Method, task: Task, train: TrainConfig, folder: Path) -> fl.Run:
    """Run, or continue from the last checkpoint. Evaluations are printed. Ends the process if it is interrupted."""

    def watch(state: State, record: RoundRecord) -> None:
        if record.metrics:
            shown = ", ".join(f"{view} {100 * score.metric:.2f}" for view, score in record.metrics.items())
            print(f"{name} seed {seed}: round {state.counted}/{train.rounds}: {shown}", flush=True)

    resume = any((folder / "checkpoints").glob("*"))
    run = fl.simulate(method, task, train=train, folder=folder, resume=resume, overwrite=not resume, watch=watch)
    if run.stopped:
        sys.exit(3)
    return run


def keep(path: Path, line: Line, run: fl.Run, folder: Path) -> None:
    """Add a run's line to the file. Its checkpoints are no longer needed."""
    with path.open("a") as file:
        file.write(json.dumps({**line, **summary(run), "checksum": run.checksum, "commit": commit()}) + "\n")
    for piece in (folder / "checkpoints").glob("*"):
        piece.unlink()


def summary(run: fl.Run) -> Line:
    """What a run's line says: the metric of each view by round, its last value, its tail, and bytes each way."""
    scored = [(r.round + 1, r.metrics) for r in run.history if r.counts and r.metrics]
    curves = {name: [m[name].metric for _, m in scored if name in m] for name in scored[-1][1]}
    orders = sum(len(r.cohort) for r in run.history if r.counts)
    return {
        "density": round(run.weights.mask.density, 5),
        "mb_down": run.bytes_down / orders / 1e6,
        "mb_up": run.bytes_up / orders / 1e6,
        "last": {name: round(100 * curve[-1], 2) for name, curve in curves.items()},
        "tail": {name: round(100 * statistics.fmean(curve[-TAIL:]), 2) for name, curve in curves.items()},
        "mean": {name: round(100 * statistics.fmean(curve[-10:]), 2) for name, curve in curves.items()},
        "spread": {name: round(100 * statistics.pstdev(curve[-10:]), 2) for name, curve in curves.items()},
        "loss": round(run.history[-1].loss, 4),
        "seconds": round(run.seconds, 1),
        "rounds_at": [r for r, _ in scored],
        "curves": {name: [round(100 * v, 2) for v in curve] for name, curve in curves.items()},
    }


def lines(path: Path) -> list[Line]:
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def _start(item: tuple[str, int, Settings], args: argparse.Namespace) -> subprocess.Popen[bytes]:
    here = [sys.executable, sys.argv[0], *args.words, "--child", json.dumps(item)]
    return subprocess.Popen(here, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)})


def _over(name: str, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is None:
        return False
    if process.returncode:
        print(f"{name} ended with status {process.returncode}", file=sys.stderr)
    return True
