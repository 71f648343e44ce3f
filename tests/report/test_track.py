"""Trackers: TensorBoard for real, the others through stand-ins for their packages."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import flashfl as fl
from flashfl.core.errors import ConfigError
from flashfl.data.task import Task
from flashfl.run.results import Results
from flashfl.run.track import Tracking, values_of

SETTINGS: dict[str, Any] = {"per_round": 2, "batch": 4, "workers": 1, "device": "cpu", "eval_every": 1}


class Stopped(Exception):
    """Ends a run in the middle."""


def scalars(folder: Path, tag: str) -> dict[int, float]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_every_round_once_after_a_resume(small_task: Task, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")

    def stop(state: Any, record: Any) -> None:
        if state.round == 3:
            raise Stopped

    method, settings = fl.NST(density=0.3), {**SETTINGS, "track": "tensorboard", "checkpoint_every": 2}
    with pytest.raises(Stopped):
        fl.simulate(method, small_task, 5, folder=tmp_path, watch=stop, **settings)
    fl.simulate(method, small_task, 5, folder=tmp_path, resume=True, **settings)
    rounds = Results.read(tmp_path).rounds
    for tag in ("density", "mismatch", "flops"):
        shown = scalars(tmp_path, tag)
        assert shown == {r.round + 1: pytest.approx(getattr(r, tag), rel=1e-5) for r in rounds}
    accuracy = scalars(tmp_path, "accuracy/after")
    assert accuracy == {r.round + 1: pytest.approx(r.metrics["after"].metric) for r in rounds}


def test_tracking_can_change_on_resume(small_task: Task, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    fl.simulate(fl.PDST(density=0.3), small_task, 2, folder=tmp_path, **SETTINGS)
    again = fl.simulate(
        fl.PDST(density=0.3), small_task, 2, folder=tmp_path, resume=True, track="tensorboard", **SETTINGS
    )
    assert len(again.history) == 2


def test_unknown_tracker_or_missing_package_fails_before_the_run(
    small_task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        fl.simulate(fl.Dense(), small_task, 1, track="tensorbord", **SETTINGS)
    with pytest.raises(ConfigError, match="needs a folder"):
        fl.simulate(fl.Dense(), small_task, 1, track="mlflow", **SETTINGS)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(ConfigError, match="pip install mlflow"):
        fl.simulate(fl.Dense(), small_task, 1, track="mlflow", folder=tmp_path, **SETTINGS)


class Fake(types.ModuleType):
    """Both packages' calls, written down."""

    def __init__(self) -> None:
        super().__init__("fake")
        self.calls: list[tuple[str, Any]] = []
        self.info = types.SimpleNamespace(run_id="r1")
        self.id = "w1"

    def start_run(self, run_id: str | None, run_name: str | None) -> Any:
        self.calls.append(("start", run_id))
        return self

    def init(self, **settings: Any) -> Any:
        self.calls.append(("init", settings["id"]))
        return self

    def log_params(self, values: Any) -> None:
        self.calls.append(("params", values))

    def log_metrics(self, values: Any, step: int) -> None:
        self.calls.append(("log", step))

    def log(self, values: Any, step: int) -> None:
        self.calls.append(("log", step))

    def end_run(self) -> None:
        self.calls.append(("end", None))

    finish = end_run


@pytest.mark.parametrize(("name", "first", "again"), [
    ("mlflow", ("start", None), ("start", "r1")), ("wandb", ("init", None), ("init", "w1")),
])  # fmt: skip
def test_mlflow_and_wandb_continue_after_a_resume(
    name: str, first: tuple[str, Any], again: tuple[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    small_task: Task,
) -> None:  # fmt: skip
    fake = Fake()
    monkeypatch.setitem(sys.modules, name, fake)
    fl.simulate(fl.PDST(density=0.3), small_task, 2, folder=tmp_path, track=name, **SETTINGS)
    assert fake.calls[0] == first
    assert [c for c in fake.calls if c[0] == "log"] == [("log", 1), ("log", 2)]
    assert fake.calls[-1] == ("end", None)
    tracking = Tracking(name, tmp_path)
    tracking.begin({}, step=2)
    tracking.close()
    assert again in fake.calls


def test_failing_tracker_is_dropped_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_task: Task
) -> None:
    class Broken(Fake):
        def log_metrics(self, values: Any, step: int) -> None:
            raise ConnectionError("no service")

    monkeypatch.setitem(sys.modules, "mlflow", Broken())
    with pytest.warns(RuntimeWarning, match="tracking with mlflow stopped: no service"):
        run = fl.simulate(fl.PDST(density=0.3), small_task, 2, folder=tmp_path, track="mlflow", **SETTINGS)
    assert len(run.history) == 2


def test_values_have_plain_names(small_task: Task) -> None:
    run = fl.simulate(fl.NST(density=0.3), small_task, 1, **SETTINGS)
    values = values_of(run.history[0])
    assert {"loss/train", "accuracy/after", "bytes/up", "total bytes/down", "mismatch", "flops"} <= set(values)
