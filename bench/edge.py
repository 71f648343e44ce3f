"""How much faster a client trains on a CPU when only the active weights are computed, and how much memory it takes.

    python bench/edge.py [--threads 1 2] [--repeat 7] [--only resnet18] [--json FILE]

Each case times whole training steps (forward, backward, SGD) at batch 32: PyTorch dense in both of its layouts, and our
kernels at each density. The subjects take turns, so that a busy machine slows all of them. A subject's time is its
median; the ratio is the faster dense layout's median over ours. Uniform masks have the same density in every layer.
`SPDST` has the layer densities of the CIFAR-10 runs in results/cifar10.jsonl. `sparseprop` is timed too where it can be
imported. The last part starts a process for each subject and compares their peak memory. Exit status 1 if a bar is
missed. Takes about ten minutes on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flashfl.core.exchange import Local
from flashfl.core.layout import Layout, tensors_of
from flashfl.core.mask import Mask, Weights
from flashfl.engine.heap import keep_freed_memory
from flashfl.engine.step import MaskedStep
from flashfl.models import build_model
from flashfl.native import SparseModel, kernels, status
from flashfl.paper.results import commit

BATCH, LR = 32, 0.01
IMAGES = {"resnet18": (3, 32, 32), "vgg16": (3, 32, 32), "mnistnet": (1, 28, 28), "leafcnn": (1, 28, 28)}
RESULTS = Path(__file__).parents[1] / "results" / "cifar10.jsonl"
Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model with a mask, and how many times faster than dense it should be."""

    model: str
    masks: str  # "uniform" or "SPDST"
    density: float
    bar: float


CASES = (
    *(Case("resnet18", "uniform", density, bar) for density, bar in ((0.1, 1.0), (0.05, 3.0), (0.01, 6.0))),
    *(Case("resnet18", "SPDST", density, bar) for density, bar in ((0.1, 1.0), (0.05, 1.5), (0.01, 3.0))),
    *(Case(model, "uniform", 0.05, 1.5) for model in ("vgg16", "mnistnet", "leafcnn")),
)


def mask_of(case: Case, layout: Layout) -> Mask:
    """A random mask with the case's layer densities."""
    densities = [case.density] * len(layout.prunable)
    if case.masks == "SPDST":
        place = f"cifar10/alpha1/spdst-d{case.density}-seed0"
        lines = (json.loads(line) for line in RESULTS.read_text().splitlines())
        densities = next(line["layer_densities"] for line in lines if line["place"] == place)
    torch.manual_seed(0)
    bits = torch.zeros(layout.prunable_size, dtype=torch.bool)
    for layer, density in zip(layout.prunable, densities, strict=True):
        count = max(1, round(density * layer.size))
        bits[layer.start + torch.randperm(layer.size)[:count]] = True
    return Mask(layout, bits)


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    return build_model(name)


def layout_of(module: nn.Module) -> Layout:
    return Layout.of(module, module.prunable)


def batch_of(case: Case) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(BATCH, *IMAGES[case.model]), torch.randint(0, 10, (BATCH,))


def masked_weights(case: Case) -> Weights:
    module = model_of(case.model)
    layout, own = layout_of(module), tensors_of(module)
    vector = torch.cat([own[x.name].detach().flatten().float() for x in layout.layers if x.kind != "fixed"])
    return Weights.masked(mask_of(case, layout), vector)


def dense_step(case: Case, form: torch.memory_format) -> Step:
    """PyTorch as it is: the zeros are multiplied."""
    module = model_of(case.model)
    layout_of(module).write(masked_weights(case).vector, module)
    module = module.to(memory_format=form).train()
    x, target = batch_of(case)
    x, optimizer = x.to(memory_format=form), torch.optim.SGD(module.parameters(), LR)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(x), target).backward()
        optimizer.step()

    return step


def sparse_step(case: Case) -> Step:
    weights, (x, target) = masked_weights(case), batch_of(case)
    model = SparseModel(model_of(case.model).train(), weights.layout, weights.mask, weights.packed())
    step, k = MaskedStep(model.vector[None, : len(model.grad)], weights.mask.active), weights.mask.active
    step.begin(Local(lr=LR))

    def train() -> None:
        model.grad.zero_()
        cross_entropy(model(x), target).backward()
        step(model.grad[None, :k], model.grad[None, k:])

    return train


