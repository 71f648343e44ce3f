"""What lying clients can do to a model on Flower, with the default settings and with others.

    python bench/attacks.py                          # every row against the defaults, one seed: ten minutes
    python bench/attacks.py --only JMWST replay      # rows whose name contains one of these words
    python bench/attacks.py --settings defaults clip trim off --seeds 0 1 2 --json results/bench/attacks.json --resume

Ten clients train on the 8x8 digits for 12 rounds, all of them in every round. One lies, or two that agree. Clients,
messages and server are Flower's, in one process (`flashfl.flower.testing`): every update is really encoded, decoded and
checked. A row is a task and an attack, a column a setting of the server. A cell is the test accuracy after the last
round in percent, its mean over the seeds, and how far that is from the honest run of the same task with the same
setting. Rows of honest clients show the distance from a plain average instead: what the setting costs.

Exit status 1 if one liar of ten costs more than 3 points anywhere with the defaults. Needs no files. Two processes at a
time by default.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message, RecordDict
from torch import nn

import flashfl as fl
from flashfl.core.exchange import Order, Update
from flashfl.core.mask import Weights
from flashfl.core.rng import fold
from flashfl.data import partition
from flashfl.data.sources import Subset
from flashfl.data.task import Task
from flashfl.data.tasks import TaskConfig, load_data
from flashfl.engine.train import Trainer
from flashfl.flower import FlashStrategy, FlowerOptions, client_app, records
from flashfl.flower.client import app_around
from flashfl.flower.host import Host
from flashfl.flower.testing import InProcessGrid
from flashfl.models import build_model
from flashfl.wire import seal

CLIENTS, ROUNDS, POINTS = 10, 12, 3.0
LIARS = (3, 7)  # the client that lies, and the second one
HUGE = 1 << 32  # samples that a liar registers
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "clip": {"robust": "off", "clip": 1.0},
    "trim": {"robust": "off", "trim": 0.25},
    "off": {"robust": "off"},
}


# -- tasks ----------------------------------------------------------------------------------------------------------


class NoNorm(nn.Module):
    """A net without BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


def digits_net() -> nn.Module:
    return build_model("digits")


def shares(split: str, labels: np.ndarray[Any, Any], seed: int) -> partition.Partition:
    """Which samples each client has. `lone`: one client alone has nines, beside its share of everything else."""
    key = fold(seed, "split")
    if split != "lone":
        return partition.split(
            "dirichlet" if "uneven" in split else "lda", labels, CLIENTS, key, alpha=float(split[:3])
        )
    nines, rest = np.flatnonzero(labels == 9), np.flatnonzero(labels != 9)
    first, *others = (rest[part] for part in partition.split("iid", labels[rest], CLIENTS, key))
    return [np.concatenate([first, nines]), *others]


METHODS: dict[str, fl.Method] = {
    "dense": fl.Dense(),
    "spdst": fl.SPDST(density=0.2, warmup_clients=CLIENTS, warmup_epochs=2),
    "jmwst": fl.JMWST(density=0.2, warmup_clients=CLIENTS, warmup_epochs=2),
}


@dataclass(frozen=True)
class Setup:
    """A model, a split of the digits and a method."""

    model: Callable[[], nn.Module]
    split: str  # alpha, or `lone`
    method: str

    @property
    def epochs(self) -> int:
        """So many that 12 rounds are enough."""
        return 3 if self.model is NoNorm else 1

    def task(self, seed: int) -> Task:
        data = load_data(TaskConfig(dataset="digits"))
        parts = shares(self.split, data.labels, seed)
        return Task(self.model, [Subset(data.train, torch.from_numpy(part)) for part in parts], data.test)


SETUPS = {
    "digits, SPDST": Setup(digits_net, "1.0", "spdst"),
    "digits, JMWST": Setup(digits_net, "1.0", "jmwst"),
    "no BatchNorm, dense": Setup(NoNorm, "1.0", "dense"),
    "digits, SPDST, alpha 0.1": Setup(digits_net, "0.1", "spdst"),
    "digits, SPDST, alpha 0.5, unequal": Setup(digits_net, "0.5 uneven", "spdst"),
    "digits, SPDST, one client alone has nines": Setup(digits_net, "lone", "spdst"),
    "no BatchNorm, dense, alpha 0.1": Setup(NoNorm, "0.1", "dense"),
    "no BatchNorm, dense, alpha 0.5, unequal": Setup(NoNorm, "0.5 uneven", "dense"),
    "no BatchNorm, dense, one client alone has nines": Setup(NoNorm, "lone", "dense"),
}

