"""How many hands a round goes through: one steady JMWST round in which masks move, followed by a profiler.

    python bench/hops.py [--source PATH_TO_SRC ...] [--list]

Digits, four clients that all take part, on the CPU engine (one process), on lanes (on the CPU) and on Flower (the
in-process grid that tests use). The third round of training is counted, when every client holds a mask already; the
model is not evaluated in it, and no checkpoint is written. Each --source is another checkout's `src`; the same rule
counts them all. --list prints the hops.

A hop is a handover of what a round is about from one file to another: a distinct (file that calls, file and function
called) in which an argument or the result is such a payload, or is a list, a plain dataclass or a job that holds one.
Payloads: State, Order, Update, Sums, Outcome, the record of the round, messages and their bytes, models and masks
(Weights, Mask, and tensors with a row of at least ROW numbers). An iterator hands over what it yields.

Left out are formats and numeric libraries, which take a payload and give it straight back: `wire`, `flower/records.py`,
`sparsity`, `kernels`, `native`, `measure`, `data`, and core's plain types. But `wire/ledger.py` and `wire/trust.py` of
the first design count, as what they do is in `engine` today. Flower itself and the grid are looked through: a call out
of them counts for the file that called them.

`shared`: hops that all three paths have. `files`: those that a reader opens to follow the path.
`calls`: distinct pairs of functions with a call between them, whatever it hands over, also within a file.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

HERE = Path(__file__).resolve().parent.parent
ENGINES = ("CPU engine", "lanes", "Flower")
ROW = 1000  # numbers; the shortest message here carries more, and no batch of data has so long a row
ROUND = 3  # the round of training that is counted
NAMES = {"State", "Order", "Update", "Sums", "Outcome", "Record", "RoundRecord"}
NAMES |= {"Weights", "Mask", "Message", "Encoded"}
COUNTED = ("core/loop.py", "core/method.py", "core/engine.py", "wire/ledger.py", "wire/trust.py")
LEFT_OUT = ("core/", "wire/", "flower/records.py", "sparsity/", "kernels/", "native/", "measure/", "data/")
SEEN_THROUGH = ("flower/testing.py", "flower/inprocess.py")


# -- what is a payload ----------------------------------------------------------------------------------------------


def holds_payload(x: object, depth: int = 3) -> bool:
    """Whether this is a payload, or plain data that holds one."""
    kind = type(x)
    if isinstance(x, torch.Tensor | np.ndarray):
        return x.ndim > 0 and x.shape[-1] >= ROW and str(x.dtype).removeprefix("torch.") != "int64"
    if isinstance(x, bytes | bytearray | memoryview):
        return len(x) >= ROW
    if kind.__module__.startswith("flwr"):
        return _of_flower(x, kind.__name__)
    if kind.__name__ in NAMES and kind.__module__.startswith("flashfl"):
        return True
    if not depth:
        return False
    if isinstance(x, functools.partial):
        return any(holds_payload(one, depth - 1) for one in (*x.args, *x.keywords.values()))
    if isinstance(x, dict):
        record = "cohort" in x and "loss" in x  # a line of the results file
        return record or any(holds_payload(one, depth - 1) for one in list(x.values())[:8])
    if isinstance(x, list | tuple):
        return any(holds_payload(one, depth - 1) for one in x[:8])
    if dataclasses.is_dataclass(kind):
        return any(holds_payload(getattr(x, f.name, None), depth - 1) for f in dataclasses.fields(kind))
    return False


def _of_flower(x: Any, name: str) -> bool:
    """Whether a message, a record or an array of Flower carries bytes of ours."""
    if name == "Message":
        return bool(x.has_content()) and holds_payload(x.content)
    if name == "Array":
        return len(x.data) >= ROW
    return name in ("RecordDict", "ArrayRecord") and any(holds_payload(one) for one in x.values())


# -- the profiler ---------------------------------------------------------------------------------------------------


class Hops:
    """Notes calls between the files of a package."""

    def __init__(self, package: Path) -> None:
        self.root, self.hops, self.calls = f"{package}/", set[tuple[str, str, str]](), set[tuple[str, str, str, str]]()

    def file(self, frame: FrameType) -> str:
        """The file of a frame inside the package; empty if it is elsewhere, or seen through."""
        path = frame.f_code.co_filename
        name = path.removeprefix(self.root) if path.startswith(self.root) else ""
        return "" if name in SEEN_THROUGH else name

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event not in ("call", "return") or not (callee := self.file(frame)):
            return
        caller = frame.f_back
        while caller is not None and not self.file(caller):
            caller = caller.f_back
        if caller is None or not (counts(here := self.file(caller)) and counts(callee)):
            return
        calls, called = function(caller), function(frame)
        if event == "call" and (here, calls) != (callee, called):
            self.calls.add((here, calls, callee, called))
        if here != callee and (holds_payload(arg) if event == "return" else self._given(frame)):
            self.hops.add((here, callee, called))

    def _given(self, frame: FrameType) -> bool:
        """Whether an argument of this call holds a payload. An iterator's arguments came from whoever made it."""
        code, values = frame.f_code, frame.f_locals
        if code.co_flags & inspect.CO_GENERATOR:
            return False
        count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
        return any(holds_payload(values.get(name)) for name in code.co_varnames[:count] if name not in ("self", "cls"))