def sparseprop_step(case: Case) -> Step:
    """SparseProp's modules in the place of the convolutions and linear layers it can replace."""
    from sparseprop.utils import swap_modules_with_sparse

    module = model_of(case.model)
    layout_of(module).write(masked_weights(case).vector, module)
    x, target = batch_of(case)
    with contextlib.redirect_stdout(io.StringIO()):
        module = swap_modules_with_sparse(module, x.shape, inplace=True).train()  # where it measures a gain
    optimizer = torch.optim.SGD(module.parameters(), LR)

    def step() -> None:
        optimizer.zero_grad()
        cross_entropy(module(x), target).backward()
        optimizer.step()

    return step


def subjects(case: Case) -> dict[str, Step]:
    found = {
        "contiguous": dense_step(case, torch.contiguous_format),
        "channels_last": dense_step(case, torch.channels_last),
        "ours": sparse_step(case),
    }
    if importlib.util.find_spec("sparseprop") is not None:
        found["sparseprop"] = sparseprop_step(case)
    return found


def measure(steps: dict[str, Step], repeat: int) -> dict[str, float]:
    """The median seconds of each subject; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeat + 1):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            if turn:  # the first is a warm-up
                times[name].append(time.perf_counter() - began)
    return {name: median(found) for name, found in times.items()}


def rows(cases: list[Case], threads: list[int], repeat: int) -> Iterator[dict[str, object]]:
    for count in threads:
        torch.set_num_threads(count)
        for case in cases:
            found = measure(subjects(case), repeat)
            best = min(found["contiguous"], found["channels_last"])
            row: dict[str, object] = {"model": case.model, "masks": case.masks, "density": case.density}
            row |= {"threads": count, "bar": case.bar, "ratio": best / found["ours"]}
            yield row | {f"{name} s": seconds for name, seconds in found.items()}


def peak(subject: str) -> int:
    """The peak memory in bytes of a process that trains ResNet18 at density 0.05."""
    command = [sys.executable, __file__, "--train", subject]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def train_alone(subject: str) -> None:
    torch.set_num_threads(1)
    case = next(case for case in CASES if (case.model, case.masks, case.density) == ("resnet18", "uniform", 0.05))
    step = sparse_step(case) if subject == "ours" else dense_step(case, getattr(torch, subject))
    for _ in range(3):
        step()
    # Not resource.getrusage, which counts what the parent had before this process was started.
    lines = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")))


def shown(row: dict[str, object]) -> str:
    return " | ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--only", choices=sorted(IMAGES), help="one model")
    parser.add_argument("--masks", choices=("uniform", "SPDST"), help="one kind of masks")
    parser.add_argument("--density", type=float, help="one density")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well, with commit and command")
    parser.add_argument("--train", help=argparse.SUPPRESS)  # what `peak` starts
    args = parser.parse_args()
    keep_freed_memory()  # as worker processes do
    if args.train:
        train_alone(args.train)
        return 0
    print(status())
    if kernels() is None:
        return 1
    found = []
    asked = (args.only, args.masks, args.density)
    cases = [
        case
        for case in CASES
        if all(a in (None, b) for a, b in zip(asked, (case.model, case.masks, case.density), strict=True))
    ]
    for row in rows(cases, args.threads, args.repeat):
        if not found:
            print(" | ".join(row))
        print(shown(row), flush=True)
        found.append(row)
    memory = {subject: peak(subject) for subject in ("contiguous_format", "channels_last", "ours")}
    print("peak memory, ResNet18 at 0.05:", ", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in memory.items()))
    if args.json:
        head = {
            "torch": torch.__version__,
            "commit": commit(),
            "command": "python bench/edge.py " + " ".join(sys.argv[1:]),
        }
        args.json.write_text(json.dumps(head | {"rows": found, "peak": memory}, indent=1) + "\n")
    missed = [row for row in found if row["ratio"] < row["bar"]]  # type: ignore[operator]
    larger = memory["ours"] >= min(memory["contiguous_format"], memory["channels_last"])
    for row in missed:
        print(f"missed: {row['model']} {row['masks']} {row['density']} is {row['ratio']:.2f}x, bar {row['bar']}x")
    return int(bool(missed) or larger)


if __name__ == "__main__":
    sys.exit(main())
