"""The GPU engine: clients train side by side in lanes; bytes are counted exactly instead of being made."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.rng import fold, permutation
from ..core.state import Client, Local, Mask, Order, Outcome, State, Sums, Weights
from ..data.examples import on_device
from ..data.task import Task
from ..sparsity import random_mask
from ..wire.values import Form
from .books import Books
from .cpu import drops
from .lanes import Lane, Options, Stack
from .train import Trainer


@dataclass
class Seat:
    """A client in a lane."""

    client: Client
    order: Order
    mask: Mask
    n: int
    batches: int
    counts: tuple[int, ...]

    def sizes(self, first: int, last: int) -> list[int]:
        """Batch sizes of the steps first..last-1 of this client's work."""
        batch = self.order.local.batch
        within = [min(batch, self.n - b * batch) for b in range(self.batches)]
        return [within[s % self.batches] for s in range(first, last)]


class LaneEngine:
    """Trains any task with any method on one device. On a CPU it does the same without capturing anything."""

    def __init__(
        self,
        task: Task,
        device: torch.device | str = "cuda",
        precision: str = "auto",
        lanes: int = 0,
        values: Form = "fp32",
        dropout: float = 0.0,
        deterministic: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.task, self.layout, self.device, self.dropout = task, task.layout, torch.device(device), dropout
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        cuda = self.device.type == "cuda"
        self.precision = ("bf16" if cuda else "fp32") if precision == "auto" else precision
        if cuda:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision != "fp32"
            torch.backends.cudnn.benchmark = not deterministic
            torch.backends.cudnn.deterministic = deterministic
        self.lanes_wanted = lanes
        self.train_data, self.judges = on_device(task.train, self.device), on_device(task.judges, self.device)
        self.capacity = min(max(len(d) for d in task.train), 1 << 16)
        self.books = Books(self.layout, values, folder)
        self.lanes: list[Lane] = []
        self.stack: Stack | None = None
        self.lr = torch.zeros((), device=self.device)
        self.judge = Trainer(task, self.device)
        self.norm1d = any(isinstance(m, nn.BatchNorm1d) for m in self.judge.module.modules())
        self.fused = _fused() if cuda else None

    # -- rounds ------------------------------------------------------------------------------------------------

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        sums = Sums(self.layout, counts=[0] * len(self.layout.prunable))
        round_ = self.books.open(s)
        present = self._present(s, orders, round_)
        for local, group in itertools.groupby(present, key=lambda pair: pair[1].local):
            if local.report == "statistics":
                self._gather(group, sums, round_)
                continue
            for chunk in _chunks(group, self._lane_count(s)):
                self._chunk(local, chunk, sums, round_)
        return round_.close(sums)

    def _present(self, s: State, orders: Iterable[tuple[Client, Order]], round_: Any) -> Iterator[tuple[Client, Order]]:
        for client, order in orders:
            round_.sent(client, order)
            if self.dropout and drops(s, client.id, self.dropout):
                round_.failed(client.id, "dropped out (simulated)")
                continue
            yield client, order

    def _lane_count(self, s: State) -> int:
        """As many lanes as asked for, else one a client up to 16, fewer if memory is short."""
        if self.stack is not None:
            return len(self.stack.values)
        wanted = self.lanes_wanted or min(16, max(s.plan.per_round, 1))
        if self.device.type == "cuda" and not self.lanes_wanted:
            free = torch.cuda.mem_get_info(self.device)[0]
            wanted = max(1, min(wanted, int(free * 0.5 / (40 * self.layout.size + (1 << 28)))))
        self.stack = Stack(self.layout, wanted, self.device, self.device.type == "cuda")
        half = None
        if self.precision == "bf16":
            half = torch.zeros(wanted, self.stack.head, dtype=torch.bfloat16, device=self.device)
        capture = self.device.type == "cuda"
        self.lanes = [Lane(self.task, self.stack, row, half, self.lr, capture) for row in range(wanted)]
        return wanted

    def _chunk(self, local: Local, chunk: Sequence[tuple[Client, Order]], sums: Sums, round_: Any) -> None:
        seats = [self._seat(client, order) for client, order in chunk]
        assert self.stack is not None
        options, rows = Options(local), len(seats)
        self._prepare(local, seats, options)
        starts = torch.stack([seat.order.weights.vector for seat in seats])
        masks = torch.stack([seat.mask.bits for seat in seats])
        starts[:, : self.layout.prunable_size] *= masks
        self.stack.load(starts, masks)
        self.lr.fill_(local.lr)
        for lane, seat in zip(self.lanes, seats, strict=False):
            lane.begin(options, fold(seat.order.key, "torch") >> 1)
        self._work(local, seats, options)
        values = self.stack.read(rows)
        if not local.statistics:
            values[:, self.layout.trained_size :] = starts[:, self.layout.trained_size :]
        if local.adapt is not None:
            bits = self.stack.logical(self.stack.masks[:rows])
            for row, seat in enumerate(seats):
                seat.mask = Mask(self.layout, bits[row], seat.counts)
        losses = torch.stack([lane.loss for lane in self.lanes[:rows]])
        round_.received(seats, values, starts, losses, sums)

    def _seat(self, client: Client, order: Order) -> Seat:
        local, n = order.local, len(self.train_data[client.id])
        batches = -(-n // local.batch)
        if n % local.batch == 1 and self.norm1d:
            batches = max(1, batches - 1)
        batches = min(batches, local.max_steps) if local.max_steps else batches
        mask = self.books.remembered(client.id, order)
        if mask is None and local.start is not None:
            recipe = local.start
            mask = random_mask(self.layout, recipe.budgets, recipe.key, self.device, recipe.nm)
        mask = mask if mask is not None else order.weights.mask
        return Seat(client, order, mask, n, batches, mask.counts)

    def _prepare(self, local: Local, seats: Sequence[Seat], options: Options) -> None:
        """Capture what these clients will need; nothing is lost by it, as no client's weights are in place yet."""
        if self.device.type != "cuda":
            return
        sizes = sorted({size for seat in seats for size in seat.sizes(0, seat.batches)})
        for lane, seat in zip(self.lanes, seats, strict=False):
            if lane.capture and any((size, options.key) not in lane.graphs for size in sizes):
                self._stage(lane, seat, 0, 0)
                torch.cuda.synchronize(self.device)
                lane.begin(options, 0)
                if not all(lane.prepare(size, options, self.fused) for size in sizes):
                    for other in self.lanes:
                        other.capture = False

    def _stage(self, lane: Lane, seat: Seat, epoch: int, first: int) -> None:
        """An epoch's samples, from batch `first` on, shuffled and augmented, as many as fit."""
        key, batch = seat.order.key, seat.order.local.batch
        at, fits = first * batch, max(1, self.capacity // batch) * batch
        order_of = permutation(fold(key, "shuffle", epoch), seat.n, self.device)[at : at + fits]
        inputs, target = self.train_data[seat.client.id].fetch(order_of, fold(key, "augment", epoch), at)
        lane.stage(inputs, target, max(self.capacity, len(target)))

    def _work(self, local: Local, seats: Sequence[Seat], options: Options) -> None:
        """All clients' steps, interleaved; between the moments at which masks move, lanes do not wait for each other."""
        moments = [
            sorted(local.adapt.moments(local.epochs, seat.batches).items()) if local.adapt else [] for seat in seats
        ]
        done = [0] * len(seats)
        for j in range(len(moments[0]) + 1):
            ends = [m[j][0] if j < len(m) else local.epochs * seat.batches for m, seat in zip(moments, seats, strict=True)]
            self._fork(len(seats))
            for step in range(max(e - d for e, d in zip(ends, done, strict=True))):
                for lane, seat, d, end in zip(self.lanes, seats, done, ends, strict=False):
                    if d + step < end:
                        self._step(lane, seat, d + step, options)
            self._join(len(seats))
            done = ends
            if j < len(moments[0]):
                steps = [m[j][0] for m in moments]
                self._move(local, seats, moments[0][j][1], steps)

    def _step(self, lane: Lane, seat: Seat, step: int, options: Options) -> None:
        epoch, b = divmod(step, seat.batches)
        per_stage = max(1, self.capacity // seat.order.local.batch)
        if b % per_stage == 0:
            if lane.stream is None:
                self._stage(lane, seat, epoch, b)
            else:
                with torch.cuda.stream(lane.stream):
                    self._stage(lane, seat, epoch, b)
        lane.run(seat.sizes(b, b + 1)[0], options, self.fused)

    def _fork(self, rows: int) -> None:
        for lane in self.lanes[:rows]:
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream(self.device))

    def _join(self, rows: int) -> None:
        for lane in self.lanes[:rows]:
            if lane.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(lane.stream)

    def _move(self, local: Local, seats: Sequence[Seat], rate: float, steps: Sequence[int]) -> None:
        """Prune and regrow in all lanes at once."""
        assert self.stack is not None
        rows = len(seats)
        values, masks = self.stack.read(rows), self.stack.logical(self.stack.masks[:rows])
        scores = None
        if local.adapt.dense_gradient:
            found = [lane.ema if lane.ema is not None else lane.grad.float() for lane in self.lanes[:rows]]
            scores = self.stack.logical(torch.stack(found))
        keys = []
        for seat, step in zip(seats, steps, strict=True):
            epoch, b = divmod(step - 1, seat.batches)
            keys.append(fold(seat.order.key, "adapt", epoch, b))
        counts = local.adapt.move(self.layout, values, masks, scores, rate, keys, [seat.counts for seat in seats])
        self.stack.load(values, masks)
        for lane, seat, new in zip(self.lanes, seats, counts, strict=False):
            seat.counts = new
            lane.moved()

    # -- the rest ----------------------------------------------------------------------------------------------

    def _gather(self, group: Iterable[tuple[Client, Order]], sums: Sums, round_: Any) -> None:
        """BatchNorm statistics of every client, one after another."""
        for client, order in group:
            update = self.judge.train(order, client.id, self.train_data[client.id])
            seat = Seat(client, order, order.weights.mask, update.n, 1, order.weights.mask.counts)
            assert update.weights is not None
            loss = torch.tensor([update.metrics["loss"] * update.n], device=self.device)
            round_.received([seat], update.weights.vector[None], order.weights.vector[None], loss, sums)

    @torch.no_grad()
    def evaluate(self, weights: Weights, statistics: bool = True) -> dict[str, float]:
        """Mean loss and metric over all judging samples, in large batches, read back once."""
        self.judge.load(weights.vector)
        module, norms = self.judge.module, bool(self.judge.norms)
        module.train() if norms and not statistics else module.eval()
        total = torch.zeros(2, device=self.device, dtype=torch.float64)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.precision == "bf16"):
            for data in self.judges:
                for start in range(0, len(data), 1000):
                    index = torch.arange(start, min(start + 1000, len(data)), device=self.device)
                    inputs, target = data.fetch(index)
                    output = module(*(_last(x, self.device) for x in inputs))
                    found = [self.task.loss(output, target), self.task.metric(output, target)]
                    total += torch.stack([torch.as_tensor(f, device=self.device).double() for f in found]) * len(index)
        loss, metric = (total / sum(len(d) for d in self.judges)).tolist()
        return {"loss": loss, "metric": metric}

    def memory(self) -> dict[str, Any]:
        return self.books.memory()

    def restore(self, memory: Mapping[str, Any]) -> None:
        self.books.restore(memory, self.device)

    def forget_masks(self, pinned: set[str]) -> None:
        self.books.forget_masks(pinned)

    def close(self) -> None:
        self.lanes, self.stack = [], None


def _last(x: Tensor, device: torch.device) -> Tensor:
    """Images channels-last, as convolutions on a GPU like them."""
    return x.contiguous(memory_format=torch.channels_last) if device.type == "cuda" and x.dim() == 4 else x


def _chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    them = iter(items)
    while chunk := list(itertools.islice(them, size)):
        yield chunk


def _fused() -> Any:
    try:
        from ..kernels.step import masked_step
    except ImportError:
        warnings.warn("Triton is not installed: training steps are not fused, which is slower", RuntimeWarning)
        return None
    return masked_step
