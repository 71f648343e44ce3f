"""Small models: all clients in one computation, their parameters stacked and mapped over with `torch.func`.

A small model's step is over before the next one is launched, so lanes wait for the host. Here a step of all clients is
one captured graph. Clients of different length share it: a sample that a client does not have counts with weight 0.
Models whose layers look at the whole batch (BatchNorm) or draw random numbers (dropout) stay in lanes.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..data.sources import Arrays, Source, below
from ..data.task import Task
from .lanes import Options, Stack

_LABELS = 64  # different ones that are looked at
_BATCHED = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def can_be_wide(module: nn.Module) -> bool:
    """Whether samples of a batch neither see each other nor draw random numbers."""
    return not any(isinstance(m, _BATCHED) for m in module.modules())


def various(sources: Sequence[Source], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """Samples unlike each other: some of the first clients', and one of each label where labels can be looked at."""
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
    """A source's labels, of a sample with several the lowest; none if they are no integers or not in memory."""
    held, index = below(data, torch.arange(len(data)))
    if not isinstance(held, Arrays) or held.target.is_floating_point() or held.target.is_complex():
        return []
    target = held.target[index.to(held.target.device)]
    found: list[int] = target.flatten(1).amin(1).tolist() if target.dim() > 1 and target.numel() else target.tolist()
    return found if target.numel() else []


