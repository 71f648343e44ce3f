"""Accuracy against epsilon: dense beside SPDST at density 0.05 and 0.1, on MNIST over 3,000 clients, 300 a round.

    python bench/epsilon.py --search        # once: the clip, judged on 3,000 training images that no
                                            # client has; SPDST 0.1 takes the clip of 0.05
    python bench/epsilon.py                 # the runs of the figure, judged on the test images
    python bench/epsilon.py --draw FILE     # the figure and its table, from the results

Every run adds one line to results/bench/privacy.jsonl when it ends, and a run that is there already is skipped, so an
interrupted command can be given again. The model is a perceptron with 200 hidden units (159,010 weights), as it trains
quickly on a CPU. Clients have 20 images each and take two steps with all of them. The server adds the noise (`secure`
is off), which has the least size that the planned rounds allow for epsilon if cohorts stay secret. SPDST has no first
phase, so its layer densities are uniform. The GPU engine computes all runs, on the CPU too: the same clipping, rounding
and noise as deployed, without messages. One run of 20 rounds takes about a minute of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flashfl as fl
from flashfl.core.engine import FixedPopulation
from flashfl.core.method import Method
from flashfl.core.rng import fold
from flashfl.data.tasks import TaskConfig, build_task
from flashfl.engine.gpu import GPUEngine
from flashfl.report.drawing import blank, decades, legend, save
from flashfl.run.simulate import drive

DENSITIES = {"dense": 1.0, "spdst 0.05": 0.05, "spdst 0.1": 0.1}
EPSILONS = (1.0, 2.0, 4.0, 8.0)
CLIPS, SEARCHED = (0.5, 1.0, 2.0), 4.0  # the search's clips, and the epsilon that it is done for
ROUNDS, COHORT, CLIENTS, DELTA, HELD = 20, 300, 3000, 1e-5, 3000
RESULTS = Path(__file__).parents[1] / "results" / "bench" / "privacy.jsonl"
INKS = ("#2563c9", "#d9621f", "#16915f")
Row = dict[str, Any]


def perceptron() -> nn.Module:
    """784-200-10 with He's initial weights. The first layer is prunable."""
    module = nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))
    for layer in (module[1], module[3]):
        nn.init.kaiming_normal_(layer.weight)
        nn.init.zeros_(layer.bias)
    return module


def task_of(seed: int, search: bool) -> fl.Task:
    asked = TaskConfig(dataset="mnist", model="mnistnet", clients=CLIENTS, alpha=1.0, held_out=HELD if search else 0)
    data = build_task(asked, fold(seed, "task"))
    return fl.Task(perceptron, data.train, data.evaluation[0], name="mnist")


def method_of(case: str) -> Method:
    density = DENSITIES[case]
    return fl.Dense() if density == 1 else fl.SPDST(density=density, warmup_clients=0)


def planned(search: bool, seeds: list[int], rows: list[Row]) -> Iterator[Row]:
    """The runs, in the order in which they are carried out. epsilon 0: without clipping and noise."""
    if search:
        for case in ("dense", "spdst 0.05"):
            for clip in CLIPS:
                yield {"case": case, "epsilon": SEARCHED, "clip": clip, "seed": 100, "search": True}
        return
    best = {case: best_clip("dense" if case == "dense" else "spdst 0.05", rows) for case in DENSITIES}
    for seed in seeds:
        for epsilon in (*reversed(EPSILONS), 0.0):
            for case, clip in best.items():
                yield {"case": case, "epsilon": epsilon, "clip": clip if epsilon else 0.0, "seed": seed}


def best_clip(case: str, rows: list[Row]) -> float:
    """The clip with the highest accuracy in the search."""
    tried = [row for row in rows if row.get("search") and row["case"] == case]
    if len(tried) < len(CLIPS):
        raise SystemExit(f"{case}: the search has {len(tried)} of {len(CLIPS)} runs. Run --search first.")
    return float(max(tried, key=lambda row: row["accuracy"])["clip"])


