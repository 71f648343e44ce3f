"""Run a method on a task: the loop, with results written, checkpoints kept, and interruptions survived."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from inspect import get_annotations
from pathlib import Path
from typing import Any

from torch import nn

from ..core.errors import CheckpointError, ConfigError
from ..core.loop import Record, checked, run_rounds
from ..core.method import Method
from ..core.parts import check_fields
from ..core.state import Client, Plan, State, Traffic, Weights
from ..data.task import Task
from ..engine import make_engine
from ..engine.store import MaskStore
from ..engine.train import warn_of_buffers
from . import checkpoint as checkpoints
from .code import code_of, joined
from .config import OUTSIDE, TrainConfig, plan_of
from .display import LeftOut
from .lock import alone
from .record import Recorder
from .results import OLD, Results, reported
from .samples import samples_of
from .track import Tracking

Watch = Callable[[State, dict[str, Any]], None]


class Run:
    """A finished (or stopped) run: its model, its record, and where it is kept."""

    def __init__(self, method: Method, task: Task, train: TrainConfig, folder: Path | None = None) -> None:
        self.method, self.task, self.train, self.folder = method, task, train, folder
        self.results = Results(folder)
        self.state: State | None = None
        self.traffic = Traffic()
        self.stopped: str | None = None
        self.code: dict[str, str] | None = None  # to be written down with the next round, after a resume

    @property
    def weights(self) -> Weights:
        assert self.state is not None
        return self.method.view(self.state)

    @property
    def accuracy(self) -> float:
        """The last round's test metric (accuracy unless the task says otherwise)."""
        return self._metric()[-1] if self._metric() else float("nan")

    @property
    def best(self) -> float:
        """The highest test metric of any round judged: for one of which less is better, it is the worst."""
        return max(self._metric(), default=float("nan"))

    def _metric(self) -> list[float]:
        return [reported(r)["metric"] for r in self.results.rounds if r["metrics"]]

    @property
    def seconds(self) -> float:
        """Time spent on finished rounds, whatever the number of interruptions between them."""
        phases = ("train", "aggregate", "evaluate")
        return float(sum(r["seconds"].get(phase, 0.0) for r in self.results.rounds for phase in phases))

    @property
    def bytes_up(self) -> int:
        return self.traffic.up

    @property
    def bytes_down(self) -> int:
        return self.traffic.down

    @property
    def bytes_judging(self) -> int:
        """What was sent, beside all training, to clients that judge the model on samples of their own."""
        return sum(line.get("judging", 0) for line in self.results.rounds)

    def over_budget(self, more: Traffic) -> bool:
        """Whether this much more traffic reaches the run's limit."""
        total = self.traffic + more
        return bool(self.train.max_bytes) and total.up + total.down >= self.train.max_bytes

    @property
    def history(self) -> list[dict[str, Any]]:
        """One entry a round, as in the results file."""
        return self.results.rounds

    def model(self, view: str = "") -> nn.Module:
        """The task's own module with the final weights, or with those of another view ("density 0.1", say)."""
        assert self.state is not None
        module = self.task.build()
        self.task.layout.write(self.method.view(self.state, view).vector.cpu(), module)
        return module.eval()

    @property
    def checksum(self) -> str:
        """A digest of the final weights and mask: equal if and only if two runs ended bit for bit alike."""
        digest = hashlib.blake2b(self.weights.mask.packed.tobytes(), digest_size=8)
        digest.update(self.weights.vector.cpu().numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: str | Path) -> Path:
        """Write the results and the final model into a folder."""
        from .export import export_weights

        target = Path(folder)
        kept, self.results.path = self.results.path, target / "results.jsonl"
        self.results.rewrite()
        self.results.path = kept
        about = {"method": self.method.name}
        return export_weights(self.weights, self.task.build(), target / "model.safetensors", about)


