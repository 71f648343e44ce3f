"""The local training loop, on models small enough to step by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import flashfl as fl
from flashfl.core.engine import FixedPopulation
from flashfl.core.exchange import Local, Order, Update
from flashfl.core.mask import Mask, Recipe, Weights
from flashfl.core.parts import part
from flashfl.data.sources import Subset
from flashfl.data.task import Task
from flashfl.engine.cpu import CPUEngine
from flashfl.engine.gpu import GPUEngine
from flashfl.engine.train import ClientFailed, Trainer
from flashfl.run.config import TrainConfig
from flashfl.run.simulate import drive
from flashfl.sparsity import PruneRegrow, recipe_mask
from tests.conftest import DropoutNet, NormNet, blobs, make_task
from tests.test_every_method import small

SIZES: list[int] = []  # of the batches the loss below has seen


def half_square(output: Tensor, target: Tensor) -> Tensor:
    """Mean of (output - target)^2 / 2: its gradient is the error times the input."""
    SIZES.append(len(target))
    return ((output.squeeze(-1) - target) ** 2).mean() / 2


def slope(output: Tensor, target: Tensor) -> Tensor:
    """The output itself: the gradient of a linear map is its input, whatever its weights."""
    SIZES.append(len(target))
    return output.mean()


@pytest.fixture(autouse=True)
def _fresh_sizes() -> None:
    SIZES.clear()


def linear(
    x: list[float], y: float, n: int = 1, loss: Callable[..., Tensor] = half_square, model: Any = None
) -> tuple[Task, Trainer]:
    """A linear map without bias, all of it prunable, and one client with n equal samples."""
    data = (torch.tensor([x] * n), torch.full((n,), y))
    model = model or (lambda: nn.Linear(len(x), 1, bias=False))
    task = Task(model, [data], data, loss=loss, metric=lambda o, t: 0.0, prunable="*weight")
    return task, Trainer(task)


def trained(trainer: Trainer, bits: list[int], values: list[float], **settings: Any) -> Update:
    mask = Mask(trainer.layout, torch.tensor(bits, dtype=torch.bool))
    order = Order(Weights.masked(mask, torch.tensor(values)), Local(**settings), key=1, tag=(2, 0, 0))
    return trainer.train(order, 0, trainer.task.train[0])


def vector(update: Update) -> list[float]:
    assert update.weights is not None
    return update.weights.vector.tolist()


def test_one_step_under_a_mask() -> None:
    # w = (1, 0, 3), x = (1, 1, 2), y = 3: output 7, error 4, gradient (4, 4, 8), of which the second is masked
    _, trainer = linear([1.0, 1.0, 2.0], 3.0)
    update = trained(trainer, [1, 0, 1], [1.0, 2.0, 3.0], lr=0.1)
    assert vector(update) == pytest.approx([0.6, 0.0, 2.2])
    assert vector(update)[1] == 0.0
    assert update.metrics["loss"] == pytest.approx(8.0)
    assert (update.n, update.counts) == (1, (2,))


def test_momentum_by_hand() -> None:
    # gradient (1, 2) at every step; velocities g, 1.5 g, 1.75 g
    _, trainer = linear([1.0, 2.0], 0.0, n=3, loss=slope)
    assert vector(trained(trainer, [1, 1], [0.0, 0.0], lr=0.1, momentum=0.5, batch=1)) == pytest.approx([-0.425, -0.85])


def test_weight_decay_by_hand() -> None:
    # w = 4 -> 4 - 0.1 (1 + 0.5 * 4) = 3.7 -> 3.7 - 0.1 (1 + 0.5 * 3.7) = 3.415; an inactive weight stays zero
    _, trainer = linear([1.0, 1.0], 0.0, n=2, loss=slope)
    got = vector(trained(trainer, [1, 0], [4.0, 4.0], lr=0.1, weight_decay=0.5, batch=1))
    assert got == pytest.approx([3.415, 0.0])


def test_prox_by_hand() -> None:
    # it pulls back to where the client started: w = 4 -> 3.9 -> 3.9 - 0.1 (1 + 2 (3.9 - 4)) = 3.82
    _, trainer = linear([1.0], 0.0, n=2, loss=slope)
    assert vector(trained(trainer, [1], [4.0], lr=0.1, prox=2.0, batch=1)) == pytest.approx([3.82])


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.9}, {"weight_decay": 0.1}, {"prox": 1.0}])
def test_inactive_weights_are_exactly_zero_after_any_training(settings: dict[str, float]) -> None:
    _, trainer = linear([0.3, -1.7, 2.2, 0.9], 1.0, n=7)
    got = vector(trained(trainer, [1, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], lr=0.05, batch=2, epochs=3, **settings))
    assert got[1:3] == [0.0, 0.0]
    assert all(got[i] != 0.0 for i in (0, 3))


def test_the_short_last_batch_is_used() -> None:
    _, trainer = linear([1.0], 0.0, n=5)
    trained(trainer, [1], [1.0], batch=2, epochs=2)
    assert SIZES == [2, 2, 1, 2, 2, 1]


def test_at_most_max_steps_an_epoch() -> None:
    _, trainer = linear([1.0], 0.0, n=10)
    trained(trainer, [1], [1.0], batch=2, epochs=2, max_steps=3)
    assert SIZES == [2] * 6


def test_every_sample_is_seen_once_an_epoch_in_another_order() -> None:
    seen: list[int] = []

    def watching(output: Tensor, target: Tensor) -> Tensor:
        seen.extend(target.tolist())
        return output.mean()

    x = torch.ones(20, 1)
    task = Task(lambda: nn.Linear(1, 1, bias=False), [(x, torch.arange(20))], (x, torch.zeros(20)), loss=watching,
                prunable="*weight")  # fmt: skip
    trained(Trainer(task), [1], [1.0], batch=3, epochs=2)
    assert sorted(seen[:20]) == sorted(seen[20:]) == list(range(20))
    assert seen[:20] != seen[20:]


@part
@dataclass(frozen=True)
class Watching(PruneRegrow):
    """Says after how many batches, and at what rate, the mask was moved."""

    moved: list[tuple[int, float]] = field(default_factory=list, compare=False)

    def move(self, *given: Any) -> None:
        self.moved.append((len(SIZES), given[4]))
        super().move(*given)


@pytest.mark.parametrize(("batches", "step"), [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_with_one_epoch_the_mask_moves_half_way(batches: int, step: int) -> None:
    _, trainer = linear([1.0] * 8, 0.0, n=2 * batches)
    rule = Watching()
    update = trained(trainer, [1] * 4 + [0] * 4, [0.1] * 8, batch=2, adapt=rule)
    assert rule.moved == [(step, 0.125)]
    assert len(SIZES) == batches
    assert update.counts == (4,)


def test_with_several_epochs_the_mask_moves_after_each_but_the_last() -> None:
    _, trainer = linear([1.0] * 8, 0.0, n=3)
    rule = Watching()
    trained(trainer, [1] * 4 + [0] * 4, [0.1] * 8, batch=2, epochs=3, adapt=rule)
    assert [at for at, _ in rule.moved] == [2, 4]
    assert [rate for _, rate in rule.moved] == pytest.approx([0.25 * 2 / 3, 0.25 / 3])


def test_what_is_regrown_at_the_end_is_an_active_zero() -> None:
    _, trainer = linear([1.0] * 8, 0.0, loss=slope)
    update = trained(trainer, [1] * 4 + [0] * 4, [5.0, 6.0, 7.0, 8.0] + [0.0] * 4, adapt=PruneRegrow(rate=0.5))
    assert update.weights is not None
    bits = update.weights.mask.bits.tolist()
    assert bits[:4] == [False, True, True, True], "ceil(0.25 * 4) smallest of the active ones are dropped"
    assert sum(bits[4:]) == 1
    assert vector(update)[0] == 0.0
    assert vector(update)[4:] == [0.0] * 4


def test_a_regrown_weight_has_no_velocity() -> None:
    """Gradient 1 everywhere, two batches, the mask moves between them: what is new makes one plain first step."""
    _, trainer = linear([1.0] * 8, 0.0, n=2, loss=slope)
    start = [5.0, 6.0, 7.0, 8.0] + [0.0] * 4
    update = trained(trainer, [1] * 4 + [0] * 4, start, lr=0.1, momentum=0.9, batch=1, adapt=PruneRegrow(rate=0.5))
    assert update.weights is not None
    got, bits = vector(update), update.weights.mask.bits.tolist()
    assert got[0] == 0.0
    assert got[1:4] == pytest.approx([w - 0.1 - 0.19 for w in start[1:4]])
    assert [w for w, bit in zip(got[4:], bits[4:], strict=True) if bit] == pytest.approx([-0.1])


def test_a_dropped_weight_that_grows_again_has_no_velocity_either() -> None:
    _, trainer = linear([1.0] * 2, 0.0, n=1, loss=slope)
    rule = PruneRegrow(rate=0.9)  # of one active weight in two it drops that one and grows the other, every epoch
    update = trained(trainer, [1, 0], [5.0, 0.0], lr=0.1, momentum=0.9, batch=1, epochs=3, adapt=rule)
    assert update.weights is not None
    assert update.weights.mask.bits.tolist() == [True, False]
    assert vector(update) == pytest.approx([-0.1, 0.0])


@pytest.mark.parametrize("growth", ["gradient", "momentum"])
def test_growth_by_score_takes_the_largest_gradient(growth: str) -> None:
    _, trainer = linear([1.0, 1.0, 1.0, 3.0, -9.0, 2.0], 0.0, loss=slope)
    rule = PruneRegrow(rate=0.5, growth=growth)  # type: ignore[arg-type]
    update = trained(trainer, [1, 1, 1, 0, 0, 0], [5.0, 6.0, 7.0, 0, 0, 0], adapt=rule)
    assert update.weights is not None
    assert update.weights.mask.bits.tolist() == [False, True, True, False, True, False]


class Norm1d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)))
        return out


def ordered(task: Task, **settings: Any) -> Order:
    mask = Mask.full(task.layout)
    return Order(Weights(mask, task.draw(0)), Local(**settings), key=3, tag=(2, 0, 0))


def norm1d(n: int) -> Task:
    return Task(Norm1d, [blobs(n, (2,), 1)], blobs(9, (2,), 2))


class Norm1x1(nn.Module):
    """BatchNorm2d after the map has shrunk to a pixel."""

    prunable = "body"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).flatten(1))
        return out


def norm1x1(n: int) -> Task:
    return Task(Norm1x1, [blobs(n, (1, 2, 2), 1)], blobs(9, (1, 2, 2), 2))


@pytest.mark.parametrize("make", [norm1d, norm1x1])
def test_last_batch_of_one_sample_is_dropped_if_batchnorm_cannot_train_on_it(make: Any) -> None:
    trainer = Trainer(make(5))
    local = Local(batch=4)
    assert [trainer.batches(make(n).train[0], local) for n in (4, 5, 6, 8, 9)] == [1, 1, 2, 2, 2]
    assert trainer.batches(make(9).train[0], Local(batch=4, max_steps=2)) == 2, "the short one is not reached"
    update = trainer.train(ordered(trainer.task, batch=4), 0, trainer.task.train[0])
    assert update.n == 5


def test_last_batch_of_one_sample_is_used_if_batchnorm_can_train_on_it() -> None:
    task = make_task("norm")
    fresh, tried = Trainer(task), Trainer(task)
    data = Subset(task.train[0], torch.arange(5))
    assert tried.batches(data, Local(batch=4)) == 2
    order = ordered(task, batch=8)
    update, other = (t.train(order, 0, data).weights for t in (tried, fresh))
    assert update is not None
    assert other is not None
    assert torch.equal(update.vector, other.vector)


@pytest.mark.parametrize("norm1d", [norm1d, norm1x1])
def test_client_with_one_sample_and_batchnorm_fails(norm1d: Any) -> None:
    trainer = Trainer(norm1d(1))
    with pytest.raises(ClientFailed, match="one sample"):
        trainer.train(ordered(trainer.task), 0, trainer.task.train[0])
    with pytest.raises(ClientFailed, match="one sample"):
        trainer.train(ordered(trainer.task, report="statistics"), 0, trainer.task.train[0])
    assert all(m.momentum is not None for m in trainer.norms), "what failed leaves no trace"


def tail(task: Task, update: Update) -> Tensor:
    assert update.weights is not None
    return update.weights.vector[task.layout.trained_size :]


def test_running_statistics_are_part_of_an_update_unless_they_are_static() -> None:
    task = make_task("norm")
    trainer, start = Trainer(task), task.draw(0)[task.layout.trained_size :]
    assert not torch.equal(tail(task, trainer.train(ordered(task), 0, task.train[0])), start)
    assert torch.equal(tail(task, trainer.train(ordered(task, statistics=False), 0, task.train[0])), start)


class Counting(nn.Module):
    """A model whose buffers outside the layout change what it does."""

    prunable = "first.weight"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        out: Tensor = self.last(self.norm(self.first(x))) / self.calls
        return out


def test_buffers_outside_the_layout_start_anew_for_every_client() -> None:
    task = Task(Counting, [blobs(8, (2,), i) for i in range(2)], blobs(9, (2,), 2))
    trainer = Trainer(task)
    weights = trainer.train(ordered(task, batch=4), 0, task.train[0]).weights
    assert weights is not None
    first = weights.vector.clone()
    trainer.train(ordered(task, batch=2), 1, task.train[1])
    again = trainer.train(ordered(task, batch=4), 0, task.train[0])
    assert again.weights is not None
    assert torch.equal(first, again.weights.vector)


class Table(nn.Module):
    """A buffer that nobody changes, with a number in it that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 3)
        self.register_buffer("table", torch.tensor([1.0, float("nan")]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


@pytest.mark.parametrize("workers", [1, 2])
def test_buffers_that_change_and_are_not_sent_cause_a_warning(workers: int) -> None:
    data = [blobs(8, (2,), i) for i in range(2)]
    with pytest.warns(RuntimeWarning, match=r"the buffers calls, which are not sent.*make them parameters") as told:
        run = fl.simulate(fl.Dense(), Task(Counting, data, data[0]), 1, per_round=2, workers=workers)
    assert len(told) == 1
    assert not run.history[0].failures
    fl.simulate(fl.Dense(), Task(Table, data, data[0]), 1, per_round=2, workers=workers)


@pytest.mark.parametrize("pretrained", [False, True])
def test_gathered_statistics_are_the_plain_mean_over_batches(pretrained: bool) -> None:
    """Whatever a pretrained model had counted before."""
    module = NormNet()
    module.layers[1].num_batches_tracked += 1000
    data = blobs(10, (1, 5, 5), 3)
    task = Task(module if pretrained else NormNet, [data], data)
    trainer = Trainer(task)
    order = ordered(task, report="statistics", batch=4)
    update = trainer.train(order, 0, task.train[0])
    assert update.weights is not None
    views = task.layout.views(update.weights.vector)
    with torch.no_grad():
        kernel = task.layout.views(order.weights.vector)["layers.0.weight"]
        maps = [nn.functional.conv2d(data[0][i : i + 4], kernel, padding=1) for i in (0, 4, 8)]
    means = torch.stack([m.mean((0, 2, 3)) for m in maps]).mean(0)
    spread = torch.stack([m.transpose(0, 1).flatten(1).var(1) for m in maps]).mean(0)
    assert views["layers.1.running_mean"].tolist() == pytest.approx(means.tolist(), rel=1e-4, abs=1e-6)
    assert views["layers.1.running_var"].tolist() == pytest.approx(spread.tolist(), rel=1e-4)
    assert [m.momentum for m in trainer.norms] == [0.1, 0.1]


class Instances(nn.Module):
    prunable = "first.weight"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True)
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu().mean((2, 3)))
        return out


