"""The first hour of a new user: likely mistakes get one clear sentence, and nothing is lost or mislabelled."""

from __future__ import annotations

import json
import multiprocessing as mp
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import flashfl as fl
from flashfl.core.errors import ConfigError, DataError
from flashfl.engine.replica import warn_of_metric
from tests.conftest import blobs, make_task

QUICK: dict[str, Any] = {"per_round": 2, "batch": 4, "workers": 1}


# -- settings that would have had no effect -------------------------------------------------------------------------


class Plain(fl.Method):
    """Settings in `__init__` instead of dataclass fields."""

    def __init__(self, share: float) -> None:
        object.__setattr__(self, "share", share)

    def init(self, plan: fl.Plan) -> fl.State:
        return fl.State(plan, fl.Weights.dense(plan.layout, plan.initial()))

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        return s.next(fl.Weights(s.mask, fl.fedavg(sums)))


def test_method_that_is_no_dataclass_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Plain is not a dataclass, so its settings share would be lost"):
        fl.simulate(Plain(0.5), make_task("norm"), 1, **QUICK)


@dataclass(frozen=True)
class Empty(fl.Method):
    name: ClassVar[str] = "empty"


def test_method_without_init_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Empty has no init: every method needs init\(plan\) and aggregate"):
        fl.simulate(Empty(), make_task("norm"), 1, **QUICK)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((make_task("norm"), fl.Dense()), r"method = Task\(.*: expected a method with its settings"),
        ((fl.Dense(), 3, make_task("norm")), "the task is of type int: expected an fl.Task"),
        ((fl.Dense(), nn.Linear(2, 2)), "the task is of type Linear: expected an fl.Task"),
    ],
    ids=["task first", "rounds second", "model"],
)
def test_swapped_arguments_of_simulate_are_refused(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        fl.simulate(*given, **QUICK)


def test_density_as_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"density = '0.1': must be a finite number, above 0 and at most 1"):
        fl.SPDST(density="0.1")  # type: ignore[arg-type]


def test_shares_must_add_up_to_one() -> None:
    with pytest.raises(ConfigError, match=r"shares = \(0.5, 0.6\): .* add up to 1"):
        fl.HeteroSPDST(densities=(0.1, 0.2), shares=(0.5, 0.6))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def data(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [blobs(12, (6,), i) for i in range(count)]


def test_glob_that_matches_nothing_is_refused_even_among_others() -> None:
    with pytest.raises(ConfigError, match=r"prunable = 'second\.bais' matches no parameter"):
        _ = fl.Task(Tied, data(), data(1)[0], prunable=["first.weight", "second.bais"]).layout


def test_alias_of_a_tied_weight_names_the_weight() -> None:
    with pytest.raises(ConfigError, match=r"'second\.weight' is tied to 'first\.weight': use that name"):
        _ = fl.Task(Tied, data(), data(1)[0], prunable="second.weight").layout


def test_prunable_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"prunable = None"):
        _ = fl.Task(Tied, data(), data(1)[0], prunable=None).layout  # type: ignore[arg-type]


# -- wrong numbers ---------------------------------------------------------------------------------------------------


def rmse(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output, target).sqrt()


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))


def regression(**more: Any) -> fl.Task:
    draw = torch.Generator().manual_seed(0)
    made = [(torch.rand(12, 6, generator=draw), torch.rand(12, 1, generator=draw)) for _ in range(5)]
    settings = {"metric": rmse, "metric_name": "rmse", "higher_is_better": False, **more}
    return fl.Task(wide, made[:4], made[4], loss=nn.functional.mse_loss, **settings)


def test_metric_that_is_not_accuracy_keeps_its_name_and_direction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = regression()
    run = fl.simulate(fl.Dense(), task, 6, eval_every=1, progress=True, folder=tmp_path, **QUICK)
    scores = [record.score.metric for record in run.history if record.score]
    assert run.metric == scores[-1]
    assert run.best == min(scores)
    with pytest.raises(AttributeError, match=r"this task's metric is rmse: use run\.metric"):
        _ = run.accuracy
    assert "rmse" in repr(run)
    assert "accuracy" not in repr(run)
    shown = capsys.readouterr().err
    assert "rmse" in shown
    assert "accuracy" not in shown
    header, *_, end = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert header["task"]["metric"] == {"name": "rmse", "higher_is_better": False}
    assert (end["metric"], end["best"]) == (run.metric, run.best)
    assert "accuracy" not in end


