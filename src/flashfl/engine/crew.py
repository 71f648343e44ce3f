"""Who carries out the steps of a chunk of clients: lanes side by side, or one wide computation."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.exchange import Client, Local, Order
from ..core.mask import Mask
from ..core.rng import fold, permutation, permutations
from ..data.sources import Arrays, Source, Subset
from ..data.task import Task
from .lanes import Lane, Options, Stack, plain_forward
from .wide import Wide


@dataclass
class Seat:
    """A client at work."""

    client: Client
    order: Order
    mask: Mask
    n: int
    batches: int  # an epoch
    counts: tuple[int, ...]

    def size(self, batch: int) -> int:
        """Samples in one batch of an epoch: the last may be short."""
        return min(self.order.local.batch, self.n - batch * self.order.local.batch)

    def samples(
        self, data: Source, epoch: int, first: int, capacity: int, device: torch.device
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """An epoch's samples from batch `first` on, shuffled and augmented, as many as fit."""
        key, at = self.order.key, first * self.order.local.batch
        index = permutation(fold(key, "shuffle", epoch), self.n, device)[at : at + capacity]
        return data.fetch(index, fold(key, "augment", epoch), at)


class Crew(Protocol):
    """Steps the clients whose weights lie in the stack's rows."""

    def prepare(self, local: Local, seats: Sequence[Seat]) -> None:
        """Capture what is needed, before any client's weights are in place."""
        ...

    def begin(self, local: Local, seats: Sequence[Seat]) -> None: ...

    def advance(self, local: Local, seats: Sequence[Seat], first: Sequence[int], last: Sequence[int]) -> None:
        """Steps first[i]..last[i]-1 of each client's work."""
        ...

    def moved(self, rows: int) -> None: ...
    def scores(self, rows: int) -> Tensor: ...
    def losses(self, rows: int) -> Tensor: ...


