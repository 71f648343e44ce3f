"""Show a run's numbers in TensorBoard, MLflow or Weights & Biases.

A tracker is a function that begins and returns two others: log and close. The results file remains the record. If a
tracker fails, it is dropped with a warning and the run goes on.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.errors import ConfigError, unknown, warn
from ..core.record import RoundRecord

Settings = Mapping[str, object]


Log = Callable[[int, dict[str, float]], object]  # takes numbers by name at a step, which is a counted round
Tracker = tuple[Log, Callable[[], object]]  # and what ends it
Begin = Callable[[ModuleType, Path, Settings, int], Tracker]  # from its package, the run's folder, settings and step


def _tensorboard(package: ModuleType, folder: Path, settings: Settings, step: int) -> Tracker:
    """Event files in RUN/tensorboard. Rounds that a resumed run repeats replace the old ones."""
    writer = package.SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)
    if not step:
        writer.add_text("settings", f"```\n{json.dumps(settings, indent=1, default=str)}\n```", 0)

    def log(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def _mlflow(package: ModuleType, folder: Path, settings: Settings, step: int) -> Tracker:
    """An MLflow run, at MLFLOW_TRACKING_URI. A resumed run continues the one it began."""
    note = folder / "mlflow-run"
    known = _noted(note, step)
    run = package.start_run(run_id=known, run_name=None if known else folder.name)
    if not known:
        note.write_text(run.info.run_id)
        package.log_params({k: str(v)[:500] for k, v in flat(settings).items()})
    return lambda step, values: package.log_metrics(values, step=step), package.end_run


def _wandb(package: ModuleType, folder: Path, settings: Settings, step: int) -> Tracker:
    """A Weights & Biases run, named after the folder. It reads WANDB_PROJECT and WANDB_MODE itself."""
    note = folder / "wandb-run"
    known = _noted(note, step)
    run = package.init(name=folder.name, dir=str(folder), config=dict(settings), id=known, resume="allow")
    note.write_text(run.id)
    return lambda step, values: run.log(values, step=step), run.finish


def _noted(note: Path, step: int) -> str | None:
    """The tracker's name for a resumed run, which it wrote down when it began."""
    return note.read_text().strip() if step and note.exists() else None


TRACKERS: dict[str, tuple[Begin, str]] = {  # and the module each needs
    "tensorboard": (_tensorboard, "torch.utils.tensorboard"),
    "mlflow": (_mlflow, "mlflow"),
    "wandb": (_wandb, "wandb"),
}


def check_names(names: str) -> list[str]:
    """The trackers a comma-separated setting asks for."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return wanted


class Tracking:
    """All trackers of a run."""

    def __init__(self, names: str, folder: Path | None, metric: str = "accuracy") -> None:
        """Raises an error if a tracker's package is missing, before anything of the run is written."""
        self._metric = metric
        self._begin: dict[str, Callable[[Settings, int], Tracker]] = {}
        self._trackers: dict[str, Tracker] = {}
        for name in check_names(names):
            if folder is None:
                raise ConfigError(f"track = {names!r}: tracking needs a folder for the run. Give `folder`")
            begin, module = TRACKERS[name]
            try:
                self._begin[name] = partial(begin, importlib.import_module(module), folder)
            except ImportError:
                raise ConfigError(f"track = {name!r} needs the {name} package: pip install {name}") from None

    def begin(self, settings: Settings, step: int) -> None:
        """Start all trackers. A resumed run starts from a later step."""
        self._trackers = {name: begin(settings, step) for name, begin in self._begin.items()}

    def log(self, step: int, record: RoundRecord) -> None:
        """Show one round."""
        values = values_of(record, self._metric) if self._trackers else {}
        for name, (log, _) in list(self._trackers.items()):
            self._try(name, partial(log, step, values))

    def close(self) -> None:
        for name, (_, close) in list(self._trackers.items()):
            self._try(name, close)

    def _try(self, name: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # an external service must not end a run
            warn(f"tracking with {name} stopped: {error}")
            del self._trackers[name]


def values_of(record: RoundRecord, metric: str = "accuracy") -> dict[str, float]:
    """The numbers of a round, by the names that trackers show."""
    if not record.counts:
        return {f"{record.phase}/{k}": float(v) for k, v in (("up", record.bytes.up), ("down", record.bytes.down))}
    values = {"loss/train": record.loss, "density": record.density, "failures": len(record.failures)}
    for view, score in record.metrics.items():
        values |= {f"{metric}/{view}": score.metric, f"loss/{view}": score.loss}
    values |= {f"bytes/{k}": v for k, v in asdict(record.bytes).items()}
    values |= {"total bytes/up": record.total.up, "total bytes/down": record.total.down}
    values |= {f"seconds/{k}": v for k, v in record.seconds.items()}
    values |= {k: v for k, v in (("mismatch", record.mismatch), ("flops", record.flops)) if v is not None}
    return {k: float(v) for k, v in values.items()}


def flat(settings: Settings, prefix: str = "") -> dict[str, Any]:
    """Nested settings by their full names, such as `method.adapt.growth`."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out