def test_other_norms_that_keep_statistics_are_gathered_too() -> None:
    data = blobs(10, (1, 5, 5), 3)
    task = Task(Instances, [data], data)
    order = ordered(task, report="statistics", batch=4)
    update = Trainer(task).train(order, 0, task.train[0])
    assert update.weights is not None
    module = task.build()
    task.layout.write(order.weights.vector, module)
    with torch.no_grad():
        spread = [module.first(data[0][i : i + 4]).var((2, 3)).mean(0) for i in (0, 4, 8)]
    found = task.layout.views(update.weights.vector)["norm.running_var"]
    assert found.tolist() == pytest.approx(torch.stack(spread).mean(0).tolist(), rel=1e-4)


class FrozenNorm(nn.Module):
    prunable = "first.weight"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu().mean((2, 3)))
        return out


@pytest.mark.parametrize("lanes", [False, True])
def test_norms_that_do_not_train_keep_their_statistics(lanes: bool) -> None:
    """Whether statistics travel or not makes no difference then, to training or to evaluation."""
    data, module = blobs(10, (1, 5, 5), 3), FrozenNorm()
    assert module.norm.running_mean is not None
    assert module.norm.running_var is not None
    module.norm.running_mean.fill_(0.3)
    module.norm.running_var.fill_(2.0)

    def trained(static: bool) -> fl.Run:
        task = Task(module, [data, data], data)
        config = TrainConfig(rounds=3, per_round=2, workers=1, static_bn=static, eval_every=1)
        engine: Any = GPUEngine(task, config, "cpu") if lanes else CPUEngine(task, config)
        try:
            return drive(fl.Dense(), task, config, engine, FixedPopulation(task.clients))
        finally:
            engine.close()

    static, plain = trained(True), trained(False)
    assert static.checksum == plain.checksum
    assert static.model().state_dict()["norm.running_var"].tolist() == [2.0] * 4
    assert [x.metrics for x in static.history] == [x.metrics for x in plain.history]
    assert [x.loss for x in static.history] == [x.loss for x in plain.history]
    # A model that is sent to clients to be evaluated carries no statistics.
    task = Task(module, [data, data], data)
    given = Weights(Mask.full(task.layout), plain.weights.vector.clone())
    bare = given.with_statistics(torch.zeros_like(given.statistics))
    found = [
        Trainer(task).evaluate(w, task.evaluation[0], torch.arange(9), own) for w, own in ((bare, False), (given, True))
    ]
    assert found[0] == found[1]


