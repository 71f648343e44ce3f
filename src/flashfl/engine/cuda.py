"""The GPU engine: clients train side by side in lanes; bytes are counted exactly instead of being made."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..core.errors import ConfigError
from ..core.exchange import DROPPED, Client, Evaluation, Local, Order, Outcome
from ..core.kernel import kernel
from ..core.mask import Mask, Weights
from ..core.rng import fold
from ..core.state import State
from ..data.examples import on_device
from ..data.task import Task
from ..sparsity import move, recipe_mask
from ..wire import round_values, segments, value_key
from ..wire.values import Form
from .counting import Counting, chunks, stacked
from .cpu import drops
from .crew import LaneCrew, Seat, WideCrew, faster
from .judge import Judge
from .lanes import Stack
from .memory import ClientMemory
from .store import MaskStore
from .train import ClientFailed
from .trust import Trust
from .wide import can_be_wide, has_convolutions, is_mean_of_samples, sees_samples_alone, various

_SMALL = 4_000_000  # weights; above this a step is long enough that lanes are never bound by launches


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
        crew: str = "auto",
        compiled: bool = False,
        trust: Trust | None = None,
    ) -> None:
        self.task, self.layout, self.device, self.dropout = task, task.layout, torch.device(device), dropout
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.set_device(self.device)  # kernels are launched on the current one
        self.precision = ("bf16" if cuda else "fp32") if precision == "auto" else precision
        if cuda:
            torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision != "fp32"
            torch.backends.cudnn.benchmark = not deterministic
            torch.backends.cudnn.deterministic = deterministic
        self.deterministic = deterministic
        self.lanes_wanted, self.crew_wanted, self.compiled = lanes, crew, compiled
        self.train_data = on_device(task.train, self.device)
        self.capacity = min(max(len(d) for d in task.train), 1 << 16)
        self.values = values
        self.memory = ClientMemory(MaskStore.in_folder(self.layout, folder), self.device)
        self.trust = trust
        self.crew: Any = None
        self.stack: Stack | None = None
        self.lr = torch.zeros((), device=self.device)
        self.judge = Judge(task, self.device, self.precision)
        self.trainer = self.judge.trainer
        self.fused = _fused() if cuda else None

    # -- rounds ------------------------------------------------------------------------------------------------

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        round_ = Counting(self.memory, self.values, self.trust)
        present = self._present(s, orders, round_)
        for local, group in itertools.groupby(present, key=lambda pair: pair[1].local):
            if local.report == "statistics":
                self._gather(group, round_)
                continue
            for chunk in chunks(group, self._rows(s)):
                self._chunk(local, chunk, round_)
        return round_.close()

    def _present(
        self, s: State, orders: Iterable[tuple[Client, Order]], round_: Counting
    ) -> Iterator[tuple[Client, Order]]:
        for client, order in orders:
            round_.sent(client, order)
            if self.dropout and drops(s, client.id, self.dropout):
                round_.failed(client.id, DROPPED)
                continue
            try:
                self.trainer.batches(self.train_data[client.id], order.local)
            except ClientFailed as error:
                round_.failed(client.id, str(error))
            else:
                yield client, order

    def _rows(self, s: State) -> int:
        """Clients at a time: as many as asked for, else those of a round, fewer if memory is short."""
        if self.stack is not None:
            return len(self.stack.values)
        small = self.layout.size < _SMALL and can_be_wide(self.trainer.module)
        wanted = self.lanes_wanted or min(64 if small and self.crew_wanted != "lanes" else 16, s.plan.per_round)
        if self.device.type == "cuda" and not self.lanes_wanted and not self.deterministic:
            free = torch.cuda.mem_get_info(self.device)[0]
            sample = sum(x[0].nbytes for x in self.train_data[0].fetch(torch.zeros(1, dtype=torch.int64))[0])
            each = 40 * self.layout.size + self.capacity * sample + (1 << 28)
            wanted = max(1, min(wanted, int(free * 0.5 / each)))
        self.stack = Stack(self.layout, wanted, self.device, self.device.type == "cuda")
        return wanted

    def _crew(self, local: Local, seats: Sequence[Seat]) -> Any:
        """Lanes or one wide computation: as asked for, else whichever is faster for these clients."""
        if self.crew is not None:
            return self.crew
        stack = self.stack
        assert stack is not None
        half = None
        if self.precision == "bf16":
            half = torch.zeros(len(stack.values), stack.head, dtype=torch.bfloat16, device=self.device)
        shared = (self.task, stack, half, self.lr, self.train_data, self.capacity)
        why_not = self._why_not_wide() if self.crew_wanted != "lanes" else "lanes were asked for"
        if self.crew_wanted == "wide" and why_not:
            raise ConfigError(f"crew = 'wide': {why_not}, which needs lanes")
        wide = not why_not and not (self.deterministic and self.crew_wanted == "auto")  # a clock is not deterministic
        crews: list[Any] = []
        if wide and (self.crew_wanted == "wide" or (self.device.type == "cuda" and self.layout.size < _SMALL)):
            crews.append(WideCrew(*shared))
            if self.device.type == "cuda" and has_convolutions(self.trainer.module):
                crews.append(WideCrew(*shared, products=True))
        if self.crew_wanted != "wide":
            crews.append(LaneCrew(*shared, self.fused, self.compiled))
        self.crew = crews[0] if len(crews) == 1 else faster(crews, local, seats)
        return self.crew

    def _why_not_wide(self) -> str:
        """What keeps clients from being trained in one computation; empty if nothing does."""
        if not can_be_wide(self.trainer.module):
            return "the model has BatchNorm or dropout layers"
        if max(len(data) for data in self.train_data) > self.capacity:
            return f"a client has more than {self.capacity} samples"
        inputs, target = various(self.train_data, self.device)
        if not sees_samples_alone(self.trainer.module, inputs):
            return "what the model makes of a sample is no tensor, or depends on its batch, on chance or earlier ones"
        if not is_mean_of_samples(self.task.loss, self.trainer.module, inputs, target):
            return "the loss of a batch is not the mean of its samples' losses"
        return ""

    def _chunk(self, local: Local, chunk: Sequence[tuple[Client, Order]], round_: Counting) -> None:
        seats = [self._seat(client, self._received_order(client, order)) for client, order in chunk]
        assert self.stack is not None
        crew, rows = self._crew(local, seats), len(seats)
        crew.prepare(local, seats)
        starts = stacked([seat.order.weights.vector for seat in seats])
        masks = stacked([seat.mask.bits for seat in seats])
        if any(seat.mask is not seat.order.weights.mask for seat in seats):  # else they are zero outside it already
            starts = starts.repeat(rows, 1) if len(starts) < rows else starts.clone()  # the server's own, perhaps
            starts[:, : self.layout.prunable_size] *= masks
        self.stack.load(starts, masks, rows)
        crew.begin(local, seats)
        self._work(local, seats, crew)
        values = self.stack.read(rows)
        if not local.statistics:
            values[:, self.layout.trained_size :] = starts[:, self.layout.trained_size :]
        if local.adapt is not None:
            bits = self.stack.logical(self.stack.masks[:rows])
            for row, seat in enumerate(seats):
                mine = bits[row].clone() if "mask" in local.keep else bits[row]  # a view would keep them all alive
                seat.mask = Mask(self.layout, mine, seat.counts)
        if self.values != "fp32" and local.report == "weights":
            for row, seat in enumerate(seats):
                key = value_key(seat.order.key, "update", seat.order.tag, seat.client.id)
                values[row] = self._rounded(Weights(seat.mask, values[row]), key, local.statistics).vector
        round_.received(seats, values, crew.losses(rows))

    def _received_order(self, client: Client, order: Order) -> Order:
        """The order as it arrives: with its values rounded, where they travel in fewer bits."""
        if self.values == "fp32":
            return order
        key = value_key(order.key, "order", order.tag, client.id)
        return replace(order, weights=self._rounded(order.weights, key, order.local.statistics))

    def _rounded(self, weights: Weights, key: int, statistics: bool) -> Weights:
        """A model as the other side will decode it."""
        packed, counts = weights.packed(), weights.mask.counts
        tail = 0 if statistics else self.layout.size - self.layout.trained_size
        travels, stays = packed[: len(packed) - tail], packed[len(packed) - tail :]
        parts = segments(self.layout, counts, "all" if statistics else "weights", self.values)
        return Weights.unpack(weights.mask, torch.cat([round_values(travels, parts, self.values, key), stays]))

    def _seat(self, client: Client, order: Order) -> Seat:
        local, data = order.local, self.train_data[client.id]
        mask = self.memory.remembered(client.id) if "mask" in local.keep else None
        if mask is None and local.start is not None:
            mask = recipe_mask(self.layout, local.start, self.device)
        mask = mask if mask is not None else order.weights.mask
        return Seat(client, order, mask, len(data), self.trainer.batches(data, local), mask.counts)

    def _work(self, local: Local, seats: Sequence[Seat], crew: Any) -> None:
        """All clients' steps, with a stop wherever masks move."""
        ends = [local.epochs * seat.batches for seat in seats]
        moments = [_moments(local, seat.batches) for seat in seats]
        done = [0] * len(seats)
        for j in range(max(map(len, moments))):
            steps = [m[j][0] if j < len(m) else at for m, at in zip(moments, done, strict=True)]
            crew.advance(local, seats, done, steps)
            moving = {row: m[j][1] for row, m in enumerate(moments) if j < len(m)}
            while moving:
                rate = next(iter(moving.values()))
                rows = [row for row, own in moving.items() if own == rate]
                self._move(local, seats, rows, rate, steps, crew)
                moving = {row: own for row, own in moving.items() if row not in rows}
            done = steps
        crew.advance(local, seats, done, ends)

    def _move(
        self, local: Local, seats: Sequence[Seat], rows: Sequence[int], rate: Any, steps: Sequence[int], crew: Any
    ) -> None:
        """Prune and regrow in these rows at once."""
        assert self.stack is not None
        assert local.adapt is not None
        every = len(seats)
        values, masks = self.stack.read(every), self.stack.logical(self.stack.masks[:every])
        scores = self.stack.logical(crew.scores(every)) if local.adapt.dense_gradient else None
        some = None if len(rows) == every else torch.tensor(rows).to(self.device, non_blocking=True)
        mine: list[Any] = [x if some is None or x is None else x[some] for x in (values, masks, scores)]
        keys = []
        for row in rows:
            epoch, b = divmod(steps[row] - 1, seats[row].batches)
            keys.append(fold(seats[row].order.key, "adapt", epoch, b))
        vectors, bits, ranks = mine
        counts = move(local.adapt, self.layout, vectors, bits, ranks, rate, keys, [seats[row].counts for row in rows])
        if some is not None:
            values[some], masks[some] = vectors, bits
        self.stack.load(values, masks, every)
        crew.moved(every)
        for row, new in zip(rows, counts, strict=True):
            seats[row].counts = new

    # -- the rest ----------------------------------------------------------------------------------------------

    def _gather(self, group: Iterable[tuple[Client, Order]], round_: Counting) -> None:
        """BatchNorm statistics of every client, one after another."""
        for client, sent in group:
            order = self._received_order(client, sent)
            try:
                update = self.trainer.train(order, client.id, self.train_data[client.id])
            except ClientFailed as error:
                round_.failed(client.id, str(error))
                continue
            seat = Seat(client, order, order.weights.mask, update.n, 1, order.weights.mask.counts)
            assert update.weights is not None
            loss = torch.tensor([update.metrics["loss"] * update.n], device=self.device)
            round_.received([seat], update.weights.vector[None], loss)

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all judging samples."""
        return self.judge.evaluate(weights, statistics)

    def close(self) -> None:
        self.crew = self.stack = None


def _moments(local: Local, batches: int) -> list[tuple[int, Any]]:
    """After which of a client's steps its mask moves, and at what rate; as in the trainer, others never come."""
    found = local.adapt.moments(local.epochs, batches) if local.adapt else {}
    steps = sorted(step for step, rate in found.items() if rate is not None and 1 <= step <= local.epochs * batches)
    return [(step, found[step]) for step in steps]


def _fused() -> Any:
    found = kernel("step", "masked_step")
    if found is None:
        warnings.warn("Triton is not installed: training steps are not fused, which is slower", RuntimeWarning)
    return found
