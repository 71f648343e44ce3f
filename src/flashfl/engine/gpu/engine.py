"""The GPU engine: clients train side by side on one device; bytes are counted exactly instead of being made."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...core.client import Clients, overrides
from ...core.engine import JSON
from ...core.errors import ConfigError, warn
from ...core.exchange import DROPPED, Client, Evaluation, Local, Order, Outcome
from ...core.kernel import kernel
from ...core.mask import Mask, Weights, count_rows
from ...core.precision import Precision
from ...core.record import Score
from ...core.state import State
from ...data.sources import on_device
from ...data.task import Task
from ...wire import round_values, segments, value_key
from ..counting import Counting, chunks, stacked
from ..cpu import drops
from ..memory import ClientMemory
from ..personal import personal_score
from ..pipeline import close_clients, open_clients
from ..robust import Robust
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

if TYPE_CHECKING:
    from ..vault import Vault

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
        self.vault = _vault(task, config, folder)
        self.crew: Crew | None = None
        self.stack: Stack | None = None
        self.evaluator = Evaluator(task, self.device, self.half)
        self.trainer = self.evaluator.trainer
        self._before = ExitStack()  # puts torch's global settings back
        if self.cuda:
            if kernel("step", "masked_step") is None:
                warn("Triton is not installed, so training steps are slower: pip install triton")
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
        account = Counting(self.memory, self.config.down, Robust.of(self.config))
        if self.vault is not None:
            from ..private_counting import PrivateCounting

            orders = list(orders)
            everyone = range(len(self.task.train))
            account = PrivateCounting(self.memory, self.vault, s, orders, self.config.dropout, everyone)
        # A client's first mask is made by now: those that differ in nothing else train together.
        alike = itertools.groupby(self._works(s, orders, account), key=lambda work: replace(work.local, start=None))
        for local, works in alike:
            if local.report == "statistics":
                self._gather(works, account)
            else:
                for chunk in chunks(works, self._rows(s)):
                    self._train(chunk, account)
        return account.close()

    def _works(self, s: State, orders: Iterable[tuple[Client, Order]], account: Counting) -> Iterator[Work]:
        """What each client that can take part has to do."""
        for client, order in orders:
            order = account.sent(client, order)
            data = self.train_data[client.id]
            if self.config.dropout and self.vault is None and drops(s, client.id, self.config.dropout):
                account.failed(client.id, DROPPED)
            if not account.trains(client.id):
                continue
            try:
                batches = self.trainer.batches(data, order.local)
            except ClientFailed as error:
                account.failed(client.id, str(error))
                continue
            sent, order = order.weights, self._received(client, order)
            own = self.memory.remembered(client.id) if "mask" in order.local.keep else None
            mask = own or starting_mask(order, self.device)
            yield Work(order.local, order.key, len(data), batches, client, order, mask, mask.counts, sent)

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

    def _chosen_crew(self, stack: Stack, works: Sequence[Work], opened: Clients | None) -> Crew:
        """Lanes or batched: as the setting says, else whichever is faster for these clients."""
        if self.crew is not None:
            return self.crew
        asked, module = self.config.crew, self.trainer.module
        # Small models may be faster batched. The clock decides, which is not deterministic.
        small = self.cuda and self.layout.size < _SMALL and not self.config.deterministic
        why_not = "lanes are at least as fast"
        if asked == "batched" or (asked == "auto" and small):
            whole = [type(part).__name__ for part in works[0].local.parts if overrides(part, "inputs")]
            why_not = f"the part {whole[0]} ranks the inputs of a whole batch" if whole else ""
            why_not = why_not or why_not_batched(self.task, module, self.train_data, self.capacity, self.device)
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
        self.crew = crews[0] if len(crews) == 1 else faster(crews, works, opened)
        return self.crew

    def _train(self, works: list[Work], account: Counting) -> None:
        """Train a few clients side by side and add up their updates."""
        assert self.stack is not None
        stack, rows, local = self.stack, len(works), works[0].local
        starts = stacked([work.order.weights.vector for work in works])
        masks = stacked([work.mask.bits for work in works])
        opened = None
        if local.parts:
            opened = self._open(stack, works, starts, masks)
            starts, masks = opened.vectors, opened.masks
        crew = self._chosen_crew(stack, works, opened)
        crew.prepare(works, opened)
        stack.load(starts, masks, rows)
        crew.begin(works, opened)
        run_steps(crew, stack, works)
        values = stack.read(rows)
        if not local.statistics:
            values[:, self.layout.trained_size :] = starts[:, self.layout.trained_size :]
        if local.adapt is not None:
            bits = stack.logical(stack.masks[:rows])
            for row, work in enumerate(works):
                mine = bits[row].clone() if "mask" in local.keep else bits[row]  # a view would keep them all alive
                work.mask = Mask(self.layout, mine, work.counts)
        if opened is not None:
            opened.state = {name: stack.logical(value) for name, value in crew.state(rows).items()}
            values = self._close(works, opened, values)
        how = local.sends(self.config.down)
        if not how.exact and local.report == "weights":
            for row, work in enumerate(works):
                values[row] = self._decoded(work, values[row], how)
        account.received(works, values, crew.losses(rows))

    def _decoded(self, work: Work, vector: Tensor, how: Precision) -> Tensor:
        """A trained model as the server will decode it."""
        key, trained = value_key(work.key, "update", work.order.tag, work.client.id), self.layout.trained_size
        if not how.changes:
            return self._rounded(Weights(work.mask, vector), key, work.local.statistics, how).vector
        change, head = vector.clone(), slice(0, self.layout.prunable_size)
        change[:trained] -= work.order.weights.vector[:trained]
        change[head].masked_fill_(~work.mask.bits, 0.0)  # the mask may have moved
        found = self._rounded(Weights(work.mask, change), key, work.local.statistics, how).vector
        found[:trained] += work.sent.vector[:trained]
        found[head].masked_fill_(~work.mask.bits, 0.0)
        return found

    def _open(self, stack: Stack, works: Sequence[Work], starts: Tensor, masks: Tensor) -> Clients:
        """Run the parts of some clients before training. What they carry through the steps lies as in the stack."""
        vectors = starts.expand(len(works), -1).clone()
        vectors[:, : self.layout.prunable_size].masked_fill_(~masks, 0.0)
        keys, steps = [work.key for work in works], [work.steps for work in works]
        given, notes = [work.order.extra for work in works], [self.memory.notes(work.client.id) for work in works]

        def validate(row: int) -> float:
            data = self.train_data[works[row].client.id]
            return self.trainer.validate(Weights(works[row].mask, vectors[row]), data, works[row].local.statistics)

        asked = (validate, self.task.draw)
        opened = open_clients(self.layout, works[0].local, keys, steps, vectors, masks, given, notes, *asked)
        if opened.vectors is not vectors:
            for row, (work, counts) in enumerate(zip(works, count_rows(self.layout, opened.masks), strict=True)):
                work.mask, work.counts = Mask(self.layout, opened.masks[row].clone(), counts), counts
        opened.state = {name: stack.columns(value) for name, value in opened.state.items()}
        return opened

    def _close(self, works: Sequence[Work], opened: Clients, values: Tensor) -> Tensor:
        """Run the parts of some clients after training: the models that they report."""
        opened.vectors, opened.masks = values, torch.stack([work.mask.bits for work in works])
        finished = close_clients(works[0].local, opened)
        for row, work in enumerate(works):
            if finished.counts is not None:
                work.counts = finished.counts[row]
                work.mask = Mask(self.layout, opened.masks[row], work.counts)
            work.extra, work.notes = finished.extras[row], finished.notes[row]
        return opened.vectors

    def _received(self, client: Client, order: Order) -> Order:
        """The order as it arrives: with its values rounded if they travel in fewer bits."""
        if self.config.down.exact:
            return order
        key = value_key(order.key, "order", order.tag, client.id)
        return replace(order, weights=self._rounded(order.weights, key, order.local.statistics, self.config.down))

    def _rounded(self, weights: Weights, key: int, statistics: bool, how: Precision) -> Weights:
        """A model as the other side will decode it."""
        packed, counts = weights.packed(), weights.mask.counts
        tail = 0 if statistics else self.layout.size - self.layout.trained_size
        travels, stays = packed[: len(packed) - tail], packed[len(packed) - tail :]
        parts = segments(self.layout, counts, "all" if statistics else "weights", how.values)
        return Weights.unpack(weights.mask, torch.cat([round_values(travels, parts, how, key), stays]))

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

    def evaluate_personal(self, weights: Weights, clients: Sequence[tuple[Client, Local]]) -> Score | None:
        return personal_score(self.trainer, self.memory, weights, clients)

    def close(self) -> None:
        """Free the device's memory and put torch's global settings back."""
        self.crew = self.stack = None
        self._before.close()


def _vault(task: Task, config: EngineSettings, folder: Path | None) -> Vault | None:
    if not (config.secure or config.dp_epsilon or config.dp_noise):
        return None
    from ..vault import open_vault  # only here, as it needs an extra

    if config.secure:
        warn(
            "secure = true is only simulated on a GPU: rounding, clipping, noise and byte counts are those of secure "
            "aggregation, but nothing is encrypted. device = 'cpu' runs the real protocol"
        )
    return open_vault(config, len(task.train), folder)
