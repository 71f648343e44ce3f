"""A task: a model, clients that hold data, what the model is evaluated on, and which of its weights may be sparse."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..core.errors import ConfigError, DataError, check_range, warn
from ..core.exchange import Client
from ..core.layout import Layout, Rule
from ..core.rng import fold, permutation
from .sources import Arrays, Items, Lazy, Source, Subset, below, source

Loss = Callable[[Any, Tensor], Tensor]
Metric = Callable[[Any, Tensor], Tensor | float]
_LOWER = {"error", "loss", "mae", "mse", "rmse", "mape", "nll", "entropy", "perplexity", "ppl"}  # better if lower
_CLIENTS = (
    "Give a list with the samples of each client, such as [(x0, y0), (x1, y1)] or [dataset0, dataset1]; for a single "
    "client, [(x, y)]. torch.utils.data.random_split divides one data set"
)


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    """The share of samples whose class is predicted correctly.

    Classes are on dimension 1 of the output, as in cross_entropy, or on the last one if that does not fit the targets.
    If targets are probabilities of classes, the most probable class is the true one.
    """
    several = output.dim() > 1 and output.shape[1] > 1
    if several and target.is_floating_point() and target.shape == output.shape:
        target = target.argmax(1)
    dim = 1 if several and target.shape == output.shape[:1] + output.shape[2:] else -1
    return (output.argmax(dim) == target).float().mean()


class Task:
    """A model, the samples of each client, and how the model is evaluated.

    model: a module, whose weights training starts from. Or a class or function that makes a module: then each seed
        starts from other random weights.
    clients: a list with each client's samples: a tuple (inputs, targets) of tensors, or a torch Dataset.
    test: the test samples. Without them, each client holds back a share of its samples (`holdout`) for evaluation. On
        Flower clients, write holdout=0 if the server has test samples.
    loss, metric: functions of (output, targets) that return the mean over a batch. Give the mean squared error, not its
        root. The default metric is accuracy; with your own loss and float targets, it is this loss.
    prunable, fixed: which parameters may be sparse, and which are never trained (docs/data.md).
    densities: the density of each client, for methods that give clients different densities.
    metric_name: the name of the metric in reports. The default is the function's name.
    higher_is_better: write False if a lower metric is better. The default is False if the metric is the loss.

    Attributes: `train` has each client's training samples. `evaluation` has the samples for evaluation: the test
    samples, or those that the clients in `evaluators` hold back.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        clients: Sequence[object],
        test: object = None,
        *,
        loss: Loss = nn.functional.cross_entropy,
        metric: Metric | None = None,
        prunable: Rule = "auto",
        fixed: Rule = (),
        densities: Sequence[float] | None = None,
        holdout: float = 0.2,
        name: str = "task",
        metric_name: str = "",
        higher_is_better: bool | None = None,
    ) -> None:
        if not callable(model):  # modules are callable too
            raise ConfigError(
                f"the model is a {type(model).__name__}: expected a torch module, or a function that makes one. Write "
                "Task(model, clients, test)."
            )
        if prunable is None:
            raise ConfigError("prunable = None: leave it out, or write prunable='none' to keep all weights dense")
        _check_function("loss", loss)
        _check_function("metric", accuracy if metric is None else metric)
        sources = _sources(clients)
        if not sources:
            raise DataError(f"the task has no clients. {_CLIENTS}")
        if densities is not None and len(densities) != len(sources):
            raise ConfigError(f"{len(densities)} densities for {len(sources)} clients: give one for each client")
        self.test = None if test is None else _source(test, "the test set")
        if metric is None:
            metric = _metric_for(loss, sources[0] if self.test is None else self.test)
            metric_name = metric_name or ("accuracy" if metric is accuracy else "loss")
        self.name, self.loss, self.metric, self.densities = name, loss, metric, densities
        function = getattr(metric, "__name__", "metric")  # a callable object has no name
        self.metric_name = metric_name or ("metric" if function == "<lambda>" else function)
        if higher_is_better is None and metric is not loss:
            _warn_about_direction(metric_name, getattr(metric, "__name__", type(metric).__name__))
        self.higher_is_better = metric is not loss if higher_is_better is None else higher_is_better
        self.metric_known = True  # False: the clients of a server without test samples may have another one
        self.info: dict[str, object] = {}  # what reports say about the task, as plain JSON data
        self._model, self._prunable, self._fixed = model, prunable, fixed
        self.train, self.evaluation, self.evaluators = _hold_out(sources, holdout if test is None else 0)
        if self.test is not None:
            self.evaluation = [self.test]
            _warn_about_nan(self.test)

    def __repr__(self) -> str:
        parameters = sum(layer.size for layer in self.layout.of_kind("prunable", "dense", "fixed"))
        samples = sum(map(len, self.train))
        return (
            f"Task({self.name!r}, {len(self.train)} clients, {samples:,} training samples, {parameters:,} parameters, "
            f"{self.layout.prunable_size / max(1, parameters):.0%} prunable)"
        )

    @property
    def model_name(self) -> str:
        """What reports call the model: its class, or the function that makes it."""
        made = self._model
        name = type(made).__name__ if isinstance(made, nn.Module) else getattr(made, "__name__", "")
        return "" if name == "<lambda>" else name

    @property
    def pretrained(self) -> bool:
        """Whether the model was given with its weights."""
        return isinstance(self._model, nn.Module)

    def build(self, key: int = 0) -> nn.Module:
        """A new module in float32. `key` draws its weights, unless the model was given with weights."""
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
            warn(
                f"the model has parameters or buffers of type {', '.join(sorted(map(str, found)))}. flashfl converts "
                "them to float32. To send weights in half precision, set values='fp16'."
            )
        return Layout.of(module.float(), self._prunable, self._fixed)

    @cached_property
    def own_rule(self) -> bool:
        """Whether the model says itself which of its weights may be sparse."""
        return self._prunable == "auto" and getattr(self.build(), "prunable", None) is not None

    def draw(self, key: int) -> Tensor:
        """Initial weights as a flat vector; the same for every key if the model was given with weights."""
        return self.layout.read(self.build(key))

    @cached_property
    def clients(self) -> tuple[Client, ...]:
        density: Sequence[float | None] = self.densities or [None] * len(self.train)
        return tuple(Client(i, len(s), d) for i, (s, d) in enumerate(zip(self.train, density, strict=True)))


