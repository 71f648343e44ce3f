"""Run a method on a task: the loop, with results written, checkpoints kept, and interruptions survived."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, is_dataclass
from inspect import get_annotations
from pathlib import Path
from typing import Any

from torch import nn

from ..core.engine import Engine, FixedPopulation, Population
from ..core.errors import CheckpointError, ConfigError
from ..core.exchange import Traffic
from ..core.loop import checked, run_rounds
from ..core.mask import Weights
from ..core.method import Method
from ..core.parts import build, check_fields
from ..core.record import RoundRecord
from ..core.state import Plan, State
from ..data.task import Task
from ..engine import make_engine
from ..engine.store import MaskStore
from ..engine.train import warn_of_buffers
from . import checkpoint as checkpoints
from .checkpoint import Keeper
from .code import code_of, joined
from .config import OUTSIDE, TrainConfig, plan_of
from .lock import alone
from .observe import Observer
from .progress import WarnOfDropped
from .results import OLD, RESULTS, Results
from .samples import samples_of
from .track import Tracking

Watch = Callable[[State, RoundRecord], None]


class Run:
    """A finished (or stopped) run: its model, its records, and where it is kept."""

    def __init__(self, method: Method, task: Task, train: TrainConfig, folder: Path | None = None) -> None:
        self.method, self.task, self.train, self.folder = method, task, train, folder
        self.results = Results(folder / RESULTS if folder else None)
        self.state: State | None = None
        self.traffic = Traffic()
        self.stopped: str | None = None

    @property
    def weights(self) -> Weights:
        assert self.state is not None
        return self.method.view(self.state)

    @property
    def accuracy(self) -> float:
        """The last test metric (accuracy unless the task says otherwise)."""
        return self._metric()[-1] if self._metric() else float("nan")

    @property
    def best(self) -> float:
        """Best test metric of the run. Assumes that higher is better."""
        return max(self._metric(), default=float("nan"))

    def _metric(self) -> list[float]:
        return [record.score.metric for record in self.history if record.score is not None]

    @property
    def seconds(self) -> float:
        """Time spent on finished rounds, without interruptions between them."""
        return sum(r.seconds.get(name, 0.0) for r in self.history for name in ("train", "aggregate", "evaluate"))

    @property
    def bytes_up(self) -> int:
        return self.traffic.up

    @property
    def bytes_down(self) -> int:
        return self.traffic.down

    @property
    def bytes_evaluation(self) -> int:
        """Bytes sent to clients that evaluated the model, beside all training."""
        return sum(record.evaluation_bytes for record in self.history)

    def over_budget(self, more: Traffic) -> bool:
        """Whether this much more traffic reaches the run's limit."""
        total = self.traffic + more
        return bool(self.train.max_bytes) and total.up + total.down >= self.train.max_bytes

    @property
    def history(self) -> list[RoundRecord]:
        """One record per round, as in the results file."""
        return self.results.rounds

    def model(self, view: str = "") -> nn.Module:
        """The task's own module with the final weights, or with those of another view, such as "density 0.1"."""
        assert self.state is not None
        module = self.task.build()
        self.task.layout.write(self.method.view(self.state, view).vector.cpu(), module)
        return module.eval()

    @property
    def checksum(self) -> str:
        """A digest of the final weights and mask. Equal for two runs that ended bit for bit alike."""
        digest = hashlib.blake2b(self.weights.mask.packed.tobytes(), digest_size=8)
        digest.update(self.weights.vector.cpu().numpy().tobytes())
        return digest.hexdigest()

    def save(self, folder: str | Path) -> Path:
        """Write the results and the final model into a folder."""
        from .export import export_weights

        target = Path(folder)
        Results(target / RESULTS, self.results.header, self.results.rounds, self.results.end).rewrite()
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
    """Train `task` with `method` and return the run.

    settings: any field of TrainConfig (per_round=10, lr=0.1, seed=3, workers=4, ...). folder: where results and
    checkpoints go; a run that was there is replaced. With resume=True that run continues from its last checkpoint, to
    the same result as without the interruption. watch: called with the state and the record after every round.
    """
    if rounds is not None:
        settings["rounds"] = rounds
    config = _train_config(train, task, settings)
    if not task.judges:
        raise ConfigError("there are no samples to evaluate the model on: give the task `test`, or a `holdout` above 0")
    warn_of_buffers(task)
    place = Path(folder) if folder else None
    engine = make_engine(task, config, place / "masks" if place else None)
    try:
        return drive(method, task, config, engine, FixedPopulation(task.clients), place, resume, watch, header)
    finally:
        engine.close()


def drive(
    method: Method,
    task: Task,
    config: TrainConfig,
    engine: Engine,
    clients: Population,
    folder: Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    header: Mapping[str, Any] | None = None,
) -> Run:
    """Run a method on any engine, with these clients. Only the task's model is used here, not its data.

    No other process may use the folder until the run is over.
    """
    _check_method(method)
    run = Run(method, task, config, folder)
    plan = plan_of(config, task, clients.size, engine.device, method)
    identity = _identity(method, task, config, clients, header or {})
    clients.admit(method, plan.key)
    keeper = Keeper(run.results, engine, clients, identity)
    with alone(folder):
        start, code = _resume(run, keeper, plan) if resume else (None, None)
        if start is None:
            start = checked(method, method.init(plan))
            keeper.begin()
        if not run.results.header:
            about = {"config": {**(header or {})}, "identity": identity, "task": _about(task, clients)}
            run.results.begin({**about, "code": code_of(method)})
        run.state = start
        name = folder.name if folder else ""
        tracking = Tracking(config.track, folder, name, header or identity, start.counted)
        with closing(tracking), keeper.on_the_way_out():
            _loop(run, engine, clients, keeper, watch or WarnOfDropped(), tracking, code)
    return run


