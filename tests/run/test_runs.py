"""Whole runs through `simulate`: bad input, bad clients, limits, and the model that comes out."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import flashfl as fl
from flashfl.aggregate import average
from flashfl.core.engine import FixedPopulation
from flashfl.core.errors import ConfigError, DataError, RunStopped
from flashfl.core.exchange import Evaluation, Outcome, Sums, Traffic
from flashfl.core.loop import _reasons, run_rounds
from flashfl.data.task import Task
from flashfl.engine.train import NOT_FINITE
from flashfl.run.config import TrainConfig, make_config, plan_of
from flashfl.run.export import export_run, masks_beside
from flashfl.run.results import Results
from tests.conftest import DropoutNet, blobs, make_task

SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "workers": 1}


def go(method: fl.Method, task: Task | None = None, rounds: int = 3, **more: Any) -> fl.Run:
    return fl.simulate(method, task or make_task("dropout"), rounds, **{**SETTINGS, **more})


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("density", [0.0, -0.5, 1.5, float("nan")])
@pytest.mark.parametrize("name", [n for n, c in fl.METHODS.items() if "density" in {f.name for f in fields(c)}])
def test_a_density_that_is_none(name: str, density: float) -> None:
    with pytest.raises(ConfigError, match="densit"):
        fl.METHODS[name](**({"densities": (density,), "shares": (1.0,)} if "hetero" in name else {"density": density}))


def test_a_density_that_keeps_nothing() -> None:
    with pytest.raises(ConfigError, match="density = 1e-05 keeps none of the model's 352 prunable weights"):
        go(fl.PDST(density=1e-5))


def test_more_clients_a_round_than_clients() -> None:
    with pytest.raises(ConfigError, match="per_round = 9: must be at least 1 and at most 8"):
        go(fl.Dense(), per_round=9)


def test_an_empty_client() -> None:
    with pytest.raises(DataError, match=r"clients\[1\] has no samples"):
        Task(DropoutNet, [blobs(3, (6,), 1), blobs(0, (6,), 1)], blobs(3, (6,), 1))
    with pytest.raises(DataError, match="no clients"):
        Task(DropoutNet, [], blobs(3, (6,), 1))


def test_a_method_must_be_a_dataclass_of_its_own() -> None:
    """Without, it would run with its parent's settings."""

    class Mine(fl.PDST):
        density: float = 0.02

    with pytest.raises(ConfigError, match=r"Mine is not a dataclass, .*put @dataclass\(frozen=True\) above the class"):
        go(Mine())


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown setting in train 'batch_size'"):
        go(fl.Dense(), batch_size=4)
    with pytest.raises(ConfigError, match="device = 'gpu'"):
        go(fl.Dense(), device="gpu")
    with pytest.raises(ConfigError, match="rounds = 0"):
        go(fl.Dense(), rounds=0)


def test_defaults_fit_a_task_of_few_clients() -> None:
    run = fl.simulate(fl.Dense(), make_task("dropout", clients=2), 1, workers=1)
    assert run.history[0].cohort == (0, 1)


@dataclass(frozen=True)
class DenseServer(fl.NST):
    """Clients with masks of their own, and a server that keeps a dense model."""

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        return s.next(fl.Weights(fl.Mask.full(s.layout), average("fedavg", sums)))


def test_sparse_answers_to_a_dense_order_have_indices_to_send() -> None:
    task = make_task("norm")
    first, later = (line.paper_bytes for line in go(DenseServer(density=0.5), task, rounds=2).history)
    assert later.down == 4 * 4 * task.layout.trained_size, "of four clients"
    assert later.up == first.up == first.down


# -- bad clients --------------------------------------------------------------------------------------------------


def with_nans(clients: set[int]) -> Task:
    data = [blobs(9 + i, (6,), i) for i in range(6)]
    for i in clients:
        data[i][0][3] = float("nan")
    return Task(DropoutNet, data, blobs(9, (6,), 9))


@pytest.mark.parametrize("method", [fl.Dense(), fl.NST(density=0.3), fl.SPDST(density=0.3, warmup_clients=6)])
def test_a_client_whose_loss_is_nan_is_left_out_and_the_round_goes_on(method: fl.Method, tmp_path: Path) -> None:
    run = go(method, with_nans({2}), per_round=6, folder=tmp_path)
    for line in Results.read(tmp_path).rounds:
        assert line.failures == {
            2: "its weights or its loss are not finite after training: check its data, or lower lr"
        }
        assert np.isfinite(line.loss)
    assert torch.isfinite(run.weights.vector).all()