@pytest.mark.parametrize("held_back", [False, True], ids=["test samples", "held back"])
def test_float_targets_without_a_metric_are_evaluated_by_the_loss(held_back: bool) -> None:
    """They were reported as "accuracy 0.00 %"."""
    made = [(torch.rand(12, 6), torch.rand(12, 1)) for _ in range(5)]
    task = fl.Task(wide, made[:4], None if held_back else made[4], loss=nn.functional.mse_loss)
    run = fl.simulate(fl.Dense(), task, 3, eval_every=1, **QUICK)
    losses = [record.score.loss for record in run.history if record.score]
    assert (task.metric_name, task.higher_is_better) == ("loss", False)
    assert run.metric == losses[-1]
    assert run.best == min(losses)
    assert "accuracy" not in repr(run)


@pytest.mark.parametrize(
    "given",
    [{"metric": rmse}, {"metric": nn.MSELoss()}, {"metric": lambda o, t: o.mean(), "metric_name": "error rate"}],
    ids=["function", "object", "name"],
)
def test_metric_that_sounds_like_an_error_needs_its_direction(given: dict[str, Any]) -> None:
    """The best round was the worst one."""
    made = [(torch.rand(12, 6), torch.rand(12, 1)) for _ in range(3)]
    with pytest.warns(RuntimeWarning, match=r"sounds like an error.*Pass higher_is_better=False") as caught:
        assert fl.Task(wide, made, loss=nn.functional.mse_loss, **given).higher_is_better
    assert [warning.filename for warning in caught] == [__file__]
    for better in (True, False):
        fl.Task(wide, made, loss=nn.functional.mse_loss, **given, higher_is_better=better)


def test_loss_as_the_metric_is_better_if_lower() -> None:
    mse = nn.functional.mse_loss
    made = [(torch.rand(12, 6), torch.rand(12, 1)) for _ in range(3)]
    assert not fl.Task(wide, made, loss=mse, metric=mse).higher_is_better
    assert fl.Task(wide, made, loss=mse, metric=lambda output, target: -mse(output, target)).higher_is_better
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert fl.Task(wide, data(), loss=smooth).metric is fl.accuracy


@pytest.mark.parametrize("shape", [(12,), (12, 1)])
def test_float_targets_with_the_loss_for_classes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"targets are single floats.*loss=torch\.nn\.functional\.mse_loss"):
        fl.Task(wide, [(torch.rand(12, 6), torch.rand(shape)) for _ in range(4)])


def test_nan_in_the_test_set_is_reported() -> None:
    inputs, targets = blobs(12, (6,), 9)
    inputs[3, 0] = float("nan")
    with pytest.warns(RuntimeWarning, match="test set has NaN"):
        fl.Task(Tied, data(), (inputs, targets))


# -- environments ----------------------------------------------------------------------------------------------------


def _simulate(seed: int) -> str:
    return fl.simulate(fl.Dense(), make_task("norm"), 1, seed=seed, per_round=2, batch=4, workers=2).checksum


def test_simulate_works_inside_a_multiprocessing_pool() -> None:
    with mp.get_context("spawn").Pool(1) as pool:
        [there] = pool.map(_simulate, [3])
    assert there == _simulate(3)


def test_warnings_point_at_the_line_of_the_user() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fl.HeteroSPDST(densities=(0.1, 0.25), shares=(0.5, 0.5), warmup_clients=0, nm=4).init(plan())
    assert [Path(w.filename).name for w in found if "pattern" in str(w.message)] == [Path(__file__).name]


def test_warning_from_a_cached_property_points_at_the_user_too() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        _ = fl.Task(Tied().half(), data(), data(1)[0]).layout
    assert [Path(w.filename).name for w in found if "float32" in str(w.message)] == [Path(__file__).name]


def plan() -> fl.Plan:
    from flashfl.run.config import TrainConfig, plan_of

    task = make_task("norm")
    return plan_of(TrainConfig(rounds=2, per_round=2), task, len(task.clients))