class NormAndDropout(nn.Module):
    prunable = "first.weight"

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.drop(self.norm(self.first(x)).mean((2, 3))))
        return out


def test_evaluation_without_statistics_turns_dropout_off() -> None:
    data = blobs(12, (1, 5, 5), 3)
    task = Task(NormAndDropout, [data], data)
    trainer, weights = Trainer(task), Weights(Mask.full(task.layout), task.draw(0))
    before, index = torch.get_rng_state(), torch.arange(12)
    found = [trainer.evaluate(weights, task.train[0], index, statistics=False) for _ in range(3)]
    assert len(set(found)) == 1
    assert found[0] != trainer.evaluate(weights, task.train[0], index)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.filterwarnings("ignore:the test set has NaN:RuntimeWarning")
def test_non_finite_weights_or_loss_fail_the_client() -> None:
    _, trainer = linear([1.0], float("nan"))
    with pytest.raises(ClientFailed, match="not finite"):
        trained(trainer, [1], [1.0])
    _, trainer = linear([1e30], 1.0)
    with pytest.raises(ClientFailed, match="not finite"):
        trained(trainer, [1], [1e30])


def test_a_client_that_remembers_nothing_starts_from_the_recipe() -> None:
    task, trainer = linear([1.0] * 8, 0.0)
    recipe = Recipe(99, (3,))
    expected = recipe_mask(task.layout, recipe)
    update = trained(trainer, [1] * 8, [1.0] * 8, start=recipe, keep=("mask",))
    assert update.weights is not None
    assert update.weights.mask.equal(expected)


