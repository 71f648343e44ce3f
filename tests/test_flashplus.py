"""flashplus: each ingredient does what its definition says, and the recipe gives way to a user's settings."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.core.client import Place
from flashfl.core.errors import ConfigError
from flashfl.core.exchange import Local
from flashfl.core.layout import Layout
from flashfl.core.state import State
from flashfl.data.sources import Arrays, Subset
from flashfl.engine.step import MaskedStep
from flashfl.run.config import TrainConfig, make_config
from flashfl.sparsity.steps import Multiply
from tests.conftest import blobs, make_task
from tests.engine.test_lanes import Plain, agree, devices
from tests.test_every_method import SETTINGS, small

PLAIN: dict[str, Any] = {
    **SETTINGS, "average": 0.0, "weight_decay": 0.0, "lr_end": 0.001, "values": "fp32", "upload": "weights"
}  # fmt: skip


def states_of(method: fl.Method, rounds: int = 4, **more: Any) -> list[State]:
    states: list[State] = []
    settings = {**PLAIN, **more}
    fl.simulate(method, make_task("norm"), rounds, watch=lambda state, record: states.append(state), **settings)
    return states


def test_without_its_recipe_it_is_spdst_and_with_r_int_it_is_jmwst() -> None:
    for changes, other in (
        (small("flashplus", look_ahead=0.0), small("spdst")),
        (small("flashplus", r_int=2, look_ahead=0.0), small("jmwst", r_int=2)),
    ):
        a, b = states_of(changes)[-1], states_of(other)[-1]
        assert torch.equal(a.weights.vector, b.weights.vector)
        assert torch.equal(a.mask.bits, b.mask.bits)


def test_recipe_applies_unless_it_is_set_otherwise() -> None:
    task = make_task("norm")
    run = fl.simulate(fl.FlashPlus(density=0.3, warmup_clients=2, warmup_epochs=1), task, 1, **SETTINGS)
    assert {name: getattr(run.train, name) for name in fl.FlashPlus.recipe} == dict(fl.FlashPlus.recipe)
    assert make_config({}, {"method": "flashplus"}).train.average == 0.98
    assert make_config({}, {"method": "flashplus", "average": "0.9"}).train.average == 0.9
    assert make_config({"train": {"average": 0.0}}, {"method": "flashplus"}).train.average == 0.0
    assert make_config({}, {"method": "spdst"}).train == TrainConfig()


def test_look_ahead_starts_from_the_last_step() -> None:
    """Clients start from w + a * (w - w of the round before), inside the mask (FedACG)."""
    method = small("flashplus", look_ahead=0.7)
    *_, before, last = states_of(method, 3)
    trained = last.layout.trained_size
    step = last.weights.vector - before.weights.vector
    expected = last.weights.vector + 0.7 * torch.cat([step[:trained], torch.zeros_like(step[trained:])])
    sent = method.ahead(last)
    torch.testing.assert_close(sent.vector, expected, rtol=1e-5, atol=1e-7)
    assert sent.is_masked()
    assert all(order.weights.vector is not last.weights.vector for _, order in method.orders(last, [fl.Client(0, 11)]))


def test_multiplicative_step_by_hand() -> None:
    """w = w * exp(-lr * (c * sign(w) * g + d)) after the SGD step, on sparse weights only; weight decay is in g."""
    start, g, lr, c, d = [0.5, -0.5, 0.25], [0.1, 0.2, -0.3], 0.2, 3.0, 0.01
    layout = Layout.build({"prunable": [("w", (2,))], "dense": [("b", (1,))]})
    weights, part = torch.tensor([start]), Multiply(c, d)
    step = MaskedStep(weights, 2, torch.tensor([[True, True]]), place=Place.logical(layout))
    step.begin(Local(lr=lr, weight_decay=0.5, parts=(part,)), [1], [1])
    step(torch.tensor([g[:2]]), torch.tensor([g[2:]]))
    followed = [x + 0.5 * w for w, x in zip(start, g, strict=True)]
    after = [w - lr * x for w, x in zip(start, followed, strict=True)]
    expected = [w * math.exp(-lr * (c * math.copysign(1, w) * x + d)) for w, x in zip(after, followed, strict=True)]
    expected[2] = after[2]
    torch.testing.assert_close(weights, torch.tensor([expected]))


def test_initial_sparse_weights_are_scaled() -> None:
    method, layout = small("flashplus", init_scale=0.5), make_task("norm").layout
    scaled, plain = states_of(method, 1)[0].weights.vector, states_of(small("flashplus"), 1)[0].weights.vector
    k = layout.prunable_size
    assert torch.equal(scaled[:k], 0.5 * plain[:k])
    assert torch.equal(scaled[k:], plain[k:])


def test_mask_grows_over_the_run_and_keeps_what_it_has() -> None:
    states = states_of(small("flashplus", grow=0.5), 16)[1:]
    masks = [s.mask for s in states]
    assert all(bool((b.bits | ~a.bits).all()) for a, b in itertools.pairwise(masks))  # none leaves
    assert masks[0].density == pytest.approx(0.15, abs=0.01)
    assert masks[-1].density == pytest.approx(0.45, abs=0.01)
    assert sum(m.density for m in masks) / len(masks) == pytest.approx(0.3, abs=0.02)
    assert all(m.recipe is not None for m in masks)  # so that masks travel as keys
    assert all(s.weights.is_masked() for s in states)


@pytest.mark.parametrize(
    "changes",
    [
        {"grow": 1.0},
        {"grow": 0.5, "nm": 4},
        {"look_ahead": 1.0},
        {"init_scale": 0.0},
        {"r_int": -1},
        {"density": 0},
        {"multiply": -1.0},
        {"shrink": -1e-3},
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        replace(fl.FlashPlus(), **changes)


@devices
@pytest.mark.parametrize("crew", ["lanes", "batched"])
@pytest.mark.parametrize("changes", [{}, {"multiply": 2.0, "shrink": 0.01}])
def test_crews_take_the_same_steps(changes: dict[str, Any], crew: str, device: str) -> None:
    x, y = blobs(88, (1, 5, 5), 1)
    parts = [Subset(Arrays((x,), y), torch.arange(11 * i, 11 * i + 7 + i % 4)) for i in range(8)]  # of unequal length
    agree(
        small("flashplus", **changes),
        fl.Task(Plain(), parts, (x, y)),
        device,
        crew=crew,
        weight_decay=0.01,
        lr_last=0.0,
    )


def test_learning_rate_below_the_last_one_is_warned_about() -> None:
    """The recipe sets the last learning rate. Who sets only a smaller first one learns that it would grow."""
    with pytest.warns(RuntimeWarning, match=r"lr = 0.005 is below lr_end = 0.01"):
        fl.simulate(small("flashplus"), make_task("norm"), 1, **{**SETTINGS, "lr": 0.005})
