"""The GPU engine against the CPU engine: always on the CPU, and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.aggregate import average
from flashfl.core.engine import FixedPopulation
from flashfl.core.errors import ConfigError
from flashfl.core.exchange import Local, Order
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe, Weights
from flashfl.core.parts import part
from flashfl.engine.gpu import GPUEngine, batched
from flashfl.engine.gpu.crew import faster
from flashfl.engine.gpu.stack import Stack
from flashfl.engine.work import Work
from flashfl.run.config import TrainConfig
from flashfl.run.simulate import drive
from flashfl.sparsity import PruneRegrow, recipe_mask, top_mask
from tests.conftest import blobs, make_task
from tests.test_every_method import VARIANTS, small

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[gpu, pytest.mark.gpu])])
CONFIG = TrainConfig(device="cpu", rounds=3, per_round=4, batch=4, eval_every=1, workers=1)


def run_lanes(method: Any, task: Any, device: str, config: TrainConfig = CONFIG, lanes: int = 3, **more: Any) -> fl.Run:
    engine = GPUEngine(task, replace(config, precision="fp32", lanes=lanes, **more), device)
    try:
        return drive(method, task, config, engine, FixedPopulation(task.clients))
    finally:
        engine.close()


def with_nan(task: fl.Task, client: int) -> fl.Task:
    """One of the clients has nothing but NaN."""
    data: Any = task.train[client]
    task.train[client] = fl.data.sources.Arrays((torch.full_like(data.inputs[0], float("nan")),), data.target)
    return task


@devices
@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=["-".join([n, *map(str, c)]) for n, c in VARIANTS])
def test_lanes_agree_with_the_cpu_engine(name: str, changes: dict[str, Any], device: str) -> None:
    """Frozen masks: weights within 1e-4. Moving ones: at most 0.5 % of mask bits, weights where both are active."""
    task = make_task("norm")
    method = small(name, **changes)
    ours, theirs = run_lanes(method, task, device), fl.simulate(method, task, train=CONFIG)
    a, b = ours.weights.to("cpu"), theirs.weights
    different = int((a.mask.bits != b.mask.bits).sum())
    assert different <= 0.005 * len(b.mask.bits)
    both = torch.ones(task.layout.size, dtype=torch.bool)
    both[: task.layout.prunable_size] = a.mask.bits & b.mask.bits
    x, y = a.vector[both], b.vector[both]
    assert float((x - y).norm() / y.norm()) < 1e-4
    assert [line.cohort for line in ours.history] == [line.cohort for line in theirs.history]
    if different == 0:
        assert ours.traffic == theirs.traffic, "counted bytes are the encoded ones"
        for view, evaluation in theirs.history[-1].metrics.items():
            assert abs(ours.history[-1].metrics[view].loss - evaluation.loss) < 1e-3


@devices
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("name", ["nst", "jmwst", "spdst", "hetero-jmwst"])
def test_round_does_not_write_to_the_state_it_starts_from(
    name: str, lanes: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With three lanes the last of four clients is alone in its chunk; that must not make its weights the server's."""
    real, task = GPUEngine.train, make_task("norm")

    def train(engine: GPUEngine, s: Any, orders: Any) -> Any:
        given = list(orders)
        models = [s.weights, *(order.weights for _, order in given)]
        before = [(model.vector.clone(), model.mask.bits.clone()) for model in models]
        outcome = real(engine, s, given)
        for model, (vector, bits) in zip(models, before, strict=True):
            assert torch.equal(model.vector, vector)
            assert torch.equal(model.mask.bits, bits)
        return outcome

    monkeypatch.setattr(GPUEngine, "train", train)
    ours, theirs = run_lanes(small(name), task, device, lanes=lanes), fl.simulate(small(name), task, train=CONFIG)
    a, b = ours.weights.to("cpu"), theirs.weights
    assert int((a.mask.bits != b.mask.bits).sum()) <= 0.005 * len(b.mask.bits)


