"""A task: a model, clients that hold data, how to judge the model, and which of its weights may be sparse."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import ConfigError, DataError
from ..core.exchange import Client
from ..core.layout import Layout, Rule
from ..core.rng import fold, permutation
from .examples import Source, Subset, source

Loss = Callable[[Any, Tensor], Tensor]
Metric = Callable[[Any, Tensor], Tensor | float]


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of targets that are the class of the largest output, or whose own largest share is that class.

    Classes lie on dimension 1, as in cross_entropy; on the last one where only that fits the targets.
    """
    several = output.dim() > 1 and output.shape[1] > 1
    if several and target.is_floating_point() and target.shape == output.shape:
        target = target.argmax(1)
    dim = 1 if several and target.shape == output.shape[:1] + output.shape[2:] else -1
    return (output.argmax(dim) == target).float().mean()


class Task:
    """What is learned, from whom, and how it is judged.

    model: a module, whose weights are kept as a pretrained start, or a function (or class) without arguments that
        makes one, drawn anew for each seed. It is trained in float32, whatever it is given in.
    clients: each client's samples: a tuple (inputs, targets) of tensors, a torch Dataset, or a source.
    test: the server's test samples; without it each client holds back `holdout` of its own and judges on that
    (0: nobody does, for clients of a server that has test samples).
    loss, metric: functions of (output, targets) giving the mean over a batch.
    prunable, fixed: which parameters may be sparse and which are never trained (see `Layout.of`).
    densities: each client's density budget, for heterogeneous methods.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        clients: Sequence[Any],
        test: Any = None,
        *,
        loss: Loss = nn.functional.cross_entropy,
        metric: Metric = accuracy,
        prunable: Rule = "auto",
        fixed: Rule = (),
        densities: Sequence[float] | None = None,
        holdout: float = 0.2,
        name: str = "task",
    ) -> None:
        if not clients:
            raise DataError("the task has no clients")
        sources = [source(data) for data in clients]
        for i, s in enumerate(sources):
            if len(s) == 0:
                raise DataError(f"client {i} has no samples: leave it out or give it some")
        if densities is not None and len(densities) != len(sources):
            raise ConfigError(f"{len(densities)} densities for {len(sources)} clients")
        self.name, self.loss, self.metric, self.densities = name, loss, metric, densities
        self.metric_known = True  # False: a server that leaves judging to its clients does not know theirs
        self.info: dict[str, Any] = {}  # what a report may say about it, as plain JSON data
        self._model, self._prunable, self._fixed = model, prunable, fixed
        self.test = None if test is None else source(test)
        if self.test is not None and len(self.test) == 0:
            raise DataError("the test set has no samples: leave `test` out, and clients hold back some of theirs")
        self.train, self.held = (sources, []) if test is not None else _hold_out(sources, holdout)
        self.holders = [i for i, s in enumerate(sources) if len(s) > 1] if self.held else []  # who holds `held`

    @property
    def pretrained(self) -> bool:
        """Whether the model was given with weights of its own."""
        return isinstance(self._model, nn.Module)

    def build(self, key: int = 0) -> nn.Module:
        """A module of the task's own, all in float32; `key` draws its weights, unless the model was given with some."""
        return self._given(key).float()

    def _given(self, key: int) -> nn.Module:
        if isinstance(self._model, nn.Module):
            return copy.deepcopy(self._model).cpu()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key)
            return self._model()

    @cached_property
    def layout(self) -> Layout:
        module = self._given(0)
        found = {t.dtype for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()} - {torch.float32}
        if found:
            warnings.warn(
                f"the model's parameters and buffers of {', '.join(sorted(map(str, found)))} are trained and kept in "
                "float32; values='fp16' makes them travel in half precision",
                RuntimeWarning,
            )
        return Layout.of(module.float(), self._prunable, self._fixed)

    @cached_property
    def own_rule(self) -> bool:
        """Whether it is the model itself that says which of its weights may be sparse."""
        return self._prunable == "auto" and getattr(self.build(), "prunable", None) is not None

    def draw(self, key: int) -> Tensor:
        """Initial weights as a flat vector; the same for every key if the model was given with weights."""
        return self.layout.read(self.build(key))

    @cached_property
    def clients(self) -> tuple[Client, ...]:
        density: Sequence[float | None] = self.densities or [None] * len(self.train)
        return tuple(Client(i, len(s), d) for i, (s, d) in enumerate(zip(self.train, density, strict=True)))

    @property
    def judges(self) -> list[Source]:
        """What the model is judged on: the server's test set, or every client's held-out samples."""
        return [self.test] if self.test is not None else list(self.held)


def _hold_out(sources: list[Source], share: float) -> tuple[list[Source], list[Source]]:
    """Each client's samples in two: to train on and to judge on; a client with one sample only trains."""
    if share == 0:
        return sources, []
    if not 0 < share < 1:
        raise ConfigError(f"holdout = {share}: must be at least 0 and below 1")
    train: list[Source] = []
    held: list[Source] = []
    for i, s in enumerate(sources):
        order = permutation(fold(0, "holdout", i), len(s))
        count = min(len(s) - 1, max(1, round(share * len(s))))
        train.append(Subset(s, order[count:].sort().values))
        if count:
            held.append(Subset(s, order[:count].sort().values))
    return train, held
