"""Experiments for flashplus: accuracy at given bytes on CIFAR-10, judged on 5,000 training images that no client has.

    python bench/plus.py --out FOLDER [--only steps,s-a-int8] [--processes 3] [--budget-minutes 20] [--root DATA]
    python bench/plus.py --out FOLDER --add 'mine: budget=545000 values=int4 upload=changes weight_decay=0.001'
    python bench/plus.py --out FOLDER --only final --test --seeds 1,2        # the figures to report
    python bench/plus.py --list

Every run adds one line to FOLDER/plus.jsonl when it ends. A run that is there already is skipped, and one that was
interrupted continues from its checkpoint, so the same command can be given again. `--test` judges on the test set
instead, with all training images; use it once, for settings that are final.
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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.core.record import RoundRecord
from flashfl.core.rng import fold
from flashfl.core.state import State
from flashfl.data.dataset import DataSet
from flashfl.data.sources import Arrays
from flashfl.data.task import Task
from flashfl.data.tasks import build_task, load_data
from flashfl.paper.results import commit
from flashfl.run.budget import within_budget
from flashfl.run.config import RunConfig, make_config

HELD = 5000
TAIL = 6  # evaluations whose mean is the tail
A, B = {"budget": "2330000"}, {"budget": "545000"}  # bytes of SPDST at density 0.05 and 0.01
INT8, INT4 = {"values": "int8", "rest": "fp16"}, {"values": "int4", "rest": "fp16", "upload": "changes"}
CHANGES = {**INT8, "upload": "changes"}
FALL, SHORT = {"lr": "0.2", "lr_end": "0.002", "lr_last": "0"}, {"rounds": "300"}
AHEAD = {"look_ahead": "0.85"}
SLOW = {**AHEAD, "lr_end": "0.01", "average": "0.98"}  # with INT4, this is flashplus's recipe
# What experiments have unless they say something else: weight decay, the paper's schedule, weights upward.
BASE = {"method": "flashplus", "look_ahead": "0", "average": "0.95", "lr_end": "0.001", "upload": "weights"}

# `a` has SPDST 0.05's bytes, `b` SPDST 0.01's. docs/flashplus.md and LOG.md say what was found.
GROUPS: dict[str, dict[str, dict[str, str]]] = {
    "final": {  # run once on the test set, beside the bars: --test --seeds 1,2
        "final-a4": {**A, **INT4, **SLOW},
        "final-b": {**B, **INT4, **SLOW},
        "final-equal-a": {"density": "0.05", "values": "fp32", **SLOW},  # SPDST 0.05 with the recipe
        "final-equal-b": {"density": "0.01", "values": "fp32", "r_int": "5", **SLOW},  # JMWST r5 0.01 with it
        "final-dense": {"density": "1", "values": "fp32", **SLOW, "warmup_clients": "0"},  # dense FedAvg with it
    },
    "steps": {  # 600 rounds, the way to the recipe
        "a-ahead": {**A, **INT8, **AHEAD},
        "b-ahead": {**B, **INT4, **AHEAD},
        "a-epochs2": {**A, **INT8, **AHEAD, "epochs": "2"},
        "a-lr-end": {**A, **INT8, **AHEAD, "lr_end": "0.01"},
        "a-changes": {**A, **CHANGES, **AHEAD},
        "a-lr01-98": {**A, **CHANGES, **SLOW},
        "b-lr01-98": {**B, **INT4, **SLOW},
        "a-lr03-98": {**A, **CHANGES, **SLOW, "lr_end": "0.03"},
        "a-int4-lr01-98": {**A, **INT4, **SLOW},
    },
    "next": {  # 600 rounds, not tried yet
        "n-lr03": {**A, **INT4, **SLOW, "lr_end": "0.03"},
        "n-epochs2": {**A, **INT4, **SLOW, "epochs": "2"},
        "n-batch16": {**A, **INT4, **SLOW, "batch": "16"},  # twice the steps
        "n-ahead0": {**A, **INT4, **SLOW, "look_ahead": "0"},
        "n-ahead95": {**A, **INT4, **SLOW, "look_ahead": "0.95"},
        "n-decay": {**A, **INT4, **SLOW, "weight_decay": "0.001"},
        "n-grow": {**A, **INT4, **SLOW, "grow": "0.5"},
        "n-momentum": {**A, **INT4, **SLOW, "look_ahead": "0", "server.momentum": "0.8"},
        "n-b-int8": {**B, **CHANGES, **SLOW},
        "n-b-move": {**B, **INT4, **SLOW, "r_int": "5", "freeze_after": "300"},
        "n-b-feedback": {**B, **INT4, **SLOW, "rounding": "nearest", "feedback": "true"},
    },
    "screen": {  # 300 rounds, to be compared among each other
        "s-a-int8": {**SHORT, **A, **INT8},
        "s-a-ahead": {**SHORT, **A, **INT8, **AHEAD},
        "s-a-fall": {**SHORT, **A, **INT8, **FALL},
        "s-a-fall-step": {**SHORT, **A, **INT8, **FALL, "server.lr": "1.5"},
        "s-a-ham": {**SHORT, **A, **INT8, "multiply": "1", "shrink": "0.001"},
        "s-b-int8": {**SHORT, **B, **INT8},
        "s-b-int4": {**SHORT, **B, **INT4},
        "s-b-scale": {**SHORT, **B, **INT8, "init_scale": "0.5"},
    },
    "control": {
        "spdst-0.05": {"method": "spdst", "density": "0.05", "average": "0.95"},
        "dense-paper": {"method": "dense", "average": "0.95"},
    },
}


def config_of(settings: dict[str, str], args: argparse.Namespace, seed: int) -> RunConfig:
    paper: dict[str, dict[str, Any]] = {
        "task": {"dataset": args.dataset, "clients": 100, "alpha": args.alpha, "data_root": args.root or ""},
        "train": {"rounds": 600, "per_round": 10, "batch": 32, "lr": 0.1, "lr_end": 0.001, "eval_every": 20},
        "method": {"name": "flashplus"},
    }
    if args.alpha_file:
        paper["task"]["partition_file"] = args.alpha_file
    paper["train"] |= {"seed": seed, "checkpoint_every": 100, "device": args.device}
    chosen = {**({} if "method" in settings else BASE), **settings, **dict(word.split("=", 1) for word in args.set)}
    return make_config(paper, chosen)


def held_out(data: DataSet, count: int) -> DataSet:
    """The data without its test samples: `count` training samples, the same in all runs, stand in for them."""
    order = np.random.Generator(np.random.Philox(20)).permutation(len(data.train))
    held, rest = (torch.from_numpy(np.sort(part)) for part in (order[:count], order[count:]))

    def some(index: torch.Tensor, **changes: Any) -> Arrays:
        inputs = tuple(torch.as_tensor(x)[index] for x in data.train.inputs)
        return replace(data.train, inputs=inputs, target=data.train.target[index], **changes)

    return replace(data, train=some(rest), test=some(held, augment=None))


def task_of(config: RunConfig, test: bool) -> Task:
    data = load_data(config.task)
    if not test:
        data = held_out(data, min(HELD, len(data.train) // 10))
    return build_task(config.task, fold(config.train.seed, "task"), data)


def summary(run: fl.Run) -> dict[str, Any]:
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


def carry_out(name: str, seed: int, settings: dict[str, str], args: argparse.Namespace) -> None:
    """One run, in a process of its own."""
    config = config_of(settings, args, seed)
    task, images = task_of(config, args.test), "test" if args.test else "held"
    folder = args.out / "-".join([name, images, f"alpha{args.alpha:g}", *args.set, f"seed{seed}"])
    method, train = config.method, config.train
    if train.budget:
        method, train, said = within_budget(method, task, train)
        print(f"{name}: {said}", flush=True)

    def watch(state: State, record: RoundRecord) -> None:
        if record.metrics:
            shown = ", ".join(f"{view} {100 * score.metric:.2f}" for view, score in record.metrics.items())
            print(f"{name} seed {seed}: round {state.counted}/{train.rounds}: {shown}", flush=True)

    resume = any((folder / "checkpoints").glob("*"))
    run = fl.simulate(method, task, train=train, folder=folder, resume=resume, overwrite=not resume, watch=watch)
    if run.stopped:
        sys.exit(3)
    line = {"name": name, "seed": seed, "test": args.test, "alpha": args.alpha, "rounds": train.rounds,
            "settings": settings, "set": args.set, **summary(run), "checksum": run.checksum,
            "commit": commit()}  # fmt: skip
    with (args.out / "plus.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    for piece in (folder / "checkpoints").glob("*"):
        piece.unlink()


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "plus.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def show(found: list[dict[str, Any]]) -> None:
    print(f"\n{'run':<20} seed  MB down    up  density   last: average  plain   tail: average  plain  seconds")
    for x in found:
        a, b = x["last"], x["tail"]
        print(
            f"{x['name']:<20} {x['seed']:>4} {x['mb_down']:>8.3f} {x['mb_up']:>5.3f} {x['density']:>8.4f} "
            f"{a.get('average', float('nan')):>14.2f} {a.get('after', float('nan')):>6.2f} "
            f"{b.get('average', float('nan')):>15.2f} {b.get('after', float('nan')):>6.2f} {x['seconds']:>8.0f}"
        )


def wanted(args: argparse.Namespace) -> dict[str, dict[str, str]]:
    """The experiments to run, in their order."""
    every = {name: settings for group in GROUPS.values() for name, settings in group.items()}
    added = {}
    for text in args.add:
        name, _, words = text.partition(":")
        added[name.strip()] = dict(word.split("=", 1) for word in words.split())
    chosen: dict[str, dict[str, str]] = dict(added)
    for name in args.only.split(",") if args.only else () if added else ("steps",):
        if name not in GROUPS and name not in every:
            raise ConfigError(f"--only {name}: --list shows the groups and experiments")
        chosen |= GROUPS.get(name, {name: every.get(name, {})})
    return chosen


def run_all(args: argparse.Namespace) -> None:
    """Start the runs that are not done yet, a few at a time, until the budget is spent."""
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.budget_minutes
    done = {(x["name"], x["seed"], x["test"], x["alpha"], tuple(x["set"])) for x in lines(args.out)}
    todo = [
        (name, seed, settings)
        for name, settings in wanted(args).items()
        for seed in map(int, args.seeds.split(","))
        if (name, seed, args.test, args.alpha, tuple(args.set)) not in done
    ]
    running: list[tuple[str, subprocess.Popen[bytes]]] = []
    waiting: Iterator[tuple[str, int, dict[str, str]]] = iter(todo)
    try:
        while True:
            running = [(name, process) for name, process in running if not _over(name, process)]
            while len(running) < args.processes and time.monotonic() < end and (item := next(waiting, None)):
                running.append((item[0], start(item, args)))
            if not running or time.monotonic() >= end:
                break
            time.sleep(1)
    finally:
        for _, process in running:  # they write a checkpoint, from which the next call continues
            process.send_signal(signal.SIGINT)
        for _, process in running:
            process.wait()
    show(lines(args.out))
    left = sum(1 for _ in waiting) + len(running)
    print(f"{left} runs left; give the same command again" if left else "all runs done")


def start(item: tuple[str, int, dict[str, str]], args: argparse.Namespace) -> subprocess.Popen[bytes]:
    here = [sys.executable, __file__, *args.words, "--child", json.dumps(item)]
    return subprocess.Popen(here, env={**os.environ, "OMP_NUM_THREADS": str(args.threads)})


def _over(name: str, process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is None:
        return False
    if process.returncode:
        print(f"{name} ended with status {process.returncode}", file=sys.stderr)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/plus"), help="folder (default: runs/plus)")
    parser.add_argument("--only", default="", help="groups or experiments, separated by commas (default: steps)")
    parser.add_argument("--add", action="append", default=[], metavar="'NAME: k=v ...'", help="another experiment")
    parser.add_argument("--set", action="append", default=[], metavar="k=v", help="a setting for all runs")
    parser.add_argument("--seeds", default="0", help="separated by commas (default: 0)")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--alpha-file", default="", help="a saved partition instead of a drawn one")
    parser.add_argument("--test", action="store_true", help="judge on the test set, with all training images")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--threads", type=int, default=4, help="CPU threads of each run (default: 4)")
    parser.add_argument("--budget-minutes", type=float, default=1e6, help="stop after this time; runs can continue")
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--root", default="", help="folder of data sets (default: FLASHFL_DATA, or ./data)")
    parser.add_argument("--list", action="store_true", help="show all experiments and their settings")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.words = [word for word in sys.argv[1:] if word]
    if args.list:
        for group, experiments in GROUPS.items():
            for name, settings in experiments.items():
                print(f"{group:<8} {name:<18} {' '.join(f'{k}={v}' for k, v in settings.items())}")
    elif args.child:
        name, seed, settings = json.loads(args.child)
        try:
            carry_out(name, seed, settings, args)
        except KeyboardInterrupt:  # before the first round
            sys.exit(3)
    else:
        run_all(args)


if __name__ == "__main__":
    main()