@devices
def test_momentum_weight_decay_and_prox_agree_with_the_cpu_engine(device: str) -> None:
    task = make_task("norm")
    config = TrainConfig(
        device="cpu", rounds=3, per_round=4, batch=4, workers=1, momentum=0.9, weight_decay=0.01, prox=0.1, epochs=2
    )
    a = run_lanes(small("jmwst"), task, device, config).weights.to("cpu")
    b = fl.simulate(small("jmwst"), task, train=config).weights
    assert float((a.vector - b.vector).norm() / b.vector.norm()) < 1e-3


class Plain(torch.nn.Module):
    """A net whose clients can be batched: neither BatchNorm nor dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 6, 3)
        self.hidden, self.head = torch.nn.Linear(54, 12), torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(torch.relu(self.conv(x)).flatten(1))))


@devices
@pytest.mark.parametrize("name", list(fl.METHODS))
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5, "weight_decay": 0.01, "prox": 0.1, "epochs": 2}])
def test_batched_agrees_with_the_cpu_engine(name: str, extra: dict[str, Any], device: str) -> None:
    task = fl.Task(Plain, [blobs(11 + i, (1, 5, 5), 100 + i) for i in range(8)], blobs(30, (1, 5, 5), 7))
    config = TrainConfig(device="cpu", rounds=3, per_round=4, batch=4, eval_every=1, workers=1, **extra)
    if name in ("sparsyfed", "zerofl"):
        with pytest.raises(ConfigError, match="needs the inputs of a whole batch"):
            run_lanes(small(name), task, device, config, lanes=3, crew="batched")
        return
    ours = run_lanes(small(name), task, device, config, lanes=3, crew="batched")
    theirs = fl.simulate(small(name), task, train=config)
    a, b = ours.weights.to("cpu"), theirs.weights
    assert int((a.mask.bits != b.mask.bits).sum()) <= 0.005 * len(b.mask.bits)
    both = torch.ones(task.layout.size, dtype=torch.bool)
    both[: task.layout.prunable_size] = a.mask.bits & b.mask.bits
    assert float((a.vector[both] - b.vector[both]).norm() / b.vector[both].norm()) < 1e-4


@devices
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(3, 1, 0), ((3, 2), (2, 1), (1, 0)), (5, 2, 2), (1, 3, "valid")]
)
def test_convolution_as_matrix_product_is_the_same(kernel: Any, stride: Any, padding: Any, device: str) -> None:
    conv = torch.nn.Conv2d(3, 4, kernel, stride, padding).to(device)
    x = torch.rand(2, 3, 8, 9, device=device)
    torch.testing.assert_close(batched._as_product(conv, x), conv(x), rtol=1e-4, atol=1e-4)


@devices
def test_batched_matrix_products_step_like_batched_convolutions(device: str) -> None:
    task = fl.Task(Plain, [blobs(8, (1, 5, 5), 100 + i) for i in range(3)], blobs(30, (1, 5, 5), 7))
    clients, found = list(zip(task.clients, (8, 8, 5), strict=True)), []
    for products in (False, True):
        stack = Stack(task.layout, 3, torch.device(device), False)
        stack.values.fill_(0.1)
        stack.masks.fill_(True)
        model = batched.Batched(task, stack, [data.to(device) for data in task.train], 8, products)
        order = Order(Weights.dense(task.layout, torch.zeros(task.layout.size)), Local(batch=4), 1, (2, 0, 0))
        sent = order.weights
        works = [Work(order.local, i, n, 2, c, order, sent.mask, (), sent) for i, (c, n) in enumerate(clients)]
        model.begin(works)
        model.advance(works, [0] * 3, [1] * 3)
        found.append(stack.values.clone())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], torch.full_like(found[0], 0.1))


@devices
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, from its compiler
@pytest.mark.filterwarnings("ignore:TensorFloat32:UserWarning")
def test_compiled_lanes_agree_with_plain_lanes(device: str) -> None:
    task = make_task("norm")
    plain, compiled = (run_lanes(small("jmwst"), task, device, compile=each) for each in (False, True))
    assert int((plain.weights.mask.bits != compiled.weights.mask.bits).sum()) == 0
    x, y = plain.weights.vector, compiled.weights.vector
    assert float((x - y).norm() / y.norm()) < 1e-4


@devices
def test_dropout_does_not_depend_on_the_number_of_lanes(device: str) -> None:
    task = make_task("dropout")
    one, many = (run_lanes(small("spdst"), task, device, lanes=n) for n in (1, 4))
    x, y = one.weights.vector, many.weights.vector
    assert float((x - y).norm() / y.norm()) < 1e-5


@devices
def test_client_with_non_finite_weights_is_dropped(device: str) -> None:
    task = with_nan(make_task("norm"), 2)
    config = TrainConfig(device="cpu", rounds=3, per_round=8, batch=4, workers=1)
    done = run_lanes(small("spdst", warmup_clients=8), task, device, config, lanes=8)
    assert all(2 in line.failures for line in done.history)
    assert torch.isfinite(done.weights.vector).all()


@devices
@pytest.mark.parametrize(("values", "close"), [("fp16", 1e-3), ("bf16", 1e-2), ("int8", 5e-2)])
def test_lossy_values_are_rounded_as_on_the_cpu_engine(values: Any, close: float, device: str) -> None:
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=3, per_round=4, batch=4, workers=1, values=values)
    a = run_lanes(small("spdst"), task, device, config, values=values)
    b = fl.simulate(small("spdst"), task, train=config)
    plain = fl.simulate(small("spdst"), task, train=CONFIG)
    x, y, z = a.weights.to("cpu").vector, b.weights.vector, plain.weights.vector
    assert float((x - y).norm() / y.norm()) < close
    assert not torch.equal(y, z), "rounding must be real"
    assert a.traffic == b.traffic
    assert a.traffic.up < plain.traffic.up


@devices
def test_static_batch_norm_agrees_with_the_cpu_engine(device: str) -> None:
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=3, per_round=4, batch=4, workers=1, static_bn=True)
    a = run_lanes(small("spdst"), task, device, config)
    b = fl.simulate(small("spdst"), task, train=config)
    assert float((a.weights.to("cpu").vector - b.weights.vector).norm() / b.weights.vector.norm()) < 1e-4
    assert a.traffic == b.traffic


@gpu
@pytest.mark.gpu
def test_operations_give_identical_masks_on_both_devices() -> None:
    layout = Layout.build(
        {"prunable": [("a", (64, 32, 3, 3)), ("b", (3, 7)), ("c", (100, 301))], "dense": [("d", (5,))]}
    )
    generator = torch.Generator().manual_seed(1)
    for trial in range(20):
        budgets = [int(torch.randint(0, k + 1, (1,), generator=generator)) for k in layout.sizes]
        vector = torch.randn(layout.size, generator=generator)
        vector[torch.rand(layout.size, generator=generator) < 0.3] = 0.0  # ties
        recipe = Recipe(trial, tuple(budgets))
        here, there = recipe_mask(layout, recipe), recipe_mask(layout, recipe, "cuda")
        assert torch.equal(here.bits, there.bits.cpu())
        top = top_mask(layout, vector.cuda(), budgets)
        assert torch.equal(top_mask(layout, vector, budgets).bits, top.bits.cpu())
        for growth in ("random", "gradient"):
            scores = torch.randn(2, layout.prunable_size, generator=generator)
            stack = torch.stack([Weights.masked(here, vector).vector] * 2)
            bits = torch.stack([here.bits] * 2)
            results = []
            for device in ("cpu", "cuda"):
                v, m = stack.to(device).clone(), bits.to(device).clone()
                PruneRegrow(growth=growth).move(  # type: ignore[arg-type]
                    layout, v, m, scores.to(device), Fraction(1, 4), [trial, trial + 1], [here.counts] * 2
                )
                results.append((v.cpu(), m.cpu()))
            assert torch.equal(results[0][0], results[1][0])
            assert torch.equal(results[0][1], results[1][1])


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", list(fl.METHODS))
def test_resume_is_bit_identical_when_deterministic(name: str, tmp_path: Any) -> None:
    task = make_task("norm")
    settings: dict[str, Any] = {
        "per_round": 4, "batch": 4, "device": "cuda", "deterministic": True, "checkpoint_every": 1
    }  # fmt: skip
    whole = fl.simulate(small(name), task, 3, **settings)
    seen: list[int] = []

    def stop(state: Any, line: Any) -> None:
        seen.append(1)
        if len(seen) == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fl.simulate(small(name), task, 3, folder=tmp_path, watch=stop, **settings)
    again = fl.simulate(small(name), task, 3, folder=tmp_path, resume=True, **settings)
    assert again.checksum == whole.checksum
    assert again.traffic == whole.traffic


# -- clients that must not affect each other --------------------------------------------------------------------


def plain_task(**more: Any) -> fl.Task:
    return fl.Task(Plain, [blobs(5 + 3 * i, (1, 5, 5), 100 + i) for i in range(6)], blobs(30, (1, 5, 5), 7), **more)


def differing(ours: fl.Run, theirs: fl.Run) -> int:
    return int((ours.weights.to("cpu").mask.bits != theirs.weights.mask.bits).sum())


@devices
@pytest.mark.parametrize("growth", ["random", "gradient", "momentum"])
@pytest.mark.parametrize("crew", ["batched", "lanes"])
def test_clients_of_unequal_length_grow_by_their_own_last_gradient(growth: Any, crew: str, device: str) -> None:
    task, method = plain_task(), fl.JMWST(0.3, warmup_clients=0, adapt=PruneRegrow(0.5, growth))
    config = TrainConfig(device="cpu", rounds=2, per_round=6, batch=4, workers=1)
    ours = run_lanes(method, task, device, config, lanes=6, crew=crew)
    assert differing(ours, fl.simulate(method, task, train=config)) <= 1


@devices
def test_loss_that_is_not_a_mean_over_samples_needs_lanes(device: str) -> None:
    weight = torch.tensor([0.1, 1.0, 5.0], device=device)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target, weight.to(output.device))

    task, config = plain_task(loss=loss), TrainConfig(device="cpu", rounds=2, per_round=6, batch=4, workers=1)
    with pytest.raises(ConfigError, match="the loss of a batch is not the mean of its samples' losses"):
        run_lanes(small("pdst"), task, device, config, crew="batched")
    a = run_lanes(small("pdst"), task, device, config, crew="auto").weights.to("cpu").vector
    b = fl.simulate(small("pdst"), task, train=config).weights.vector
    assert float((a - b).norm() / b.norm()) < 1e-4


@devices
@pytest.mark.parametrize("crew", ["batched", "lanes"])
def test_nan_of_one_client_does_not_reach_the_next_in_its_row(crew: str, device: str) -> None:
    data = [blobs(9, (1, 5, 5), 100 + i) for i in range(4)]
    data[0] = (torch.full_like(data[0][0], float("nan")), data[0][1])
    data[1] = (data[1][0][:3], data[1][1][:3])  # fewer: what is staged behind them is the first one's
    task = fl.Task(Plain, data, blobs(30, (1, 5, 5), 7))
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1)
    done = run_lanes(small("pdst"), task, device, config, lanes=1, crew=crew)
    assert [list(line.failures) for line in done.history] == [[0], [0]]


@pytest.mark.filterwarnings("ignore:only 42%")
@devices
def test_client_with_one_sample_is_dropped_if_batch_norm_cannot_train_on_it(device: str) -> None:
    def net() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 3))

    task = fl.Task(net, [blobs(n, (6,), i) for i, n in enumerate((9, 1, 8, 7))], blobs(20, (6,), 9))
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1)
    ours, theirs = run_lanes(small("pdst"), task, device, config), fl.simulate(small("pdst"), task, train=config)
    assert [line.failures for line in ours.history] == [line.failures for line in theirs.history]
    assert ours.traffic == theirs.traffic


@devices
def test_client_that_cannot_gather_statistics_does_not_end_the_run(device: str) -> None:
    task = with_nan(make_task("norm"), 2)
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1, static_bn=True)
    assert torch.isfinite(run_lanes(small("pdst"), task, device, config).weights.vector).all()


@devices
@pytest.mark.parametrize("name", ["nst", "jmwst", "hetero-jmwst"])
def test_static_batch_norm_of_moving_masks_agrees(name: str, device: str) -> None:
    """Statistics are gathered under the server's model (or its part for a density), whatever mask a client keeps."""
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=3, per_round=4, batch=4, workers=1, static_bn=True)
    ours, theirs = run_lanes(small(name), task, device, config), fl.simulate(small(name), task, train=config)
    mine, other = ours.history[-1].metrics, theirs.history[-1].metrics
    assert other.keys() == mine.keys() == {"after", *(["density 0.2", "density 0.3"] if "hetero" in name else [])}
    assert all(abs(mine[view].loss - other[view].loss) < 1e-3 for view in other)


