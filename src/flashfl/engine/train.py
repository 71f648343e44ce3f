"""The one local training loop: a replica of the model, stepped under a mask, the same wherever it runs."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.errors import FlashError
from ..core.exchange import Local, Order, Update
from ..core.layout import tensors_of
from ..core.mask import Mask, Weights
from ..core.rng import fold, permutation
from ..data.examples import Source, in_memory
from ..data.task import Task
from ..sparsity import move, recipe_mask
from .trust import all_finite

NOT_FINITE = "its weights or its loss are not finite after training"
_PART = 1 << 20
_EVAL_BATCH = 250
_NORMS = nn.modules.batchnorm._NormBase  # all that may keep statistics: BatchNorm, InstanceNorm


def judged_batches(n: int) -> Iterator[tuple[int, int]]:
    """Where the batches begin and end in which n samples are judged: everywhere the same, as sums depend on it."""
    return ((start, min(start + _EVAL_BATCH, n)) for start in range(0, n, _EVAL_BATCH))


class ClientFailed(FlashError):
    """A client's work cannot be used; the round goes on without it."""


class Trainer:
    """One replica whose parameters, gradients and statistics are views into flat vectors."""

    def __init__(self, task: Task, device: torch.device | str = "cpu") -> None:
        self.task, self.layout, self.device = task, task.layout, torch.device(device)
        self.module = task.build().to(device)
        self.vector = torch.zeros(self.layout.size, device=device)
        own = tensors_of(self.module)
        brought = [own[layer.name].flatten().float() for layer in self.layout.of_kind("statistic")]
        self._statistics = torch.cat(brought) if brought else self.vector[:0]
        self.grad = torch.zeros(self.layout.trained_size, device=device)
        self.norms = [m for m in self.module.modules() if isinstance(m, _NORMS)]
        self._bind()
        self._takes_one: bool | None = None  # whether it can train on a batch of one sample; None: not tried yet
        # Buffers outside the layout (counters, tables) start every client's work as the model defines them.
        bound = {layer.name for layer in self.layout.of_kind("statistic")}
        self._buffers = {n: b.clone() for n, b in self.module.named_buffers() if n not in bound}

    def _bind(self) -> None:
        values, grads = self.layout.views(self.vector), {}
        for layer in self.layout.of_kind("prunable", "dense"):
            grads[layer.name] = self.grad[layer.start : layer.stop].view(layer.shape)
        for name, p in self.module.named_parameters():
            if name in values:
                p.data, p.grad = values[name].copy_(p.data), grads[name]
            else:
                p.requires_grad_(False)
        for layer in self.layout.of_kind("statistic"):
            owner, _, leaf = layer.name.rpartition(".")
            self.module.get_submodule(owner)._buffers[leaf] = values[layer.name]

    def load(self, vector: Tensor) -> None:
        self.vector.copy_(vector)
        for name, buffer in self.module.named_buffers():
            if name in self._buffers:
                buffer.copy_(self._buffers[name])

    def train(self, order: Order, client: int, data: Source, remembered: Mask | None = None) -> Update:
        """A client's whole work in one round: train, perhaps move the mask, report.

        The update's weights lie in this replica: they are to be used before it trains again.
        """
        local, key = order.local, order.key
        mask = remembered or self._starting_mask(order)
        start = order.weights.restrict(mask).vector
        self.load(start)
        statistics = start[self.layout.trained_size :].clone()
        if not local.statistics:  # they have not travelled, and a norm that is frozen uses what the model brought
            self.vector[self.layout.trained_size :] = self._statistics
        del start, order  # as large as the model, and no longer needed
        with seeded(fold(key, "torch") >> 1, self.device):
            if local.report == "statistics":
                loss = self._gather(local, data)
            else:
                mask, loss = self._epochs(local, key, data, mask)
        if not local.statistics and local.report != "statistics":
            self.vector[self.layout.trained_size :] = statistics
        if not math.isfinite(loss) or not all_finite(self.vector):
            raise ClientFailed(NOT_FINITE)
        weights = None if local.report == "counts" else Weights(mask, self.vector)
        return Update.of(client, len(data), weights, mask.counts, {"loss": loss})

    def _starting_mask(self, order: Order) -> Mask:
        if (recipe := order.local.start) is not None:
            return recipe_mask(self.layout, recipe, self.device)
        return order.weights.mask

    def _epochs(self, local: Local, key: int, data: Source, mask: Mask) -> tuple[Mask, float]:
        k = self.layout.prunable_size
        bits, counts = mask.bits.clone(), mask.counts
        full = sum(counts) == k  # then there is nothing to mask, and a mask's product is as large as the model
        stepper = Stepper(self, local, None if full else bits)
        batches = self.batches(data, local)
        moments = local.adapt.moments(local.epochs, batches) if local.adapt else {}
        self.module.train()
        total, seen = torch.zeros((), device=self.device), 0
        for epoch in range(local.epochs):
            order_of = permutation(fold(key, "shuffle", epoch), len(data))
            augment = fold(key, "augment", epoch)
            for b in range(batches):
                index = order_of[b * local.batch : (b + 1) * local.batch]
                inputs, target = data.fetch(index, augment, b * local.batch)
                total += stepper.step(inputs, target) * len(index)
                seen += len(index)
                rate = moments.get(epoch * batches + b + 1)
                if rate is not None and local.adapt is not None:
                    keys = [fold(key, "adapt", epoch, b)]
                    [counts] = move(
                        local.adapt, self.layout, self.vector[None], bits[None], stepper.scores(), rate, keys, [counts]
                    )
                    stepper.moved()
        if not full:
            _mask(self.vector[:k], bits)
        if moments:
            mask = Mask(self.layout, bits, counts)
        return mask, float(total / max(1, seen))

    def batches(self, data: Source, local: Local) -> int:
        """Batches an epoch; a last batch of one sample is left out where BatchNorm could not take it."""
        n = len(data)
        count = local.batches(n)
        if n % local.batch == 1 and count == math.ceil(n / local.batch) and self.norms and not self._one(data):
            count -= 1
        if count == 0:
            raise ClientFailed("it has one sample, which BatchNorm cannot train on")
        return count

    def _one(self, data: Source) -> bool:
        """Whether the model can train on one sample: BatchNorm cannot if a channel has one value, flat or a 1x1 map."""
        if self._takes_one is None:
            kept = self.vector.clone()
            self.module.train()
            with torch.no_grad(), torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
                try:
                    self.module(*data.fetch(torch.zeros(1, dtype=torch.long))[0])
                    self._takes_one = True
                except ValueError:
                    self._takes_one = False
            self.load(kept)
        return self._takes_one

    def _gather(self, local: Local, data: Source) -> float:
        """BatchNorm statistics of this client's data under the given weights, and the mean loss."""
        batches, momenta = self.batches(data, local), [m.momentum for m in self.norms]
        self.module.train()
        gathered = {m for m in self.norms if m.training and m.track_running_stats}  # others stay as they are: frozen
        for layer in self.layout.of_kind("statistic"):
            if self.module.get_submodule(layer.name.rpartition(".")[0]) in gathered:
                self.vector[layer.start : layer.stop] = 0
        total, seen = 0.0, 0
        try:
            with torch.no_grad():
                for b in range(batches):
                    for m in self.norms:
                        m.momentum = 1 / (b + 1)  # a plain average over batches
                    index = torch.arange(b * local.batch, min(len(data), (b + 1) * local.batch))
                    inputs, target = data.fetch(index)
                    total += float(self.task.loss(self.module(*inputs), target)) * len(index)
                    seen += len(index)
        finally:  # a client that fails is left out, and this replica goes on to the next
            for m, momentum in zip(self.norms, momenta, strict=True):
                m.momentum = momentum
        return total / seen

    def evaluate(self, weights: Weights, data: Source, index: Tensor, statistics: bool = True) -> tuple[float, float]:
        """Loss and metric of a model on some samples, times their number."""
        self.load(weights.vector)
        if not statistics:  # they may not have travelled
            self.vector[self.layout.trained_size :] = self._statistics
        self.judging(statistics)
        drawn = not in_memory(data)  # a data set of the user's may draw; seeding takes longer than a small batch
        with torch.no_grad(), seeded(int(index[0]), self.device) if drawn else nullcontext():
            inputs, target = data.fetch(index)
            output = self.module(*inputs)
            n = len(index)
            return float(self.task.loss(output, target)) * n, float(self.task.metric(output, target)) * n

    def judge(self, weights: Weights, data: Source, statistics: bool = True) -> tuple[float, float]:
        """Loss and metric of a model on all of a source's samples, times their number."""
        loss = metric = 0.0
        for start, stop in judged_batches(len(data)):
            part = self.evaluate(weights, data, torch.arange(start, stop), statistics)
            loss, metric = loss + part[0], metric + part[1]
        return loss, metric

    def judging(self, statistics: bool) -> None:
        """Set the module to be judged: without statistics BatchNorm takes each batch's own, and nothing else trains."""
        self.module.train()
        frozen = {m for m in self.norms if not m.training}
        self.module.eval()
        for m in self.norms:
            m.train(not statistics and m not in frozen)


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, whoever draws (dropout, a data set of the user's) draws the same whatever was drawn before."""
    outside = random.getstate(), np.random.get_state()
    # On a CPU not torch.manual_seed, which looks at its whole stack for devices that are not there.
    seed_torch = torch.manual_seed if device.type == "cuda" else torch.default_generator.manual_seed
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            seed_torch(seed)
            random.seed(seed)
            np.random.seed(seed & 0xFFFFFFFF)
            yield
    finally:
        random.setstate(outside[0])
        np.random.set_state(outside[1])


class Stepper:
    """Masked SGD with optional momentum, weight decay and a proximal term, on the trainer's flat vectors."""

    def __init__(self, trainer: Trainer, local: Local, bits: Tensor | None) -> None:
        """`bits`: the weights that are trained, None: all."""
        self.trainer, self.local, self.bits = trainer, local, bits
        self.trained = trainer.vector[: trainer.layout.trained_size]
        self.k = trainer.layout.prunable_size
        self.start = self.trained.clone() if local.prox else None
        self.velocity = torch.zeros_like(self.trained) if local.momentum else None
        self.rule = local.adapt if local.adapt is not None and local.adapt.dense_gradient else None
        self.dense = torch.zeros(1, self.k, device=trainer.device) if self.rule else None

    @torch.enable_grad()
    def _backward(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        loss: Any = self.trainer.task.loss(self.trainer.module(*inputs), target)
        loss.backward()
        return loss.detach().reshape(())  # type: ignore[no-any-return]

    @torch.no_grad()
    def step(self, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        """One SGD step; the batch's mean loss, still on the device."""
        grad = self.trainer.grad.zero_()
        loss = self._backward(inputs, target)
        if self.rule is not None and self.dense is not None:
            self.rule.collect(self.dense, grad[None, : self.k])
        if self.local.weight_decay:
            grad.add_(self.trained, alpha=self.local.weight_decay)
        if self.start is not None:
            grad.add_(self.trained - self.start, alpha=self.local.prox)
        if self.bits is not None:
            _mask(grad[: self.k], self.bits)
        if self.velocity is not None:
            grad = self.velocity.mul_(self.local.momentum).add_(grad)
        self.trained.add_(grad, alpha=-self.local.lr)
        return loss

    def scores(self) -> Tensor | None:
        """What growth by score ranks: the last batch's gradient, or its running mean."""
        return self.dense

    def moved(self) -> None:
        """The mask has moved: weights outside it have no velocity, and those new in it had none."""
        if self.velocity is not None and self.bits is not None:
            _mask(self.velocity[: self.k], self.bits)


def _mask(values: Tensor, bits: Tensor) -> None:
    """values *= bits, a part at a time: torch makes numbers of all the bits it multiplies by."""
    for at in range(0, len(values), _PART):
        values[at : at + _PART] *= bits[at : at + _PART]


def warn_of_buffers(task: Task) -> None:
    """Warn of what a model learns beside its weights and that does not travel: buffers that one batch changes."""
    module = task.build()
    bound = {layer.name for layer in task.layout.of_kind("statistic")}
    kept = {n: b.clone() for n, b in module.named_buffers() if n not in bound and b.is_floating_point()}
    if not kept:
        return
    module.train()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            data = task.train[0]
            module(*data.fetch(torch.arange(min(4, len(data))))[0])
        except Exception:  # whatever a user's model does: it is told of where it trains
            return
    found = dict(module.named_buffers())
    lost = [n for n, b in kept.items() if n in found and not torch.allclose(b, found[n], 0, 0, equal_nan=True)]
    if lost:
        warnings.warn(
            f"training changes the buffers {', '.join(lost[:4])}{', ...' if lost[4:] else ''}, which do not travel: "
            "every client starts from the model's own, and what it makes of them is lost. Statistics of a norm travel "
            "if they are called running_mean and running_var",
            RuntimeWarning,
        )


def remember(update: Update, keep: tuple[str, ...]) -> Mapping[str, Mask]:
    """What a client keeps for the next time."""
    if "mask" in keep and update.weights is not None:
        return {"mask": update.weights.mask}
    return {}