def carry_out(asked: Row, device: str) -> Row:
    """One run and its line of results."""
    task = task_of(asked["seed"], bool(asked.get("search")))
    private = {"dp_epsilon": asked["epsilon"], "dp_clip": asked["clip"], "dp_delta": DELTA} if asked["epsilon"] else {}
    config = fl.TrainConfig(
        rounds=ROUNDS, per_round=COHORT, epochs=2, batch=20, lr=0.3, lr_end=0.3, eval_every=5, seed=asked["seed"],
        checkpoint_every=0, crew="batched", **private,
    )  # fmt: skip
    method, began, curve = method_of(asked["case"]), time.process_time(), []

    def watch(state: object, record: Any) -> None:
        if record.score is not None:
            curve.append([record.round + 1, round(record.score.metric, 4)])

    engine = GPUEngine(task, config, device)
    run = drive(method, task, config, engine, FixedPopulation(task.clients), watch=watch)
    spent, noise = run.privacy, None if engine.vault is None else engine.vault.privacy.noise
    return {
        **asked, "accuracy": curve[-1][1], "known": spent and round(spent.known, 4),
        "sampled": spent and round(spent.sampled, 4), "delta": DELTA, "noise": noise and round(noise.multiplier, 4),
        "rounds": ROUNDS, "clients": CLIENTS, "per_round": COHORT, "numbers": run.weights.mask.active + 2210,
        "curve": curve, "cpu_seconds": round(time.process_time() - began, 1), "device": device,
        "torch": torch.__version__, "commit": commit(), "command": "python bench/epsilon.py " + " ".join(sys.argv[1:]),
    }  # fmt: skip


def commit() -> str:
    said = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent)
    return said.stdout.strip()


def read(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key(row: Row) -> tuple[object, ...]:
    return row["case"], row["epsilon"], row["clip"], row["seed"], bool(row.get("search"))


def draw(rows: list[Row], path: Path) -> None:
    """Two panels: epsilon against somebody who sees models only, and against a server that knows the cohorts."""
    made = blank((8.6, 3.8))
    panels = made.subplots(1, 2, sharey=True)
    final = [row for row in rows if not row.get("search")]
    for ink, case in zip(INKS, DENSITIES, strict=True):
        mine = [row for row in final if row["case"] == case]
        for axes, which in zip(panels, ("sampled", "known"), strict=True):
            done = [e for e in EPSILONS if any(row["epsilon"] == e for row in mine)]
            x, y = [mean(mine, e, which) for e in done], [100 * mean(mine, e, "accuracy") for e in done]
            axes.plot(x, y, "o-", color=ink, label=case, linewidth=1.6)
            axes.axhline(100 * mean(mine, 0.0, "accuracy"), color=ink, linestyle=":", linewidth=1)
    panels[0].set(xlabel="epsilon, cohorts secret", ylabel="accuracy (%)", xscale="log")
    panels[1].set(xlabel="epsilon, cohorts known (as to the server)", xscale="log")
    for axes in panels:
        axes.grid(alpha=0.25)
        decades(axes.xaxis)
    panels[0].set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
    legend(made, panels)
    save(made, path)


def mean(rows: list[Row], epsilon: float, name: str) -> float:
    found = [row[name] for row in rows if row["epsilon"] == epsilon]
    return math.fsum(found) / len(found) if found else math.nan


def table(rows: list[Row]) -> str:
    final = [row for row in rows if not row.get("search")]
    lines = ["| epsilon, cohorts secret | cohorts known | noise | " + " | ".join(DENSITIES) + " |"]
    lines.append("|---|---|---|" + "---|" * len(DENSITIES))
    for epsilon in (*EPSILONS, 0.0):
        accuracy = [100 * mean([r for r in final if r["case"] == case], epsilon, "accuracy") for case in DENSITIES]
        if all(map(math.isnan, accuracy)):
            continue
        shown = " | ".join("" if math.isnan(value) else f"{value:.1f} %" for value in accuracy)
        if epsilon:
            known, noise = (mean(final, epsilon, name) for name in ("known", "noise"))
            lines.append(f"| {epsilon:g} | {known:.1f} | {noise:.2f} | {shown} |")
        else:
            lines.append(f"| no privacy | | | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--search", action="store_true", help="choose the clip on held-out training images")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of results")
    parser.add_argument("--draw", type=Path, help="write the figure here, print the table, and run nothing")
    given = parser.parse_args()
    if given.draw:
        draw(read(given.out), given.draw)
        print(table(read(given.out)))
        return
    torch.set_num_threads(1)
    for asked in planned(given.search, given.seeds, read(given.out)):
        if key(asked) in {key(row) for row in read(given.out)}:
            continue
        row = carry_out(asked, given.device)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        with given.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{row['case']}, epsilon {row['epsilon']:g}, clip {row['clip']:g}: {row['accuracy']:.4f}", flush=True)


if __name__ == "__main__":
    main()
