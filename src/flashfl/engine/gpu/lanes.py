"""Lanes: each client has a replica and a stream of its own, and its step is captured once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...core.client import Clients
from ...data.sources import Source
from ...data.task import Task
from ..replica import Replica
from ..step import MaskedStep
from ..work import Work
from .graphs import Graphs
from .stack import Stack

Forward = Callable[..., Tensor]  # (module, *inputs) -> output


def _forward(module: nn.Module, *inputs: Tensor) -> Tensor:
    output: Tensor = module(*inputs)
    return output


class Lane:
    """Trains the client in one row of the stack."""

    def __init__(
        self, task: Task, stack: Stack, row: int, data: Sequence[Source], capacity: int, forward: Forward
    ) -> None:
        """capacity: samples that are staged at a time."""
        self.task, self.stack, self.device, self.row = task, stack, stack.device, row
        self.data, self.capacity, self.forward = data, capacity, forward
        mine = slice(row, row + 1)
        self.replica = Replica(task, self.device, lambda layer: stack.used(layer)[row])
        self.replica.module.train()
        half = None if stack.half is None else stack.half[mine]
        self.step = MaskedStep(stack.values[mine, : stack.trained], stack.head, stack.masks[mine], half, stack.place)
        # The gradient of the prunable weights, in the precision they are used in, and of the others.
        self.head = torch.zeros(1, stack.head, device=self.device, dtype=torch.float32 if half is None else half.dtype)
        self.rest = torch.zeros(1, stack.trained - stack.head, device=self.device)
        self.loss = torch.zeros((), device=self.device)
        self.at = torch.zeros((), dtype=torch.int64, device=self.device)  # the next staged sample
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.generator = torch.Generator(self.device)
        self.inputs: list[Tensor] = []
        self.target: Tensor | None = None
        self.graphs = Graphs("the training step", self.device)

    def begin(self, work: Work, opened: Clients | None) -> None:
        """Take on a new client: its weights and mask are in the stack."""
        self.loss.zero_()
        self.replica.reset_buffers()
        self.replica.inputs.use(work.local.parts)
        mine = slice(self.row, self.row + 1)
        state = {} if opened is None else {name: value[mine] for name, value in opened.state.items()}
        self.step.begin(work.local, opened.keys[mine] if opened else (), [work.steps], state)
        self.generator.manual_seed(work.seed)

    def _staged_batches(self, work: Work) -> int:
        return max(1, self.capacity // work.local.batch)

    def _stage(self, work: Work, epoch: int, first: int) -> None:
        """Take an epoch's samples from batch `first` on, as many as fit, into buffers that keep their addresses.

        Images are kept with their channels last.
        """
        fits = self._staged_batches(work) * work.local.batch
        order, capacity = work.shuffled(epoch, self.device), max(self.capacity, fits)
        inputs, target = work.fetch(self.data[work.client.id], epoch, order, first * work.local.batch, fits)
        pieces = [x.permute(0, 2, 3, 1) if self._image(x) else x for x in inputs]
        if self.target is None or len(self.target) < capacity:
            # Zeros: a step is tried out before it is captured, perhaps on more samples than the first client has.
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

    def _step(self, batch: int) -> None:
        """One SGD step on the next `batch` staged samples. Everything it reads and writes stays where it is."""
        assert self.target is not None
        self.step.show()
        index = self.at + torch.arange(batch, device=self.device)
        inputs = [x.index_select(0, index) for x in self.inputs]
        inputs = [x.permute(0, 3, 1, 2) if t else x for x, t in zip(inputs, self._turned, strict=True)]
        target = self.target.index_select(0, index)
        enabled = self.stack.half is not None
        with torch.autocast(self.device.type, torch.bfloat16, enabled=enabled, cache_enabled=False):
            loss = self.task.loss(self.forward(self.replica.module, *inputs), target)
        params, layers = self.replica.params, self.replica.layers
        found = torch.autograd.grad(loss, params, allow_unused=True)
        with torch.no_grad():
            grads = [torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)]
            grads = [g.to_dense() if g.is_sparse else g for g in grads]
            cut = len(self.stack.layout.prunable)
            self.stack.join(layers[:cut], grads[:cut], self.head[0])
            self.stack.join(layers[cut:], grads[cut:], self.rest[0])
            self.step(self.head, self.rest)
            self.loss += loss.detach().float() * batch
            self.at += batch

    def run(self, work: Work, step: int) -> None:
        """Enqueue one step of a client's work on this lane's stream."""
        epoch, b = divmod(step, work.batches)
        batch = work.size(b)
        with torch.cuda.stream(self.stream):
            if b % self._staged_batches(work) == 0:
                self._stage(work, epoch, b)
            if not self.graphs.replay((batch, self.step.key)):
                with self._own_randomness():
                    self._step(batch)

    def prepare(self, work: Work, sizes: Sequence[int], opened: Clients | None) -> None:
        """Capture the steps for these batch sizes, unless they are. The weights are garbage afterwards."""
        settings = MaskedStep.key_of(work.local)
        if any(self.graphs.lacks((size, settings)) for size in sizes):
            self._stage(work, 0, 0)
            self.begin(work, opened)
            torch.cuda.synchronize(self.device)
            for size in sizes:
                self._capture(size)

    def _capture(self, batch: int) -> None:
        def tries() -> None:
            self._step(batch)
            self.at.zero_()
            self.replica.check_buffers()

        with self._own_randomness():
            self.graphs.capture((batch, self.step.key), lambda: self._step(batch), tries, self.stream)

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Inside, torch's default generator is this lane's, so that dropout does not depend on other lanes."""
        if self.device.type == "cpu":
            outside = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            try:
                yield
            finally:
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