def test_a_clients_own_mask_goes_before_the_orders() -> None:
    _, trainer = linear([1.0, 1.0, 2.0], 3.0)
    own = Mask(trainer.layout, torch.tensor([False, True, True]))
    mask = Mask.full(trainer.layout)
    order = Order(Weights(mask, torch.tensor([1.0, 2.0, 3.0])), Local(lr=0.1), 1, (2, 0, 0))
    update = trainer.train(order, 0, trainer.task.train[0], own)
    # w = (0, 2, 3): output 8, error 5, gradient (5, 5, 10) under the mask
    assert vector(update) == pytest.approx([0.0, 1.5, 2.0])


def test_counts_alone_are_reported_where_they_are_asked_for() -> None:
    _, trainer = linear([1.0] * 8, 0.0)
    update = trained(trainer, [1] * 4 + [0] * 4, [1.0] * 8, report="counts")
    assert update.weights is None
    assert update.counts == (4,)


def test_the_given_weights_are_not_written_to() -> None:
    _, trainer = linear([1.0, 2.0], 3.0)
    mask = Mask.full(trainer.layout)
    start = torch.tensor([1.0, 2.0])
    for _ in range(2):
        trainer.train(Order(Weights(mask, start), Local(), 1, (2, 0, 0)), 0, trainer.task.train[0])
    assert start.tolist() == [1.0, 2.0]