class LaneCrew:
    """One replica, stream and captured step for each client."""

    def __init__(self, task: Task, stack: Stack, half: Tensor | None, lr: Tensor, data: Sequence[Source],
                 capacity: int, fused: Callable[..., None] | None, compiled: bool = False) -> None:  # fmt: skip
        self.stack, self.lr, self.data, self.capacity, self.fused = stack, lr, data, capacity, fused
        self.device = stack.values.device
        capture = self.device.type == "cuda"
        # Compiled once: replicas of one model differ in nothing a compiled function depends on.
        forward = torch.compile(plain_forward, dynamic=False) if compiled else plain_forward
        self.lanes = [Lane(task, stack, row, half, lr, capture, forward) for row in range(len(stack.values))]

    def prepare(self, local: Local, seats: Sequence[Seat]) -> None:
        options = Options(local)
        sizes = sorted({seat.size(b) for seat in seats for b in range(seat.batches)})
        for lane, seat in zip(self.lanes, seats, strict=False):
            if lane.capture and any((size, options.key) not in lane.graphs for size in sizes):
                self._stage(lane, seat, 0, 0)
                lane.begin(options, 0)
                torch.cuda.synchronize(self.device)
                if not all(lane.prepare(size, options, self.fused) for size in sizes):
                    for other in self.lanes:
                        other.capture = False

    def begin(self, local: Local, seats: Sequence[Seat]) -> None:
        self.lr.fill_(local.lr)
        for lane, seat in zip(self.lanes, seats, strict=False):
            lane.begin(Options(local), fold(seat.order.key, "torch") >> 1)

    def _stage(self, lane: Lane, seat: Seat, epoch: int, first: int) -> None:
        batch = seat.order.local.batch
        fits = max(1, self.capacity // batch) * batch
        inputs, target = seat.samples(self.data[seat.client.id], epoch, first, fits, self.device)
        lane.stage(inputs, target, max(self.capacity, fits))

    def advance(self, local: Local, seats: Sequence[Seat], first: Sequence[int], last: Sequence[int]) -> None:
        """Lanes are interleaved, so that every stream has work, and do not wait for each other."""
        options, here = Options(local), self.lanes[: len(seats)]
        for lane in here:
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream(self.device))
        for step in range(max(b - a for a, b in zip(first, last, strict=True))):
            for lane, seat, a, b in zip(here, seats, first, last, strict=True):
                if a + step < b:
                    self._step(lane, seat, a + step, options)
        for lane in here:
            if lane.stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(lane.stream)

    def _step(self, lane: Lane, seat: Seat, step: int, options: Options) -> None:
        epoch, b = divmod(step, seat.batches)
        if b % max(1, self.capacity // seat.order.local.batch) == 0:
            with torch.cuda.stream(lane.stream):
                self._stage(lane, seat, epoch, b)
        lane.run(seat.size(b), options, self.fused)

    def moved(self, rows: int) -> None:
        for lane in self.lanes[:rows]:
            lane.moved()

    def scores(self, rows: int) -> Tensor:
        return torch.cat([lane.scores for lane in self.lanes[:rows] if lane.scores is not None])

    def losses(self, rows: int) -> Tensor:
        return torch.stack([lane.loss for lane in self.lanes[:rows]])


class WideCrew:
    """All clients in one captured computation."""

    def __init__(self, task: Task, stack: Stack, half: Tensor | None, lr: Tensor, data: Sequence[Source],
                 capacity: int, products: bool = False) -> None:  # fmt: skip
        self.wide, self.lr, self.data, self.capacity = Wide(task, stack, half, lr, products), lr, data, capacity
        self.device = stack.values.device
        self._staged = -1  # which epoch's samples lie ready

    def prepare(self, local: Local, seats: Sequence[Seat]) -> None:
        options = Options(local)
        if self.wide.capture and (local.batch, options.key) not in self.wide.graphs:
            self._stage(seats, 0)
            self.wide.begin(options)
            self.wide.prepare(local.batch, options)

    def begin(self, local: Local, seats: Sequence[Seat]) -> None:
        self.lr.fill_(local.lr)
        self.wide.begin(Options(local))
        self._staged = -1

    def _stage(self, seats: Sequence[Seat], epoch: int) -> None:
        """Where clients have equal shares of data that is not augmented, one gather serves them all."""
        keys = [fold(seat.order.key, "shuffle", epoch) for seat in seats]
        orders = permutations(keys, [seat.n for seat in seats], self.device)
        data = [self.data[seat.client.id] for seat in seats]
        base, n = data[0].source if isinstance(data[0], Subset) else None, seats[0].n
        plain = isinstance(base, Arrays) and base.augment is None
        if plain and all(isinstance(d, Subset) and d.source is base and len(d) == n for d in data):
            places = torch.stack([d.index for d in data])  # type: ignore[attr-defined]
            inputs, target = base.fetch(places.gather(1, torch.stack(orders)).flatten())  # type: ignore[union-attr]
            self.wide.stage_all(inputs, target, len(seats), self.capacity)
            return
        found = [
            d.fetch(order, fold(seat.order.key, "augment", epoch), 0)
            for d, seat, order in zip(data, seats, orders, strict=True)
        ]
        self.wide.stage(found, self.capacity)

    def advance(self, local: Local, seats: Sequence[Seat], first: Sequence[int], last: Sequence[int]) -> None:
        """Epoch by epoch, as all clients begin an epoch together."""
        options = Options(local)
        epochs = {s // seat.batches for seat, a, b in zip(seats, first, last, strict=True) for s in (a, b - 1) if a < b}
        for epoch in range(min(epochs, default=0), max(epochs, default=-1) + 1):
            spans = [
                (max(a - epoch * seat.batches, 0), min(b - epoch * seat.batches, seat.batches))
                for seat, a, b in zip(seats, first, last, strict=True)
            ]
            if epoch != self._staged or any(a == 0 for a, _ in spans):
                self._stage(seats, epoch)
                self._staged = epoch
            limits = [min(seat.n, b * local.batch) for seat, (_, b) in zip(seats, spans, strict=True)]
            self.wide.span([a * local.batch for a, _ in spans], limits)
            for _ in range(max(b - a for a, b in spans)):
                self.wide.run(local.batch, options)

    def moved(self, rows: int) -> None:
        self.wide.moved()

    def scores(self, rows: int) -> Tensor:
        assert self.wide.scores is not None
        return self.wide.scores[:rows]

    def losses(self, rows: int) -> Tensor:
        return self.wide.loss[:rows].clone()


def faster(crews: Sequence[Any], local: Local, seats: Sequence[Seat]) -> Any:
    """The crew that takes less time for an epoch of these clients; the stack holds garbage afterwards."""
    times: dict[float, Any] = {}
    for crew in crews:
        try:
            crew.prepare(local, seats)
            for _ in range(2):
                _settled(crew.device)
                began = time.perf_counter()
                crew.begin(local, seats)
                crew.advance(local, seats, [0] * len(seats), [seat.batches for seat in seats])
                _settled(crew.device)
        except Exception as error:  # what cannot be mapped over (an `if` on a tensor, say) can still run in lanes
            if crew is crews[-1] and not times:
                raise
            warnings.warn(f"{type(crew).__name__} cannot run this model ({str(error).splitlines()[0]})", RuntimeWarning)
            continue
        times[time.perf_counter() - began] = crew
    return times[min(times)]


def _settled(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
