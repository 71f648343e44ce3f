"""Whether clients of a model can be batched into one computation: what its layers, its outputs and its loss allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ...data.sources import Source
from ...data.task import Task

_CLIENTS, _SAMPLES = 16, 32  # at most so many clients are tried, and samples of each
_MIXING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def no_mixing_layers(module: nn.Module) -> bool:
    """Whether the model has neither BatchNorm nor dropout layers."""
    return not any(isinstance(m, _MIXING) for m in module.modules())


def why_not_batched(task: Task, module: nn.Module, data: Sequence[Source], capacity: int, device: torch.device) -> str:
    """Why these clients cannot be batched; empty if they can."""
    if not no_mixing_layers(module):
        return "the model has BatchNorm or dropout layers"
    if max(map(len, data)) > capacity:
        return f"a client has more than {capacity} samples"
    try:
        return _why_not(task, module, data[:: -(-len(data) // _CLIENTS)], device)
    except (AttributeError, TypeError, LookupError, RuntimeError, ValueError) as error:
        return f"the model or its loss cannot be tried on some samples ({str(error).splitlines()[0]})"


@torch.no_grad()
def _why_not(task: Task, module: nn.Module, data: Sequence[Source], device: torch.device) -> str:
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
        return "the model's output must be a tensor and depend only on its own sample"
    each = [task.loss(whole[i : i + 1], target[i : i + 1]) for i in fine.nonzero().flatten().tolist()]
    if each and not torch.isclose(torch.stack(each).mean(), task.loss(whole[fine], target[fine]), rtol=1e-3, atol=1e-6):
        return "the loss of a batch is not the mean of its samples' losses"
    return ""