# -- working with it -------------------------------------------------------------------------------------------------


def test_progress_is_off_where_nobody_watches_and_on_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    fl.simulate(fl.Dense(), make_task("norm"), 1, **QUICK)
    assert capsys.readouterr().err == ""
    fl.simulate(fl.Dense(), make_task("norm"), 1, progress=True, **QUICK)
    assert "round 1/1" in capsys.readouterr().err


def test_reprs_are_short_and_runs_have_one_for_notebooks() -> None:
    task = make_task("norm")
    run = fl.simulate(fl.PDST(density=0.3), task, 1, **QUICK)
    assert repr(run).startswith("Run(method pdst, ")
    assert "<table>" in run._repr_html_()
    assert "8 clients" in repr(task)
    assert repr(run.state).startswith("State(training, round 1 of 1, density 0.")


def test_run_from_python_leaves_its_model_in_the_folder(tmp_path: Path) -> None:
    task = make_task("norm")
    run = fl.simulate(fl.PDST(density=0.3), task, 1, folder=tmp_path, **QUICK)
    module = task.build()
    module.load_state_dict(load_file(tmp_path / "model.safetensors"))
    expected = run.model()
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected.parameters(), strict=True))


def test_option_of_another_method_names_the_methods_that_have_it() -> None:
    from flashfl.run.config import make_config

    with pytest.raises(ConfigError, match=r"unknown option 'r_int': pdst has no such setting; jmwst"):
        make_config({}, {"method": "pdst", "r_int": "5"})


def test_optimizer_says_what_clients_and_the_server_can_use() -> None:
    from flashfl.run.config import make_config

    said = r"optimizer = 'adam': .* Clients train with SGD: set `lr`, `momentum` .* --server\.adam 0\.99"
    with pytest.raises(ConfigError, match=said):
        fl.simulate(fl.PDST(density=0.3), make_task("norm"), 1, optimizer="adam")
    for data, overrides in (({"train": {"optimizer": "adam"}}, {}), ({}, {"optimizer": "adam"})):
        with pytest.raises(ConfigError, match=said):
            make_config(data, overrides)
    server = {"adam": 0.99, "momentum": 0.9, "lr": 0.01}  # what the sentence advises
    assert fl.simulate(fl.PDST(density=0.3), make_task("norm"), 1, per_round=2, workers=1, server=server).history
    words = {"server.adam": "0.99", "server.momentum": "0.9", "server.lr": "0.01"}
    assert make_config({}, words).train.server.adam == 0.99


@pytest.mark.parametrize("given", ["mse", nn.MSELoss, 3])
@pytest.mark.parametrize("role", ["loss", "metric"])
def test_loss_or_metric_that_is_no_function_is_refused(role: str, given: Any) -> None:
    data = [(torch.rand(8, 3), torch.rand(8, 1))] * 2
    with pytest.raises(ConfigError, match=rf"{role} = .*: expected a function .* such as torch.*MSELoss\(\)"):
        fl.Task(lambda: nn.Linear(3, 1), data, **{role: given})
    assert fl.Task(lambda: nn.Linear(3, 1), data, loss=nn.MSELoss()).metric_name == "loss"


def test_number_in_place_of_the_data_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.data_root = 10: expected str, got int"):
        fl.tasks.digits(10)


def test_root_of_a_mean_is_warned_about_whatever_the_samples_are(recwarn: pytest.WarningsRecorder) -> None:
    def rmse(output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().mean().sqrt()

    for seed in range(4):
        x = torch.randn(50, 8, generator=torch.Generator().manual_seed(seed))
        clients = [(x, x.sum(1)) for _ in range(2)]
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 1), nn.Flatten(0))
        with pytest.warns(RuntimeWarning, match="rmse is not a mean over samples"):
            warn_of_metric(fl.Task(model, clients, loss=nn.functional.mse_loss, metric=rmse, higher_is_better=False))
    recwarn.clear()
    broken = [(x * torch.nan, x.sum(1)) for _ in range(2)]
    warn_of_metric(fl.Task(model, broken, loss=nn.functional.mse_loss))
    assert not [w for w in recwarn if "mean over samples" in str(w.message)]