@devices
@pytest.mark.parametrize("lanes", [8, 5, 2, 1])
def test_simulated_client_far_from_the_others_counts(lanes: int, device: str) -> None:
    data = [blobs(12, (1, 5, 5), 100 + i) for i in range(8)]
    data[2] = (data[2][0] * 50, data[2][1])
    task = fl.Task(Plain, data, blobs(30, (1, 5, 5), 7))
    config = TrainConfig(device="cpu", rounds=1, per_round=8, batch=12, workers=1, lr=0.01)
    ours = run_lanes(fl.PDST(0.5), task, device, config, lanes=lanes)
    theirs = fl.simulate(fl.PDST(0.5), task, train=config)
    assert ours.history[0].failures == theirs.history[0].failures == {}
    assert ours.traffic == theirs.traffic
    torch.testing.assert_close(ours.weights.vector.cpu(), theirs.weights.vector, rtol=1e-4, atol=1e-5)


def test_kept_mask_does_not_keep_memory_of_other_rows() -> None:
    task = make_task("norm")
    engine = GPUEngine(task, replace(CONFIG, lanes=4), "cpu")
    drive(small("nst"), task, CONFIG, engine, FixedPopulation(task.clients))
    kept = [engine.memory.remembered(client.id) for client in task.clients]
    assert any(kept)
    for own in filter(None, kept):
        assert own.bits.untyped_storage().nbytes() == task.layout.prunable_size


