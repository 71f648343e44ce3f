"""Reports as whole numbers: sums decode to the engine's sums, never overflow, and rounding is unbiased."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from flashfl.aggregate import add
from flashfl.core.errors import ConfigError
from flashfl.core.exchange import Local, Sums, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights
from flashfl.privacy.noise import LARGEST, LEAST
from flashfl.privacy.policy import Policy
from flashfl.privacy.vector import Noise, Packing, Ranges

LAYOUT = Layout.build(
    {
        "prunable": [("a", (40, 10)), ("b", (5, 40))],
        "dense": [("bias", (40,))],
        "statistic": [("n.running_mean", (8,)), ("n.running_var", (8,))],
    }
)


def model(seed: int = 0) -> Weights:
    torch.manual_seed(seed)
    mask = Mask(LAYOUT, torch.rand(LAYOUT.prunable_size) < 0.3)
    vector = torch.randn(LAYOUT.size)
    vector[-8:] = vector[-8:].abs() + 0.5
    return Weights.masked(mask, vector)


def updates(start: Weights, clients: int, far: float = 0.1) -> list[Update]:
    found = []
    for client in range(clients):
        torch.manual_seed(100 + client)
        values = start.packed() + far * torch.randn(len(start.packed()))
        values[-8:] = values[-8:].abs()
        found.append(Update(client, 20 + client, start.mask, values, start.mask.counts, {"loss": 1.0 + client / 10}))
    return found


def packing(start: Weights, cohort: int = 10, **changes: object) -> Packing:
    return replace(Packing(LAYOUT, Local(), start.mask.active, cohort), **changes)  # type: ignore[arg-type]


def summed(how: Packing, start: Weights, all: list[Update]) -> torch.Tensor:
    return torch.stack([how.encode(u, start.packed(), 7 * u.client) for u in all]).sum(0)


def test_decoded_sums_are_the_engines_sums() -> None:
    start = model()
    all, how = updates(start, 10), packing(start)
    sums, clamped = how.decode(summed(how, start, all), start, len(all))
    plain = Sums(LAYOUT, counts=[0] * 2)
    for update in all:
        add(plain, update)
    assert (sums.n, sums.clients, sums.counts, clamped) == (plain.n, plain.clients, plain.counts, 0)
    assert sums.loss == pytest.approx(plain.loss, rel=1e-3)
    assert sums.weights is not None
    assert plain.weights is not None
    assert torch.allclose(sums.weights / sums.n, plain.weights / plain.n, atol=1e-4)
    assert torch.equal(sums.holders, plain.holders)  # type: ignore[arg-type]
    active = start.mask.active
    assert torch.allclose(sums.statistics[active] / sums.n, plain.statistics[active] / plain.n, atol=1e-3)


@pytest.mark.parametrize("report", ["counts", "statistics"])
def test_layer_counts_and_statistics_go_the_same_way(report: str) -> None:
    start = model()
    how = packing(start, local=Local(report=report))  # type: ignore[arg-type]
    all = updates(start, 6)
    if report == "counts":
        all = [Update(u.client, u.n, None, None, (u.client + 3, 9), u.metrics) for u in all]
    sums, _ = how.decode(summed(how, start, all), start, 6)
    assert sums.n == sum(u.n for u in all)
    if report == "counts":
        assert sums.counts == [sum(u.client + 3 for u in all), 54]
        assert sums.weights is None
    else:
        assert sums.weights is not None
        expected = sum((u.values[-16:].double() * u.n for u in all if u.values is not None), torch.zeros(16).double())
        assert torch.allclose(sums.weights[-16:] / sums.n, expected / sums.n, atol=1e-3)
        assert not sums.weights[:-16].any()


def test_static_batchnorm_sends_no_statistics() -> None:
    start = model()
    how = packing(start, local=Local(statistics=False))
    assert how.length == packing(start).length - 16
    sums, _ = how.decode(summed(how, start, updates(start, 3)), start, 3)
    assert sums.statistics == {}


@pytest.mark.parametrize("cohort", [3, 10, 100, 4000, 5000, 100_000])
def test_sums_of_the_largest_reports_do_not_overflow(cohort: int) -> None:
    start = model()
    how, far = packing(start, cohort), torch.full((len(start.packed()),), 1e9)
    most = Update(0, 10**9, start.mask, far, start.mask.counts, {"loss": 1e9})
    least = Update(0, 10**9, start.mask, -far, start.mask.counts, {"loss": -1e9})
    for update in (most, least):
        assert int(how.encode(update, start.packed(), 1).abs().max()) * cohort < 2 ** (how.bits - 1)
    assert how.bits == (32 if cohort <= 4000 else 64)
    assert how.sections[0].scale * how.sections[0].range >= 2**8


def test_clamped_values_are_counted() -> None:
    start = model()
    how = packing(start, ranges=Ranges(weights=0.5, samples=16))
    values = start.packed().clone()
    values[3] += 2
    values[5] -= 2
    sums, clamped = how.decode(
        how.encode(Update(0, 20, start.mask, values, start.mask.counts), start.packed(), 1), start, 1
    )
    assert clamped == 3  # two weights, and the number of samples
    assert sums.n == 16
    assert sums.weights is not None
    changed = Weights(start.mask, sums.weights.float() / 16).packed() - start.packed()
    assert changed[3] == pytest.approx(0.5, abs=1e-4)
    assert changed[5] == pytest.approx(-0.5, abs=1e-4)


def test_rounding_is_unbiased_and_keyed() -> None:
    start = model()
    how = packing(start, cohort=4000)
    update = updates(start, 1)[0]
    rows = torch.stack([how.encode(update, start.packed(), key) for key in range(500)])
    exact = how._values(update, start.packed())[0][:100] * how.sections[0].scale
    assert (rows[:, :100].double().mean(0) - exact).abs().max() < 5 * 0.5 / math.sqrt(500)
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(rows[3], how.encode(update, start.packed(), 3))


def test_variance_never_decodes_below_zero() -> None:
    start = model()
    values = start.packed().clone()
    values[-8:] = 0
    how = packing(start, cohort=4000)
    sums, _ = how.decode(how.encode(Update(0, 1, start.mask, values, ()), start.packed(), 1), start, 1)
    assert sums.weights is not None
    assert bool((sums.weights[-8:] >= 0).all())


# Differential privacy.


def test_hostile_clients_that_clip_honestly_cannot_move_the_sum_beyond_the_bound() -> None:
    start = model()
    noise = Noise(clip=0.5, multiplier=1.0)
    how = packing(start, noise=noise)
    honest = updates(start, 10)
    for size in (1e3, 1e20, 1e30):
        hostile = replace(honest[4], values=start.packed() + size * torch.randn(len(start.packed())), n=10**6)
        others = [hostile if u.client == 4 else u for u in honest]
        moved = (summed(how, start, others) - summed(how, start, honest)).double() / how.sections[0].scale
        assert float(moved.norm()) <= 2 * (0.5 + math.sqrt(how.length) / how.sections[0].scale)


def test_clipping_keeps_short_changes_and_shortens_long_ones() -> None:
    start = model()
    how = packing(start, noise=Noise(clip=0.5, multiplier=1.0))
    for far, expected in ((1e-3, None), (10.0, 0.5)):
        update = updates(start, 1, far)[0]
        assert update.values is not None
        change = how.encode(update, start.packed(), 1).double() / how.sections[0].scale
        length = float((update.values - start.packed()).norm())
        assert float(change.norm()) == pytest.approx(expected or length, rel=1e-3)


def test_private_sums_have_a_fixed_denominator_and_no_loss() -> None:
    start = model()
    how = packing(start, noise=Noise(clip=100.0, multiplier=1.0))
    all = updates(start, 5)
    sums, clamped = how.decode(summed(how, start, all), start, len(all))
    assert (sums.n, sums.clients, clamped) == (10, 5, 0)
    assert math.isnan(sums.loss)
    mean = sum(u.values.double() - start.packed() for u in all if u.values is not None) / 10  # type: ignore[operator]
    assert sums.weights is not None
    assert torch.allclose(Weights(start.mask, sums.weights / 10).packed() - start.packed(), mean, atol=1e-4)
    assert [section.name for section in how.sections] == ["changes"]


def test_noise_and_sum_fit_into_the_numbers() -> None:
    start = model()
    for multiplier in (0.1, 1.0, 50.0):
        how = packing(start, cohort=300, noise=Noise(1.0, multiplier), honest=171)
        spread = how.deviation * math.sqrt(300)
        assert 300 * how.sections[0].scale + 11 * spread < 2 ** (how.bits - 1)


@pytest.mark.parametrize("honest", [None, 1], ids=["secure", "server"])
@pytest.mark.parametrize("cohort", [3, 10, 300, 5000, 100_000])
def test_noise_of_every_size_can_be_drawn_for_every_cohort(cohort: int, honest: int | None) -> None:
    start = model()
    for multiplier in (0.05, 0.7, 3.1, 50.0, 700.0):
        for clip in (1e-3, 0.3, 7.0):
            how = packing(start, cohort, noise=Noise(clip, multiplier), honest=honest or Policy().honest(cohort))
            assert LEAST <= how.deviation <= LARGEST
            spread = how.deviation * math.sqrt(1 if honest else cohort)
            assert cohort * (how.sections[0].scale * clip + math.sqrt(how.length)) + 10 * spread < 2 ** (how.bits - 1)


def test_statistics_are_clipped_and_noised_with_the_weights() -> None:
    start = model()
    how = packing(start, noise=Noise(1.0, 1.0))
    assert how.length == start.mask.active + 40 + 16
    far = start.packed().clone()
    far[-16:] += 1e6
    change = how.encode(Update(0, 5, start.mask, far, ()), start.packed(), 1).double() / how.sections[0].scale
    assert float(change.norm()) == pytest.approx(1.0, abs=1e-3)


def test_change_that_overflows_counts_as_none() -> None:
    start = model()
    how = packing(start, noise=Noise(1.0, 1.0))
    far = torch.full_like(start.packed(), 3e38)
    change = how.encode(Update(0, 5, start.mask, far, ()), -far, 1)
    assert int(change.abs().max()) <= 1


def test_layer_counts_are_refused_under_differential_privacy() -> None:
    with pytest.raises(ConfigError, match="warmup_clients = 0"):
        _ = packing(model(), local=Local(report="counts"), noise=Noise(1.0, 1.0)).length


def test_impossible_ranges_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"ranges\.weights = 0"):
        Ranges(weights=0)
