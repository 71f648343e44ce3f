"""Run a method on a task: the loop, with results written, checkpoints kept, and interruptions survived."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core.engine import JSON, Engine, FixedPopulation, Population
from ..core.errors import ConfigError, FlashError, warn
from ..core.loop import checked, run_rounds
from ..core.method import Method
from ..core.state import Plan, State
from ..data.task import Task
from ..engine import make_engine
from ..engine.replica import warn_of_buffers, warn_of_metric
from .budget import warn_if_over, within_budget
from .checkpoint import Keeper
from .checks import check_method, check_private, check_sparse
from .code import code_of, joined
from .config import Settings, TrainConfig, make_train, plan_of
from .identity import identity_of, samples_of
from .lock import alone
from .observe import Observer
from .progress import Display, WarnOfDropped, Watch, is_live
from .run import Run
from .track import Tracking


def simulate(
    method: Method,
    task: Task,
    rounds: int | None = None,
    *,
    train: TrainConfig | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: bool | Display | None = None,
    watch: Watch | None = None,
    header: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Run:
    """Train `task` with `method` and return the run.

    settings: fields of TrainConfig, such as per_round=10, lr=0.1, seed=3. They override the method's `recipe`.
    folder: where results, checkpoints and the final model go. If it already holds a run, resume=True continues this
    run from its last checkpoint, and overwrite=True replaces it. A resumed run may have more `rounds`.
    progress: whether to show progress. None: on a terminal and in notebooks. Or a Display.
    watch: a function that is called with the state and the record after every round.

    Ctrl-C ends the run early, and simulate returns its finished rounds.
    """
    if rounds is not None:
        settings["rounds"] = rounds
    check_method(method)
    if not isinstance(task, Task):
        kind = type(task).__name__
        raise ConfigError(f"the task is of type {kind}: expected an fl.Task. Write fl.simulate(method, task, rounds).")
    usual = asdict(train) if train else {"per_round": min(TrainConfig.per_round, len(task.train)), **method.recipe}
    config = make_train({**usual, **settings})
    place, chosen = Path(folder) if folder else None, ""
    if config.budget:
        method, config, chosen = within_budget(method, task, config, place if resume else None)
    if not task.evaluation:
        raise ConfigError(
            "there are no samples to evaluate the model on: give the task `test`. Or set `holdout` above 0, and give "
            "clients at least 2 samples: a client with a single sample only trains."
        )
    warn_of_buffers(task)
    warn_of_metric(task)
    if isinstance(progress, Display):
        display = progress
    else:
        show = progress if progress is not None else watch is None and is_live(sys.stderr)
        label, then = method.name or type(method).__name__, watch or WarnOfDropped()
        display = Display(label, config.rounds, quiet=not show, then=then)
    if chosen and not display.quiet:
        print(f"{display.label}: {chosen}", file=sys.stderr)
    with closing(display), closing(make_engine(task, config, place / "masks" if place else None)) as engine:
        clients = FixedPopulation(task.clients)
        run = drive(method, task, config, engine, clients, place, resume, display, header, overwrite)
    if place is not None and header is None and run.kept:
        run.export(place / "model.safetensors")  # a run made in Python: only here the module is known
    return run


def drive(
    method: Method,
    task: Task,
    config: TrainConfig,
    engine: Engine,
    clients: Population,
    folder: Path | None = None,
    resume: bool = False,
    watch: Watch | None = None,
    header: Mapping[str, Settings] | None = None,
    overwrite: bool = True,
) -> Run:
    """Run a method on any engine, with these clients. Only the task's model is used here, not its data.

    watch: a Display, or a function that is called with the state and the record after every round.
    No other process may use the folder until the run is over.
    """
    check_method(method)
    check_sparse(method, task)
    check_private(method, task, config)
    tracking = Tracking(config.track, folder, task.metric_name)
    run = Run(method, task, config, folder)
    plan = plan_of(config, task, clients.size, engine.device, method)
    identity = identity_of(method, task, config, clients, header or {})
    clients.admit(method, plan.key)
    keeper = Keeper(run, engine, clients, identity)
    if isinstance(watch, Display):
        display = watch
    else:
        display = Display("", config.rounds, quiet=True, then=watch or WarnOfDropped())
    display.shown, display.secure = run.shown, config.secure
    with alone(folder):
        if run.results.earned and not (resume or overwrite):  # refuses a linked file before anything is removed
            raise ConfigError(
                f"{folder} already holds a run: continue it with resume=True, replace it with overwrite=True, or "
                "choose another folder"
            )
        start = _resume(run, keeper, plan) if resume else None
        computes: Mapping[str, JSON] = {}
        if start is None:
            start = checked(method, method.init(plan))
            keeper.begin()
            computes = engine.prepare(start)
        if not run.results.header:
            about = {"config": {**(header or {})}, "identity": identity, "task": _about(task, clients)}
            run.results.begin({**about, **computes, "code": code_of(method)})
        if resume:
            display.resumed(_resumed(start, config.rounds))
        run.state = start
        tracking.begin(header or identity, start.counted)
        with closing(tracking), keeper.on_the_way_out():
            try:
                _loop(run, engine, clients, keeper, display, tracking)
            except KeyboardInterrupt:
                run.stopped, run.kept = "interrupted", keeper.keep()
                again = ": continue with resume=True" if folder else ""
                warn(f"interrupted after {run.state.counted} of {config.rounds} rounds{again}")
    return run


def _loop(run: Run, engine: Engine, clients: Population, keeper: Keeper, display: Display, tracking: Tracking) -> None:
    """All rounds, and the end of the run."""
    config = run.train
    assert run.state is not None
    observer = Observer(run.method, run.task, run.state, run.folder)
    engine.memory.snapshot()
    rounds = run_rounds(
        run.method, run.state, clients, engine, config.eval_every, config.min_replies, config.retries,
        run.bytes_left, display.tick,
    )  # fmt: skip
    for state, found, trips in () if run.over_budget else rounds:
        traffic = run.traffic + found.bytes
        record = observer.complete(found, state, traffic, trips)
        # From here on the round counts, in all its parts.
        run.state, run.traffic, run.rounds = state, traffic, run.rounds + 1
        engine.memory.snapshot()  # the state and what the engine remembers belong together
        run.results.append(record)
        if config.track:
            tracking.log(state.counted, record)
        display(state, record)
        if config.private or keeper.due():  # clients open each private round's sum once only
            keeper.keep()
    run.kept = keeper.keep()
    if not run.kept:
        _rescue(run)
    if run.method.done(run.state):
        warn_if_over(run.method, config, run.traffic)
    else:
        run.stopped = run.why_over or f"reached the limit of {config.max_bytes} bytes"
    run.results.finish(
        {
            "checksum": run.checksum,
            "metric": run.metric,
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


def _about(task: Task, clients: Population) -> Settings:
    """What a run records about its task."""
    layout, present = task.layout, clients.present()
    return {
        "name": task.name,
        "model": task.model_name,
        "metric": {"name": task.metric_name, "higher_is_better": task.higher_is_better},
        "clients": len(present),
        "samples": sum(c.n for c in present),
        "layers": [(x.name, list(x.shape)) for x in layout.prunable],  # names and shapes
        "prunable": layout.prunable_size,
        "values": layout.size,
        "trained": layout.trained_size,
        "data": samples_of(task, floats=True) if clients.fixed is not None else "",
        "info": task.info,  # how a task that was made by name describes itself
    }


def _resume(run: Run, keeper: Keeper, plan: Plan) -> State | None:
    """The state to continue from. None: there is no checkpoint, so the run starts from the beginning."""
    state = keeper.load(plan)
    if state is None:
        return None
    _note_extension(run, state)
    if not (run.method.done(state) or run.over_budget):
        _note_code(run)
    if run.results.header:
        run.results.rewrite()
    return state


def _resumed(state: State, rounds: int) -> str:
    """Where a resumed run goes on."""
    if state.counted >= rounds:
        return f"nothing left to train, as all {rounds} rounds are done"
    if state.counted:
        return f"going on after round {state.counted} of {rounds}"
    if state.round:
        return f"going on in the phase {state.phase.name!r}, after its round {state.round}"
    return "no checkpoint found, starting at round 1"


def _note_extension(run: Run, state: State) -> None:
    """Say what more rounds do to the learning rate, and record that the run is not one that had them from the start."""
    header, now = run.results.header, run.train.rounds
    settings = header.get("identity", {}).get("settings", {})
    before = settings.get("rounds", now)
    if before != now:
        warn(
            f"rounds changed from {before} to {now}: from round {state.counted + 1} on, the learning rate follows the "
            f"schedule of {now} rounds and continues at {state.plan.lr(state.counted):.4g}"
        )
        settings["rounds"] = now
        header["extended"] = [*header.get("extended", []), before]
        if "train" in header.get("config", {}):
            header["config"]["train"]["rounds"] = now


def _note_code(run: Run) -> None:
    """Record the code of a run that goes on with what is installed now. Warn if it has changed."""
    if not isinstance(before := run.results.header.get("code"), dict):
        return
    now = joined(before, code_of(run.method))
    if changed := [name for name, digest in (now or {}).items() if digest != before.get(name)]:
        warn(
            f"the code of {', '.join(changed)} changed since this run began, so its results mix two versions. To avoid "
            "this, start again without resume."
        )
    run.results.header["code"] = now
