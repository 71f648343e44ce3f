"""A Flower strategy over any method: the same loop, results and checkpoints as in a simulation."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from ..core.errors import ConfigError
from ..core.mask import Weights
from ..core.method import Method
from ..core.record import RoundRecord
from ..core.state import State
from ..data.task import Task
from ..run import checkpoint
from ..run.config import TrainConfig
from ..run.progress import Display
from ..run.simulate import Run, Watch, drive
from .engine import FlowerEngine
from .fixed import fingerprint
from .options import FlowerOptions
from .roster import Roster, Terms

log = logging.getLogger("flwr.flashfl")
_ONLY_START = "FlashStrategy runs as a whole: call strategy.start(grid)"


class FlashStrategy(Strategy):
    """Runs a method on the nodes of a grid.

    method: any Method. task: the model and how it is judged (`server_task`); with test samples the server judges,
    without them the clients do. train: the run's settings; without any, the usual ones and a checkpoint after each
    round. options: how to deal with clients.
    folder: where results and checkpoints go. resume: go on from the last checkpoint there, if there is one.
    header: what the results file says of the run's settings. watch: called after every round; progress is shown unless
    quiet.

    Call `start`. Flower's step-by-step hooks raise an error: they could not send a client the masks it has lost.
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
        header: Mapping[str, Any] | None = None,
        watch: Watch | None = None,
        quiet: bool = False,
    ) -> None:
        self.method, self.task = method, task
        self.train, self.options = train or TrainConfig(checkpoint_every=1), options or FlowerOptions()
        if not resume:  # a run that has recorded them goes on with them
            _check(self.train)
        self.folder = Path(folder) if folder else None
        self.resume, self.header, self.watch, self.quiet = resume, header, watch, quiet
        self.run: Run | None = None

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        **unused: Any,
    ) -> Result:
        """Train to the end. The run itself is then in `run`; Flower's result holds the model and its metrics."""
        if initial_arrays is not None:
            raise ConfigError("initial_arrays: the method draws the weights; to start from some, give Task that module")
        self.train = replace(self.train, rounds=num_rounds) if num_rounds else self.train
        self.options = replace(self.options, timeout=timeout) if timeout else self.options
        resume = self.resume and self.folder is not None and bool(checkpoint.found_in(self.folder / "checkpoints"))
        engine = self.connect(grid)
        if self.task.test is None and not any(entry.held for entry in engine.roster.entries.values()):
            raise ConfigError(
                "nothing to judge the model on: give the server's task `test`, or the clients' a `holdout` above 0"
            )
        self.summary()
        display = Display(self.method.name, self.train.rounds, quiet=self.quiet)

        def watch(state: State, record: RoundRecord) -> None:
            display(state, record)
            if self.watch is not None:
                self.watch(state, record)

        try:
            self.run = drive(
                self.method, self.task, self.train, engine, engine.roster, self.folder, resume, watch, self.header
            )
        finally:
            display.close()
        return _result(self.run)

    def connect(self, grid: Grid) -> FlowerEngine:
        """Wait for clients; the engine that reaches them."""
        need, options = self.train.min_replies, self.options
        terms = Terms(self.task.layout.hash, fingerprint(self.task), options.max_samples)
        roster = Roster(grid, terms, need, options.wait, options.poll)
        if self.resume and (record := _latest(self.folder)) is not None:
            roster.load(record["clients"])
        roster.gather(options.clients or min(self.train.per_round, roster.size or self.train.per_round))
        if self.train.per_round > roster.size:
            raise ConfigError(
                f"per_round = {self.train.per_round} and {roster.size} clients registered: start more SuperNodes, "
                "or set per_round to what there is"
            )
        log.info("clients: %s", ", ".join(f"{c.id} ({c.n} samples)" for c in roster.present()))
        masks = self.folder / "masks" if self.folder else None
        return FlowerEngine(
            self.task, grid, roster, options, self.train.values, masks, self.train.clip, self.train.trim
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise NotImplementedError(_ONLY_START)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        raise NotImplementedError(_ONLY_START)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        raise NotImplementedError(_ONLY_START)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        raise NotImplementedError(_ONLY_START)

    def summary(self) -> None:
        """Log what is about to run."""
        log.info("%r on %r: %d rounds of %d clients, values as %s; %r", self.method, self.task.name, self.train.rounds,
                 self.train.per_round, self.train.values, self.options)  # fmt: skip


def _check(train: TrainConfig) -> None:
    """Refuse settings of a simulation that would be recorded and have no effect."""
    if train.dropout:
        raise ConfigError(
            f"dropout = {train.dropout}: it simulates failures; on Flower, real clients fail on their own. Set it to 0."
        )
    if train.device not in ("auto", "cpu"):
        raise ConfigError(f"device = {train.device!r}: Flower's clients train on the CPU; set it to auto or cpu")


def _latest(folder: Path | None) -> dict[str, Any] | None:
    """The newest checkpoint's record that is whole; whether its tensors are is checked when it is loaded."""
    for path in checkpoint.found_in(folder / "checkpoints") if folder else ():
        with suppress(checkpoint.Unusable):
            return checkpoint.read_record(path)
    return None


def _arrays(task: Task, weights: Weights) -> ArrayRecord:
    """A model as Flower keeps one: its tensors by name."""
    views = task.layout.views(weights.vector.cpu())
    return ArrayRecord({name: Array(view.numpy()) for name, view in views.items()})


def _result(run: Run) -> Result:
    result = Result()
    result.arrays = _arrays(run.task, run.weights)
    for record in run.history:
        if record.score is not None:
            result.evaluate_metrics_serverapp[record.round + 1] = MetricRecord(asdict(record.score))
    return result