# -- whole runs ---------------------------------------------------------------------------------------------------


def test_a_pretrained_model_keeps_its_weights_and_is_not_touched() -> None:
    module = DropoutNet()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    data = [blobs(9 + i, (6,), i) for i in range(4)]
    task = Task(module, data, blobs(9, (6,), 9))
    assert task.pretrained
    assert torch.equal(task.draw(1), task.draw(2))
    still = fl.simulate(fl.Dense(), task, 1, lr=0.0, workers=1)
    moved = fl.simulate(fl.Dense(), task, 1, workers=1)
    for name, value in before.items():
        assert torch.equal(still.model().state_dict()[name], value), "with nothing learned it is the model given"
        assert torch.equal(module.state_dict()[name], value)
    assert not torch.equal(moved.model().state_dict()["layers.0.weight"], before["layers.0.weight"])


def test_without_test_samples_clients_evaluate_on_held_back_samples_weighted_by_size() -> None:
    def share_of_ones(output: Tensor, target: Tensor) -> float:
        return float(target.float().mean())

    x = torch.rand(60, 6)
    clients = [(x[:10], torch.ones(10).long()), (x[10:], torch.zeros(50).long())]
    task = Task(DropoutNet, clients, metric=share_of_ones)
    assert [len(held) for held in task.evaluation] == [2, 10]
    assert [c.n for c in task.clients] == [8, 40], "what is held back is not trained on"
    run = fl.simulate(fl.Dense(), task, 1, workers=1)
    assert run.metric == pytest.approx(2 / 12)


