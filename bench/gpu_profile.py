"""Where a round's time goes on one GPU: wall time of each part, waiting for the device around it.

python bench/gpu_profile.py [--case b]
python bench/gpu_profile.py --waits      # instead: where a round waits for the device, and how often
python bench/gpu_profile.py --counting   # instead: what it costs to count every message's bytes
python bench/gpu_profile.py --kernels    # instead: which kernels take a round's device time
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_round import round_of, task_of, timed

from flashfl import aggregate
from flashfl.core.exchange import Traffic
from flashfl.engine import counting as accounting
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.gpu.batched import Batched
from flashfl.engine.gpu.lanes import Lanes
from flashfl.engine.gpu.stack import Stack
from flashfl.methods import jmwst
from flashfl.models import norm
from flashfl.sparsity import rules
from flashfl.sparsity.rules import PruneRegrow

SPENT: dict[str, float] = defaultdict(float)


def watch(owner: Any, name: str, label: str) -> None:
    """Replace a function by one that adds up the time it takes, device work included."""
    inner = getattr(owner, name)

    def timed(*args: Any, **more: Any) -> Any:
        torch.cuda.synchronize()
        began = time.perf_counter()
        result = inner(*args, **more)
        torch.cuda.synchronize()
        SPENT[label] += time.perf_counter() - began
        return result

    setattr(owner, name, timed)


def waits(work: Callable[[], Any]) -> None:
    """Every place at which `work` waits for the device, found by torch itself."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        work()
        torch.cuda.set_sync_debug_mode("default")
    found = [each for each in found if "called a synchronizing" in str(each.message)]  # not that the mode is new
    places = Counter(f"{Path(each.filename).name}:{each.lineno}" for each in found)
    print(f"{sum(places.values())} waits in one round")
    for place, count in places.most_common():
        print(f"  {count:4}  {place}")


def counting(work: Callable[[], Any], rounds: int) -> None:
    """Rounds with and without counting, in turn: sizes of masks on the device, of messages on the host."""
    ways = {True: (accounting.mask_sizes, accounting.size_with), False: (_no_sizes, lambda *_: Traffic())}
    spent: dict[bool, list[float]] = {True: [], False: []}
    for at in range(2 * rounds):
        counts = at % 2 == 0
        accounting.mask_sizes, accounting.size_with = ways[counts]  # type: ignore[assignment]
        spent[counts].append(timed(work, 1))
    counted, plain = statistics.median(spent[True]), statistics.median(spent[False])
    print(f"{1000 * counted:.2f} ms a round, {1000 * plain:.2f} without counting: {100 * (counted / plain - 1):+.1f} %")


def kernels(work: Callable[[], Any], most: int = 25) -> None:
    """The kernels of one round by the time they take, added up over streams: lanes overlap, so it exceeds the wall."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    found = sorted(trace.key_averages(), key=lambda each: -each.self_device_time_total)
    total = sum(each.self_device_time_total for each in found)
    print(f"{sum(each.count for each in found)} kernels and copies, {total / 1000:.1f} ms over all streams")
    for each in found[:most]:
        print(f"  {each.self_device_time_total / 1000:8.2f} ms  {each.count:6}  {each.key[:110]}")


def _no_sizes(layout: Any, bits: torch.Tensor, bases: Any = ()) -> torch.Tensor:
    rows = max(len(bits), *(len(base) for base in bases)) if bases else len(bits)
    return torch.zeros(rows, dtype=torch.int64, device=bits.device)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default="b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--counting", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--plain", action="store_true", help="BatchNorm and ReLU as torch does them")
    parser.add_argument("--compile", action="store_true", help="compile the lanes' forward pass with torch.compile")
    args = parser.parse_args()
    norm.fused = not args.plain
    task, config, method = task_of(args.case)
    engine = GPUEngine(task, replace(config, compile=args.compile))
    one = round_of(engine, task, config, method)
    for _ in range(2):
        one()
    if args.waits:
        waits(one)
        return
    if args.kernels:
        kernels(one)
        return
    if args.counting:
        counting(one, 5 * args.rounds)
        return
    parts = [
        (Lanes, "advance", "advance (training steps)"), (Lanes, "begin", "begin"),
        (Batched, "advance", "advance (training steps)"), (Batched, "_stage", "  stage"),
        (PruneRegrow, "move", "move"), (PruneRegrow, "_shares", "  shares"), (rules, "hash_rows", "  hash"),
        (rules, "lowest_by_layer", "  select"), (Stack, "load", "stack load"), (Stack, "read", "stack read"),
        (Stack, "logical", "stack logical"), (accounting, "mask_sizes", "count mask bytes"),
        (accounting.Counting, "received", "received"), (accounting.Counting, "close", "close"),
        (accounting.Counting, "_add", "  add"),
        (aggregate, "fedavg", "average"), (jmwst, "top_mask", "top mask"),
    ]  # fmt: skip
    for owner, name, label in parts:
        if hasattr(owner, name):
            watch(owner, name, label)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(args.rounds):
        one()
    torch.cuda.synchronize()
    total = (time.perf_counter() - began) / args.rounds
    print(f"case {args.case}: {1000 * total:.1f} ms a round (waiting around every part makes it slower)")
    for label, seconds in SPENT.items():
        print(f"  {label:<28} {1000 * seconds / args.rounds:8.2f} ms")


if __name__ == "__main__":
    main()
