"""Run a method on a task: the loop, with results written, checkpoints kept, and interruptions survived."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, fields
from html import escape
from inspect import get_annotations
from pathlib import Path
from typing import Any

from torch import nn

from ..core.engine import Engine, FixedPopulation, Population
from ..core.errors import ConfigError, FlashError, warn
from ..core.exchange import Traffic
from ..core.loop import checked, run_rounds
from ..core.mask import Weights
from ..core.method import Method
from ..core.parts import build, check_fields
from ..core.record import RoundRecord
from ..core.state import Plan, State
from ..data.task import Task
from ..engine import make_engine
from ..engine.replica import warn_of_buffers
from ..engine.store import MaskStore
from . import checkpoint as checkpoints
from .checkpoint import Keeper
from .code import code_of, joined
from .config import OUTSIDE, TrainConfig, plan_of
from .lock import alone
from .observe import Observer
from .progress import Display, WarnOfDropped, amount, duration, is_live
from .results import RESULTS, Results
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
        self.stopped: str | None = None  # why the run ended early
        self.kept = True  # whether its last state was written to the folder

    def __repr__(self) -> str:
        rows = ", ".join(f"{name} {value}" for name, value in self._summary().items())
        return f"Run({rows})"

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(v)}</td></tr>" for k, v in self._summary().items())
        return f"<table>{rows}</table>"

    def _summary(self) -> dict[str, str]:
        """What a person wants to see of a run, as text."""
        state = self.state
        found = {"method": self.method.name or type(self.method).__name__, "task": self.task.name}
        if state is not None:
            found |= {"rounds": f"{state.counted}/{state.plan.rounds}", "density": f"{self.weights.mask.density:.4f}"}
            found |= {"accuracy": f"{100 * self.accuracy:.2f} %", "best": f"{100 * self.best:.2f} %"}
        found |= {"up": amount(self.bytes_up), "down": amount(self.bytes_down), "time": duration(self.seconds)}
        return found | ({"stopped": self.stopped} if self.stopped else {})

    @property
    def weights(self) -> Weights:
        """The final model: its mask and a flat vector."""
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
        """Bytes from clients to the server in training."""
        return self.traffic.up

    @property
    def bytes_down(self) -> int:
        """Bytes from the server to clients in training."""
        return self.traffic.down

    @property
    def bytes_evaluation(self) -> int:
        """Bytes sent to clients that evaluated the model. Not part of `bytes_up` and `bytes_down`."""
        return sum(record.evaluation_bytes for record in self.history)

    def over_budget(self, more: Traffic) -> bool:
        """Whether the run reaches `max_bytes` with this much more traffic."""
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
        target = Path(folder)
        Results(target / RESULTS, self.results.header, self.results.rounds, self.results.end).rewrite()
        return self.save_model(target)

    def save_model(self, folder: Path) -> Path:
        """Write the final model, for `load_state_dict`, and its masks into a folder."""
        from .export import export_weights

        about = {"method": self.method.name}
        return export_weights(self.weights, self.task.build(), folder / "model.safetensors", about)


def simulate(
    method: Method,
    task: Task,
    rounds: int | None = None,
    *,
    train: TrainConfig | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
    watch: Watch | None = None,
    header: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train `task` with `method` and return the run.

    settings: any field of TrainConfig (per_round=10, lr=0.1, seed=3, workers=4, ...).
    folder: where results, checkpoints and the final model go. If it holds a run already, choose: resume=True continues
    that run from its last checkpoint, to the same result as without the interruption; overwrite=True replaces it.
    A resumed run may have more `rounds` than before; the learning rate then follows the longer schedule from there on.
    progress: show it on a terminal and in notebooks (None), always (True) or never (False).
    watch: called with the state and the record after every round.

    Ctrl-C ends the run early: its finished rounds are kept and returned.
    """
    if rounds is not None:
        settings["rounds"] = rounds
    config = _train_config(train, task, settings)
    if not task.evaluation:
        raise ConfigError("there are no samples to evaluate the model on: give the task `test`, or a `holdout` above 0")
    warn_of_buffers(task)
    place = Path(folder) if folder else None
    display = _display(method, config, progress, watch)
    engine = make_engine(task, config, place / "masks" if place else None)
    try:
        clients = FixedPopulation(task.clients)
        run = drive(method, task, config, engine, clients, place, resume, display or watch, header, display, overwrite)
    finally:
        engine.close()
        if display is not None:
            display.close()
    if place is not None and header is None and run.kept:
        run.save_model(place)  # a run made in Python: only here the module is known
    return run


class _Shown(Display):
    """A display in front of the caller's own watch."""

    watch: Watch

    def __call__(self, state: State, record: RoundRecord) -> None:
        super().__call__(state, record)
        self.watch(state, record)