def test_a_client_that_is_left_out_is_told_of_once_where_nobody_watches() -> None:
    def told(**more: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            go(fl.Dense(), with_nans({2, 4}), rounds=3, per_round=6, **more)
        return [str(one.message) for one in caught]

    why = NOT_FINITE
    assert told() == [f"client {c} was dropped in round 1: {why}" for c in (2, 4)]
    assert not told(watch=lambda state, line: None), "whoever watches says it"
    dropped = told(dropout=0.3)
    assert dropped
    assert not any("simulated" in text for text in dropped)


@pytest.mark.filterwarnings("ignore:the test set has NaN:RuntimeWarning")
def test_a_run_judged_by_nan_goes_on_and_is_told_of(tmp_path: Path) -> None:
    """Its file is JSON all the same, and whoever reads it finds NaN."""
    from flashfl.report.load import load

    task = Task(
        DropoutNet, [blobs(9, (6,), i) for i in range(6)], (torch.full((9, 6), float("nan")), torch.ones(9).long())
    )
    go(fl.Dense(), task, folder=tmp_path, eval_every=1)
    assert "NaN" not in (tmp_path / "results.jsonl").read_text()
    score = Results.read(tmp_path).rounds[0].score
    assert score is not None
    assert np.isnan(score.loss)
    run = go(fl.Dense(), task, folder=tmp_path, eval_every=1, resume=True)
    assert run.history[-1].score is not None
    assert run.accuracy == run.history[-1].score.metric
    assert not load([tmp_path]).problems


def test_infinite_metric_is_written_as_json(tmp_path: Path) -> None:
    data = [blobs(9, (6,), i) for i in range(6)]
    task = Task(DropoutNet, data, blobs(9, (6,), 7), metric=lambda output, target: torch.tensor(math.inf))
    go(fl.Dense(), task, folder=tmp_path, eval_every=1)
    assert "Infinity" not in (tmp_path / "results.jsonl").read_text()


def test_if_all_are_nan_the_run_stops(tmp_path: Path) -> None:
    with pytest.raises(
        RunStopped,
        match=r"round 1 failed 2 times: 0 of 4 clients sent a usable reply, fewer than .* = 1 .client",
    ):
        go(fl.Dense(), with_nans(set(range(6))), folder=tmp_path, retries=1)
    assert list((tmp_path / "checkpoints").glob("*.json"))


def test_a_stopped_run_names_those_who_failed_first() -> None:
    """Later attempts may fail because of the first one, and only three reasons are shown."""
    first, later = {7: "no memory", 8: "no memory"}, dict.fromkeys((1, 2, 7), "it waits for the others")
    trips: Any = [((), SimpleNamespace(failures=failures)) for failures in (first, later)]
    assert _reasons(trips) == "client 7: no memory; client 8: no memory; client 1: it waits for the others"


def test_a_share_of_clients_can_be_made_to_fail() -> None:
    task = make_task("dropout", clients=24, samples=3)
    run = go(fl.Dense(), task, rounds=6, per_round=24, dropout=0.25)
    lost = [len(line.failures) for line in run.history]
    assert 0.15 < sum(lost) / (6 * 24) < 0.35
    assert len(set(lost)) > 1
    assert all(why == "dropped out (simulated)" for line in run.history for why in line.failures.values())
    again = go(fl.Dense(), task, rounds=6, per_round=24, dropout=0.25, workers=2)
    assert again.checksum == run.checksum, "the same ones every time"


def test_too_few_replies_repeat_the_round_and_its_bytes_count() -> None:
    run = go(fl.Dense(), rounds=4, dropout=0.5, min_replies=3, retries=20)
    assert max(line.attempt for line in run.history) > 0
    whole = go(fl.Dense(), rounds=4)
    repeated = next(line for line in run.history if line.attempt)
    assert repeated.bytes.down > 1.5 * whole.history[1].bytes.down


def test_a_round_without_a_cohort_is_no_round() -> None:
    """Where clients come and go there may be nobody."""

    class Nobody:
        device = torch.device("cpu")
        memory: Any = SimpleNamespace(rollback=lambda: None)

        def train(self, s: Any, orders: Any) -> Outcome:
            return Outcome(Sums(s.layout), Traffic(), {1: "a consequence" if s.attempt else "the cause"})

        def evaluate(self, weights: Any, statistics: bool = True) -> Evaluation:
            raise AssertionError

        def close(self) -> None:
            pass

    task = make_task("dropout")
    state = fl.Dense().init(plan_of(TrainConfig(per_round=2), task, len(task.clients)))
    with pytest.raises(RunStopped, match=r"failed 3 times.*client 1: the cause"):
        list(run_rounds(fl.Dense(), state, FixedPopulation(()), Nobody()))


# -- limits and forms ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("static", [False, True])
def test_a_limit_of_bytes_ends_a_run_with_a_last_judgement(static: bool, tmp_path: Path) -> None:
    task = make_task("norm")
    whole = go(fl.PDST(density=0.3), task, rounds=6, eval_every=100, static_bn=static)
    one = whole.history[0].bytes.up + whole.history[0].bytes.down
    limit = int(2.5 * one)
    run = go(fl.PDST(density=0.3), task, rounds=6, eval_every=100, static_bn=static, max_bytes=limit, folder=tmp_path)
    assert len(run.history) == 3
    assert [bool(line.metrics) for line in run.history] == [False, False, True]
    assert run.bytes_up + run.bytes_down >= limit
    assert run.stopped == f"reached the limit of {limit} bytes"
    assert Results.read(tmp_path).end["stopped"] == run.stopped
    again = go(fl.PDST(density=0.3), task, rounds=6, eval_every=100, static_bn=static, max_bytes=limit,
               folder=tmp_path, resume=True)  # fmt: skip
    assert len(again.history) == 3, "what is spent is spent"
    assert again.checksum == run.checksum
    if not static:
        more = go(fl.PDST(density=0.3), task, rounds=6, eval_every=100, folder=tmp_path, resume=True)
        assert more.checksum == whole.checksum, "and with a higher limit it goes on"


@pytest.mark.parametrize("method", [fl.Dense(), fl.NST(density=0.3), fl.PDST(density=0.3)], ids=lambda m: m.name)
def test_values_in_fewer_bits_are_fewer_bytes(method: fl.Method) -> None:
    runs = {form: go(method, make_task("norm"), values=form) for form in ("fp32", "fp16", "bf16", "int8")}
    spent = {form: run.traffic.values for form, run in runs.items()}
    assert spent["int8"] < spent["fp16"] == spent["bf16"] < spent["fp32"]
    assert len({run.checksum for run in runs.values()}) == 4
    for run in runs.values():
        assert torch.isfinite(run.weights.vector).all()
        assert not any(line.failures for line in run.history)
    two = go(method, make_task("norm"), values="int8", workers=2)
    assert two.checksum == runs["int8"].checksum


# -- what comes out -----------------------------------------------------------------------------------------------


def test_the_model_is_the_users_own_with_the_final_weights() -> None:
    task = make_task("norm")
    run = go(fl.SPDST(density=0.3, warmup_clients=2, warmup_epochs=2), task)
    model = run.model()
    assert type(model).__name__ == "NormNet"
    assert not model.training
    assert torch.equal(task.layout.read(model), run.weights.vector)
    views = task.layout.views(run.weights.vector)
    assert all(torch.equal(p, views[name]) for name, p in model.named_parameters())
    active = sum(int((model.state_dict()[x.name] != 0).sum()) for x in task.layout.prunable)
    assert active <= run.weights.mask.active
    assert task.test is not None
    inputs, target = task.test.fetch(torch.arange(30))
    with torch.no_grad():
        assert float((model(*inputs).argmax(-1) == target).float().mean()) == pytest.approx(run.accuracy)


def test_saved_results_and_model(tmp_path: Path) -> None:
    run = go(fl.PDST(density=0.3))
    path = run.save(tmp_path / "kept")
    assert path == tmp_path / "kept" / "model.safetensors"
    assert [r.round for r in Results.read(tmp_path / "kept").rounds] == [0, 1, 2]
    check_export(path, run)


def check_export(path: Path, run: fl.Run) -> None:
    layout = run.weights.layout
    masks = load_file(masks_beside(path))
    assert set(masks) == {layer.name for layer in layout.prunable}
    with safe_open(path, "pt") as file:
        names = set(file.keys())
        about = json.loads(file.metadata()["flashfl"])
        assert about["density"] == pytest.approx(run.weights.mask.density)
        assert about["method"] == run.method.name
        for layer in layout.travelling:
            values = file.get_tensor(layer.name)
            assert torch.equal(values, layout.views(run.weights.vector)[layer.name])
            if layer.kind == "prunable":
                mask = masks[layer.name]
                assert mask.dtype == torch.bool
                bits = run.weights.mask.bits[layer.start : layer.stop].view(layer.shape)
                assert torch.equal(mask, bits)
                assert not values[~mask].any()
    assert names == set(run.task.build().state_dict())


@pytest.mark.parametrize("name", ["spdst", "nst", "hetero-jmwst"])
def test_a_run_in_a_folder_can_be_exported(name: str, tmp_path: Path) -> None:
    from flashfl.run.compare import run_config

    config = make_config({}, {"method": name, "rounds": "2", "limit": "80", "clients": "4", "per_round": "3",
                              "max_steps": "1", "workers": "1", "device": "cpu",
                              **({} if name == "nst" else {"warmup_clients": "2", "warmup_epochs": "1"})})  # fmt: skip
    run = run_config(config, tmp_path, quiet=True)
    check_export(export_run(tmp_path), run)
    assert export_run(tmp_path, tmp_path / "there" / "m.safetensors").exists()
    with pytest.raises(ConfigError, match="unknown view 'density 7'"):
        export_run(tmp_path, view="density 7")
    if "hetero" in name:
        part = export_run(tmp_path, view="density 0.1")
        assert part.name == "model-density-0.1.safetensors"
        found, module = load_file(part), run.model("density 0.1").state_dict()
        assert all(torch.equal(value, module[n]) for n, value in found.items())
        assert any(not torch.equal(value, run.model().state_dict()[n]) for n, value in module.items())


def test_a_run_made_in_python_says_why_it_cannot_be_exported(tmp_path: Path) -> None:
    go(fl.Dense(), folder=tmp_path)
    with pytest.raises(ConfigError, match=r"made in Python, .* Its model is in .*model\.safetensors already"):
        export_run(tmp_path)
    with pytest.raises(ConfigError, match=r"made in Python, .* call run\.export\(path, 'sparse', ''\)"):
        export_run(tmp_path, format="sparse")


def test_a_task_changed_behind_a_runs_back_is_another_run(tmp_path: Path) -> None:
    """The number of samples of each client is the same, the samples are not."""
    from flashfl.core.errors import CheckpointError
    from flashfl.run.compare import run_config

    options = {"rounds": "1", "limit": "80", "clients": "4", "per_round": "2", "max_steps": "1", "warmup_clients": "0",
               "workers": "1", "device": "cpu"}  # fmt: skip
    run_config(make_config({}, {**options, "alpha": "1"}), tmp_path, quiet=True)
    with pytest.raises(CheckpointError, match=r"belongs to another run \(alpha: 1.0 there, 0.1 here"):
        run_config(make_config({}, {**options, "alpha": "0.1"}), tmp_path, quiet=True, resume=True)


# -- any model, any data, any loss --------------------------------------------------------------------------------


class Two(nn.Module):
    """Two inputs, a frozen table, and an output that is no class."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.out = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 1)
        self.table = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        out: Tensor = self.out(torch.relu(self.left(a) + self.right(b))).squeeze(-1) * self.table[0]
        return out


@pytest.mark.parametrize("wrap", [lambda *t: t, lambda *t: [x.numpy() for x in t], TensorDataset],
                         ids=["tensors", "arrays", "dataset"])  # fmt: skip
def test_two_inputs_a_regression_and_a_rule(wrap: Callable[..., Any]) -> None:
    torch.manual_seed(1)
    data = [(torch.rand(12, 3), torch.rand(12, 2), torch.rand(12)) for _ in range(5)]
    task = Task(
        Two, [wrap(*d) for d in data[:4]], wrap(*data[4]), loss=nn.functional.mse_loss,
        metric=lambda o, t: -(o - t).abs().mean(), prunable=lambda name, p: name in ("left.weight", "right.weight"),
    )  # fmt: skip
    run = fl.simulate(fl.PDST(density=0.5), task, 3, per_round=2, workers=1, lr=0.01)
    assert run.weights.mask.active == 20
    assert run.metric < 0, "a metric need not be an accuracy"
    assert torch.equal(run.model().table, torch.ones(4))


def test_a_run_tells_its_story_as_it_goes(tmp_path: Path) -> None:
    seen: list[tuple[str, int, bool]] = []
    run = go(fl.SPDST(density=0.3, warmup_clients=2), rounds=5, eval_every=2, folder=tmp_path,
             watch=lambda s, line: seen.append((line.phase, line.round, bool(line.metrics))))  # fmt: skip
    rounds = [(0, False), (1, True), (2, False), (3, True), (4, True)]
    assert seen == [("sensitivity", 0, False), *(("training", *each) for each in rounds)]
    found = Results.read(tmp_path)
    assert found.end is not None
    assert found.end["checksum"] == run.checksum
    assert found.end["metric"] == run.accuracy <= run.best == found.end["best"]
    assert found.end["bytes"]["up"] == run.bytes_up == sum(line.bytes.up for line in found.rounds)
    for line in found.rounds:
        parts = line.bytes
        assert parts.up + parts.down == parts.values + parts.mask + parts.overhead
        assert set(line.seconds) >= {"train", "aggregate", "evaluate"}
    assert found.header["identity"]["settings"]["seed"] == 0
    assert found.header["task"]["prunable"] == 352


def test_seeds_differ_and_repeat() -> None:
    runs = [go(fl.Dense(), seed=seed) for seed in (0, 1, 0)]
    assert runs[0].checksum == runs[2].checksum != runs[1].checksum
