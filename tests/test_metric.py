"""A metric that is not accuracy keeps its name and direction everywhere a user meets it."""

from __future__ import annotations

import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashfl as fl
from flashfl.cli import main
from flashfl.run import compare as comparing
from flashfl.run.table import Entry, Table

WORDS = ["--rounds", "3", "--per-round", "2", "--eval-every", "1", "--batch", "4", "--workers", "1", "--device", "cpu"]


def root(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target).sqrt()


def houses(test: int = 20, **more: Any) -> fl.Task:
    """A regression task."""
    draw = torch.Generator().manual_seed(0)
    made = [(torch.rand(n, 6, generator=draw), 9 * torch.rand(n, 1, generator=draw)) for n in (12, 12, 12, 12, test)]
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    named = {"metric": nn.functional.mse_loss, "metric_name": "mse", "higher_is_better": False, "name": "houses"}
    return fl.Task(net, made[:4], made[4], loss=nn.functional.mse_loss, **{**named, **more})


@pytest.fixture
def regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line trains on houses."""
    monkeypatch.setattr(comparing, "build_task", lambda config, key: houses())


@pytest.mark.usefixtures("regression")
def test_run_prints_name_and_best_of_the_metric(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--method", "pdst", *WORDS, "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    lines = (tmp_path / "run" / "results.jsonl").read_text().splitlines()
    scores = [json.loads(line)["metrics"]["after"]["metric"] for line in lines[1:-1]]
    said = re.match(r"pdst: mse ([\d.]+) \(best ([\d.]+)\), density", out)
    assert said
    assert [float(v) for v in said.groups()] == [pytest.approx(v, rel=1e-3) for v in (scores[-1], min(scores))]
    assert "round 3/3  mse" in err
    assert "accuracy" not in out + err
    assert "%" not in out + err


@pytest.mark.usefixtures("regression")
def test_compare_and_report_name_metric_and_direction(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--methods", "dense,hetero-spdst", "--seeds", "2", "--densities", "0.1,0.3", "--shares", "0.5,0.5"]
    assert main(["compare", *words, "--warmup-clients", "2", *WORDS, "--quiet", "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.replace(str(tmp_path), "").splitlines())) <= 80
    assert "mse" in out
    assert "lower" in out
    assert "accuracy" not in out
    assert main(["report", str(tmp_path), "--format", "md"]) == 0
    table = capsys.readouterr().out
    assert "| mse (lower is better) | best |" in table
    assert "accuracy" not in table
    assert main(["report", str(tmp_path), "--format", "csv"]) == 0
    assert ",mse," in capsys.readouterr().out.splitlines()[0]


def test_trackers_get_the_name_of_the_metric(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    seen: list[str] = []
    fake = types.ModuleType("mlflow")
    run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))
    fake.__dict__.update(
        start_run=lambda **given: run, log_params=lambda values: None, end_run=lambda: None,
        log_metrics=lambda values, step: seen.extend(values),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    fl.simulate(fl.Dense(), houses(), 1, per_round=2, batch=4, workers=1, folder=tmp_path, track="mlflow")
    assert "mse/after" in seen
    assert not any("accuracy" in name for name in seen)


def test_metric_that_is_no_mean_is_reported() -> None:
    settings: dict[str, Any] = {"per_round": 2, "batch": 4, "workers": 1}
    with pytest.warns(RuntimeWarning, match="rmse is not a mean over samples"):
        fl.simulate(fl.Dense(), houses(300, metric=root, metric_name="rmse"), 1, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fl.simulate(fl.Dense(), houses(300), 1, **settings)
        run = fl.simulate(fl.Dense(), houses(20, metric=root, metric_name="rmse"), 1, **settings)  # one batch: exact
    test = houses(20).test
    assert test is not None
    inputs, target = test.fetch(torch.arange(20))
    with torch.no_grad():
        assert run.metric == pytest.approx(float(root(run.model()(*inputs), target)), rel=1e-5)


def test_wide_table_is_broken_to_80_columns() -> None:
    head = ("method", "rmse (lower is better)", "best", "density", "up / round", "down / round", "time (s)")
    row = (
        "hetero-jmwst-as-we-like-it",
        "0.0001234 ± 1.23e-05",
        "0.0001234",
        "1.0000",
        "155.6 kB",
        "238.3 kB",
        "12345.6",
    )
    table = Table(head, [[Entry(text) for text in row]] * 2, title="a title that is long " * 6)
    lines = table.terminal().splitlines()
    assert max(map(len, lines)) <= 80
    for word in (*row[0].split("-"), *" ".join(row[1:]).split(), "better)"):
        assert any(word in line for line in lines), word
