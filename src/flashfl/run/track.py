"""A run's numbers in the tool a group already looks at: TensorBoard, MLflow or Weights & Biases.

A tracker is three small functions: begin (its constructor), log, close. The results file remains the record; a
tracker that fails is named in a warning and left out, and the run goes on.
"""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import ConfigError, unknown
from ..core.record import RoundRecord


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run: its folder, name and settings, and the round it starts or goes on from."""

    folder: Path
    name: str
    settings: Mapping[str, Any]
    step: int = 0


class Tracker(Protocol):
    """Takes numbers by name at a step; a step is a counted round."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TensorBoard:
    """Event files in RUN/tensorboard; what a resumed run does again replaces what was there."""

    def __init__(self, about: About) -> None:
        SummaryWriter = _need(*_NEEDS["tensorboard"]).SummaryWriter  # noqa: N806
        self._writer = SummaryWriter(str(about.folder / "tensorboard"), purge_step=about.step + 1)
        if not about.step:
            self._writer.add_text("settings", f"```\n{json.dumps(about.settings, indent=1, default=str)}\n```", 0)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class MLflow:
    """A run of MLflow's, where MLFLOW_TRACKING_URI says; a resumed run goes on in the one it began."""

    def __init__(self, about: About) -> None:
        self._mlflow = _need(*_NEEDS["mlflow"])
        note = about.folder / "mlflow-run"
        known = note.read_text().strip() if about.step and note.exists() else None
        run = self._mlflow.start_run(run_id=known, run_name=None if known else about.name)
        if not known:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(run.info.run_id)
            self._mlflow.log_params({k: str(v)[:500] for k, v in flat(about.settings).items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class WandB:
    """A run of Weights & Biases', named after the folder; WANDB_PROJECT and WANDB_MODE are its own to read."""

    def __init__(self, about: About) -> None:
        wandb = _need(*_NEEDS["wandb"])
        note = about.folder / "wandb-run"
        known = note.read_text().strip() if about.step and note.exists() else None
        about.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            name=about.name, dir=str(about.folder), config=dict(about.settings), id=known, resume="allow"
        )
        note.write_text(self._run.id)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[About], Tracker]] = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}


def check_names(names: str) -> list[str]:
    """The trackers a comma-separated setting asks for."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    for name in wanted:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    return wanted


_NEEDS = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard"), "mlflow": ("mlflow",) * 2, "wandb": ("wandb",) * 2,
}  # fmt: skip


def check_installed(names: str) -> None:
    """An error if a tracker that is asked for cannot be had."""
    for name in check_names(names):
        if name in _NEEDS:
            _need(*_NEEDS[name])


class Tracking:
    """All the trackers of a run as one."""

    def __init__(self, names: str, folder: Path | None, name: str, settings: Mapping[str, Any], step: int) -> None:
        wanted = check_names(names)
        if wanted and folder is None:
            raise ConfigError(f"track = {names!r}: tracking needs a folder for the run")
        self._trackers: dict[str, Tracker] = {}
        if folder is not None:
            about = About(folder, name, settings, step)
            self._trackers = {which: TRACKERS[which](about) for which in wanted}

    def log(self, step: int, record: RoundRecord) -> None:
        """One round."""
        if self._trackers:
            values = values_of(record)
            self._each(lambda tracker: tracker.log(step, values))

    def close(self) -> None:
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # somebody else's service must not end a run
                warnings.warn(f"tracking with {name} stopped: {error}", RuntimeWarning)
                del self._trackers[name]


def values_of(record: RoundRecord) -> dict[str, float]:
    """The numbers of a round, by the names trackers show them under."""
    if not record.counts:
        return {f"{record.phase}/{k}": float(v) for k, v in (("up", record.bytes.up), ("down", record.bytes.down))}
    values = {"loss/train": record.loss, "density": record.density, "failures": len(record.failures)}
    for view, score in record.metrics.items():
        values |= {f"accuracy/{view}": score.metric, f"loss/{view}": score.loss}
    values |= {f"bytes/{k}": v for k, v in asdict(record.bytes).items()}
    values |= {"total bytes/up": record.total.up, "total bytes/down": record.total.down}
    values |= {f"seconds/{k}": v for k, v in record.seconds.items()}
    values |= {k: v for k, v in (("mismatch", record.mismatch), ("flops", record.flops)) if v is not None}
    return {k: float(v) for k, v in values.items()}


def _need(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"track = {package!r} needs the {package} package: pip install {package}") from None


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their full names, such as `method.adapt.growth`."""
    out: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = value
    return out
