"""Which crew trains clients side by side on a GPU, and how many of them at a time. It is chosen once a run.

A crew is `lanes.Lanes` or `batched.Batched`. The clients' weights lie in the first rows of a stack, and all of them
have the same local settings. Clients can be batched into one computation if the model's layers, its outputs and its
loss allow it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from ...core.client import Clients, overrides
from ...core.errors import ConfigError, warn
from ...data.sources import Source
from ...data.task import Task
from ..settings import EngineSettings
from ..work import Work
from .batched import Batched, convolutions
from .lanes import Lanes
from .stack import Stack

Crew = Lanes | Batched
_SMALL = 4_000_000  # weights; in larger models a step is long enough that lanes never wait for launches
_CLIENTS, _SAMPLES = 16, 32  # at most so many clients are tried, and samples of each
_MIXING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def make_stack(
    task: Task, data: Sequence[Source], module: nn.Module, config: EngineSettings, device: torch.device,
    per_round: int, capacity: int, half: bool,
) -> Stack:  # fmt: skip
    """Room for as many clients at a time as asked for, else for those of a round; fewer if memory is short."""
    cuda, size = device.type == "cuda", task.layout.size
    small = size < _SMALL and _no_mixing_layers(module)
    wanted = config.lanes or min(64 if small and config.crew != "lanes" else 16, per_round)
    if cuda and not config.lanes and not config.deterministic:
        free = torch.cuda.mem_get_info(device)[0]
        sample = sum(x[0].nbytes for x in data[0].fetch(torch.zeros(1, dtype=torch.int64))[0])
        each = 40 * size + capacity * sample + (1 << 28)
        wanted = max(1, min(wanted, int(free * 0.5 / each)))
    return Stack(task.layout, wanted, device, channels_last=cuda, half=half)


def choose_crew(
    task: Task, data: Sequence[Source], module: nn.Module, config: EngineSettings, stack: Stack, capacity: int,
    works: Sequence[Work], opened: Clients | None,
) -> Crew:  # fmt: skip
    """Lanes or batched: as the setting says, else whichever is faster for these clients."""
    cuda, asked = stack.device.type == "cuda", config.crew
    # Small models may be faster batched. The clock decides, which is not deterministic.
    small = cuda and task.layout.size < _SMALL and not config.deterministic
    why_not = "lanes are at least as fast"
    if asked == "batched" or (asked == "auto" and small):
        why_not = why_one_by_one(works[0])
        why_not = why_not or _why_not_batched(task, module, data, capacity, stack.device)
    if asked == "batched" and why_not:
        raise ConfigError(f"crew = 'batched': {why_not}. Use crew = 'lanes' or 'auto'.")
    shared = (task, stack, data, capacity)
    crews: list[Crew] = []
    if not why_not:
        crews.append(Batched(*shared))
        if cuda and convolutions(module):
            crews.append(Batched(*shared, products=True))
    if asked != "batched":
        crews.append(Lanes(*shared, config.compile))
    return crews[0] if len(crews) == 1 else faster(crews, works, opened)


def why_one_by_one(work: Work) -> str:
    """Why clients with this work cannot be batched, whatever the model is; empty if they can."""
    whole = [type(part).__name__ for part in work.local.parts if overrides(part, "inputs")]
    return f"the part {whole[0]} needs the inputs of a whole batch of one client" if whole else ""


def faster(crews: Sequence[Crew], works: Sequence[Work], opened: Clients | None = None) -> Crew:
    """The crew that takes the least time for an epoch of these clients. The stack holds garbage afterwards."""
    times: dict[float, Crew] = {}
    for crew in crews:
        try:
            crew.prepare(works, opened)
            for _ in range(2):
                _wait(crew.device)
                began = time.perf_counter()
                crew.begin(works, opened)
                crew.advance(works, [0] * len(works), [work.batches for work in works])
                _wait(crew.device)
        except Exception as error:  # a model that cannot be batched (an `if` on a tensor, say) can still run in lanes
            if crew is crews[-1] and not times:
                raise
            warn(
                f"training with crew = {type(crew).__name__.lower()!r} failed on this GPU "
                f"({str(error).splitlines()[0]}), so flashfl trains in another way. You need not do anything, but "
                "training may be slower."
            )
            continue
        times[time.perf_counter() - began] = crew
    return times[min(times)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _no_mixing_layers(module: nn.Module) -> bool:
    """Whether the model has neither BatchNorm nor dropout layers."""
    return not any(isinstance(m, _MIXING) for m in module.modules())


def _why_not_batched(task: Task, module: nn.Module, data: Sequence[Source], capacity: int, device: torch.device) -> str:
    """Why these clients cannot be batched; empty if they can."""
    if not _no_mixing_layers(module):
        return "the model has BatchNorm or dropout layers"
    if max(map(len, data)) > capacity:
        return f"a client has more than {capacity} samples"
    try:
        return _why_samples_mix(task, module, data[:: -(-len(data) // _CLIENTS)], device)
    except (AttributeError, TypeError, LookupError, RuntimeError, ValueError) as error:
        return f"the model or its loss failed on a few test inputs ({str(error).splitlines()[0]})"


@torch.no_grad()
def _why_samples_mix(task: Task, module: nn.Module, data: Sequence[Source], device: torch.device) -> str:
    """Try some samples. Layers' types do not show everything.

    A model may take a mean over the batch, draw numbers, or count its calls. A loss with class weights or ignored
    labels is not the mean over samples.
    """
    some = [d.fetch(torch.arange(min(_SAMPLES, len(d)), device=device)) for d in data]
    inputs, target = [torch.cat(x) for x in zip(*(x for x, _ in some), strict=True)], torch.cat([y for _, y in some])
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train()
    few = max(1, len(target) // 2)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        whole, part = module(*inputs), module(*(x[:few] for x in inputs))
    fine = whole.flatten(1).isfinite().all(1)  # other samples say nothing
    error = (whole[:few] - part)[fine[:few]].abs()
    same = all(torch.equal(before[name], buffer) for name, buffer in module.named_buffers())
    if not same or (len(error) and bool(error.max() > 1e-2 * whole[fine].abs().max())):
        return (
            "the model's output for one sample changes with the other samples of the batch, or the model draws random "
            "numbers or changes its buffers"
        )
    each = [task.loss(whole[i : i + 1], target[i : i + 1]) for i in fine.nonzero().flatten().tolist()]
    if each and not torch.isclose(torch.stack(each).mean(), task.loss(whole[fine], target[fine]), rtol=1e-3, atol=1e-6):
        return "the loss of a batch is not the mean of its samples' losses"
    return ""
