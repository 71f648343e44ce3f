"""Epsilon: by hand, by dp-accounting called directly, and through interruptions. Noise: its variance and its source."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from accounting_support import epsilon_sampled

from flashfl.core.errors import CheckpointError
from flashfl.privacy import noise
from flashfl.privacy.accounting import Draw, Ledger, epsilon_known, most_rounds, multiplier_for
from flashfl.privacy.noise import LARGEST, LEAST, discrete_gaussian
from flashfl.privacy.vector import Noise

dp = pytest.importorskip("dp_accounting")


def test_epsilon_agrees_with_a_case_computed_by_hand() -> None:
    """Noise of 4 clips against a sensitivity of 2 clips: RDP(a) = a / 8 a round, so 0.5 a over 4 rounds.

    Converted by Canonne, Kamath and Steinke's bound: eps = 0.5 a + ln(1 - 1/a) - ln(delta a) / (a - 1), least over a.
    """
    orders = [1 + x / 1000 for x in range(100, 20_000)]
    expected = min(0.5 * a + math.log1p(-1 / a) - math.log(1e-5 * a) / (a - 1) for a in orders)
    found = epsilon_known(4.0, 4, 1e-5)
    assert found == pytest.approx(expected, rel=1e-3)  # dp-accounting tries fewer orders
    assert found >= expected
    assert expected == pytest.approx(4.7284, abs=1e-4)


def test_epsilon_is_that_of_dp_accounting_called_directly() -> None:
    event = dp.SelfComposedDpEvent(dp.GaussianDpEvent(0.75), 30)
    direct = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE).compose(event)
    assert epsilon_known(1.5, 30, 1e-6) == pytest.approx(direct.get_epsilon(1e-6), rel=1e-12)
    event = dp.SampledWithoutReplacementDpEvent(3000, 300, dp.GaussianDpEvent(0.75))
    direct = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE).compose(event, 100)
    assert epsilon_sampled(1.5, 100, 1e-5, 3000, 300) == pytest.approx(direct.get_epsilon(1e-5), rel=1e-12)


def test_secret_cohorts_amplify_and_full_cohorts_do_not() -> None:
    assert epsilon_sampled(4.0, 50, 1e-5, 3000, 300) < epsilon_known(4.0, 50, 1e-5)
    assert epsilon_sampled(4.0, 50, 1e-5, 10, 10) == epsilon_known(4.0, 50, 1e-5)
    assert epsilon_known(4.0, 0, 1e-5) == 0


@pytest.mark.parametrize("known", [True, False])
def test_calibrated_noise_spends_the_budget_and_hardly_less(known: bool) -> None:
    rounds, clients, cohort = 40, 60, 20
    multiplier = multiplier_for(8.0, 1e-5, rounds, Draw(clients, cohort), known)

    def spent(m: float) -> float:
        if known:
            return epsilon_known(m, most_rounds(rounds, clients, cohort), 1e-5)
        return epsilon_sampled(m, rounds, 1e-5, clients, cohort)

    assert 7.9 < spent(multiplier) <= 8.0
    assert spent(0.99 * multiplier) > 8.0


def test_most_rounds_bounds_how_often_a_client_is_drawn() -> None:
    assert most_rounds(50, 10, 10) == 50
    most, draw = most_rounds(100, 300, 30), random.Random(1)
    assert 10 < most < 100
    times = [sum(draw.random() < 0.1 for _ in range(100)) for _ in range(300)]
    assert max(times) <= most


def test_ledger_counts_the_client_with_most_rounds_and_every_attempt() -> None:
    ledger = Ledger(4.0, 1e-5, Draw(100, 10))
    ledger.spend([1, 2, 3])
    ledger.spend([3, 4, 5])  # perhaps a repeated attempt: it spends too
    found = ledger.epsilon()
    assert found.known == epsilon_known(4.0, 2, 1e-5)
    assert found.sampled == epsilon_sampled(4.0, 2, 1e-5, 100, 10)
    assert ledger.epsilon(more=1).known == epsilon_known(4.0, 3, 1e-5)


def test_ledger_survives_an_interruption(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    first = Ledger(4.0, 1e-5, Draw(100, 10), path)
    first.spend([1, 2])
    first.spend([2, 3])
    again = Ledger(4.0, 1e-5, Draw(100, 10), path)
    assert again.epsilon() == first.epsilon()
    assert Ledger(8.0, 1e-5, Draw(100, 10), path).epsilon() == first.epsilon()  # earlier rounds had less noise
    path.write_text("{")
    with pytest.raises(CheckpointError, match="the privacy spent so far is unknown"):
        Ledger(4.0, 1e-5, Draw(100, 10), path)


# Noise.


@pytest.mark.parametrize("deviation", [LEAST, 1000, 1 << 20, 1 << 27])
def test_noise_has_the_variance_and_the_shape_claimed(deviation: int) -> None:
    count = 200_000
    x = discrete_gaussian(deviation, count) / deviation
    assert abs(x.mean()) < 5 / math.sqrt(count)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / count)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / count)
    for z in (0.5, 1.0, 2.0):
        expected = (1 + math.erf(z / math.sqrt(2))) / 2
        assert abs((x <= z).mean() - expected) < 5 * 0.5 / math.sqrt(count) + 0.4 / deviation


def test_discrete_gaussian_probabilities_are_exact_for_a_small_deviation() -> None:
    count, deviation = 400_000, LEAST
    drawn = discrete_gaussian(deviation, count)
    whole = sum(math.exp(-(y**2) / (2 * deviation**2)) for y in range(-400, 401))
    for y in (0, 1, -1, 16, -30):
        p = math.exp(-(y**2) / (2 * deviation**2)) / whole
        assert abs((drawn == y).mean() - p) < 5 * math.sqrt(p / count)


def test_squares_of_far_values_do_not_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value of 24 deviations has a probability below e^-280. Its square has more than 63 bits."""
    far = np.array([24 * LARGEST, -24 * LARGEST, LARGEST], np.int64)
    monkeypatch.setattr(noise, "_laplace", lambda scale, count: np.resize(far, count))
    assert set(discrete_gaussian(LARGEST, 1000)) == {LARGEST}


def test_shares_of_honest_survivors_add_up_to_the_noise_promised() -> None:
    noise, scale, length, honest = Noise(1.0, 2.0), 2.0**18, 20_000, 6
    share = noise.deviation(scale, length, honest)
    total = sum(discrete_gaussian(share, length) for _ in range(honest))
    promised = noise.multiplier * (scale * noise.clip + math.sqrt(length))
    assert share * math.sqrt(honest) >= promised
    assert np.std(total) == pytest.approx(promised, rel=5 / math.sqrt(2 * length))


def test_noise_never_comes_from_a_seed() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        drawn.append(discrete_gaussian(1000, 1000))
    assert not np.array_equal(*drawn)


@pytest.mark.parametrize("deviation", [0, LEAST - 1, (1 << 27) + 1])
def test_noise_that_cannot_be_drawn_exactly_is_refused(deviation: int) -> None:
    with pytest.raises(ValueError, match="deviation"):
        discrete_gaussian(deviation, 10)