@torch.no_grad()
def sees_samples_alone(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    """Whether a sample's output in training is its own, whatever else is in the batch and however often it is asked.

    What else a model may do (take a mean over the batch, draw numbers, count its calls) shows in no layer's type.
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
    except (AttributeError, TypeError, LookupError, RuntimeError, ValueError):  # no tensor of samples, odd buffers
        return False
    finally:
        for name, buffer in module.named_buffers():
            if name in kept:
                buffer.copy_(kept[name])


@torch.no_grad()
def is_mean_of_samples(loss: Any, module: nn.Module, inputs: Sequence[Tensor], target: Tensor) -> bool:
    """Whether a batch's loss is the mean of its samples' (class weights or ignored labels make it something else)."""
    output = module(*inputs)
    try:
        fine = output.flatten(1).isfinite().all(1)  # what is not finite to begin with says nothing of the loss
        output, target = output[fine], target[fine]
        if not len(target):
            return True
        single = torch.stack([loss(output[i : i + 1], target[i : i + 1]) for i in range(len(target))]).mean()
        return bool(torch.isclose(single.float(), loss(output, target).float(), rtol=1e-3, atol=1e-6))
    except (
        AttributeError,
        TypeError,
        IndexError,
        RuntimeError,
    ):  # an output that is no tensor of samples, to begin with
        return False


def _products(module: nn.Module) -> list[nn.Conv2d]:
    """The convolutions in a model that `_as_product` can do."""
    found = [m for m in module.modules() if type(m) is nn.Conv2d]  # a subclass may compute something else
    return [m for m in found if (m.groups, m.dilation, m.padding_mode) == (1, (1, 1), "zeros") and m.padding != "same"]


def has_convolutions(module: nn.Module) -> bool:
    return bool(_products(module))


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


class Wide:
    """The rows of a stack as one mapped model. `stage` gives it samples, `run` steps all rows."""

    def __init__(self, task: Task, stack: Stack, half: Tensor | None, lr: Tensor, products: bool = False) -> None:
        self.task, self.layout, self.stack, self.half, self.lr = task, task.layout, stack, half, lr
        self.device = stack.values.device
        self.rows = len(stack.values)
        self.module = task.build().to(self.device).train()
        if products:
            for m in _products(self.module):
                m.forward = functools.partial(_as_product, m)  # type: ignore[method-assign]
        self.params: dict[str, Tensor] = {}
        for layer in self.layout.of_kind("prunable", "dense"):
            flat = half if half is not None and layer.kind == "prunable" else stack.values
            self.params[layer.name] = self._rows(flat, layer)
        rest = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.shared = {name: t.detach() for name, t in rest.items() if name not in self.params}
        self.grad = torch.zeros(
            self.rows, stack.head, device=self.device, dtype=(half if half is not None else lr).dtype
        )
        self.loss = torch.zeros(self.rows, device=self.device)
        self.at = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        self.limit = torch.zeros(self.rows, dtype=torch.int64, device=self.device)
        self.base = torch.zeros(self.rows, 1, dtype=torch.int64, device=self.device)
        self.inputs: list[Tensor] = []
        self.target: Tensor | None = None
        self.capacity = 0
        self.start: Tensor | None = None
        self.velocity: Tensor | None = None
        self.scores: Tensor | None = None
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.capture = self.device.type == "cuda"

    def _rows(self, flat: Tensor, layer: Any) -> Tensor:
        """A layer's tensors of all rows, [rows, *shape], as a view."""
        part: Tensor = flat[:, self.stack.span(layer)]
        if self.stack.turned(layer):
            o, i, h, w = layer.shape
            turned: Tensor = part.unflatten(1, (o, h, w, i)).permute(0, 1, 4, 2, 3)
            return turned
        shaped: Tensor = part.unflatten(1, layer.shape) if len(layer.shape) != 1 else part
        return shaped

    def begin(self, options: Options) -> None:
        """New clients' weights are in the stack."""
        self.loss.zero_()
        self.moved()
        trained = self.stack.values[:, : self.stack.trained]
        if options.prox:
            self.start = trained.clone() if self.start is None else self.start.copy_(trained)
        if options.momentum:
            self.velocity = torch.zeros_like(trained) if self.velocity is None else self.velocity.zero_()
        if options.rule:
            self.scores = torch.zeros_like(self.grad).float() if self.scores is None else self.scores.zero_()

    def moved(self) -> None:
        """The weights or masks in the stack have changed."""
        if self.half is not None:
            self.half.copy_(self.stack.values[:, : self.stack.head])
        if self.velocity is not None:
            self.velocity[:, : self.stack.head] *= self.stack.masks

    def stage(self, samples: Sequence[tuple[tuple[Tensor, ...], Tensor]], capacity: int) -> None:
        """An epoch's samples of each row."""
        target = self._room(*samples[0], capacity)
        for row, (inputs, labels) in enumerate(samples):
            for buffer, x in zip(self.inputs, inputs, strict=True):
                buffer[row, : len(x)].copy_(x)
            target[row, : len(labels)].copy_(labels)

    def stage_all(self, inputs: tuple[Tensor, ...], labels: Tensor, rows: int, capacity: int) -> None:
        """The same for rows that have equally many, given one after another: a copy or two for all of them."""
        n = len(labels) // rows
        target = self._room(inputs, labels, capacity)
        for buffer, x in zip([*self.inputs, target], [*inputs, labels], strict=True):
            buffer[:rows, :n].copy_(x.unflatten(0, (rows, n)))

    def _room(self, inputs: tuple[Tensor, ...], target: Tensor, capacity: int) -> Tensor:
        """Buffers that hold so many samples a row; where the labels go."""
        if self.target is None or self.capacity < capacity:
            self.inputs = [x.new_zeros((self.rows, capacity, *x.shape[1:])) for x in inputs]
            self.target = target.new_zeros((self.rows, capacity, *target.shape[1:]))
            self.capacity = capacity
            self.base = (torch.arange(self.rows, device=self.device) * capacity)[:, None]
            self.graphs.clear()
        return self.target

    def span(self, first: Sequence[int], limit: Sequence[int]) -> None:
        """Which of the staged samples each row is to train on next; rows that are not named have none."""
        idle = self.rows - len(first)
        self.at.copy_(torch.tensor([*first, *[0] * idle]), non_blocking=True)
        self.limit.copy_(torch.tensor([*limit, *[0] * idle]), non_blocking=True)

    def _one(self, params: dict[str, Tensor], inputs: tuple[Tensor, ...], target: Tensor, valid: Tensor) -> Any:
        """One client's mean loss over the samples it has, and their sum."""
        output = functional_call(self.module, {**params, **self.shared}, inputs)
        each = vmap(lambda o, t: self.task.loss(o[None], t[None]))(output, target).float() * valid
        return each.sum() / valid.sum().clamp(min=1), each.sum()

    def step(self, batch: int, options: Options) -> None:
        assert self.target is not None
        index = self.at[:, None] + torch.arange(batch, device=self.device)
        valid = (index < self.limit[:, None]).float()
        # Where a row has no more samples it sees its own last one again, with weight 0: another client's may be NaN.
        flat = (self.base + torch.minimum(index, (self.limit[:, None] - 1).clamp(min=0))).flatten()
        inputs = tuple(x.flatten(0, 1).index_select(0, flat).unflatten(0, (self.rows, batch)) for x in self.inputs)
        target = self.target.flatten(0, 1).index_select(0, flat).unflatten(0, (self.rows, batch))
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half is not None, cache_enabled=False):
            grads, (_, total) = vmap(grad_and_value(self._one, has_aux=True))(self.params, inputs, target, valid)
        with torch.no_grad():
            self._update(grads, valid.any(1)[:, None], options)
            self.loss += total
            self.at += batch

    def _update(self, grads: dict[str, Tensor], busy: Tensor, options: Options) -> None:
        head, values = self.stack.head, self.stack.values
        trained = values[:, : self.stack.trained]
        grad = torch.zeros_like(trained)
        for layer in self.layout.of_kind("prunable", "dense"):
            self._rows(grad, layer).copy_(grads[layer.name])
        self.grad.copy_(torch.where(busy, grad[:, :head], self.grad))
        if self.scores is not None and options.rule is not None:
            new = self.scores.clone()
            options.rule.collect(new, grad[:, :head])
            self.scores.copy_(torch.where(busy, new, self.scores))
        if options.weight_decay:
            grad.add_(trained, alpha=options.weight_decay)
        if options.prox and self.start is not None:
            grad.add_(trained - self.start, alpha=options.prox)
        grad[:, :head] *= self.stack.masks
        if options.momentum and self.velocity is not None:
            self.velocity.copy_(torch.where(busy, self.velocity * options.momentum + grad, self.velocity))
            grad = self.velocity
        trained.sub_(grad * (self.lr * busy))
        if self.half is not None:
            self.half.copy_(trained[:, :head])

    def run(self, batch: int, options: Options) -> None:
        graph = self.graphs.get((batch, options.key))
        if graph is not None:
            graph.replay()
        else:
            self.step(batch, options)

    def prepare(self, batch: int, options: Options) -> None:
        """Capture the step; the weights in the stack are garbage afterwards."""
        if not self.capture or (batch, options.key) in self.graphs:
            return
        try:
            self.graphs[(batch, options.key)] = captured(lambda: self.step(batch, options), self.device)
        except RuntimeError as error:
            self.capture = False
            warnings.warn(f"the mapped step cannot be captured ({str(error).splitlines()[0]})", RuntimeWarning)


def captured(work: Callable[[], None], device: torch.device) -> Any:
    """A CUDA graph of `work`, warmed up on a stream of its own."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
    return graph