# -- attacks --------------------------------------------------------------------------------------------------------

Lie = Callable[[Update, Order], Update]
MARK = struct.pack("<f", 1234.5678)


def told(update: Update, vector: torch.Tensor) -> Update:
    """The update with other weights or statistics."""
    assert update.mask is not None
    return replace(update, values=Weights(update.mask, vector).packed())


def weights_of(update: Update, order: Order) -> tuple[torch.Tensor, torch.Tensor, int]:
    """A copy of the update's vector, that of its order where the update has weights, and how many are trained."""
    assert update.weights is not None
    start = order.weights.restrict(update.weights.mask).vector
    return update.weights.vector.clone(), start, update.weights.layout.trained_size


def variances(update: Update, order: Order) -> Update:
    vector, _, _ = weights_of(update, order)
    for layer in order.weights.layout.of_kind("statistic"):
        if layer.name.endswith("running_var"):
            vector[layer.start : layer.stop] *= 72
    return told(update, vector)


def further(factor: float, update: Update, order: Order) -> Update:
    """The start and `factor` times the honest change."""
    vector, start, trained = weights_of(update, order)
    vector[:trained] = start[:trained] + factor * (vector[:trained] - start[:trained])
    return told(update, vector)


def flipped(update: Update, order: Order) -> Update:
    vector, _, trained = weights_of(update, order)
    vector[:trained] *= -1
    return told(update, vector)


def shifted(update: Update, order: Order) -> Update:
    vector, _, trained = weights_of(update, order)
    vector[:trained] += 1
    return told(update, vector)


def one_weight(update: Update, order: Order) -> Update:
    """A large change of the last bias alone: the whole length that clipping leaves goes into one number."""
    vector, start, trained = weights_of(update, order)
    vector[:trained] = start[:trained]
    vector[trained - 1] += 1e4
    return told(update, vector)


def marked(update: Update, order: Order) -> Update:
    """A number that `with_nan` finds again in the encoded bytes."""
    vector, _, trained = weights_of(update, order)
    vector[trained - 1] = struct.unpack("<f", MARK)[0]
    return told(update, vector)


class Replay:
    """The first update again and again. Its tag and key are those of the round, as the client writes them."""

    def __init__(self) -> None:
        self.first: Update | None = None

    def __call__(self, update: Update, order: Order) -> Update:
        assert update.values is not None
        # A copy: a dense update shares the memory that the client trains in.
        self.first = self.first or replace(update, values=update.values.clone())
        return replace(update, mask=self.first.mask, values=self.first.values, counts=self.first.counts)


def votes(update: Update, order: Order) -> Update:
    """Layer counts of the first phase: as many weights as fit into the last layers, none in the first."""
    left, counts = sum(update.counts), []
    for size in reversed(order.weights.layout.sizes):
        counts.append(min(left, size))
        left -= counts[-1]
    return replace(update, counts=tuple(reversed(counts)))


@dataclass(frozen=True)
class Attack:
    """`lie` makes the lie from an honest update, new for each run and shared by its liars."""

    lie: Callable[[], Lie]
    samples: int = 0  # that a liar registers; 0: as many as it has
    liars: int = 1
    nan: bool = False
    first_phase: bool = False  # whether it lies about layer counts instead of weights


def always(lie: Lie) -> Callable[[], Lie]:
    return lambda: lie


REVERSED = always(functools.partial(further, -9.0))
ATTACKS = {
    "variances 72 times too large": Attack(always(variances)),
    "replay of its first update": Attack(Replay),
    "start - 9 x honest change": Attack(REVERSED),
    "start - honest change": Attack(always(functools.partial(further, -1.0))),
    "2^32 samples, honest weights": Attack(always(lambda update, order: update), samples=HUGE),
    "2^32 samples, signs flipped": Attack(always(flipped), samples=HUGE),
    "signs flipped": Attack(always(flipped)),
    "constant shift": Attack(always(shifted)),
    "all into one bias": Attack(always(one_weight)),
    "NaN": Attack(always(marked), nan=True),
    "false layer counts": Attack(always(votes), first_phase=True),
    "two: variances": Attack(always(variances), liars=2),
    "two: start - 9 x honest change": Attack(REVERSED, liars=2),
    "two: 2^32 samples, signs flipped": Attack(always(flipped), samples=HUGE, liars=2),
    "two: constant shift": Attack(always(shifted), liars=2),
}
HONEST = "honest"


