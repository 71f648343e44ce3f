"""Many clients side by side on one device: replicas whose training step is captured once and replayed on streams.

All lanes' weights lie in one stack, in the memory order the device likes best (convolutions channels-last), so that
what concerns all clients (moving masks, averaging) is one operation on the stack.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import FlashError
from ..core.exchange import Adapt, Local
from ..core.layout import Layer, Layout
from ..data.task import Task

_NORMS = nn.modules.batchnorm._BatchNorm


_ALIGN = 64  # elements; kernels that load 16 bytes at a time fault on anything less regular


class Stack:
    """The flat vectors of several clients: every tensor aligned, convolutions channels-last where that is wanted.

    `head` positions hold the prunable weights, `trained` all weights, `size` the statistics too, padding included.
    """

    def __init__(self, layout: Layout, rows: int, device: torch.device, channels_last: bool) -> None:
        self.layout, self.channels_last = layout, channels_last
        self.starts: dict[str, int] = {}
        at, ends = 0, {"prunable": 0, "dense": 0, "statistic": 0}
        for layer in layout.travelling:
            self.starts[layer.name] = at
            at += -(-layer.size // _ALIGN) * _ALIGN
            ends[layer.kind] = at
        self.head = ends["prunable"]
        self.trained = max(self.head, ends["dense"])
        self.size = max(self.trained, ends["statistic"])
        self.values = torch.zeros(rows, self.size, device=device)
        self.masks = torch.zeros(rows, self.head, dtype=torch.bool, device=device)
        self._logical, padding, self._stacked = (each.to(device) for each in self._maps())
        self._padding = {self.size: padding, self.head: padding[padding < self.head]}

    def _maps(self) -> tuple[Tensor, Tensor, Tensor]:
        """The logical place of each position, which positions are padding, and the position of each logical place."""
        logical = torch.full((self.size,), -1, dtype=torch.int32)
        for layer in self.layout.travelling:
            places = torch.arange(layer.start, layer.stop, dtype=torch.int32).view(layer.shape)
            logical[self.span(layer)] = (places.permute(0, 2, 3, 1) if self.turned(layer) else places).reshape(-1)
        filled, padding = (logical >= 0).nonzero().squeeze(1), (logical < 0).nonzero().squeeze(1)
        stacked = torch.empty(self.layout.size, dtype=torch.int32)
        stacked[logical[filled].long()] = filled.int()
        return logical.clamp(min=0), padding, stacked

    def turned(self, layer: Layer) -> bool:
        return self.channels_last and len(layer.shape) == 4

    def span(self, layer: Layer) -> slice:
        start = self.starts[layer.name]
        return slice(start, start + layer.size)

    def view(self, flat: Tensor, layer: Layer) -> Tensor:
        """A layer's tensor, in its logical shape, inside a flat row of this stack."""
        part = flat[self.span(layer)]
        if self.turned(layer):
            o, i, h, w = layer.shape
            return part.view(o, h, w, i).permute(0, 3, 1, 2)
        return part.view(layer.shape)

    def pieces(self, layers: Sequence[Layer], tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of these consecutive layers as flat pieces in this stack's order, padding included."""
        out = []
        for layer, tensor in zip(layers, tensors, strict=True):
            flat = (tensor.permute(0, 2, 3, 1) if self.turned(layer) else tensor).reshape(-1).to(dtype)
            out.append(flat)
            if pad := -layer.size % _ALIGN:
                out.append(flat.new_zeros(pad))
        return out

    def load(self, values: Tensor, masks: Tensor, rows: int) -> None:
        """Take rows in logical order: as many as are asked for, or one for all of them."""
        self._fill(self.values[:rows], values)
        self._fill(self.masks[:rows], masks)

    def _fill(self, rows: Tensor, logical: Tensor) -> None:
        width = rows.shape[1]
        if len(logical) == len(rows):
            torch.index_select(logical, 1, self._logical[:width], out=rows)
        else:
            rows.copy_(logical.index_select(1, self._logical[:width]))
        rows.index_fill_(1, self._padding[width], 0)

    def read(self, rows: int) -> Tensor:
        """The first rows, in logical order."""
        return self.values[:rows].index_select(1, self._stacked)

    def logical(self, heads: Tensor) -> Tensor:
        """Rows over the prunable weights, in logical order."""
        return heads.index_select(1, self._stacked[: self.layout.prunable_size])


class Options:
    """What a captured step depends on: another value means another capture."""

    def __init__(self, local: Local) -> None:
        self.momentum, self.weight_decay, self.prox = local.momentum, local.weight_decay, local.prox
        self.rule = local.adapt if local.adapt is not None and local.adapt.dense_gradient else None

    @property
    def key(self) -> tuple[float, float, float, Adapt | None]:
        return (self.momentum, self.weight_decay, self.prox, self.rule)


def plain_forward(module: nn.Module, *inputs: Tensor) -> Any:
    return module(*inputs)


class Lane:
    """One replica on one stream. `stage` gives it an epoch's samples, `run` steps through them."""

    def __init__(
        self,
        task: Task,
        stack: Stack,
        row: int,
        half: Tensor | None,
        lr: Tensor,
        capture: bool,
        forward: Callable[..., Any],
    ) -> None:
        self.task, self.layout, self.stack, self.row, self.lr, self.capture = task, task.layout, stack, row, lr, capture
        self.forward = forward  # the module and its inputs -> its output
        device = stack.values.device
        self.device = device
        self.master, self.mask = stack.values[row], stack.masks[row]
        self.half = None if half is None else half[row]
        self.module = task.build().to(device)
        self.module.train()
        for m in self.module.modules():
            if isinstance(m, _NORMS) and m.momentum is not None:
                m.num_batches_tracked = None  # counts for nothing then, and would be a kernel a layer and step
        self._bind()
        self.k = stack.head
        self.grad = torch.zeros(self.k, device=device, dtype=torch.float32 if half is None else half.dtype)
        self.rest = self.master[self.k : stack.trained]
        self.loss = torch.zeros((), device=device)
        self.at = torch.zeros((), dtype=torch.int64, device=device)
        self.start: Tensor | None = None
        self.velocity: Tensor | None = None
        self.scores: Tensor | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.generator = torch.Generator(device)
        self.inputs: list[Tensor] = []
        self.target: Tensor | None = None
        self.graphs: dict[tuple[Any, ...], Any] = {}
        self.pool: Any = None
        bound = {layer.name for layer in self.layout.of_kind("statistic")}
        self._buffers = [(n, b, b.clone()) for n, b in self.module.named_buffers() if n not in bound]

    def _bind(self) -> None:
        layers = {layer.name: layer for layer in self.layout.travelling}
        self.params: list[nn.Parameter] = []
        self.layers: list[Layer] = []
        named = dict(self.module.named_parameters())
        for layer in self.layout.of_kind("prunable", "dense"):
            p = named[layer.name]
            flat = self.half if self.half is not None and layer.kind == "prunable" else self.master
            p.data = self.stack.view(flat, layer)
            self.params.append(p)
            self.layers.append(layer)
        for name, p in named.items():
            if name not in layers:
                p.requires_grad_(False)
        for layer in self.layout.of_kind("statistic"):
            owner, _, leaf = layer.name.rpartition(".")
            self.module.get_submodule(owner)._buffers[leaf] = self.stack.view(self.master, layer)

    def begin(self, options: Options, seed: int) -> None:
        """A new client's weights are in the stack: make everything that hangs on them ready."""
        self.loss.zero_()
        if self.half is not None:
            self.half.copy_(self.master[: self.k])
        for name, buffer, value in self._buffers:
            owner, _, leaf = name.rpartition(".")
            self.module.get_submodule(owner)._buffers[leaf] = buffer.copy_(value)  # whatever is there by now
        trained = self.master[: self.stack.trained]
        if options.prox:
            self.start = trained.clone() if self.start is None else self.start.copy_(trained)
        if options.momentum:
            self.velocity = torch.zeros_like(trained) if self.velocity is None else self.velocity.zero_()
        if options.rule:
            self.scores = torch.zeros(1, self.k, device=self.device) if self.scores is None else self.scores.zero_()
        self.generator.manual_seed(seed)

    def moved(self) -> None:
        """The mask or the weights in the stack have changed under way."""
        if self.half is not None:
            self.half.copy_(self.master[: self.k])
        if self.velocity is not None:
            self.velocity[: self.k] *= self.mask

    def stage(self, inputs: tuple[Tensor, ...], target: Tensor, capacity: int) -> None:
        """Take samples into buffers whose addresses never change; images are kept with their channels last."""
        pieces = [x.permute(0, 2, 3, 1) if self._image(x) else x for x in inputs]
        if self.target is None or len(self.target) < capacity:
            # Zeros: what is captured is tried out, perhaps on more samples than the first client has.
            self.inputs = [x.new_zeros((capacity, *x.shape[1:])) for x in pieces]
            self.target = target.new_zeros((capacity, *target.shape[1:]))
            self.graphs.clear()
            self._turned = [self._image(x) for x in inputs]
        for buffer, piece in zip(self.inputs, pieces, strict=True):
            buffer[: len(piece)].copy_(piece)
        self.target[: len(target)].copy_(target)
        self.at.zero_()

    def _image(self, x: Tensor) -> bool:
        return self.stack.channels_last and x.dim() == 4 and x.is_floating_point()

    def step(self, batch: int, options: Options, fused: Callable[..., None] | None) -> None:
        """One SGD step on the next `batch` staged samples: everything it reads and writes stays where it is."""
        assert self.target is not None
        index = self.at + torch.arange(batch, device=self.device)
        inputs = [x.index_select(0, index) for x in self.inputs]
        inputs = [x.permute(0, 3, 1, 2) if t else x for x, t in zip(inputs, self._turned, strict=True)]
        target = self.target.index_select(0, index)
        enabled = self.half is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
            loss = self.task.loss(self.forward(self.module, *inputs), target)
        found = torch.autograd.grad(loss, self.params, allow_unused=True)
        with torch.no_grad():
            grads = [torch.zeros_like(p) if g is None else g for p, g in zip(self.params, found, strict=True)]
            grads = [g.to_dense() if g.is_sparse else g for g in grads]
            cut = len(self.layout.prunable)
            heads = self.stack.pieces(self.layers[:cut], grads[:cut], self.grad.dtype)
            tails = self.stack.pieces(self.layers[cut:], grads[cut:], torch.float32)
            if heads:
                torch.cat(heads, out=self.grad)
            self._update(torch.cat(tails) if tails else self.rest[:0], options, fused)
            self.loss += loss.detach().float() * batch
            self.at += batch

    def _update(self, tail: Tensor, options: Options, fused: Callable[..., None] | None) -> None:
        if self.scores is not None and options.rule is not None:
            options.rule.collect(self.scores, self.grad[None].float())
        plain = not (options.momentum or options.weight_decay or options.prox)
        head = self.master[: self.k]
        if plain and fused is not None and self.k:
            fused(head, self.half, self.grad, self.mask, self.lr)
            self.rest.sub_(tail * self.lr)
            return
        grad = torch.cat([self.grad.float(), tail])
        trained = self.master[: self.stack.trained]
        if options.weight_decay:
            grad.add_(trained, alpha=options.weight_decay)
        if options.prox and self.start is not None:
            grad.add_(trained - self.start, alpha=options.prox)
        grad[: self.k] *= self.mask
        if options.momentum and self.velocity is not None:
            grad = self.velocity.mul_(options.momentum).add_(grad)
        trained.sub_(grad * self.lr)
        if self.half is not None:
            self.half.copy_(head)

    def run(self, batch: int, options: Options, fused: Callable[..., None] | None) -> None:
        """Enqueue one step on this lane's stream."""
        graph = self.graphs.get((batch, options.key))
        if graph is not None:
            with torch.cuda.stream(self.stream):
                graph.replay()
        else:
            with torch.cuda.stream(self.stream), self._own_randomness():
                self.step(batch, options, fused)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Inside, torch's default generator is this lane's, so that dropout does not depend on other lanes."""
        if self.generator.device.type == "cpu":
            outside = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            yield
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(outside)
            return
        default = torch.cuda.default_generators[self.device.index or 0]
        kept = default.graphsafe_get_state()
        default.graphsafe_set_state(self.generator.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(kept)

    def prepare(self, batch: int, options: Options, fused: Callable[..., None] | None) -> bool:
        """Capture the step for this batch size, unless it is; whether that worked. Weights are garbage afterwards."""
        if not self.capture or (batch, options.key) in self.graphs:
            return True
        assert self.stream is not None
        try:
            self._capture(batch, options, fused)
        except Exception as error:
            self.capture = False
            self.graphs.clear()
            torch.cuda.synchronize(self.device)
            warnings.warn(
                f"the training step cannot be captured as a CUDA graph ({str(error).splitlines()[0]}); it runs "
                "eagerly, which is slower", RuntimeWarning,
            )  # fmt: skip
            return False
        return True

    def _check_buffers(self) -> None:
        """A buffer that the model replaces, and does not write to, would never change in what is captured."""
        now = dict(self.module.named_buffers())
        for name, buffer, _ in self._buffers:
            if now.get(name) is not buffer:
                raise FlashError(f"the model puts another tensor in the place of its buffer {name}")

    def _capture(self, batch: int, options: Options, fused: Callable[..., None] | None) -> None:
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with self._own_randomness():
            with torch.cuda.stream(self.stream):
                for _ in range(2):
                    self.at.zero_()
                    self.step(batch, options, fused)
                self.at.zero_()
            self.stream.synchronize()
            self._check_buffers()
            graph = torch.cuda.CUDAGraph()
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                self.step(batch, options, fused)
            self.graphs[(batch, options.key)] = graph
