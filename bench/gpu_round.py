"""Seconds a round on one GPU: this engine beside the naive way, in one run.

    python bench/gpu_round.py [--cases a,b,c,d] [--rounds 5] [--naive-rounds 2] [--compile] [--plain] [--deterministic]

(a) ResNet18, 10 clients x 500 images of 32x32, batch 32, frozen masks; (b) the same with masks that move every round;
(c) a CNN of two convolutions, 50 clients x 50 images of 28x28, batch 10; (d) MNISTNet, 10 clients x 600 images, batch
32. "Naive" is what most simulators do: one client after another, eager, a plain optimizer, masks applied parameter by
parameter, in the same precision. The floor is the larger of the counted arithmetic over 790 TFLOP/s and the counted
memory traffic over 4.0 TB/s (measured ceilings of one H200). bench/README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import flashfl as fl
from flashfl.core.rng import fold, permutation
from flashfl.core.state import State
from flashfl.data.augment import CropFlip, Normalise
from flashfl.data.sources import Arrays, Subset
from flashfl.engine.gpu import GPUEngine
from flashfl.models import build_model, norm
from flashfl.run.config import TrainConfig, plan_of

FLOPS, BANDWIDTH = 790e12, 4.0e12


class SmallCNN(nn.Module):
    """Two 3x3 convolutions (32 and 64 filters) and a hidden layer of 128."""

    prunable = "body"

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 49, 128), nn.ReLU(), nn.Linear(128, 10),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def images(count: int, shape: tuple[int, int, int], augment: bool) -> Arrays:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (count, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (count,), generator=generator)

    channels = shape[0]
    prepare = Normalise((0.5,) * channels, (0.25,) * channels)
    return Arrays((x,), y, prepare, CropFlip() if augment else None)


def task_of(case: str) -> tuple[fl.Task, TrainConfig, fl.Method]:
    clients, each, batch, shape = {
        "a": (10, 500, 32, (3, 32, 32)), "b": (10, 500, 32, (3, 32, 32)), "c": (50, 50, 10, (1, 28, 28)),
        "d": (10, 600, 32, (1, 28, 28)),
    }[case]  # fmt: skip
    data = images(clients * each, shape, case in "ab")
    shares = [Subset(data, torch.arange(i * each, (i + 1) * each)) for i in range(clients)]
    model: Callable[[], nn.Module] = (
        SmallCNN if case == "c" else lambda: build_model("resnet18" if case in "ab" else "mnistnet")
    )
    task = fl.Task(model, shares, Subset(data, torch.arange(100)), name=case)
    config = TrainConfig(rounds=1000, per_round=clients, batch=batch)
    return task, config, fl.JMWST(0.05, warmup_clients=0) if case == "b" else fl.PDST(0.05)


def naive_round(task: fl.Task, config: TrainConfig, method: fl.Method, state: State, shares: list[Any]) -> State:
    """One client after another, eagerly: what a round costs without an engine."""
    layout, device = task.layout, state.weights.vector.device
    sums = torch.zeros(layout.size, dtype=torch.float64, device=device)
    named = {layer.name: layer for layer in layout.layers}
    for client, order in method.orders(state, task.clients):
        local = order.local
        module = naive_round.module  # type: ignore[attr-defined]
        layout.write(order.weights.vector, module)
        mask = {x.name: order.weights.mask.bits[x.start : x.stop].view(x.shape) for x in layout.prunable}
        optimizer = torch.optim.SGD(module.parameters(), lr=local.lr)
        order_of = permutation(fold(order.key, "shuffle", 0), client.n, device)
        batches = -(-client.n // local.batch)
        moments = local.adapt.moments(1, batches) if local.adapt else {}
        module.train()
        for b in range(batches):
            inputs, target = shares[client.id].fetch(
                order_of[b * local.batch : (b + 1) * local.batch], fold(order.key, "augment", 0), b * local.batch
            )
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = task.loss(module(*inputs), target)
            loss.backward()
            for name, p in module.named_parameters():
                if name in mask:
                    p.grad.mul_(mask[name])  # type: ignore[union-attr]
            optimizer.step()
            if b + 1 in moments:
                _naive_move(module, named, mask, moments[b + 1])
        with torch.no_grad():
            state_dict = module.state_dict()
            for x in layout.travelling:
                sums[x.start : x.stop].add_(state_dict[x.name].reshape(-1), alpha=client.n)
    return replace(state, weights=fl.Weights(state.mask, (sums / sum(c.n for c in task.clients)).float()))


def _naive_move(module: nn.Module, named: dict[str, Any], mask: dict[str, Any], rate: float) -> None:
    """Prune and regrow layer by layer with sorts and Python numbers, as usual scripts do."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if name in mask:
                flat, on = p.data.view(-1), mask[name].view(-1).clone()
                drop = int(on.sum().item() * rate) + 1
                size = flat.abs().masked_fill(~on, float("inf"))
                lost = size.argsort()[:drop]
                free = (~on).nonzero().squeeze(1)
                new = free[torch.randperm(len(free), device=free.device)[:drop]]
                on[lost] = False
                on[new] = True
                flat *= on
                mask[name] = on.view_as(mask[name])