def function(frame: FrameType) -> str:
    """The name of a frame's function. A comprehension or a lambda belongs to the function around it."""
    return frame.f_code.co_qualname.partition(".<locals>.<")[0]


def counts(file: str) -> bool:
    return file in COUNTED or not file.startswith(LEFT_OUT)


# -- one round ------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.Conv2d(32, 64, 3)
        self.last = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        return self.last(self.second(x).relu().mean((2, 3)))


def measure(engine: str) -> Hops:
    """Run a few rounds and follow one of them."""
    import flashfl as fl

    with np.load(HERE / "src/flashfl/data/loaders/digits.npz") as file:
        x = torch.from_numpy(file["images"].astype(np.float32).reshape(-1, 1, 8, 8) / 16)
        y = torch.from_numpy(file["labels"].astype(np.int64))
    shares = [(x[i : i + 48], y[i : i + 48]) for i in range(0, 4 * 48, 48)]
    task = fl.Task(Net, shares, (x[-100:], y[-100:]))
    method = fl.JMWST(density=0.2, warmup_clients=2, warmup_epochs=1)
    config = {"rounds": ROUND + 1, "per_round": 4, "batch": 16, "eval_every": 100, "workers": 1, "checkpoint_every": 0}
    hops, done = Hops(Path(fl.__file__).parent), 0

    def watch(state: object, record: object) -> None:
        nonlocal done
        done += 1  # the round of the first phase is one more
        sys.setprofile(hops if done == ROUND else None)

    with tempfile.TemporaryDirectory() as folder:
        run(engine, method, task, fl.TrainConfig(**config, device="cpu"), Path(folder), watch)
    return hops


def run(engine: str, method: Any, task: Any, config: Any, folder: Path, watch: Callable[..., None]) -> None:
    """Both designs have these three ways to run; their names differ."""
    if engine == "Flower":
        from flashfl.flower import FlashStrategy, FlowerOptions, client_app

        grid: Any = _module("flower.testing", "flower.inprocess").InProcessGrid({})
        for client in range(len(task.train)):
            grid.join(1000 + client, client_app(task), {"partition-id": client})
        options = FlowerOptions(clients=len(task.train), wait=60.0, timeout=60.0, poll=0.01)
        FlashStrategy(method, task, config, options, folder=folder, watch=watch, quiet=True).start(grid)
        return
    simulate = _module("run.simulate", "run.runner")
    if engine == "lanes":
        simulate.make_engine = _lanes
    simulate.simulate(method, task, train=config, folder=folder, watch=watch)


def _lanes(task: Any, config: Any, folder: Path) -> Any:
    """The GPU engine on the CPU."""
    found = _module("engine.gpu", "engine.cuda")
    if hasattr(found, "LaneEngine"):
        return found.LaneEngine(task, "cpu", "fp32", crew="lanes", folder=folder)
    return found.GPUEngine(task, dataclasses.replace(config, crew="lanes"), "cpu", folder)


def _module(*names: str) -> Any:
    """The first of these modules of the package that there is."""
    for name in names:
        try:
            return importlib.import_module(f"flashfl.{name}")
        except ModuleNotFoundError:
            continue
    raise SystemExit(f"this version has none of {', '.join(names)}")


# -- figures --------------------------------------------------------------------------------------------------------


def figures(hops: Hops) -> dict[str, Any]:
    rows = sorted(f"{here} -> {there}:{called}" for here, there, called in hops.hops)
    files = {file for hop in hops.hops for file in hop[:2]}
    return {"hops": rows, "files": len(files), "calls": len(hops.calls)}


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """One row for each source, as in LOG.md."""
    lines = [
        "| source | hops: shared, then CPU, lanes, Flower | files: CPU, lanes, Flower | calls: CPU, lanes, Flower |",
        "|---|---|---|---|",
    ]
    for source, engines in found.items():
        shared = set.intersection(*(set(one["hops"]) for one in engines.values()))
        inside = (str(len(engines[name]["hops"]) - len(shared)) for name in ENGINES)
        files, calls = (", ".join(str(engines[name][what]) for name in ENGINES) for what in ("files", "calls"))
        lines.append(f"| {source} | {len(shared)}, {', '.join(inside)} | {files} | {calls} |")
    return "\n".join(lines)


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("--source", action="append", help="the `src` folder to measure; may be given several times")
    asked.add_argument("--list", action="store_true", help="print the hops too")
    asked.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)  # measure here, print JSON
    given = asked.parse_args()
    sources = given.source or [str(HERE / "src")]
    if given.engine:
        sys.path.insert(0, str(Path(sources[0]).resolve()))
        torch.set_num_threads(1)
        print(json.dumps(figures(measure(given.engine))))
        return
    found: dict[str, dict[str, Any]] = {}
    for source in sources:
        for engine in ENGINES:  # each in a process of its own, as versions of one package cannot share one
            command = [sys.executable, __file__, "--source", source, "--engine", engine]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            found.setdefault(source, {})[engine] = json.loads(printed.splitlines()[-1])
    print(table(found))
    if given.list:
        for source, engines in found.items():
            for engine, one in engines.items():
                print(f"\n{source}, {engine}", *one["hops"], sep="\n  ")


if __name__ == "__main__":
    main()