def test_crew_that_fails_is_skipped() -> None:
    class Failing:
        device = torch.device("cpu")

        def prepare(self, *_: Any) -> None:
            raise RuntimeError("cannot be mapped")

    class Working:
        device = torch.device("cpu")
        prepare = begin = advance = lambda *_: None

    works = Working()
    with pytest.warns(RuntimeWarning, match="training with crew = 'failing' failed"):
        assert faster([Failing(), works], []) is works
    with pytest.raises(RuntimeError):
        faster([Failing()], [])


def test_subclasses_of_convolutions_are_not_turned_into_products() -> None:
    class Standardised(torch.nn.Conv2d):
        pass

    assert batched.convolutions(torch.nn.Sequential(torch.nn.Conv2d(1, 1, 3)))
    assert not batched.convolutions(torch.nn.Sequential(Standardised(1, 1, 3)))


@devices
def test_statistics_are_gathered_under_rounded_weights(device: str) -> None:
    task = make_task("norm")
    config = TrainConfig(device="cpu", rounds=2, per_round=4, batch=4, workers=1, static_bn=True, values="int8")
    ours = run_lanes(small("pdst"), task, device, config, values="int8")
    theirs = fl.simulate(small("pdst"), task, train=config)
    a, b = ours.weights.to("cpu").statistics, theirs.weights.statistics
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# -- models, losses and rules that behave in ways no layer's type shows --------------------------------------------