class Liar(Trainer):
    """Trains as told, then lies."""

    def __init__(self, task: Task, attack: Attack, lie: Lie) -> None:
        super().__init__(task)
        self.attack, self.lie = attack, lie

    def train(self, order: Order, *args: Any, **more: Any) -> Update:
        update = super().train(order, *args, **more)
        if (update.values is None) == self.attack.first_phase:
            update = self.lie(update, order)
        return replace(update, n=self.attack.samples or update.n)


class LyingHost(Host):
    """A node that lies about its samples too."""

    def __init__(self, task: Task, attack: Attack, lie: Lie) -> None:
        super().__init__(task)
        self.samples, self.trainer = attack.samples, Liar(task, attack, lie)

    def about(self, context: Context) -> RecordDict:
        said = super().about(context)
        fields = records.read_fields(said, "client")
        return records.fields("client", {**fields, "n": self.samples or fields["n"]})


def with_nan(node: int, message: Message, reply: Message) -> Iterable[Message]:
    """The reply with the marked number made a NaN, checksum and all."""
    if not reply.has_error() and "update" in reply.content:
        data = records.read_blob(reply.content, "update")[1]
        reply.content = records.blob("update", seal(data.replace(MARK, struct.pack("<f", float("nan")))))
    return [reply]


def federation(task: Task, attack: Attack | None) -> InProcessGrid:
    honest = client_app(task)
    grid = InProcessGrid({100 + c.id: (honest, {"partition-id": c.id}) for c in task.clients})
    if attack is not None:
        grid.tamper = with_nan if attack.nan else grid.tamper
        lie = attack.lie()
        for liar in LIARS[: attack.liars]:
            grid.join(100 + liar, app_around(LyingHost(task, attack, lie).serve), {"partition-id": liar})
    return grid


# -- running --------------------------------------------------------------------------------------------------------

Cell = tuple[str, str, str, int]  # setup, attack, setting, seed


def run(cell: Cell) -> float:
    """The accuracy after the last round, in percent."""
    setup, attack, setting, seed = cell
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    task, method = SETUPS[setup].task(seed), METHODS[SETUPS[setup].method]
    train = fl.TrainConfig(
        rounds=ROUNDS, per_round=CLIENTS, epochs=SETUPS[setup].epochs, eval_every=ROUNDS, seed=seed, **SETTINGS[setting]
    )
    strategy = FlashStrategy(method, task, train, FlowerOptions(clients=CLIENTS, wait=60, poll=0.01), quiet=True)
    strategy.start(federation(task, ATTACKS.get(attack)))
    assert strategy.run is not None
    return 100 * strategy.run.accuracy


def rows(only: list[str]) -> list[tuple[str, str]]:
    """Setups and attacks. Where clients are unlike, only honest runs: what the defaults cost them."""
    found = []
    for name, setup in SETUPS.items():
        usual = setup.split == "1.0"
        for kind in (HONEST, *ATTACKS) if usual else (HONEST,):
            about_norm, about_counts = "variances" in kind, "layer counts" in kind
            if (about_norm and setup.model is NoNorm) or (about_counts and setup.method == "dense"):
                continue
            found.append((name, kind))
    return [row for row in found if not only or any(word in " ".join(row) for word in only)]


def measure(cells: list[Cell], workers: int, found: dict[Cell, float], file: Path | None) -> None:
    """Run the cells that are not in `found`, two at a time by default. Says how far it is, and writes as it goes."""
    left = [cell for cell in cells if cell not in found]
    began = time.monotonic()
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        jobs = {pool.submit(run, cell): cell for cell in left}
        for number, done in enumerate(as_completed(jobs), 1):
            cell = jobs[done]
            found[cell] = done.result()
            spent = time.monotonic() - began
            print(
                f"{number}/{len(left)} after {spent:.0f} s, {spent / number * (len(left) - number):.0f} s left: "
                f"{'; '.join(map(str, cell))}: {found[cell]:.1f} %", file=sys.stderr, flush=True,
            )  # fmt: skip
            if file is not None:
                file.write_text(json.dumps(record(found), indent=1) + "\n")