def _check_method(method: object) -> None:
    if not isinstance(method, Method):
        raise ConfigError(f"method = {method!r}: expected a method with its settings, such as fl.SPDST(density=0.05)")
    own = [name for name, hint in get_annotations(type(method)).items() if "ClassVar" not in str(hint)]
    if own and "__dataclass_fields__" not in vars(type(method)):
        raise ConfigError(
            f"{type(method).__name__} is not a dataclass, so {', '.join(own)} would have no effect: put "
            "@dataclass(frozen=True) above the class"
        )
    assert is_dataclass(method)
    check_fields(method)


def _train_config(train: TrainConfig | None, task: Task, settings: Mapping[str, Any]) -> TrainConfig:
    if train is not None and not settings:
        return train
    base = asdict(train) if train is not None else {"per_round": min(TrainConfig.per_round, len(task.train))}
    return build(TrainConfig, {**base, **settings}, "train")


def _loop(
    run: Run,
    engine: Engine,
    clients: Population,
    keeper: Keeper,
    watch: Watch,
    tracking: Tracking,
    code: dict[str, str] | None,
) -> None:
    """All rounds. `code`: what a resumed run is made by from now on, recorded with its first new round."""
    config = run.train
    assert run.state is not None
    observer = Observer(run.method, run.task, run.state, run.folder)
    keeper.state, keeper.traffic = run.state, run.traffic
    keeper.snapshot()
    rounds = run_rounds(
        run.method, run.state, clients, engine, config.eval_every, config.min_replies, config.retries,
        run.over_budget, observer.observe,
    )  # fmt: skip
    for state, found in () if run.over_budget(Traffic()) else rounds:
        traffic = run.traffic + found.bytes
        record = observer.complete(found, state, traffic)
        # From here on the round counts, in all its parts.
        run.state, run.traffic, keeper.rounds = state, traffic, keeper.rounds + 1
        keeper.state, keeper.traffic = state, traffic
        keeper.snapshot()
        if code is not None:
            run.results.header["code"], code = code, None
            run.results.rewrite()
        run.results.append(record)
        tracking.log(state.counted, record)
        watch(state, record)
        if config.checkpoint_every and keeper.rounds % config.checkpoint_every == 0:
            keeper.keep()
    keeper.keep()
    if not run.method.done(run.state):
        run.stopped = f"reached the limit of {config.max_bytes} bytes"
    run.results.finish(
        {
            "checksum": run.checksum,
            "accuracy": run.accuracy,
            "best": run.best,
            "bytes": asdict(run.traffic),
            "evaluation_bytes": run.bytes_evaluation,
            "seconds": run.seconds,
            "stopped": run.stopped,
        }
    )


def _about(task: Task, clients: Population) -> dict[str, Any]:
    layout, present = task.layout, clients.present()
    return {
        "name": task.name,
        "clients": len(present),
        "samples": sum(c.n for c in present),
        "layers": [[x.name, list(x.shape)] for x in layout.prunable],
        "prunable": layout.prunable_size,
        "values": layout.size,
        "trained": layout.trained_size,
        "info": task.info,
    }


def _identity(
    method: Method, task: Task, config: TrainConfig, clients: Population, header: Mapping[str, Any]
) -> dict[str, Any]:
    """What must be equal for a checkpoint to belong to this run."""
    settings = {k: v for k, v in asdict(config).items() if k not in (*OUTSIDE, "max_bytes")}
    fixed = clients.fixed  # clients that come and go are not part of what a run is
    known = json.dumps([[c.id, c.n, c.density] for c in fixed or ()])
    samples = samples_of(task) if fixed is not None else ""
    return {
        "method": f"{method!r}",
        "settings": settings,
        "layout": task.layout.hash,
        "clients": hashlib.blake2b(known.encode(), digest_size=8).hexdigest(),
        "task": {k: v for k, v in header.get("task", {}).items() if k not in OUTSIDE},
        **({"samples": samples} if samples else {}),
    }


def _resume(run: Run, keeper: Keeper, plan: Plan) -> tuple[State | None, dict[str, str] | None]:
    """The state to continue from, and the code the run is made by from now on.

    No state: the folder has neither a checkpoint nor a finished round.
    """
    if keeper.folder is None:
        raise ConfigError("resume needs the folder of the run to continue: give `folder`")
    if not checkpoints.found_in(keeper.folder) and (earned := run.results.earned()) is not None:
        if not earned:
            return None, None
        raise CheckpointError(
            f"{run.folder} holds {earned} finished rounds and no checkpoint to continue from. Start the run again "
            f"without resume (--overwrite on the command line); the old rounds are then kept in {OLD}."
        )
    masks = MaskStore.in_folder(plan.layout, keeper.folder.with_name("masks"))
    state, run.traffic = keeper.load(plan, masks)
    ends = run.method.done(state) or run.over_budget(Traffic())
    return state, None if ends else _code(run)


def _code(run: Run) -> dict[str, str] | None:
    """The code of a run that goes on with what is installed now. Warns if it has changed."""
    if not isinstance(before := run.results.header.get("code"), dict):
        return None
    now = joined(before, code_of(run.method))
    if changed := [name for name, digest in (now or {}).items() if digest != before.get(name)]:
        warnings.warn(
            f"the code of {', '.join(changed)} changed since this run began, so its results mix two versions. Start "
            "again without resume for a run of one version.",
            RuntimeWarning,
        )
    return now