def simulate(
    method: Method,
    task: Task,
    rounds: int | None = None,
    *,
    train: TrainConfig | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    header: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train `task` with `method` and give the run back.

    settings: any field of TrainConfig (per_round=10, lr=0.1, seed=3, workers=4, ...). folder: where results and
    checkpoints go, in place of those of a run that was there; with resume=True that run continues from its last
    checkpoint, to the very result an undisturbed run would have had. watch is called with the state and the record
    after every round.
    """
    if rounds is not None:
        settings["rounds"] = rounds
    config = _train_config(train, task, settings)
    if not task.evaluation:
        raise ConfigError("nothing to judge the model on: give the task `test`, or a `holdout` above 0")
    warn_of_buffers(task)
    place = Path(folder) if folder else None
    engine = make_engine(task, config, place / "masks" if place else None)
    try:
        return drive(method, task, config, engine, task.clients, place, resume, watch, header)
    finally:
        engine.close()


def drive(
    method: Method,
    task: Task,
    config: TrainConfig,
    engine: Any,
    clients: Sequence[Client],
    folder: Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    header: Mapping[str, Any] | None = None,
    flower: Mapping[str, Any] | None = None,
) -> Run:
    """Run a method on any engine, for these clients; of the task only its model is used here.

    flower: how far a Flower server believes its clients; it is recorded, and what decides an average must stay.
    The folder is this process's alone until the run is over; it is an error if another process uses it.
    """
    _check_method(method)
    run = Run(method, task, config, folder)
    plan = plan_of(config, task, getattr(clients, "planned", clients), engine.device, method)
    identity = _identity(method, task, config, clients, header or {})
    if flower:
        identity["flower"] = {k: flower[k] for k in ("clip", "trim")}
    # Clients that come and go are admitted as they come, by whoever keeps the list of them.
    live = getattr(clients, "admit", None)
    clients = live(method, plan.key) if live else method.admit(clients, plan.key)
    keeper = _Keeper(run, engine, identity)
    with alone(folder):
        start = _resume(run, keeper, plan) if resume else None
        if start is None:
            start = checked(method, method.init(plan))
            keeper.begin()
        if not run.results.lines:
            about = {"config": {**(header or {})}, "identity": identity, "task": _about(task, clients)}
            run.results.begin({**about, **({"flower": dict(flower)} if flower else {}), "code": code_of(method)})
        run.state = start
        step = start.round if start.stage == 2 else 0
        tracking = Tracking(config.track, folder, folder.name if folder else "", header or identity, step)
        with closing(tracking), keeper.on_the_way_out():
            _loop(run, engine, clients, keeper, watch, tracking)
    return run


def _check_method(method: Any) -> None:
    if not isinstance(method, Method):
        raise ConfigError(f"method = {method!r}: expected a method with its settings, such as fl.SPDST(density=0.05)")
    own = [name for name, hint in get_annotations(type(method)).items() if "ClassVar" not in str(hint)]
    if own and "__dataclass_fields__" not in vars(type(method)):
        raise ConfigError(
            f"{type(method).__name__} is not a dataclass of its own, so {', '.join(own)} would not count: put "
            "@dataclass(frozen=True) above the class"
        )
    check_fields(method)


def _train_config(train: TrainConfig | None, task: Task, settings: Mapping[str, Any]) -> TrainConfig:
    from ..core.parts import build

    if train is not None and not settings:
        return train
    base = asdict(train) if train is not None else {"per_round": min(TrainConfig.per_round, len(task.train))}
    return build(TrainConfig, {**base, **settings}, "train")


def _loop(run: Run, engine: Any, clients: Any, keeper: _Keeper, watch: Watch | None, tracking: Tracking) -> None:
    config, recorder = run.train, Recorder(run.task, clients, run.folder)
    assert run.state is not None
    left_out = LeftOut()
    recorder.begin(run.state)
    keeper.mark()
    rounds = run_rounds(
        run.method, run.state, clients, recorder.tap(engine), config.eval_every, config.min_replies, config.retries,
        run.over_budget,
    )  # fmt: skip
    for state, record in () if run.over_budget(Traffic()) else rounds:
        traffic = run.traffic + record.traffic
        line = recorder.complete(_line(record, traffic), state)
        # From here on the round counts, in all its parts.
        run.state, run.traffic, keeper.rounds = state, traffic, keeper.rounds + 1
        keeper.mark()
        if run.code is not None:  # now there is a round of this code too
            run.results.lines[0]["code"], run.code = run.code, None
            run.results.rewrite()
        run.results.append(line)
        tracking.log(state.round, line)
        (watch or left_out)(state, line)
        if config.checkpoint_every and keeper.rounds % config.checkpoint_every == 0:
            keeper.keep()
    keeper.keep()
    if not run.state.done:
        run.stopped = f"its limit of {config.max_bytes} bytes was reached"
    run.results.append(
        {
            "type": "end",
            "checksum": run.checksum,
            "accuracy": run.accuracy,
            "best": run.best,
            "bytes": asdict(run.traffic),
            **({"judging": run.bytes_judging} if run.bytes_judging else {}),
            "seconds": run.seconds,
            "stopped": run.stopped,
        }
    )


def _line(record: Record, total: Traffic) -> dict[str, Any]:
    """A round as one JSON line."""
    return {
        "type": "round",
        "stage": record.stage,
        "round": record.round,
        "attempt": record.attempt,
        "cohort": list(record.cohort),
        "failures": {str(k): v for k, v in record.failures.items()},
        **({"missed": {str(k): v for k, v in record.missed.items()}} if record.missed else {}),
        "loss": record.loss,
        "metrics": {view: dict(values) for view, values in record.metrics.items()},
        "bytes": asdict(record.traffic),
        "total": {"up": total.up, "down": total.down},
        "seconds": {k: round(v, 4) for k, v in record.seconds.items()},
    }


def _about(task: Task, clients: Any) -> dict[str, Any]:
    layout = task.layout
    return {
        "name": task.name,
        "clients": len(clients),
        "samples": sum(c.n for c in clients),
        "layers": [[x.name, list(x.shape)] for x in layout.prunable],
        "prunable": layout.prunable_size,
        "values": layout.size,
        "trained": layout.trained_size,
        "info": getattr(task, "info", {}),
    }


def _identity(
    method: Method, task: Task, config: TrainConfig, clients: Sequence[Client], header: Mapping[str, Any]
) -> dict[str, Any]:
    """What must be equal for a checkpoint to be this run's."""
    settings = {k: v for k, v in asdict(config).items() if k not in (*OUTSIDE, "max_bytes")}
    live = hasattr(clients, "admit")  # those that come and go are not part of what a run is
    known = json.dumps([] if live else [[c.id, c.n, c.density] for c in clients])
    samples = "" if live else samples_of(task)
    return {
        "method": f"{method!r}",
        "settings": settings,
        "layout": task.layout.hash,
        "clients": hashlib.blake2b(known.encode(), digest_size=8).hexdigest(),
        "task": {k: v for k, v in header.get("task", {}).items() if k not in OUTSIDE},
        **({"samples": samples} if samples else {}),
    }


class _Keeper:
    """Keeps checkpoints of a run, when told and when interrupted."""

    def __init__(self, run: Run, engine: Any, identity: Mapping[str, Any]) -> None:
        self.run, self.engine, self.identity = run, engine, identity
        self.folder = run.folder / "checkpoints" if run.folder else None
        self.rounds = 0  # done so far, those of stage 1 included

    def begin(self) -> None:
        if self.folder is not None:
            checkpoints.clear(self.folder)

    def mark(self) -> None:
        """The run's state and what the engine remembers belong together now, whatever happens in the next round."""
        if self.folder is not None:
            self.engine.mark()

    def keep(self) -> None:
        """Write a checkpoint; if that fails (a full disk, say) warn, keep the one before, and go on."""
        if self.folder is None or self.run.state is None:
            return
        progress = {"rounds": self.rounds, "traffic": asdict(self.run.traffic)}
        try:
            self.run.results.sync()
            point = checkpoints.Checkpoint(self.run.state, self.engine.memory(), progress)
            checkpoints.save(self.folder, self.rounds, point, self.identity)
        except OSError as error:
            self._failed(error)
            return
        self.engine.forget_masks(checkpoints.referenced(self.folder))

    @contextmanager
    def on_the_way_out(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # whatever ends the run, its finished rounds are kept
            try:
                self.keep()
            except Exception as error:  # of a device that is lost, say: what ended the run is what must be told
                self._failed(error)
            raise

    def _failed(self, error: Exception) -> None:
        said = f"could not write a checkpoint to {self.folder} ({error}); the last good one is kept"
        warnings.warn(said, RuntimeWarning)


def _resume(run: Run, keeper: _Keeper, plan: Plan) -> State | None:
    """The state to go on from; None if the run in the folder has neither a checkpoint nor a finished round."""
    if keeper.folder is None:
        raise ConfigError("resume needs the folder of the run to continue")
    if not checkpoints.found_in(keeper.folder) and (earned := run.results.earned()) is not None:
        if not earned:
            return None
        raise CheckpointError(
            f"{run.folder} holds {earned} finished rounds and no checkpoint to go on from: start the run anew, without "
            f"resume (--overwrite on the command line); these rounds are then kept in {OLD}"
        )
    masks = MaskStore(plan.layout, keeper.folder.with_name("masks"))
    point = checkpoints.load(keeper.folder, plan, keeper.identity, masks)
    keeper.engine.restore(point.engine)
    keeper.engine.forget_masks(checkpoints.referenced(keeper.folder))  # from now on, too, what checkpoints name is kept
    keeper.rounds = point.progress["rounds"]
    run.results.resume(point.progress["rounds"])
    run.traffic = Traffic(**point.progress["traffic"])
    if not point.state.done and not run.over_budget(Traffic()):
        run.code = _code(run)
    return point.state


def _code(run: Run) -> dict[str, str] | None:
    """The code that a run is of from its next round on; said where it is other than it began with."""
    header = next(iter(run.results.lines), {})
    if not isinstance(before := header.get("code"), dict):
        return None
    now = joined(before, code_of(run.method))
    if changed := [name for name, digest in (now or {}).items() if digest != before.get(name)]:
        warnings.warn(
            f"the code of {', '.join(changed)} has changed since the last round of the run in {run.folder}: what comes "
            "out is of neither code alone (start anew, without resume, for a run of one code)",
            RuntimeWarning,
        )
    return now