def table(found: dict[Cell, float], settings: list[str], seeds: list[int]) -> tuple[list[str], list[str]]:
    """Lines of a Markdown table, and what is not as promised."""

    def cell(setup: str, attack: str, setting: str) -> tuple[float | None, float | None]:
        """The accuracy, and its distance from the honest run over the seeds that have both."""
        beside = (setup, HONEST, "off" if attack == HONEST else setting)
        here = {seed: found[c] for seed in seeds if (c := (setup, attack, setting, seed)) in found}
        lost = [here[seed] - found[c] for seed in here if (c := (*beside, seed)) in found]
        return fmean(here.values()) if here else None, fmean(lost) if lost else None

    order = {row: at for at, row in enumerate(rows([]))}
    lines = [f"| task | attack | {' | '.join(settings)} |", "|---" * (2 + len(settings)) + "|"]
    broken = []
    for setup, attack in sorted({cell[:2] for cell in found}, key=order.__getitem__):
        texts = []
        for setting in settings:
            here, lost = cell(setup, attack, setting)
            if here is None:
                texts.append("")
                continue
            plain = lost is None or (attack, setting) == (HONEST, "off")
            texts.append(f"{here:.1f}" if plain else f"{here:.1f} ({lost:+.1f})")
            alone = attack != HONEST and ATTACKS[attack].liars == 1
            if alone and setting == "defaults" and lost is not None and lost < -POINTS:
                broken.append(f"{setup}, {attack}: {here:.1f} %, {lost:+.1f} from the honest run")
        lines.append(f"| {setup} | {attack} | {' | '.join(texts)} |")
    return lines, broken


def record(found: dict[Cell, float]) -> dict[str, Any]:
    """Every cell, and how it was measured."""
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    names = ("task", "attack", "setting", "seed", "accuracy")
    return {
        "commit": git.stdout.strip(), "command": "python bench/attacks.py " + " ".join(sys.argv[1:]),
        "torch": torch.__version__,
        "rounds": ROUNDS, "clients": CLIENTS,
        "cells": [dict(zip(names, (*cell, round(value, 2)), strict=True)) for cell, value in found.items()],
    }  # fmt: skip


def known(file: Path | None) -> dict[Cell, float]:
    """The cells that a file already has."""
    cells = json.loads(file.read_text())["cells"] if file is not None and file.exists() else []
    return {(c["task"], c["attack"], c["setting"], c["seed"]): c["accuracy"] for c in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these")
    parser.add_argument("--settings", nargs="*", default=["defaults"], choices=SETTINGS, help="columns")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0])
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    parser.add_argument("--json", type=Path, help="also write every cell to this file, as it goes")
    parser.add_argument("--resume", action="store_true", help="keep the cells that the file already has")
    parser.add_argument("--list", action="store_true", help="list the rows and stop")
    parser.add_argument("--table", action="store_true", help="measure nothing: print the table of the cells in --json")
    args = parser.parse_args()
    chosen = rows(args.only)
    if args.list:
        print("\n".join(": ".join(row) for row in chosen))
        return
    honest = list(dict.fromkeys((setup, HONEST) for setup, _ in chosen))
    cells = [(*row, setting, seed) for row in dict.fromkeys([*honest, *chosen]) for setting in args.settings
             for seed in args.seeds]  # fmt: skip
    if "off" not in args.settings:  # what the honest runs are compared with
        cells += [(*row, "off", seed) for row in honest for seed in args.seeds]
    os.environ["OMP_NUM_THREADS"] = "1"
    found = known(args.json) if args.resume or args.table else {}
    if not args.table:
        measure(cells, args.workers, found, args.json)
    lines, broken = table(found, args.settings, args.seeds)
    print("\n".join(lines))
    for line in broken:
        print(f"more than {POINTS:g} points lost: {line}")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