def _display(method: Method, config: TrainConfig, progress: bool | None, watch: Watch | None) -> _Shown | None:
    if progress is False or (progress is None and (watch is not None or not is_live(sys.stderr))):
        return None
    shown = _Shown(getattr(method, "name", "") or type(method).__name__, config.rounds)
    shown.watch = watch or WarnOfDropped()
    return shown


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
    display: Display | None = None,
    overwrite: bool = True,
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
        if not (resume or overwrite) and run.results.earned():
            raise ConfigError(
                f"{folder} already holds a run: continue it with resume=True, replace it with overwrite=True, or choose "
                "another folder"
            )
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
            try:
                _loop(run, engine, clients, keeper, watch or WarnOfDropped(), tracking, code, display)
            except KeyboardInterrupt:
                run.stopped, run.kept = "interrupted", keeper.keep()
                warn(f"interrupted after {run.state.counted} of {config.rounds} rounds")
    return run


def _check_method(method: object) -> None:
    if not isinstance(method, Method):
        raise ConfigError(f"method = {method!r}: expected a method with its settings, such as fl.SPDST(density=0.05)")
    kind = type(method)
    own = [name for name, hint in get_annotations(kind).items() if "ClassVar" not in str(hint)]
    own = [] if "__dataclass_fields__" in vars(kind) else own
    own += sorted(vars(method).keys() - {f.name for f in fields(method)})
    if own:
        raise ConfigError(
            f"{kind.__name__} is not a dataclass, so its settings {', '.join(own)} would be lost: put "
            "@dataclass(frozen=True) above the class and list its settings as fields"
        )
    for name in ("init", "aggregate"):
        if getattr(kind, name) is getattr(Method, name):
            raise ConfigError(f"{kind.__name__} has no {name}: every method needs init(plan) and aggregate(s, sums)")
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
    display: Display | None,
) -> None:
    """All rounds. `code`: what a resumed run is made by from now on, recorded with its first new round."""
    config = run.train
    assert run.state is not None
    observer = Observer(run.method, run.task, run.state, run.folder)
    keeper.state, keeper.traffic = run.state, run.traffic
    keeper.snapshot()
    rounds = run_rounds(
        run.method, run.state, clients, engine, config.eval_every, config.min_replies, config.retries,
        run.over_budget, observer.observe, display.tick if display else lambda state, orders: None,
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
    run.kept = keeper.keep()
    if not run.kept:
        _rescue(run)
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


def _rescue(run: Run) -> None:
    """The final checkpoint could not be written: put the model elsewhere, or say that only memory has it."""
    place = Path(tempfile.gettempdir()) / f"flashfl-{run.folder.name if run.folder else 'run'}-{os.getpid()}"
    try:
        path = run.save(place)
    except (FlashError, OSError):
        warn(
            "the final model could not be written anywhere: it is in memory only. Use run.save(folder) or run.model()."
        )
    else:
        warn(f"the final model could not be written to {run.folder}: it is in {path} instead")


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

    No state: there is no checkpoint, so the run starts from the beginning.
    """
    if keeper.folder is None:
        raise ConfigError("resume needs the folder of the run to continue: give `folder`")
    if not checkpoints.found_in(keeper.folder):
        return None, None
    masks = MaskStore.in_folder(plan.layout, keeper.folder.with_name("masks"))
    state, run.traffic = keeper.load(plan, masks)
    _note_extension(run, state)
    ends = run.method.done(state) or run.over_budget(Traffic())
    return state, None if ends else _code(run)


def _note_extension(run: Run, state: State) -> None:
    """Say what more rounds do to the learning rate; fewer than are done is an error."""
    before, now = run.results.header.get("identity", {}).get("settings", {}).get("rounds"), run.train.rounds
    if state.counted > now:
        raise ConfigError(f"rounds = {now}: the run in {run.folder} has {state.counted} rounds already")
    if isinstance(before, int) and before != now:
        warn(
            f"rounds was {before} and is {now} now: from round {state.counted} on, the learning rate follows the "
            f"schedule of {now} rounds and continues at {state.plan.lr(state.counted):.4g}"
        )
        run.results.header["identity"]["settings"]["rounds"] = now
        if isinstance(train := run.results.header.get("config", {}).get("train"), dict):
            train["rounds"] = now


def _code(run: Run) -> dict[str, str] | None:
    """The code of a run that goes on with what is installed now. Warns if it has changed."""
    if not isinstance(before := run.results.header.get("code"), dict):
        return None
    now = joined(before, code_of(run.method))
    if changed := [name for name, digest in (now or {}).items() if digest != before.get(name)]:
        warn(
            f"the code of {', '.join(changed)} changed since this run began, so its results mix two versions. Start "
            "again without resume for a run of one version."
        )
    return now
