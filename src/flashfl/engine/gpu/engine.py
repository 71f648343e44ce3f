"""The GPU engine: clients train side by side on one device; bytes are counted exactly instead of being made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ...core.engine import JSON
from ...core.errors import ConfigError, warn
from ...core.exchange import DROPPED, Client, Evaluation, Order, Outcome
from ...core.kernel import kernel
from ...core.mask import Mask, Weights
from ...core.state import State
from ...data.sources import on_device
from ...data.task import Task
from ...wire import round_values, segments, value_key
from ..counting import Counting, chunks, stacked
from ..cpu import drops, trust_in_simulated
from ..memory import ClientMemory
from ..settings import EngineSettings
from ..store import MaskStore
from ..train import ClientFailed, starting_mask
from ..work import Work
from .batchable import no_mixing_layers, why_not_batched
from .batched import Batched, convolutions
from .crew import Crew, faster, run_steps
from .evaluate import Evaluator
from .lanes import Lanes
from .stack import Stack

_SMALL = 4_000_000  # weights; in larger models a step is long enough that lanes never wait for launches


class GPUEngine:
    """Trains any task with any method on one device. On a CPU it does the same without CUDA graphs."""

    def __init__(
        self, task: Task, config: EngineSettings, device: torch.device | str = "cuda", folder: Path | None = None
    ) -> None:
        """folder: where masks are stored."""
        self.task, self.layout, self.config, self.device = task, task.layout, config, torch.device(device)
        self.cuda = self.device.type == "cuda"
        if self.cuda and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.half = config.precision == "bf16" or (config.precision == "auto" and self.cuda)
        self.train_data = on_device(task.train, self.device)
        self.capacity = min(max(len(d) for d in task.train), 1 << 16)
        self.memory = ClientMemory(MaskStore.in_folder(self.layout, folder), self.device)
        self.crew: Crew | None = None
        self.stack: Stack | None = None
        self.evaluator = Evaluator(task, self.device, self.half)
        self.trainer = self.evaluator.trainer
        self._before = ExitStack()  # puts torch's global settings back
        if self.cuda:
            if kernel("step", "masked_step") is None:
                warn("Triton is not installed: training steps are not fused, which is slower")
            self._set_up_torch(config.deterministic)

    def _set_up_torch(self, deterministic: bool) -> None:
        """Change torch's global settings until `close`."""
        self._before.callback(torch.cuda.set_device, torch.cuda.current_device())
        torch.cuda.set_device(self.device)  # kernels are launched on the current one
        cudnn, tf32 = torch.backends.cudnn, self.config.precision != "fp32"
        for owner, name, value in (
            (torch.backends.cuda.matmul, "allow_tf32", tf32),
            (cudnn, "allow_tf32", tf32),
            (cudnn, "benchmark", not deterministic),
            (cudnn, "deterministic", deterministic),
        ):
            self._before.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

    def prepare(self, s: State) -> dict[str, JSON]:
        return {}

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        account = Counting(self.memory, self.config.values, trust_in_simulated(self.config))
        for local, works in itertools.groupby(self._works(s, orders, account), key=lambda work: work.local):
            if local.report == "statistics":
                self._gather(works, account)
            else:
                for chunk in chunks(works, self._rows(s)):
                    self._train(chunk, account)
        return account.close()

    def _works(self, s: State, orders: Iterable[tuple[Client, Order]], account: Counting) -> Iterator[Work]:
        """What each client that can take part has to do."""
        for client, order in orders:
            account.sent(client, order)
            data = self.train_data[client.id]
            if self.config.dropout and drops(s, client.id, self.config.dropout):
                account.failed(client.id, DROPPED)
                continue
            try:
                batches = self.trainer.batches(data, order.local)
            except ClientFailed as error:
                account.failed(client.id, str(error))
                continue
            order = self._received(client, order)
            own = self.memory.remembered(client.id) if "mask" in order.local.keep else None
            mask = own or starting_mask(order, self.device)
            yield Work(order.local, order.key, len(data), batches, client, order, mask, mask.counts)

    def _rows(self, s: State) -> int:
        """Clients at a time: as many as asked for, else those of a round, fewer if memory is short."""
        if self.stack is not None:
            return len(self.stack)
        small = self.layout.size < _SMALL and no_mixing_layers(self.trainer.module)
        wanted = self.config.lanes or min(64 if small and self.config.crew != "lanes" else 16, s.plan.per_round)
        if self.cuda and not self.config.lanes and not self.config.deterministic:
            free = torch.cuda.mem_get_info(self.device)[0]
            sample = sum(x[0].nbytes for x in self.train_data[0].fetch(torch.zeros(1, dtype=torch.int64))[0])
            each = 40 * self.layout.size + self.capacity * sample + (1 << 28)
            wanted = max(1, min(wanted, int(free * 0.5 / each)))
        self.stack = Stack(self.layout, wanted, self.device, channels_last=self.cuda, half=self.half)
        return wanted

    def _chosen_crew(self, stack: Stack, works: Sequence[Work]) -> Crew:
        """Lanes or batched: as the setting says, else whichever is faster for these clients."""
        if self.crew is not None:
            return self.crew
        asked, module = self.config.crew, self.trainer.module
        # Small models may be faster batched. The clock decides, which is not deterministic.
        small = self.cuda and self.layout.size < _SMALL and not self.config.deterministic
        why_not = "lanes are at least as fast"
        if asked == "batched" or (asked == "auto" and small):
            why_not = why_not_batched(self.task, module, self.train_data, self.capacity, self.device)
        if asked == "batched" and why_not:
            raise ConfigError(f"crew = 'batched': {why_not}. Use crew = 'lanes' or 'auto'.")
        shared = (self.task, stack, self.train_data, self.capacity)
        crews: list[Crew] = []
        if not why_not:
            crews.append(Batched(*shared))
            if self.cuda and convolutions(module):
                crews.append(Batched(*shared, products=True))
        if asked != "batched":
            crews.append(Lanes(*shared, self.config.compile))
        self.crew = crews[0] if len(crews) == 1 else faster(crews, works)
        return self.crew

    def _train(self, works: list[Work], account: Counting) -> None:
        """Train a few clients side by side and add up their updates."""
        assert self.stack is not None
        stack, rows, local = self.stack, len(works), works[0].local
        crew = self._chosen_crew(stack, works)
        crew.prepare(works)
        starts = stacked([work.order.weights.vector for work in works])
        stack.load(starts, stacked([work.mask.bits for work in works]), rows)
        crew.begin(works)
        run_steps(crew, stack, works)
        values = stack.read(rows)
        if not local.statistics:
            values[:, self.layout.trained_size :] = starts[:, self.layout.trained_size :]
        if local.adapt is not None:
            bits = stack.logical(stack.masks[:rows])
            for row, work in enumerate(works):
                mine = bits[row].clone() if "mask" in local.keep else bits[row]  # a view would keep them all alive
                work.mask = Mask(self.layout, mine, work.counts)
        if self.config.values != "fp32" and local.report == "weights":
            for row, work in enumerate(works):
                key = value_key(work.key, "update", work.order.tag, work.client.id)
                values[row] = self._rounded(Weights(work.mask, values[row]), key, local.statistics).vector
        account.received(works, values, crew.losses(rows))

    def _received(self, client: Client, order: Order) -> Order:
        """The order as it arrives: with its values rounded if they travel in fewer bits."""
        if self.config.values == "fp32":
            return order
        key = value_key(order.key, "order", order.tag, client.id)
        return replace(order, weights=self._rounded(order.weights, key, order.local.statistics))

    def _rounded(self, weights: Weights, key: int, statistics: bool) -> Weights:
        """A model as the other side will decode it."""
        packed, counts = weights.packed(), weights.mask.counts
        tail = 0 if statistics else self.layout.size - self.layout.trained_size
        travels, stays = packed[: len(packed) - tail], packed[len(packed) - tail :]
        parts = segments(self.layout, counts, "all" if statistics else "weights", self.config.values)
        return Weights.unpack(weights.mask, torch.cat([round_values(travels, parts, self.config.values, key), stays]))

    def _gather(self, works: Iterable[Work], account: Counting) -> None:
        """BatchNorm statistics of every client, one after another."""
        for work in works:
            client = work.client.id
            try:
                update = self.trainer.train(work.order, client, self.train_data[client], work.mask)
            except ClientFailed as error:
                account.failed(client, str(error))
                continue
            assert update.weights is not None
            loss = torch.tensor([update.metrics["loss"] * update.n], device=self.device)
            account.received([work], update.weights.vector[None], loss)

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """Mean loss and metric over all evaluation samples."""
        return self.evaluator.evaluate(weights, statistics)

    def close(self) -> None:
        """Free the device's memory and put torch's global settings back."""
        self.crew = self.stack = None
        self._before.close()