def floor_seconds(task: fl.Task, config: TrainConfig) -> float:
    """Counted arithmetic and memory traffic of a round: activations in bf16, weights once a step."""
    module = task.build().cuda().eval()
    macs = elements = 0

    def hook(m: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        nonlocal macs, elements
        elements += output.numel()
        if isinstance(m, nn.Conv2d | nn.Linear):
            macs += output.numel() * m.weight[0].numel()

    leaves = [m for m in module.modules() if not list(m.children())]
    handles = [m.register_forward_hook(hook) for m in leaves]
    inputs, _ = task.train[0].to("cuda").fetch(torch.arange(1, device="cuda"))
    module(*inputs)
    for handle in handles:
        handle.remove()
    samples = sum(c.n for c in task.clients)
    steps = sum(-(-c.n // config.batch) for c in task.clients)
    arithmetic = 3 * 2 * macs * samples / FLOPS
    # Every layer's output is written once and read once going forward, and its gradient likewise going back.
    activations = 4 * 2 * elements * samples
    weights = steps * task.layout.trained_size * (2 + 2 + 2 + 4 + 4)
    return max(arithmetic, (activations + weights) / BANDWIDTH)


def timed(work: Callable[[], None], rounds: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / rounds


def round_of(engine: GPUEngine, task: fl.Task, config: TrainConfig, method: fl.Method) -> Callable[[], None]:
    """A function that carries out one more round of everybody, from the method's initial state on."""
    plan = plan_of(config, task, len(task.clients), engine.device)
    everyone = method.admit(task.clients, plan.key)
    box = [method.init(plan)]

    def one() -> None:
        outcome = engine.train(box[0], method.orders(box[0], everyone))
        box[0] = method.aggregate(box[0], outcome.sums)

    return one


def measure(case: str, rounds: int, naive_rounds: int, **options: Any) -> dict[str, Any]:
    task, config, method = task_of(case)
    engine = GPUEngine(task, replace(config, **options))
    ours = round_of(engine, task, config, method)
    for _ in range(2):
        ours()
    mine = timed(ours, rounds)
    state = [method.init(plan_of(config, task, len(task.clients), engine.device))]
    naive_round.module = task.build().cuda()  # type: ignore[attr-defined]

    def theirs() -> None:
        state[0] = naive_round(task, config, method, state[0], engine.train_data)

    theirs()
    plain = timed(theirs, naive_rounds)
    floor = floor_seconds(task, config)
    ratios = {"ratio": plain / mine, "floor": floor, "of_floor": floor / mine}
    return {"case": case, "naive": plain, "ours": mine, **ratios, **options}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="a,b,c,d")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--naive-rounds", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="lanes run code made by torch.compile")
    parser.add_argument("--plain", action="store_true", help="BatchNorm and ReLU as torch does them")
    parser.add_argument("--deterministic", action="store_true", help="the same bits every time")
    parser.add_argument("--json", type=Path, help="also write the figures here, with machine, commit and command")
    args = parser.parse_args()
    norm.fused = not args.plain
    options = {"compile": args.compile, "deterministic": args.deterministic}
    rows = []
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("case  naive s/round  ours s/round  ratio  floor s/round  share of floor")
    for case in args.cases.split(","):
        row = measure(case, args.rounds, args.naive_rounds, **options)
        rows.append(row)
        print(
            f"  {case}   {row['naive']:10.4f}   {row['ours']:10.4f}   {row['ratio']:5.1f}   {row['floor']:10.4f}"
            f"   {100 * row['of_floor']:8.1f} %",
            flush=True,
        )
        torch.cuda.empty_cache()
    if args.json:
        about = {
            "machine": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "commit": os.environ.get("FLASHFL_COMMIT", ""),
            "command": " ".join(["python", "bench/gpu_round.py", *sys.argv[1:]]),
            "cases": rows,
        }
        args.json.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    main()
