"""Whether clients of a model can be batched into one computation: what its layers, its outputs and its loss allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ...data.sources import Arrays, Source, below
from ...data.task import Task

_LABELS = 64  # at most so many different labels are tried
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
    inputs, target = _various(data, device)
    if not _sees_samples_alone(module, inputs):
        return "the model's output must be a tensor and depend only on its own sample"
    if not _is_mean_of_samples(task.loss, module, inputs, target):
        return "the loss of a batch is not the mean of its samples' losses"
    return ""


def _various(sources: Sequence[Source], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Samples unlike each other: some of the first clients', and one of each label if labels can be read."""
    chosen = [(data, list(range(min(4, len(data))))) for data in sources[:8]]
    seen: set[int] = set()
    for data in sources:
        labels = _labels(data)
        first = dict(zip(reversed(labels), range(len(labels) - 1, -1, -1), strict=True))
        new = set(list(set(first) - seen)[: _LABELS - len(seen)])
        if new:
            chosen.append((data, sorted(first[label] for label in new)))
            seen |= new
    some = [data.fetch(torch.tensor(index, device=device)) for data, index in chosen]
    return [torch.cat(each) for each in zip(*(x for x, _ in some), strict=True)], torch.cat([y for _, y in some])


def _labels(data: Source) -> list[int]:
    """A source's labels (the lowest of a sample with several); none if they are not integers or not in memory."""
    held, index = below(data, torch.arange(len(data)))
    if not isinstance(held, Arrays) or held.target.is_floating_point() or held.target.is_complex():
        return []
    target = held.target[index.to(held.target.device)]
    found: list[int] = target.flatten(1).amin(1).tolist() if target.dim() > 1 and target.numel() else target.tolist()
    return found if target.numel() else []


@torch.no_grad()
def _sees_samples_alone(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether a sample's output depends on nothing else: not on its batch, on chance, or on earlier calls.

    Layers' types do not show it: a model may take a mean over the batch, draw numbers, or count its calls.
    """
    kept = {name: buffer.clone() for name, buffer in module.named_buffers()}
    module.train()
    few = max(1, len(inputs[0]) // 2)
    try:
        with torch.random.fork_rng(devices=[inputs[0].device] if inputs[0].is_cuda else []):
            whole, part = module(*inputs)[:few], module(*(x[:few] for x in inputs))
        error = (whole - part).abs()[whole.isfinite() & part.isfinite()]
        alike = not len(error) or bool(error.max() <= 1e-2 * whole[whole.isfinite()].abs().max())
        now = dict(module.named_buffers())
        return alike and all(torch.equal(b.nan_to_num(), now[name].nan_to_num()) for name, b in kept.items())
    except (AttributeError, TypeError, LookupError, RuntimeError, ValueError):  # not a tensor of samples, odd buffers
        return False
    finally:
        for name, buffer in module.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])


@torch.no_grad()
def _is_mean_of_samples(
    loss: Callable[[Tensor, Tensor], Tensor], module: nn.Module, inputs: Sequence[Tensor], target: Tensor
) -> bool:
    """Whether a batch's loss is the mean of its samples' losses. Class weights or ignored labels change that."""
    output = module(*inputs)
    try:
        fine = output.flatten(1).isfinite().all(1)  # other samples say nothing about the loss
        output, target = output[fine], target[fine]
        if not len(target):
            return True
        single = torch.stack([loss(output[i : i + 1], target[i : i + 1]) for i in range(len(target))]).mean()
        return bool(torch.isclose(single.float(), loss(output, target).float(), rtol=1e-3, atol=1e-6))
    except (AttributeError, TypeError, IndexError, RuntimeError):  # the output is not a tensor of samples
        return False