def _check_function(role: str, given: object) -> None:
    """A loss or a metric must be a function of (output, targets), not a name or a class."""
    if isinstance(given, type) or not callable(given):
        raise ConfigError(
            f"{role} = {given!r}: expected a function of (output, targets), such as torch.nn.functional.cross_entropy, "
            "torch.nn.MSELoss() or flashfl.accuracy"
        )


def _sources(clients: Sequence[object]) -> list[Source]:
    """Each client's samples as a source."""
    if isinstance(clients, Dataset | Source | Mapping) or not isinstance(clients, Iterable | Items):
        raise DataError(f"`clients` is a {type(clients).__name__}. {_CLIENTS}")
    return [_source(data, f"clients[{i}]", check=i == 0) for i, data in enumerate(clients)]


def _source(data: object, who: str, check: bool = True) -> Source:
    """A source, perhaps with a look at its first sample; errors say whose samples they are."""
    try:
        made = source(data)
        if check and isinstance(made, Lazy):
            made.check()
    except DataError as error:
        raise DataError(f"{who}: {error}") from None
    if len(made) == 0:
        raise DataError(f"{who} has no samples: leave it out or give it some")
    return made


def _metric_for(loss: Loss, data: Source) -> Metric:
    """The metric of a task that names none: accuracy for classes, the user's loss for targets that are floats."""
    try:
        with torch.random.fork_rng(devices=[]):
            target = data.fetch(torch.tensor([0]))[1]
    except Exception:  # a fault of the data is reported where they are used
        return accuracy
    if loss is not nn.functional.cross_entropy:
        return loss if target.is_floating_point() else accuracy
    if target.is_floating_point() and target.numel() == 1:
        raise DataError(
            "the targets are single floats, and the loss is cross_entropy, which needs classes. For regression, write "
            "Task(..., loss=torch.nn.functional.mse_loss); for classes, give whole numbers: targets.long()"
        )
    return accuracy


def _warn_about_direction(*names: str) -> None:
    """Warn if a metric with one of these names sounds like an error: by default a higher one counts as better."""
    for name in names:
        words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)  # of error_rate, MSELoss
        if _LOWER & {word.lower() for word in words}:
            warn(
                f"the metric {name!r} sounds like an error, but higher values count as better. Pass "
                "higher_is_better=False, or higher_is_better=True to keep this and silence the warning."
            )
            return


def _warn_about_nan(test: Source) -> None:
    data, index = below(test, torch.arange(len(test)))
    for x in map(torch.as_tensor, (*data.inputs, data.target) if isinstance(data, Arrays) else ()):
        if x.is_floating_point() and x[index].isnan().any():
            warn("the test set has NaN, so the loss will be NaN unless the model handles them: check the data")


def _hold_out(sources: list[Source], share: float) -> tuple[list[Source], list[Source], list[int]]:
    """Each client's samples to train on, those held back to evaluate on, and the clients that hold some back.

    A client with a single sample only trains.
    """
    check_range("[0, 1)", holdout=share)
    if share == 0:
        return sources, [], []
    train: list[Source] = []
    held: dict[int, Source] = {}
    for i, s in enumerate(sources):
        order = permutation(fold(0, "holdout", i), len(s))
        count = min(len(s) - 1, max(1, round(share * len(s))))
        train.append(Subset(s, order[count:].sort().values))
        if count:
            held[i] = Subset(s, order[:count].sort().values)
    return train, list(held.values()), list(held)
