"""What separates us from the paper on CIFAR-10 at alpha 1000? SPDST with one change of the recipe at a time.

    python bench/recipe.py [--only every-0.1,fp32-0.1] [--seeds 0,1] [--budget-minutes 20] [--root DATA]
    python bench/recipe.py --list

Every run is one process on one GPU and adds one line to runs/recipe/recipe.jsonl when it ends (--out: another folder).
A run that is there already is skipped, and one that was interrupted continues from its checkpoint, so the same command
can be given again. Runs evaluate on the test set.

How to read the table: `last` is the accuracy after the last round, `best` that of the best evaluation, both less the
paper's figure. Seeds differ by 0.1 to 0.4 points, so a change that explains 0.4 must show in both densities. `every`
changes nothing but when the model is evaluated: its `last` is what other rows are compared with, and its `best`, of 600
evaluations, says whether the paper's figures can be best ones.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import lru_cache

import torch
from experiments import Bench, Line, Settings, config_of, keep, options, simulate
from torch import Tensor

from flashfl.core.errors import ConfigError
from flashfl.core.rng import fold
from flashfl.data.augment import CropFlip, Normalise
from flashfl.data.dataset import DataSet
from flashfl.data.sources import Inputs
from flashfl.data.tasks import build_task, load_data
from flashfl.paper.cells import load_table
from flashfl.run.config import RunConfig

FILE = "recipe.jsonl"
CHANGES: dict[str, Settings] = {  # most informative first
    "every": {"eval_every": "1"},
    "fp32": {"precision": "fp32"},  # instead of bf16
    "pad": {"pad": "mean"},  # crops are padded after normalising: with the mean colour, not with black
    "plain": {"augment": "false"},  # no crops and mirrored images
    "decay": {"decay": "before"},  # the learning rate of round t is that of t + 1
    "full": {"max_steps": "15"},  # without the short last batch of a client's 500 images
}
GROUPS: dict[str, dict[str, Settings]] = {
    density: {
        f"{name}-{density}": {"method": "spdst", "density": density, **change} for name, change in CHANGES.items()
    }
    for density in ("0.1", "0.05")
}
GROUPS = {"all": GROUPS["0.1"] | GROUPS["0.05"], **GROUPS}


def carry_out(name: str, seed: int, settings: Settings, args: argparse.Namespace) -> None:
    own = {k: v for k, v in settings.items() if k not in ("pad", "decay")}
    config = config_of(own, args, seed, "spdst", 10)
    train, data = config.train, load_data(config.task)
    if "decay" in settings:  # lr(t + 1) is the same exponential, which begins and ends one step lower
        step = (train.lr_end / train.lr) ** (1 / train.rounds)
        train = replace(train, lr=train.lr * step, lr_end=train.lr_end * step)
    if "pad" in settings:
        data = padded_with_mean(data)
    task = build_task(config.task, fold(train.seed, "task"), data)
    folder = args.out / "-".join([name, args.dataset, f"alpha{args.alpha:g}", *args.set, f"seed{seed}"])
    run = simulate(name, seed, config.method, task, train, folder)
    line = {"name": name, "seed": seed, "dataset": args.dataset, "alpha": args.alpha, "rounds": train.rounds}
    keep(args.out / FILE, {**line, "settings": settings, "set": args.set, "paper": paper_of(config)}, run, folder)


def padded_with_mean(data: DataSet) -> DataSet:
    """The data with crops that show the mean colour, which normalising turns to 0, where they pass the edge."""
    crop, norm = data.train.augment, data.train.prepare
    if not (isinstance(crop, CropFlip) and isinstance(norm, Normalise)):
        raise ConfigError("pad: this data set has no crops. Leave out the experiments `pad`, or use cifar10.")

    def augment(inputs: Inputs, key: int, at: int) -> Inputs:
        images, *rest = inputs
        cropped, inside = (crop((x,), key, at)[0] for x in (images, torch.ones_like(images)))
        return (torch.where(inside.bool(), cropped, _mean(norm, str(images.device))), *rest)

    return replace(data, train=replace(data.train, augment=augment))


@lru_cache(maxsize=4)
def _mean(norm: Normalise, device: str) -> Tensor:
    """Cached, because a copy to a GPU at every batch would stall it."""
    return torch.tensor([round(m * norm.white) for m in norm.mean], dtype=torch.uint8, device=device).view(-1, 1, 1)


def paper_of(config: RunConfig) -> float | None:
    """The paper's figure for the cell that a run changes."""
    mine = (config.task.dataset, config.task.alpha, config.method.name, getattr(config.method, "density", 1.0))
    cells = [cell for cell in load_table("main").cells if cell.paper]
    return next((c.paper["mean"] for c in cells if (c.dataset, c.alpha, c.method["name"], c.density) == mine), None)


def show(found: list[Line]) -> None:
    print(f"\n{'run':<12} seed  alpha   last  - paper   best  - paper  at round  seconds")
    for x in found:
        curve, paper = x["curves"]["after"], x["paper"]
        last, best = curve[-1], max(curve)
        apart = [f"{value - paper:>+8.2f}" if paper else f"{'':>8}" for value in (last, best)]
        print(
            f"{x['name']:<12} {x['seed']:>4} {x['alpha']:>6g} {last:>6.2f} {apart[0]} {best:>6.2f} {apart[1]} "
            f"{x['rounds_at'][curve.index(best)]:>9} {x['seconds']:>8.0f}"
        )


def main() -> None:
    parser = options(__doc__, "runs/recipe", "all")
    parser.add_argument("--alpha", type=float, default=1000.0)
    Bench(FILE, GROUPS, "all", ("dataset", "alpha", "set"), carry_out, show).main(parser)


if __name__ == "__main__":
    main()
