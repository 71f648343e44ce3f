"""Batched: all clients in one computation, their parameters stacked and mapped over with `torch.func`.

A small model's step is over before the next one is launched, so lanes wait for the host. Here one captured graph steps
all clients. Clients of different length share it: a sample that a client does not have counts with weight 0.
Models whose layers mix the samples of a batch (BatchNorm) or draw random numbers (dropout) need lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ...core.client import Clients
from ...core.rng import permutations
from ...data.sources import Arrays, Inputs, Source, Subset
from ...data.task import Task
from ..replica import PrunedInputs
from ..step import MaskedStep
from ..work import Work
from .graphs import Graphs
from .stack import Stack


class Batched:
    """Steps all rows of a stack as one mapped model."""

    def __init__(self, task: Task, stack: Stack, data: Sequence[Source], capacity: int, products: bool = False) -> None:
        """capacity: samples of the largest client. products: compute convolutions as matrix products."""
        self.task, self.stack, self.device, self.data, self.capacity = task, stack, stack.device, data, capacity
        self.module = task.build().to(self.device).train()
        if products:
            for m in convolutions(self.module):
                m.forward = functools.partial(_as_product, m)  # type: ignore[method-assign]
        self._inputs = PrunedInputs(self.module, {layer.name for layer in task.layout.prunable})
        trained = task.layout.of_kind("prunable", "dense")
        self.params = {layer.name: stack.used(layer) for layer in trained}
        rest = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.shared = {name: t.detach() for name, t in rest.items() if name not in self.params}
        self.step = MaskedStep(stack.values[:, : stack.trained], stack.head, stack.masks, stack.half, stack.place)
        self.grad = torch.zeros(len(stack), stack.trained, device=self.device)
        self._grads = {layer.name: stack.view(self.grad, layer) for layer in trained}
        self.loss = torch.zeros(len(stack), device=self.device)
        # For each row its next staged sample, and the one it stops at.
        self.at, self.limit = torch.zeros(2, len(stack), dtype=torch.int64, device=self.device)
        self.base = (torch.arange(len(stack), device=self.device) * capacity)[:, None]
        self.inputs: list[Tensor] = []
        self.target: Tensor | None = None
        self.graphs = Graphs("the batched training step", self.device)
        self._staged = -1  # the epoch whose samples are staged

    def prepare(self, works: Sequence[Work], opened: Clients | None = None) -> None:
        """Capture what is needed, before any client's weights are in place."""
        settings, batch = MaskedStep.key_of(works[0].local), works[0].local.batch
        if self.graphs.lacks((batch, settings)):
            self._stage(works, 0)
            self.begin(works, opened)
            self.graphs.capture((batch, settings), lambda: self._step(batch))

    def begin(self, works: Sequence[Work], opened: Clients | None = None) -> None:
        """Take on new clients: their weights and masks are in the stack. opened: what their parts made ready."""
        local, steps = works[0].local, [work.steps for work in works]
        self.loss.zero_()
        self._inputs.use(local.parts)
        self.step.begin(local, opened.keys if opened else (), steps, opened.state if opened else None)
        self._staged = -1

    def state(self, rows: int) -> dict[str, Tensor]:
        """What parts carried through the steps, [rows, columns of the stack]."""
        return {name: value[:rows] for name, value in self.step.state.items()}

    def advance(self, works: Sequence[Work], first: Sequence[int], last: Sequence[int]) -> None:
        """Steps first[i]..last[i]-1 of each client's work, counted from 0.

        They are taken epoch by epoch, as all clients begin an epoch together.
        """
        batch = works[0].local.batch
        epochs = {s // work.batches for work, a, b in zip(works, first, last, strict=True) for s in (a, b - 1) if a < b}
        for epoch in range(min(epochs, default=0), max(epochs, default=-1) + 1):
            spans = [
                (max(a - epoch * work.batches, 0), min(b - epoch * work.batches, work.batches))
                for work, a, b in zip(works, first, last, strict=True)
            ]
            if epoch != self._staged or any(a == 0 for a, _ in spans):
                self._stage(works, epoch)
                self._staged = epoch
            limits = [min(work.n, b * batch) for work, (_, b) in zip(works, spans, strict=True)]
            self._span([a * batch for a, _ in spans], limits)
            for _ in range(max(b - a for a, b in spans)):
                if not self.graphs.replay((batch, self.step.key)):
                    self._step(batch)

    def moved(self, rows: int) -> None:
        """Follow masks and weights in the stack that have moved."""
        self.step.moved()

    def scores(self, rows: int) -> Tensor:
        """What the rule that moves masks has collected, [rows, columns of the stack's prunable weights]."""
        assert self.step.scores is not None
        return self.step.scores[:rows]

    def losses(self, rows: int) -> Tensor:
        """Each client's loss so far, added up over samples."""
        return self.loss[:rows].clone()

    def _stage(self, works: Sequence[Work], epoch: int) -> None:
        """An epoch's samples of each row. Equal shares of data that is not augmented are gathered at once."""
        orders = permutations([work.shuffle_key(epoch) for work in works], [work.n for work in works], self.device)
        data = [self.data[work.client.id] for work in works]
        n, shares = works[0].n, [d for d in data if isinstance(d, Subset)]
        base = shares[0].source if len(shares) == len(data) else None
        plain = isinstance(base, Arrays) and base.augment is None
        if plain and base is not None and all(d.source is base and len(d) == n for d in shares):
            places = torch.stack([d.index for d in shares])
            inputs, labels = base.fetch(places.gather(1, torch.stack(orders)).flatten())
            for buffer, x in zip(self._buffers(inputs, labels), [*inputs, labels], strict=True):
                buffer[: len(works), :n].copy_(x.unflatten(0, (len(works), n)))
            return
        for row, (d, work, order) in enumerate(zip(data, works, orders, strict=True)):
            inputs, labels = work.fetch(d, epoch, order, 0, work.n)
            for buffer, x in zip(self._buffers(inputs, labels), [*inputs, labels], strict=True):
                buffer[row, : len(x)].copy_(x)

    def _buffers(self, inputs: Inputs, target: Tensor) -> list[Tensor]:
        """Where the samples of all rows are staged: inputs, then targets. They keep their addresses."""
        if self.target is None:
            room = (len(self.stack), self.capacity)
            self.inputs = [x.new_zeros((*room, *x.shape[1:])) for x in inputs]
            self.target = target.new_zeros((*room, *target.shape[1:]))
        return [*self.inputs, self.target]

    def _span(self, first: Sequence[int], limit: Sequence[int]) -> None:
        """Which of the staged samples each row trains on next. Rows beyond these have none."""
        idle = len(self.stack) - len(first)
        self.at.copy_(torch.tensor([*first, *[0] * idle]), non_blocking=True)
        self.limit.copy_(torch.tensor([*limit, *[0] * idle]), non_blocking=True)

    def _one(
        self, params: Mapping[str, Tensor], inputs: Inputs, target: Tensor, valid: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One client's mean loss over the samples it has, and their sum."""
        output = functional_call(self.module, {**params, **self.shared}, inputs)
        each = vmap(lambda o, t: self.task.loss(o[None], t[None]))(output, target).float() * valid
        return each.sum() / valid.sum().clamp(min=1), each.sum()

    def _step(self, batch: int) -> None:
        """One SGD step of every row that has samples left. Everything it reads and writes stays where it is."""
        assert self.target is not None
        self.step.show()
        index = self.at[:, None] + torch.arange(batch, device=self.device)
        valid = (index < self.limit[:, None]).float()
        # A row without more samples sees its own last one again, with weight 0: another client's may be NaN.
        flat = (self.base + torch.minimum(index, (self.limit[:, None] - 1).clamp(min=0))).flatten()
        *inputs, target = (
            x.flatten(0, 1).index_select(0, flat).unflatten(0, (len(self.stack), batch))
            for x in (*self.inputs, self.target)
        )
        enabled = self.stack.half is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
            mapped = vmap(grad_and_value(self._one, has_aux=True))
            grads, (_, total) = mapped(self.params, tuple(inputs), target, valid)
        with torch.no_grad():
            for name, view in self._grads.items():
                view.copy_(grads[name])
            head = self.stack.head
            self.step(self.grad[:, :head], self.grad[:, head:], valid.any(1)[:, None])
            self.loss += total
            self.at += batch


def convolutions(module: nn.Module) -> list[nn.Conv2d]:
    """The convolutions in a model that `_as_product` can compute."""
    found = [m for m in module.modules() if type(m) is nn.Conv2d]  # a subclass may compute something else
    return [m for m in found if (m.groups, m.dilation, m.padding_mode) == (1, (1, 1), "zeros") and m.padding != "same"]


def _as_product(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution as one matrix product over the patches of all samples.

    Mapped over clients it is a batched product, which a GPU does at full speed; a mapped convolution is a grouped one,
    for which it has few good kernels.
    """
    (kh, kw), (sh, sw) = conv.kernel_size, conv.stride
    top, left = (0, 0) if isinstance(conv.padding, str) else conv.padding
    x = nn.functional.pad(x, (left, left, top, top))
    h, w = (x.shape[2] - kh) // sh + 1, (x.shape[3] - kw) // sw + 1
    down, across = (h - 1) * sh + 1, (w - 1) * sw + 1  # places from the first patch's corner to the last one's
    patches = torch.stack([x[:, :, i : i + down : sh, j : j + across : sw] for i in range(kh) for j in range(kw)], -1)
    rows = patches.permute(0, 2, 3, 1, 4).reshape(len(x) * h * w, -1)
    out = nn.functional.linear(rows, conv.weight.flatten(1), conv.bias)
    return out.view(len(x), h, w, -1).permute(0, 3, 1, 2)