def agree(method: Any, task: fl.Task, device: str, crew: str = "auto", **settings: Any) -> tuple[fl.Run, fl.Run]:
    """Run on both engines and check that masks, weights, bytes and dropped clients are the same."""
    config = TrainConfig(device="cpu", rounds=3, batch=4, eval_every=1, workers=1, **{"per_round": 6, **settings})
    ours = run_lanes(method, task, device, config, lanes=2, crew=crew)
    theirs = fl.simulate(method, task, train=config)
    assert differing(ours, theirs) == 0
    a, b = ours.weights.to("cpu").vector, theirs.weights.vector
    assert float((a - b).norm() / b.norm()) < 1e-4
    assert ours.traffic == theirs.traffic
    assert [line.failures for line in ours.history] == [line.failures for line in theirs.history]
    return ours, theirs


class OwnMean(Plain):
    """BatchNorm by hand: a sample's output depends on the others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class Counting(Plain):
    """Counts its calls in a buffer that it puts another tensor in the place of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return super().forward(x) / (1 + 0.1 * self.calls)


class Rarely(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(20, 6, sparse=True)
        self.hidden, self.head = torch.nn.Linear(6, 12), torch.nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(self.words(x).mean(1))))


@devices
@pytest.mark.parametrize("model", [OwnMean, Counting])
@pytest.mark.filterwarnings("ignore:training changes the buffers", "ignore:the training step cannot be captured")
@pytest.mark.filterwarnings("ignore:evaluation cannot be captured")
def test_model_that_mixes_samples_needs_lanes(model: Any, device: str) -> None:
    task = fl.Task(model, [blobs(5 + 3 * i, (1, 5, 5), 100 + i) for i in range(6)], blobs(30, (1, 5, 5), 7))
    with pytest.raises(ConfigError, match="output for one sample changes with the other samples"):
        run_lanes(small("pdst"), task, device, crew="batched")
    agree(small("jmwst", warmup_clients=0), task, device)


