"""A copy of a task's model whose weights and statistics lie in somebody else's memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor, nn

from ..core.client import Part, overrides
from ..core.errors import FlashError, warn
from ..core.kernel import kernel
from ..core.layout import Layer, tensors_of
from ..data.task import Task, accuracy

EVALUATION_BATCH = 250  # samples
_NORMS = nn.modules.batchnorm._NormBase  # every layer that may keep statistics: BatchNorm, InstanceNorm
_COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SAMPLE = 1 << 15  # in a larger input, at most so many entries decide what the largest are


class Replica:
    """A model bound to flat memory: `place` gives the view that holds a layer of the task's layout."""

    def __init__(self, task: Task, device: torch.device, place: Callable[[Layer], Tensor]) -> None:
        self.module = task.build().to(device)
        self.norms = [m for m in self.module.modules() if isinstance(m, _NORMS)]
        for m in self.norms:
            if type(m) in _COUNTING and m.momentum is not None:
                m.num_batches_tracked = None  # unused then, and on a GPU one more kernel per layer and step
        self.layers = task.layout.of_kind("prunable", "dense")
        statistics, own = task.layout.of_kind("statistic"), tensors_of(self.module)
        brought = [own[layer.name].flatten().float() for layer in statistics]
        self.statistics = torch.cat(brought) if brought else torch.zeros(0, device=device)  # as the model defines them
        named = dict(self.module.named_parameters())
        self.params = [named[layer.name] for layer in self.layers]
        for layer, p in zip(self.layers, self.params, strict=True):
            p.data = place(layer).copy_(p.data)
        for name in named.keys() - {layer.name for layer in self.layers}:
            named[name].requires_grad_(False)
        for layer in statistics:
            self._set_buffer(layer.name, place(layer))
        bound = {layer.name for layer in statistics}
        self.inputs = PrunedInputs(self.module, {layer.name for layer in task.layout.prunable})
        self._others = [(n, b, b.clone()) for n, b in self.module.named_buffers() if n not in bound]

    def _set_buffer(self, name: str, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        self.module.get_submodule(owner)._buffers[leaf] = value

    def reset_buffers(self) -> None:
        """Buffers outside the layout (counters, tables) start every client's work as the model defines them."""
        for name, buffer, value in self._others:
            self._set_buffer(name, buffer.copy_(value))

    def check_buffers(self) -> None:
        """A buffer that the model replaces instead of writing to it would never change in a CUDA graph."""
        now = dict(self.module.named_buffers())
        for name, buffer, _ in self._others:
            if now.get(name) is not buffer:
                raise FlashError(
                    f"the model replaces its buffer {name} by another tensor: change it in place, such as with copy_()"
                )

    def evaluation_mode(self, statistics: bool) -> None:
        """Prepare the module to be evaluated. Without statistics, BatchNorm uses each batch's own."""
        self.module.train()
        frozen = {m for m in self.norms if not m.training}
        self.module.eval()
        for m in self.norms:
            m.train(not statistics and m not in frozen)


class PrunedInputs:
    """Changes the convolutions and linear layers of a model whose weights have one of these names.

    The output and the gradient of the input stay what they were. The gradient of the weight is made from the largest
    entries of the input only. Other layers keep their whole input.
    """

    def __init__(self, module: nn.Module, weights: Collection[str]) -> None:
        self.part: Part | None = None
        self._layers = [
            m
            for name, m in module.named_modules()
            if type(m) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and f"{name}.weight".lstrip(".") in weights
        ]
        self._own = [m.forward for m in self._layers]

    def use(self, parts: Sequence[Part]) -> None:
        """Follow the last of these parts that prunes inputs; without any, the model is as it was."""
        part = next((part for part in reversed(parts) if overrides(part, "inputs")), None)
        if part == self.part:
            return
        self.part = part
        for m, own in zip(self._layers, self._own, strict=True):
            m.forward = own if part is None else functools.partial(_pruned_forward, m, part)  # type: ignore[method-assign]


def _pruned_forward(m: nn.Linear | nn.Conv2d, part: Part, x: Tensor) -> Tensor:
    """The layer's output. Of all that the layer saves for the backward pass, only the input is pruned."""
    weight, kind = m.weight, x.device.type
    share = part.inputs(weight.detach())
    if share is not None and torch.is_autocast_enabled(kind):
        weight = weight.to(torch.get_autocast_dtype(kind))  # else the layer would save a copy of the weight

    def save(tensor: Tensor) -> Tensor:
        return tensor if share is None or tensor.data_ptr() == weight.data_ptr() else largest(tensor.detach(), share)

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        if isinstance(m, nn.Linear):
            return nn.functional.linear(x, weight, m.bias)
        output: Tensor = m._conv_forward(x, weight, m.bias)
        return output


def largest(x: Tensor, share: Tensor) -> Tensor:
    """`x` with zeros in the place of all but this share of its entries, those of the largest magnitude.

    In an input of more than 32,768 entries, regularly spaced ones decide where the largest begin.
    """
    spacing = -(-x.numel() // _SAMPLE) | 1  # odd, as an even one would meet some columns of an image only
    if x.is_cuda and (fast := kernel("largest", "largest")) is not None:
        kept: Tensor = fast(x, share, spacing)
        return kept
    ranked = x.abs().flatten()[::spacing].sort().values
    at = ((1 - share) * ranked.numel()).floor().clamp(0, ranked.numel() - 1).long()
    return torch.where(x.abs() >= ranked.gather(0, at.reshape(1)), x, 0.0)


def warn_of_buffers(task: Task) -> None:
    """Warn about buffers that training changes and that are not sent: all but BatchNorm statistics."""
    module = task.build().train()
    bound = {layer.name for layer in task.layout.of_kind("statistic")}
    kept = {n: b.clone() for n, b in module.named_buffers() if n not in bound and b.is_floating_point()}
    data = task.train[0]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            module(*data.fetch(torch.arange(min(4, len(data))))[0])
    except Exception:  # whatever the user's model raises is reported where it trains
        return
    now = module.named_buffers()
    lost = [n for n, b in now if n in kept and not torch.allclose(b, kept[n], 0, 0, equal_nan=True)]
    if lost:
        warn(
            f"training changes the buffers {', '.join(lost[:4])}{', ...' if lost[4:] else ''}, which are not sent, so "
            "the changes are lost. Only running_mean and running_var of normalisation layers are sent. If the model "
            "needs these values after training, make them parameters."
        )


def warn_of_metric(task: Task) -> None:
    """Warn if outputs and targets have different shapes, or if the metric is no mean over samples.

    Averaged over batches, such a metric is not the metric of all samples.
    """
    data = task.evaluation[0]
    if task.metric is accuracy or len(data) < 2:
        return
    module, count = task.build().eval(), min(8, len(data))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            inputs, target = data.fetch(torch.arange(count))
            output = module(*inputs)
            if target.is_floating_point() and output.numel() == target.numel() and output.shape != target.shape:
                warn(
                    f"the model's outputs have the shape {tuple(output.shape)}, and the targets {tuple(target.shape)}: "
                    "a loss such as mse_loss then compares every sample with every other. Give both the same shape"
                )
                return
            if len(task.evaluation) == 1 and len(data) <= EVALUATION_BATCH:
                return  # all samples are evaluated at once
            far = 100 + 100 * (output.abs().max() + target.abs().max())
            output[:1] += far  # a sample unlike the others: a root of a mean shows at once
            parts = (slice(None), slice(0, 1), slice(1, None))
            all_, first, rest = (float(task.metric(output[part], target[part])) for part in parts)
    except Exception:  # whatever the user's model or metric raises is reported where it is evaluated
        return
    mean = (first + (count - 1) * rest) / count
    if math.isfinite(all_) and not math.isclose(all_, mean, rel_tol=1e-3, abs_tol=1e-6):
        warn(
            f"{task.metric_name} is not a mean over samples. It is averaged over batches of {EVALUATION_BATCH} samples "
            "and over clients, so the result differs from its value for all samples. Use a mean over samples, such as "
            "the squared error instead of its root."
        )
