"""Runs on native kernels: the same masks and curves as dense ones, chosen once, resumed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.core.exchange import Local, Order
from flashfl.core.mask import Mask, Weights
from flashfl.core.rng import permutation
from flashfl.engine import sparse
from flashfl.engine.train import Trainer
from flashfl.native import library
from flashfl.run.results import RESULTS
from flashfl.sparsity import PruneRegrow

pytestmark = pytest.mark.skipif(library.kernels() is None, reason=library.status())
BRIEF: dict[str, Any] = {"density": 0.2, "warmup_clients": 2, "warmup_epochs": 2}  # a brief first phase
QUICK: dict[str, Any] = {"rounds": 4, "per_round": 3, "progress": False, "lr": 0.05}


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose native kernels for every model, however small, whatever the clock says."""
    monkeypatch.setattr(sparse, "LEAST_BYTES", 0)
    monkeypatch.setattr(sparse, "GAIN", 0.0001)


def task() -> fl.Task:
    return fl.tasks.digits(clients=6)


def curve(run: fl.Run) -> list[float]:
    return [record.loss for record in run.history]


@pytest.mark.parametrize("rule", [None, PruneRegrow()], ids=["frozen", "random growth"])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.01, "momentum": 0.9}, {"prox": 0.1, "batch": 7}])
def test_a_client_on_native_kernels_has_the_same_mask_and_weights(rule: PruneRegrow | None, settings: Any) -> None:
    digits = task()
    mask = Mask(digits.layout, permutation(4, digits.layout.prunable_size) < digits.layout.prunable_size // 5)
    local = Local(lr=0.05, max_steps=4, adapt=rule, **settings)
    order = Order(Weights.masked(mask, digits.draw(5)), local, 11, (2, 0, 0))
    found = []
    for native in (False, True):
        trainer = Trainer(digits)
        trainer.sparse = native
        found.append(trainer.train(order, 0, digits.train[0]))
    assert torch.equal(found[0].mask.bits, found[1].mask.bits)
    difference = (found[0].values - found[1].values).norm() / found[0].values.norm()
    can_be_sparse = rule is None or not settings.keys() & {"momentum", "prox"}
    assert float(difference) < 5e-3  # a rounding can turn a ReLU around, and the next steps enlarge the difference
    assert (float(difference) == 0) != can_be_sparse


@pytest.mark.usefixtures("always")
def test_a_sparse_run_with_frozen_masks_agrees_with_a_dense_one() -> None:
    ours = fl.simulate(fl.PDST(density=0.2), task(), workers=1, **QUICK)
    dense = fl.simulate(fl.PDST(density=0.2), task(), workers=1, sparse_compute=False, **QUICK)
    assert ours.results.header["compute"]["sparse"] is True
    assert "compute" not in dense.results.header
    assert curve(ours) == pytest.approx(curve(dense), rel=1e-3)
    assert ours.checksum != dense.checksum  # other kernels were at work
    assert torch.equal(ours.weights.mask.bits, dense.weights.mask.bits)
    torch.testing.assert_close(ours.weights.vector, dense.weights.vector, rtol=1e-2, atol=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("method", [fl.SPDST(density=0.2), fl.JMWST(density=0.2)], ids=["spdst", "jmwst"])
def test_a_sparse_run_with_moving_masks_has_the_curve_of_a_dense_one(method: fl.Method) -> None:
    """Over many steps a change in the last bit of the weights changes masks too, dense or sparse."""
    ours = fl.simulate(method, task(), workers=1, **QUICK)
    dense = fl.simulate(method, task(), workers=1, sparse_compute=False, **QUICK)
    assert curve(ours) == pytest.approx(curve(dense), rel=2e-2)
    assert ours.weights.mask.active == dense.weights.mask.active


@pytest.mark.usefixtures("always")
def test_a_sparse_run_does_not_depend_on_the_number_of_workers() -> None:
    runs = [fl.simulate(fl.JMWST(**BRIEF), task(), workers=workers, **QUICK) for workers in (1, 2)]
    assert runs[0].checksum == runs[1].checksum


@pytest.mark.usefixtures("always")
def test_resume_keeps_the_choice_and_is_bit_identical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fl.simulate(fl.SPDST(**BRIEF), task(), workers=1, **QUICK)

    def stop(state: fl.State, record: object) -> None:
        if state.counted == 2:
            raise KeyboardInterrupt

    with pytest.warns(RuntimeWarning, match="interrupted"):
        fl.simulate(fl.SPDST(**BRIEF), task(), workers=1, folder=tmp_path, watch=stop, **QUICK)
    monkeypatch.setattr(sparse, "_gain", lambda *args: pytest.fail("a resumed run measured again"))
    resumed = fl.simulate(fl.SPDST(**BRIEF), task(), workers=2, folder=tmp_path, resume=True, **QUICK)
    assert resumed.checksum == whole.checksum
    header = json.loads((tmp_path / RESULTS).read_text().splitlines()[0])
    assert header["compute"]["sparse"] is True


def test_small_models_stay_dense_without_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "_compare", lambda *args: pytest.fail("a small model was measured"))
    run = fl.simulate(fl.SPDST(**BRIEF), task(), workers=1, **{**QUICK, "rounds": 1})
    assert "compute" not in run.results.header


@pytest.mark.usefixtures("always")
def test_a_model_that_refuses_planes_trains_dense() -> None:
    class Strict(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
            self.fc = torch.nn.Linear(8, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert type(x) is torch.Tensor
            out: torch.Tensor = self.fc(self.body(x).mean((2, 3)))
            return out

    digits = task()
    strict = fl.Task(model=Strict, clients=digits.train, test=digits.test)
    run = fl.simulate(fl.PDST(density=0.2), strict, workers=1, **{**QUICK, "rounds": 1})
    assert "compute" not in run.results.header


@pytest.mark.usefixtures("always")
def test_without_native_kernels_a_run_is_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "kernels", lambda: None)
    run = fl.simulate(fl.PDST(density=0.2), task(), workers=1, **{**QUICK, "rounds": 1})
    assert "compute" not in run.results.header
