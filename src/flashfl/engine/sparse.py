"""Training with native kernels: only active weights are computed. Whether that pays is measured once a run."""

from __future__ import annotations

import timeit

import torch
from torch import Tensor

from ..core.engine import JSON
from ..core.exchange import Local
from ..core.mask import Mask, Weights
from ..core.state import State
from ..data.sources import Inputs, Source
from ..data.task import Task
from ..native import SparseModel, kernels
from .memory import ClientMemory
from .replica import Replica
from .step import MaskedStep
from .work import Schedule

LEAST_BYTES = 1_000_000  # of prunable weights; a smaller model trains in milliseconds, and stays dense
GAIN = 1.2  # a sparse step must be at least this much faster than a dense one
_TURNS = 3
_AGREE = 1e-3  # relative difference of the outputs of both


class SparseTraining:
    """One client's steps on the active weights alone. Values, gradients and velocities exist for those only."""

    def __init__(self, task: Task, mask: Mask, vector: Tensor) -> None:
        self.task, self.layout = task, task.layout
        self.replica = Replica(task, torch.device("cpu"), lambda layer: torch.empty(layer.shape))
        self.model = SparseModel(self.replica.module, self.layout, mask, Weights(mask, vector).packed())

    @staticmethod
    def can(local: Local, mask: Mask) -> bool:
        """Whether this work can be done: the mask is frozen, or moves without the gradients of inactive weights.

        A momentum or a proximal term would have to move along with the mask. Parts work on whole vectors.
        """
        rule = local.adapt
        still = rule is None or not (rule.dense_gradient or local.momentum or local.prox or local.lr_last != 1)
        return not local.parts and still and mask.active < mask.layout.prunable_size and kernels() is not None

    def begin(self, schedule: Schedule, mask: Mask, vector: Tensor) -> None:
        """Take on a client: its mask and weights."""
        self._schedule = schedule
        self.replica.reset_buffers()
        self.moved(mask, vector)
        self.model.module.train()

    def moved(self, mask: Mask, vector: Tensor) -> None:
        """Follow a change of the mask: pack the weights again."""
        self.model.load(mask, Weights(mask, vector).packed())
        self._step = MaskedStep(self.model.vector[None, : len(self.model.grad)], mask.active)
        self._step.begin(self._schedule.local, (), [self._schedule.steps])

    def step(self, inputs: Inputs, target: Tensor) -> Tensor:
        """One step on one batch. Returns its mean loss."""
        model, active = self.model, self.model.mask.active
        model.grad.zero_()
        with torch.enable_grad():
            loss = self.task.loss(model(*inputs), target)
            loss.backward()  # type: ignore[no-untyped-call]
        self._step(model.grad[None, :active], model.grad[None, active:])
        return loss.detach().reshape(())

    def write(self, vector: Tensor) -> None:
        """Put the weights and statistics as they are now into a whole vector."""
        mask, packed, k = self.model.mask, self.model.vector.detach(), self.layout.prunable_size
        vector[:k].zero_()
        vector[mask.places] = packed[: mask.active]
        vector[k:] = packed[mask.active :]


def choose(task: Task, s: State, memory: ClientMemory, threads: int) -> dict[str, JSON]:
    """Decide for a whole run whether it computes active weights only, and say so for the results' header."""
    measured = _gain(task, s.weights, s.plan.local, task.train[0], threads) if len(task.train) else 0.0
    memory.sparse = measured >= GAIN
    return {"compute": {"sparse": memory.sparse, "gain": round(measured, 2)}} if measured else {}


def _gain(task: Task, weights: Weights, local: Local, data: Source, threads: int) -> float:
    """How many times faster a step on the active weights is; 0 if the model cannot run so, or is too small to try."""
    mask, count = weights.mask, min(local.batch, len(data))
    if not SparseTraining.can(local, mask) or 4 * mask.layout.prunable_size < LEAST_BYTES or count < 2:
        return 0.0
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.random.fork_rng(devices=[]):
            inputs, target = data.fetch(torch.arange(count))
            return _compare(task, weights, local, inputs, target)
    except Exception:  # whatever the model does that sparse training does not know, it trains as before
        return 0.0
    finally:
        torch.set_num_threads(before)


def _compare(task: Task, weights: Weights, local: Local, inputs: Inputs, target: Tensor) -> float:
    vector = weights.vector.clone()
    ours = SparseTraining(task, weights.mask, vector)
    ours.begin(Schedule(local, 0, len(target), 1), weights.mask, vector)
    theirs = Replica(task, torch.device("cpu"), lambda layer: torch.empty(layer.shape))
    task.layout.write(vector, theirs.module)
    theirs.module.train()
    with torch.no_grad():
        found = []
        for run in (theirs.module, ours.model):
            torch.manual_seed(0)
            found.append(run(*inputs))
    if not float((found[0] - found[1]).norm()) <= _AGREE * float(found[0].norm()) + 1e-6:
        return 0.0

    def dense() -> None:
        for p in theirs.params:
            p.grad = None
        task.loss(theirs.module(*inputs), target).backward()  # type: ignore[no-untyped-call]

    turns = [timeit.repeat(step, number=1, repeat=1 + _TURNS) for step in (dense, lambda: ours.step(inputs, target))]
    before, now = (min(times[1:]) for times in turns)  # the first turn of each only warms up
    return before / now