@pytest.mark.parametrize("workers", [1, 2])
def test_run_leaves_global_random_state_unchanged(workers: int) -> None:
    task = make_task("dropout")
    np.random.seed(3)
    random.seed(3)
    torch.manual_seed(3)
    before = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index]
    fl.simulate(fl.SPDST(density=0.5, warmup_clients=2, warmup_epochs=2), task, 2, workers=workers)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[index]


@pytest.mark.parametrize("threads", [1, 2])
def test_run_restores_the_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    fl.simulate(fl.Dense(), make_task("dropout"), 1, workers=1, threads=threads)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("static", [False, True])
def test_static_batchnorm_ends_with_gathered_statistics(static: bool) -> None:
    task = make_task("norm")
    run = fl.simulate(fl.Dense(), task, 2, workers=1, static_bn=static, per_round=3)
    views = task.layout.views(run.weights.vector)
    assert float(views["layers.1.running_var"].min()) > 0
    assert torch.isfinite(run.weights.vector).all()
    if static:  # every client is asked at the end, and answers with its statistics alone
        assert run.history[-1].bytes.up > run.history[0].bytes.up
        assert run.history[-1].bytes.down > 2 * run.history[0].bytes.down


def test_failure_while_gathering_statistics_restores_batchnorm() -> None:
    trainer = Trainer(make_task("norm"))
    data = trainer.task.train[0]
    broken = type("Broken", (), {"__len__": lambda self: len(data), "fetch": lambda self, index, *a: 1 / 0})()
    with pytest.raises(ZeroDivisionError):
        trainer.train(ordered(trainer.task, report="statistics"), 0, broken)
    assert all(m.momentum is not None for m in trainer.norms)


class Jittered(torch.utils.data.Dataset[Any]):
    """Samples that are augmented with whatever generator its author is used to."""

    def __init__(self, kind: str, client: int) -> None:
        self.kind, (self.x, self.y) = kind, blobs(9, (6,), client)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        draw = {"random": random.random, "numpy": np.random.rand, "torch": lambda: torch.rand(()).item()}[self.kind]
        return self.x[i] + draw(), self.y[i]


@pytest.mark.parametrize("kind", ["random", "numpy", "torch"])
def test_random_data_sets_do_not_depend_on_the_number_of_workers(kind: str) -> None:
    task = Task(DropoutNet, [Jittered(kind, i) for i in range(4)])
    runs = [fl.simulate(small("pdst"), task, 2, per_round=4, batch=4, workers=workers) for workers in (1, 2)]
    assert runs[0].checksum == runs[1].checksum
    assert [line.metrics for line in runs[0].history] == [line.metrics for line in runs[1].history]


def test_a_loss_may_have_one_element() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target).reshape(1)

    task = make_task("dropout")
    plain, wrapped = (
        task,
        Task(task._model, [blobs(11 + i, (6,), 100 + i) for i in range(8)], blobs(30, (6,), 7), loss=loss),
    )
    runs = [fl.simulate(small("pdst"), t, 1, per_round=4, batch=4, workers=1) for t in (plain, wrapped)]
    assert runs[0].checksum == runs[1].checksum
