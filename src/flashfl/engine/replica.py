"""A copy of a task's model whose weights and statistics lie in somebody else's memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..core.client import Part
from ..core.errors import FlashError, warn
from ..core.layout import Layer, tensors_of
from ..data.task import Task, accuracy
from .inputs import PrunedInputs

EVALUATION_BATCH = 250  # samples
_NORMS = nn.modules.batchnorm._NormBase  # every layer that may keep statistics: BatchNorm, InstanceNorm
_COUNTING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
        self._inputs: PrunedInputs | None = None
        self._others = [(n, b, b.clone()) for n, b in self.module.named_buffers() if n not in bound]

    def _set_buffer(self, name: str, value: Tensor) -> None:
        owner, _, leaf = name.rpartition(".")
        self.module.get_submodule(owner)._buffers[leaf] = value

    def keep_inputs(self, parts: Sequence[Part]) -> None:
        """From now on, layers keep as much of their inputs for the gradient as the parts say."""
        if self._inputs is None:
            self._inputs = PrunedInputs(self.module, {layer.name for layer in self.layers if layer.kind == "prunable"})
        self._inputs.use(parts)

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
            f"training changes the buffers {', '.join(lost[:4])}{', ...' if lost[4:] else ''}, which are not sent. The "
            "changes are lost: every client starts with the buffers of the original model. Of all buffers, only "
            "running_mean and running_var of normalisation layers are sent."
        )


def warn_of_metric(task: Task) -> None:
    """Warn if the metric is no mean over samples: averaged over batches, it is not the metric of all samples."""
    data = task.evaluation[0]
    whole = len(task.evaluation) == 1 and len(data) <= EVALUATION_BATCH
    if task.metric is accuracy or whole or len(data) < 2:
        return
    module, count = task.build().eval(), min(8, len(data))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            inputs, target = data.fetch(torch.arange(count))
            output = module(*inputs)
            all_, first, rest = (float(task.metric(output[part], target[part])) for part in _PARTS)
    except Exception:  # whatever the user's model or metric raises is reported where it is evaluated
        return
    if not math.isclose(all_, (first + (count - 1) * rest) / count, rel_tol=1e-3, abs_tol=1e-6):
        warn(
            f"{task.metric_name} is not a mean over samples. It is computed for each batch of {EVALUATION_BATCH} test "
            "samples, or for each client that holds samples back, and then averaged. That differs from its value for "
            "all samples at once. Use a mean over samples, such as the squared error instead of its root."
        )


_PARTS = (slice(None), slice(0, 1), slice(1, None))
