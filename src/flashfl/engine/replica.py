"""A copy of a task's model whose weights and statistics lie in somebody else's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ..core.client import Part
from ..core.errors import FlashError, warn
from ..core.layout import Layer, tensors_of
from ..data.task import Task
from .inputs import PrunedInputs

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
                raise FlashError(f"the model replaces its buffer {name} by another tensor")

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
            f"training changes the buffers {', '.join(lost[:4])}{', ...' if lost[4:] else ''}, which are not sent: "
            "every client starts with the model's own, and changes are lost. Statistics of a norm are sent if they are "
            "called running_mean and running_var"
        )
