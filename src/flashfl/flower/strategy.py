"""A Flower strategy over any method: the same loop, results and checkpoints as in a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from flwr.app import Array, ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor, nn

from ..core.errors import ConfigError, DataError
from ..core.method import Method
from ..data.sources import Arrays, Inputs
from ..data.task import Task
from ..run import checkpoint
from ..run.budget import within_budget
from ..run.config import TrainConfig, make_train
from ..run.progress import Display, Watch
from ..run.run import Run
from ..run.sealed import read_record
from ..run.simulate import drive
from .attendance import FlowerOptions
from .engine import FlowerEngine
from .records import log
from .registry import Registry


def _elsewhere(example: Inputs) -> Arrays:
    """Two samples that stand for those of clients. An example shows what they look like."""
    return Arrays(
        tuple(x[[0, 0]] for x in example), torch.zeros(2, dtype=torch.long), prepare=None if example else _unknown
    )


def _unknown(inputs: Inputs) -> Inputs:
    raise DataError("the server has no samples: give server_task an `example` input")


def server_task(
    model: nn.Module | Callable[[], nn.Module],
    test: object = None,
    *,
    example: Tensor | tuple[Tensor, ...] | None = None,
    **settings: Any,
) -> Task:
    """The server's task: the model, and test samples if it has some. Without them, clients evaluate the model.

    example: a batch of inputs, to count FLOPs if there are no test samples.
    settings: loss, metric, prunable, fixed and name, as for `Task`. The model, `prunable` and `fixed` must be the same
        as on the clients. If clients evaluate by accuracy, set metric=flashfl.accuracy.
    """
    if test is None and "loss" in settings and "metric" not in settings:
        raise ConfigError(
            "server_task has a loss, but no test samples and no metric. Give the metric that clients report, such as "
            "metric=flashfl.accuracy. If they report the loss, give metric=loss and metric_name='loss'."
        )
    inputs = (example,) if isinstance(example, Tensor) else example or ()
    task = Task(model, [_elsewhere(inputs)], test, **settings)
    task.metric_known = test is not None or "metric" in settings  # otherwise clients may have another metric
    return task


class FlashStrategy(Strategy):
    """Runs a method on the nodes of a grid.

    method: any Method.
    task: the model and how to evaluate it, made by `server_task`.
    train: the run's settings. The default writes a checkpoint after each round.
    options: how to wait for clients.
    folder: where results and checkpoints go.
    resume: continue from the last checkpoint in the folder, if there is one.
    overwrite: replace a run in the folder. By default it is an error if the folder holds one.
    header: settings to record in the results file.
    watch: a function that is called with the state and the record after every round.
    quiet: show no progress.
    secure: True or False overrides `secure` of `train` (docs/privacy.md).

    Call `start`. Flower's hooks for single steps, such as `configure_train`, raise an error.
    """

    def __init__(
        self,
        method: Method,
        task: Task,
        train: TrainConfig | None = None,
        options: FlowerOptions | None = None,
        *,
        folder: str | Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
        header: Mapping[str, Any] | None = None,
        watch: Watch | None = None,
        quiet: bool = False,
        secure: bool | None = None,
    ) -> None:
        self.method, self.task = method, task
        train = train or make_train({"checkpoint_every": 1, **method.recipe})
        self.train = replace(train, robust="on") if train.robust == "auto" else train
        self.options = options or FlowerOptions()
        if secure is not None:
            self.train = replace(self.train, secure=secure)
        if not resume:  # a resumed run keeps the settings it has recorded
            _check(self.train)
        self.folder = Path(folder) if folder else None
        self.resume, self.overwrite, self.header, self.watch, self.quiet = resume, overwrite, header, watch, quiet
        self.run: Run | None = None

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        **unused: Any,
    ) -> Result:
        """Train to the end. Returns the model and its metrics. The whole run is then in the attribute `run`."""
        if initial_arrays is not None:
            raise ConfigError(
                "initial_arrays cannot be used: the method makes the first weights. To start from your own, give Task "
                "a module that has them"
            )
        self.train = replace(self.train, rounds=num_rounds) if num_rounds else self.train
        self.options = replace(self.options, timeout=timeout) if timeout else self.options
        resume = self.resume and self.folder is not None
        if self.train.budget:
            folder = self.folder if resume else None
            self.method, self.train, said = within_budget(self.method, self.task, self.train, folder)
            log.info("%s", said)
        engine = self.connect(grid)
        if self.task.test is None and not any(entry.held for entry in engine.registry.entries.values()):
            raise ConfigError(
                "nobody has samples to evaluate the model on: give the server's task `test`. Or give the clients' "
                "tasks a `holdout` above 0 and at least 2 samples: a client with a single sample only trains."
            )
        self.summary()
        display = Display(self.method.name, self.train.rounds, quiet=self.quiet, then=self.watch)
        with closing(display):
            self.run = drive(
                self.method, self.task, self.train, engine, engine.registry, self.folder, resume, display, self.header,
                self.overwrite,
            )  # fmt: skip
        return _result(self.run)

    def connect(self, grid: Grid) -> FlowerEngine:
        """Wait for clients. Returns the engine that sends them orders."""
        options = self.options
        registry = Registry(grid, self.task, options, self.train.min_replies)
        registry.admit(self.method, 0)  # to refuse unfit clients; the run does it again, with its key
        if self.resume:
            _load_latest(registry, self.folder)
        registry.gather(options.clients or min(self.train.per_round, registry.size or self.train.per_round))
        return FlowerEngine(self.task, registry, self.train, self.folder / "masks" if self.folder else None)

    def _no_step(self, *unused: Any, **also_unused: Any) -> NoReturn:
        raise NotImplementedError("FlashStrategy runs all rounds itself. Call strategy.start(grid).")

    # Flower's hooks for single steps.
    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _no_step

    def summary(self) -> None:
        """Log what is about to run."""
        train = self.train
        log.info("%r on %r: %d rounds of %d clients, values as %s down and %s up; %r", self.method, self.task.name,
                 train.rounds, train.per_round, train.down.values, train.up.values, self.options)  # fmt: skip


def _check(train: TrainConfig) -> None:
    """Refuse settings that work in a simulation only."""
    if train.dropout:
        raise ConfigError(
            f"dropout = {train.dropout}: it simulates failures; on Flower, real clients fail on their own. Set it to 0."
        )
    if train.device not in ("auto", "cpu"):
        raise ConfigError(f"device = {train.device!r}: clients on Flower train on the CPU. Set it to auto or cpu.")


def _load_latest(registry: Registry, folder: Path | None) -> None:
    """Take over the clients of the newest checkpoint that can be read. Its tensors are checked when it is loaded."""
    for path in checkpoint.found_in(folder / "checkpoints") if folder else ():
        with suppress(Exception):  # the content may be a stranger's, and fail in any way
            return registry.load(read_record(path)["clients"])


def _result(run: Run) -> Result:
    """The model as Flower keeps one, its tensors by name, and the metrics of each round."""
    result = Result()
    views = run.task.layout.views(run.weights.vector.cpu())
    result.arrays = ArrayRecord({name: Array(view.numpy()) for name, view in views.items()})
    for record in run.history:
        if record.score is not None:
            result.evaluate_metrics_serverapp[record.round + 1] = MetricRecord(asdict(record.score))
    return result
