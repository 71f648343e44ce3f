"""Does a client cost more in a large cohort? Time a client on one GPU, with 1, 20 and 100 times as many as lanes.

    python bench/gpu_scale.py [--cases a,b,c] [--times 1,20,100]

The models and methods are those of gpu_round.py, with few images a client, so that what grows with the cohort and not
with the training would show: (a) ResNet18 with 64 images and frozen masks, (b) the same with masks that move, (c) two
convolutions with 20 images. What is printed last is the cost of a client beside that of the smallest cohort: at most 1.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from gpu_round import images, round_of, task_of, timed

import flashfl as fl
from flashfl.data.sources import Subset
from flashfl.engine.gpu import GPUEngine
from flashfl.run.config import TrainConfig

LANES = {"a": 10, "b": 10, "c": 50}
EACH = {"a": 64, "b": 64, "c": 20}


def measure(case: str, times: int, rounds: int) -> dict[str, Any]:
    like, config, method = task_of(case)
    clients, each = LANES[case] * times, EACH[case]
    shape = (1, 28, 28) if case == "c" else (3, 32, 32)
    data = images(1000, shape, case in "ab")
    # Images are shared round robin: memory for them is not what is measured.
    shares = [Subset(data, (torch.arange(each) + i * each) % 1000) for i in range(clients)]
    task = fl.Task(like.build, shares, Subset(data, torch.arange(100)), name=f"{case}x{times}")
    settings = TrainConfig(rounds=1000, per_round=clients, batch=config.batch, lanes=LANES[case])
    engine = GPUEngine(task, settings)
    one = round_of(engine, task, settings, method)
    one()
    torch.cuda.reset_peak_memory_stats()
    seconds = timed(one, rounds)
    peak = torch.cuda.max_memory_allocated()
    return {"case": case, "clients": clients, "seconds": seconds, "each": seconds / clients, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="a,b,c")
    parser.add_argument("--times", default="1,20,100")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("case  clients  s/round  ms/client  GPU memory  beside the smallest")
    for case in args.cases.split(","):
        base = 0.0
        for times in map(int, args.times.split(",")):
            row = measure(case, times, 10 if times == 1 else 2)
            base = base or row["each"]
            rows.append({**row, "ratio": row["each"] / base})
            print(
                f"  {case}   {row['clients']:7}  {row['seconds']:7.3f}  {1000 * row['each']:9.3f}"
                f"  {row['peak'] / 1e9:7.1f} GB  {row['each'] / base:8.2f}",
                flush=True,
            )
            torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
