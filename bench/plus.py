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
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from experiments import Bench, Line, Settings, config_of, keep, options, simulate

from flashfl.core.rng import fold
from flashfl.data.dataset import DataSet
from flashfl.data.sources import Arrays
from flashfl.data.task import Task
from flashfl.data.tasks import build_task, load_data
from flashfl.run.budget import within_budget
from flashfl.run.config import RunConfig

FILE = "plus.jsonl"
HELD = 5000
A, B = {"budget": "2330000"}, {"budget": "545000"}  # bytes of SPDST at density 0.05 and 0.01
INT8, INT4 = {"values": "int8", "rest": "fp16"}, {"values": "int4", "rest": "fp16", "upload": "changes"}
CHANGES = {**INT8, "upload": "changes"}
FALL, SHORT = {"lr": "0.2", "lr_end": "0.002", "lr_last": "0"}, {"rounds": "300"}
AHEAD = {"look_ahead": "0.85"}
SLOW = {**AHEAD, "lr_end": "0.01", "average": "0.98"}  # with INT4, this is flashplus's recipe
# What experiments have unless they say something else: weight decay, the paper's schedule, weights upward.
BASE = {"method": "flashplus", "look_ahead": "0", "average": "0.95", "lr_end": "0.001", "upload": "weights"}

# `a` has SPDST 0.05's bytes, `b` SPDST 0.01's. docs/flashplus.md and LOG.md say what was found.
GROUPS: dict[str, dict[str, Settings]] = {
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


def carry_out(name: str, seed: int, settings: Settings, args: argparse.Namespace) -> None:
    split = {"partition_file": args.alpha_file} if args.alpha_file else {}
    chosen = {**({} if "method" in settings else BASE), **settings}
    config = config_of(chosen, args, seed, "flashplus", 20, **split)
    task, images = task_of(config, args.test), "test" if args.test else "held"
    folder = args.out / "-".join([name, images, f"alpha{args.alpha:g}", *args.set, f"seed{seed}"])
    method, train = config.method, config.train
    if train.budget:
        method, train, said = within_budget(method, task, train)
        print(f"{name}: {said}", flush=True)
    run = simulate(name, seed, method, task, train, folder)
    line = {"name": name, "seed": seed, "test": args.test, "alpha": args.alpha, "rounds": train.rounds}
    keep(args.out / FILE, {**line, "settings": settings, "set": args.set}, run, folder)


def show(found: list[Line]) -> None:
    print(f"\n{'run':<20} seed  MB down    up  density   last: average  plain   tail: average  plain  seconds")
    for x in found:
        a, b = x["last"], x["tail"]
        print(
            f"{x['name']:<20} {x['seed']:>4} {x['mb_down']:>8.3f} {x['mb_up']:>5.3f} {x['density']:>8.4f} "
            f"{a.get('average', float('nan')):>14.2f} {a.get('after', float('nan')):>6.2f} "
            f"{b.get('average', float('nan')):>15.2f} {b.get('after', float('nan')):>6.2f} {x['seconds']:>8.0f}"
        )


def main() -> None:
    parser = options(__doc__, "runs/plus", "steps")
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--alpha-file", default="", help="a saved partition instead of a drawn one")
    parser.add_argument("--test", action="store_true", help="judge on the test set, with all training images")
    Bench(FILE, GROUPS, "steps", ("test", "alpha", "set"), carry_out, show).main(parser)


if __name__ == "__main__":
    main()
