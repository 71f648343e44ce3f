"""Poisson cohorts: independent coin flips, accounted as such, with a fixed denominator; rounds without clients."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("dp_accounting", reason="pip install 'flashfl[privacy]'")
pytest.importorskip("cryptography", reason="pip install 'flashfl[privacy]'")

import dp_accounting as dp
from accounting_support import epsilon_sampled

import flashfl as fl
from flashfl.core.errors import ConfigError, RunStopped
from flashfl.core.exchange import Client
from flashfl.core.rng import flip
from flashfl.core.state import State
from flashfl.engine.private import packing
from flashfl.engine.vault import Vault, open_vault
from flashfl.privacy.accounting import Draw, Ledger, epsilon_known, multiplier_for
from flashfl.privacy.settings import privacy_of
from flashfl.run.config import TrainConfig, plan_of
from tests.conftest import make_task

SETTINGS = {"per_round": 3, "rounds": 6, "device": "cpu", "workers": 1, "batch": 8, "dp_noise": 4.0}
PDST = fl.PDST(density=0.3)


@pytest.fixture(scope="module")
def task() -> fl.Task:
    return make_task("norm", clients=10)


def simulated(task: fl.Task, method: fl.Method = PDST, **settings: object) -> fl.Run:
    return fl.simulate(method, task, progress=False, **{**SETTINGS, "dp_sampling": "poisson", **settings})


def state_of(task: fl.Task, **settings: object) -> tuple[State, TrainConfig]:
    config = TrainConfig(**{**SETTINGS, "dp_sampling": "poisson", **settings})  # type: ignore[arg-type]
    return PDST.init(plan_of(config, task, 10)), config


def test_poisson_epsilon_is_that_of_dp_accounting_called_directly() -> None:
    event = dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(1.5))
    direct = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL).compose(event, 100)
    assert epsilon_sampled(1.5, 100, 1e-5, 3000, 300, poisson=True) == pytest.approx(direct.get_epsilon(1e-5))
    everyone = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL)
    everyone.compose(dp.GaussianDpEvent(1.5), 100)
    assert epsilon_sampled(1.5, 100, 1e-5, 10, 10, poisson=True) == pytest.approx(everyone.get_epsilon(1e-5))


def test_poisson_noise_for_an_epsilon_spends_it_and_hardly_less() -> None:
    draw = Draw(3000, 300, poisson=True)
    multiplier = multiplier_for(8.0, 1e-5, 100, draw, known=False)
    assert 7.9 < epsilon_sampled(multiplier, 100, 1e-5, 3000, 300, poisson=True) <= 8.0


def test_coins_are_independent_and_keyed() -> None:
    rows = np.array([np.isin(range(50), flip(key, range(50), 0.2)) for key in range(2000)])
    assert abs(rows.mean() - 0.2) < 5 * math.sqrt(0.16 / rows.size)
    assert abs(rows.sum(1).var() - 50 * 0.16) < 5 * 8 * math.sqrt(2 / 2000)  # binomial: nothing fixes the size
    pairs = (rows[:, 0] & rows[:, 1]).mean()
    assert abs(pairs - 0.04) < 5 * math.sqrt(0.04 / 2000)
    assert flip(7, [3, 1, 2], 1.0) == [1, 2, 3]
    assert flip(7, range(9), 0.0) == []
    assert flip(7, range(50), 0.2) == [i for i in flip(7, range(99), 0.2) if i < 50]  # others change no coin


def test_poisson_run_accounts_what_it_did(task: fl.Task) -> None:
    run = simulated(task)
    sizes = [len(record.cohort) for record in run.history]
    assert len(set(sizes)) > 1
    for done, record in enumerate(run.history, 1):
        assert record.privacy is not None
        assert record.privacy.sampled == epsilon_sampled(4.0, done, 1e-5, 10, 3, poisson=True)
    taken = max(sum(client in record.cohort for record in run.history) for client in range(10))
    assert run.privacy is not None
    assert run.privacy.known == epsilon_known(4.0, taken, 1e-5)


def test_poisson_sum_has_a_fixed_denominator_and_hides_the_size_of_the_cohort(task: fl.Task) -> None:
    s, config = state_of(task)
    privacy = privacy_of(config, 10)
    assert privacy is not None
    made = [packing(privacy, s.order(Client(0, 0), s.plan.local), asked) for asked in (0, 1, 3, 9)]
    assert {how.planned for how in made} == {3}
    assert {how.sections for how in made} == {made[0].sections}
    assert made[0].cohort == 10  # all could come
    sums, _ = made[0].decode(torch.zeros(made[0].length, dtype=torch.int64), s.weights, 0)
    assert sums.n == 3


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_round_without_clients_adds_noise_alone_and_spends_too(
    task: fl.Task, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "gpu":
        from flashfl.engine.gpu import GPUEngine

        monkeypatch.setattr(
            "flashfl.run.simulate.make_engine", lambda task, config, folder: GPUEngine(task, config, "cpu", folder)
        )
    monkeypatch.setattr("flashfl.core.state.flip", lambda key, clients, chance: [])
    models: list[torch.Tensor] = []
    run = simulated(
        task, rounds=2, dp_noise=2.0, dp_clip=0.01, watch=lambda s, record: models.append(s.weights.packed())
    )
    assert [record.cohort for record in run.history] == [(), ()]
    trained = len(models[0]) - task.layout.size + task.layout.trained_size
    moved = (models[1] - models[0])[:trained]
    assert moved.std().item() == pytest.approx(2.0 * 0.01 / 3, rel=0.3)
    assert run.privacy is not None
    assert run.privacy.sampled == epsilon_sampled(2.0, 2, 1e-5, 10, 3, poisson=True)
    assert run.privacy.known == 0
    assert [record.bytes.up for record in run.history] == [0, 0]


def test_poisson_run_ends_when_its_budget_is_spent_and_resumes(task: fl.Task, tmp_path: Path) -> None:
    budget = epsilon_sampled(4.0, 3, 1e-5, 10, 3, poisson=True) + 0.01
    more = {"dp_epsilon": budget, "folder": tmp_path / "run"}
    run = simulated(task, **more)
    assert len(run.history) == 3
    assert run.stopped == f"spent its privacy budget of epsilon {budget:g}"
    assert len(simulated(task, resume=True, **more).history) == 3


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"secure": True, "dp_noise": 1.0}, "not possible with secure = true"), ({}, "needs noise")],
    ids=["secure", "without-dp"],
)
def test_poisson_cohorts_are_refused_where_they_bring_nothing(settings: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        TrainConfig(dp_sampling="poisson", **settings)  # type: ignore[arg-type]


# Accounting for the sampling that was really done.


def vault_of(task: fl.Task, **settings: object) -> tuple[Vault, Ledger, State]:
    s, config = state_of(task, dp_sampling="fixed", **settings)
    vault = open_vault(config, 10, None)
    assert vault is not None
    assert vault.ledger is not None
    return vault, vault.ledger, s


def test_cohort_drawn_from_fewer_clients_is_amplified_less(task: fl.Task) -> None:
    """On Flower clients come and go: three of five is not three of ten."""
    vault, ledger, s = vault_of(task)
    present = [Client(i, 1) for i in (1, 4, 5, 6, 9)]
    vault.spend(s, [c.id for c in PDST.cohort(s, present)], [c.id for c in present])
    assert ledger.draws == {Draw(5, 3): 1}
    assert ledger.epsilon().sampled == epsilon_sampled(4.0, 1, 1e-5, 5, 3)


def test_cohort_that_was_not_drawn_by_the_runs_key_is_not_amplified(task: fl.Task) -> None:
    vault, ledger, s = vault_of(task)
    drawn = [c.id for c in PDST.cohort(s, task.clients)]
    other = [i for i in range(10) if i not in drawn][:3]
    vault.spend(s, other, range(10))
    assert ledger.draws == {Draw(): 1}
    assert ledger.epsilon().sampled == epsilon_known(4.0, 1, 1e-5)
    vault.spend(s, drawn, range(10))
    assert ledger.draws == {Draw(): 1, Draw(10, 3): 1}


def test_repeated_round_that_the_budget_does_not_allow_ends_the_run(task: fl.Task) -> None:
    vault, _, s = vault_of(task, dp_epsilon=epsilon_sampled(4.0, 1, 1e-5, 10, 3) + 0.01)
    cohort = [c.id for c in PDST.cohort(s, task.clients)]
    vault.spend(s, cohort, range(10))
    with pytest.raises(RunStopped, match=r"another round would spend more than dp_epsilon = .*, so training ends"):
        vault.spend(s.again(), cohort, range(10))


@pytest.mark.parametrize("settings", [{"dp_noise": 1.0}, {"dp_epsilon": 8.0}])
def test_gathering_statistics_at_the_end_is_refused_under_differential_privacy(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"static_bn = true.*static_bn = false"):
        TrainConfig(static_bn=True, **settings)  # type: ignore[arg-type]