class Lanes:
    """One lane for each row of the stack. They do not wait for each other."""

    def __init__(self, task: Task, stack: Stack, data: Sequence[Source], capacity: int, compiled: bool = False) -> None:
        """capacity: samples that are staged at a time."""
        self.device = stack.device
        # Compiled once: replicas of one model differ in nothing a compiled function depends on.
        forward: Forward = torch.compile(_forward, dynamic=False) if compiled else _forward
        self.lanes = [Lane(task, stack, row, data, capacity, forward) for row in range(len(stack))]

    def prepare(self, works: Sequence[Work], opened: Clients | None = None) -> None:
        """Capture what is needed, before any client's weights are in place."""
        sizes = sorted({work.size(b) for work in works for b in range(work.batches)})
        for lane, work in zip(self.lanes, works, strict=False):
            lane.prepare(work, sizes, opened)
            if not lane.graphs.active:  # then no other lane's can be captured either
                for other in self.lanes:
                    other.graphs.active = False

    def begin(self, works: Sequence[Work], opened: Clients | None = None) -> None:
        """Take on new clients: their weights and masks are in the stack. opened: what their parts made ready."""
        for lane, work in zip(self.lanes, works, strict=False):
            lane.begin(work, opened)

    def state(self, rows: int) -> dict[str, Tensor]:
        """What parts carried through the steps, [rows, columns of the stack]."""
        steps = [lane.step for lane in self.lanes[:rows]]
        return {name: torch.cat([step.state[name] for step in steps]) for name in steps[0].state}

    def advance(self, works: Sequence[Work], first: Sequence[int], last: Sequence[int]) -> None:
        """Steps first[i]..last[i]-1 of each client's work, counted from 0.

        They are enqueued lane by lane in turn, so that every stream has work.
        """
        here = self.lanes[: len(works)]
        for lane in here:
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream(self.device))
        for step in range(max(b - a for a, b in zip(first, last, strict=True))):
            for lane, work, a, b in zip(here, works, first, last, strict=True):
                if a + step < b:
                    lane.run(work, a + step)
        for lane in here:
            if lane.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(lane.stream)

    def moved(self, rows: int) -> None:
        """Follow masks and weights in the stack that have moved."""
        for lane in self.lanes[:rows]:
            lane.step.moved()

    def scores(self, rows: int) -> Tensor:
        """What the rule that moves masks has collected, [rows, columns of the stack's prunable weights]."""
        return torch.cat([lane.step.scores for lane in self.lanes[:rows] if lane.step.scores is not None])

    def losses(self, rows: int) -> Tensor:
        """Each client's loss so far, added up over samples."""
        return torch.stack([lane.loss for lane in self.lanes[:rows]])