@devices
def test_ignored_label_that_is_rare_needs_lanes(device: str) -> None:
    data = [blobs(12, (1, 5, 5), 100 + i) for i in range(6)]
    for x, y in data[:3]:
        y[9] = -100  # what cross-entropy leaves out of its mean
        assert len(x) == len(y)
    task = fl.Task(Plain, data, blobs(30, (1, 5, 5), 7))
    with pytest.raises(ConfigError, match="not the mean of its samples' losses"):
        run_lanes(small("pdst"), task, device, crew="batched")
    agree(small("pdst"), task, device)


@devices
@pytest.mark.filterwarnings("ignore:only 30%", "ignore:training with crew = .* failed")
def test_sparse_gradients_agree_with_the_cpu_engine(device: str) -> None:
    data = [((torch.arange(40 + 5 * i).view(-1, 5) * 7 + i) % 20, torch.arange(8 + i) % 3) for i in range(6)]
    agree(small("pdst"), fl.Task(Rarely, data, data[0], prunable="hidden.weight"), device)


@devices
def test_client_with_negative_running_variance_is_dropped(device: str) -> None:
    class Eager(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.norm = torch.nn.Linear(25, 12), torch.nn.BatchNorm1d(12, momentum=1.9)
            self.head = torch.nn.Linear(12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(torch.relu(self.norm(self.hidden(x.flatten(1)))))

    data = [blobs(12, (1, 5, 5), 100 + i) for i in range(6)]
    data = [(x * (100 if i % 2 else 0.01), y) for i, (x, y) in enumerate(data)]  # 1 - 1.9 + 1.9 v, v large or small
    task = fl.Task(Eager, data, blobs(30, (1, 5, 5), 7))
    config = TrainConfig(device="cpu", rounds=1, per_round=6, batch=16, workers=1)
    ours, theirs = run_lanes(small("pdst"), task, device, config), fl.simulate(small("pdst"), task, train=config)
    dropped = [list(line.failures) for line in ours.history]
    assert dropped == [list(line.failures) for line in theirs.history]
    assert dropped == [[0, 2, 4]]
    assert all("variance is below zero" in why for why in ours.history[0].failures.values())


@devices
@pytest.mark.parametrize("static", [False, True])
def test_evaluation_uses_the_same_batches_as_the_cpu_engine(static: bool, device: str) -> None:
    weight = torch.tensor([0.1, 1.0, 5.0], device=device)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output, target, weight.to(output.device))

    task = make_task("norm")
    x, y = blobs(600, (1, 5, 5), 7)
    order = y.sort(stable=True).indices
    task = fl.Task(task._model, [blobs(12, (1, 5, 5), 100 + i) for i in range(6)], (x[order], y[order]), loss=loss)
    ours, theirs = agree(small("pdst"), task, device, static_bn=static)
    for a, b in zip(ours.history, theirs.history, strict=True):
        for view in b.metrics:
            assert a.metrics[view].loss == pytest.approx(b.metrics[view].loss, rel=1e-3)


@part
@dataclass(frozen=True)
class EveryOther(PruneRegrow):
    """Moves every second step, at a rate that hangs on how many a client has; one moment never comes."""

    def moments(self, epochs: int, batches: int) -> dict[int, Fraction]:
        return {0: Fraction(1, 2)} | {step: Fraction(1, 2 + batches) for step in range(2, epochs * batches + 1, 2)}


@devices
@pytest.mark.parametrize("crew", ["batched", "lanes"])
@pytest.mark.parametrize("first", [5, 26])
def test_masks_move_at_each_clients_own_steps(first: int, crew: str, device: str) -> None:
    sizes = [first, 5, 26, 9, 14, 23]
    task = fl.Task(Plain, [blobs(n, (1, 5, 5), 100 + i) for i, n in enumerate(sizes)], blobs(30, (1, 5, 5), 7))
    agree(fl.JMWST(0.3, warmup_clients=0, adapt=EveryOther(0.5)), task, device, crew, epochs=2)


@part
@dataclass(frozen=True)
class Untidy(PruneRegrow):
    """Moves the mask, but leaves the weights that it drops as they are."""

    def move(self, layout: Layout, vectors: torch.Tensor, *others: Any) -> None:
        super().move(layout, vectors.clone(), *others)


@devices
@pytest.mark.parametrize("crew", ["batched", "lanes"])
@pytest.mark.parametrize("rule", [PruneRegrow(0.5), Untidy(0.5)])
def test_own_masks_that_move_under_a_proximal_term_agree(rule: Any, crew: str, device: str) -> None:
    agree(fl.NST(0.3, adapt=rule), plain_task(), device, crew, epochs=2, prox=0.5, momentum=0.5)


@gpu
@pytest.mark.gpu
def test_close_restores_global_settings_of_torch() -> None:
    def settings() -> tuple[Any, ...]:
        cudnn = torch.backends.cudnn
        tf32 = torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32
        return *tf32, cudnn.benchmark, cudnn.deterministic, torch.cuda.current_device()

    for deterministic in (False, True):
        for precision in ("fp32", "tf32", "bf16"):
            before = settings()
            GPUEngine(make_task("norm"), TrainConfig(precision=precision, deterministic=deterministic)).close()
            assert settings() == before


@dataclass(frozen=True)
class OwnParts(fl.PDST):
    """Each client has a random mask of its own, which nobody moves; the server keeps everything."""

    keep: tuple[str, ...] = ()

    def init(self, plan: Any) -> Any:
        s = super().init(plan)
        return replace(s, weights=Weights(Mask.full(s.layout), s.weights.vector))

    def order(self, s: Any, client: Any) -> Any:
        start = Recipe(client.id, tuple(size // 4 for size in s.layout.sizes))
        return s.order(client, self.local(s, start=start, keep=self.keep))

    def aggregate(self, s: Any, sums: Any) -> Any:
        return s.next(Weights(s.mask, average("wfa", sums)))


@pytest.mark.parametrize("keep", [(), ("mask",)])
def test_recipe_masks_are_counted_as_they_travel(keep: tuple[str, ...]) -> None:
    agree(OwnParts(0.3, keep=keep), make_task("norm"), "cpu")
