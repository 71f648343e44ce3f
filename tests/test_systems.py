"""What each system of other papers does to a model of eight weights: the exact masks, votes and scores."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import flashfl as fl
from flashfl.aggregate import add
from flashfl.core.client import Clients, Part, Place, Rows
from flashfl.core.errors import ConfigError
from flashfl.core.exchange import Extra, Local, Update
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights
from flashfl.engine.pipeline import close_clients, open_clients
from flashfl.methods import METHODS
from flashfl.methods.fedpm import Scores, frozen
from flashfl.methods.fedrts import FedRTS, Votes
from flashfl.methods.fjord import OrderedDropout
from flashfl.methods.heterofl import Slice
from flashfl.methods.lotteryfl import Ticket
from flashfl.methods.prunefl import SquaredGradients, best_per_time
from flashfl.methods.scaffold import ControlVariate
from flashfl.methods.sparsyfed import LargestWeights, Power, powered
from flashfl.methods.ssfl import SALIENCY, Saliency
from flashfl.methods.zerofl import Largest, Swat
from flashfl.models import build_model
from flashfl.sparsity import LayerRegrow
from flashfl.sparsity.width import belonging, width_mask
from tests.conftest import blobs, make_task

EIGHT = Layout.build({"prunable": [("w", (2, 4))], "dense": [("b", (1,))]})
TRAINED = torch.tensor([[0.5, -4.0, 1.0, 0.1, 3.0, -0.2, 2.0, 0.0, 7.0]])


def bits(text: str) -> Tensor:
    return torch.tensor([c == "1" for c in text])


def client(*parts: Part, start: Tensor | None = None, mask: str = "11111111", **more: Any) -> tuple[Local, Clients]:
    local = Local(lr=0.5, parts=parts)
    begin = torch.zeros(1, 9) if start is None else start
    asked = (lambda row: more.get("metric", 0.9), lambda key: torch.full((9,), 0.25), lambda row: more.get("classes"))
    given, notes = more.get("given", {}), more.get("notes", {})
    return local, open_clients(EIGHT, local, [1], [4], begin, bits(mask)[None], [given], [notes], *asked)


def finished(part: Part, trained: Tensor = TRAINED, **more: Any) -> tuple[Clients, Any]:
    local, c = client(part, **more)
    c.vectors = trained.clone()
    return c, close_clients(local, c)


def rows(weights: Tensor, layout: Layout = EIGHT, state: dict[str, Tensor] | None = None, count: int = 0) -> Rows:
    one = torch.tensor([[count]])
    key = torch.tensor([[3, 4]], dtype=torch.int32)
    return Rows(Place.logical(layout), weights, key, one, one + 9, torch.tensor([[0.5]]), state or {})


def state(name: str, vector: Tensor, mask: str = "11111111", rounds: int = 10, **fields: Any) -> tuple[Any, fl.State]:
    """A method on the eight weights, and its state with this model."""
    plan = fl.Plan(EIGHT, lambda key: torch.arange(1.0, 10.0), 1, rounds, 4, 2)
    method = METHODS[name](**fields)
    first = method.init(plan)
    weights = Weights.masked(Mask(EIGHT, bits(mask)), vector)
    return method, fl.State(plan, weights, first.phase, extra=first.extra)


def sums(*updates: tuple[int, str, list[float]], **extra: list[Any]) -> fl.Sums:
    """What some updates add up to: (n, mask, vector)."""
    total = fl.Sums(EIGHT, counts=[0])
    for i, (n, mask, vector) in enumerate(updates):
        weights = Weights.masked(Mask(EIGHT, bits(mask)), torch.tensor(vector))
        more = {name: Extra("dense", torch.as_tensor(values[i]).float()) for name, values in extra.items()}
        update = Update.of(i, n, weights, weights.mask.counts)
        add(total, Update(i, n, update.mask, update.values, update.counts, {}, more))
    return total


def test_feddst_regrows_in_the_same_layer_by_gradient() -> None:
    rule = LayerRegrow(0.5)
    vectors, masks = TRAINED.clone(), bits("11110000")[None].clone()
    vectors[0, 4:8] = 0
    scores = torch.tensor([[0.0, 0, 0, 0, 1.0, -9.0, 0.5, 3.0]])
    assert rule.moments(10, 4) == {20: Fraction(1, 2)}
    assert rule.moments(1, 5) == {3: Fraction(1, 2)}
    rule.move(EIGHT, vectors, masks, scores, Fraction(1, 2), [1], [(4,)])
    assert torch.equal(masks[0], bits("01100101")), "0.5 and 0.1 are the smallest; 5 and 7 have the largest gradients"


def test_feddst_averages_over_holders_and_prunes_back() -> None:
    method, s = state("feddst", torch.ones(9), "11110000", density=0.5)
    first = (1, "11110000", [1.0, 2, 3, 4, 0, 0, 0, 0, 1])
    second = (3, "00111100", [0.0, 0, 1, 0, 9, -8, 0, 0, 1])
    after = method.aggregate(s, sums(first, second))
    assert after.before.vector[:8].tolist() == [1, 2, 1.5, 1, 9, -8, 0, 0]
    assert torch.equal(after.mask.bits, bits("01101100"))


def test_fedspa_keeps_weights_that_nobody_held() -> None:
    method, s = state("fedspa", torch.full((9,), 5.0), density=0.5)
    after = method.aggregate(s, sums((1, "11000000", [1.0] * 9), (1, "01100000", [3.0] * 9)))
    assert after.weights.vector.tolist() == [1, 2, 3, 5, 5, 5, 5, 5, 2]
    work = method.work(s, fl.Client(0, 5)), method.work(s, fl.Client(1, 5))
    assert work[0].start.key != work[1].start.key
    assert work[0].start.budgets == work[1].start.budgets


def test_ssfl_scores_the_product_of_gradient_and_weight() -> None:
    local, c = client(Saliency())
    r = rows(TRAINED, state=c.state)
    Saliency().before(r, torch.tensor([[2.0, 0.5, -3.0, 1.0, 0.0, 1.0, 1.0, 8.0, 9.0]]))
    done = close_clients(local, c)
    assert done.extras[0]["saliency"].value.tolist() == pytest.approx([1.0, 2.0, 3.0, 0.1, 0, 0.2, 2.0, 0])
    method, s = state("ssfl", torch.arange(1.0, 10.0), density=0.25)
    assert s.phase == SALIENCY
    zero = [0.0] * 9
    scores = [[4.0, 0, 0, 0, 0, 0, 0, 0], [1.0, 2, 1, 0, 0, 0, 0, 3]]
    after = method.aggregate(s, sums((1, "11111111", zero), (3, "11111111", zero), saliency=scores))
    assert torch.equal(after.mask.bits, bits("10000001")), "7, 6, 3 and 9: the two largest sums of n * score"


def test_scaffold_corrects_gradients_and_updates_its_control_variate() -> None:
    given = {"control": Extra("dense", torch.full((9,), 1.0))}
    notes = {"control": Extra("dense", torch.full((9,), 0.25))}
    local, c = client(ControlVariate(), given=given, notes=notes)
    gradient = torch.zeros(1, 9)
    ControlVariate().before(rows(TRAINED, state=c.state), gradient)
    assert gradient.tolist() == [[0.75] * 9]
    c.vectors = torch.full((1, 9), -2.0)  # 4 steps at 0.5: a mean gradient of 1
    done = close_clients(local, c)
    assert done.notes[0]["control"].value.tolist() == [0.25] * 9, "c_i - c + (0 + 2) / (4 * 0.5)"
    assert done.extras[0]["control"].value.tolist() == [0.0] * 9
    local, c = client(ControlVariate(0.2), given=given, notes=notes)
    c.vectors = torch.full((1, 9), -1.4)  # steps at 0.5 * (1, 0.8, 0.6, 0.4), so again a mean gradient of 1
    assert close_clients(local, c).notes[0]["control"].value.tolist() == pytest.approx([0.25] * 9)
    method, s = state("scaffold", torch.zeros(9))
    after = method.aggregate(s, sums((1, "11111111", [1.0] * 9), control=[[2.0] * 9]))
    assert after.extra["control"].tolist() == [0.5] * 9, "one of four clients"


def test_sparsyfed_sees_powers_and_sends_the_largest() -> None:
    part = Power(2.0)
    seen = part.view(rows(TRAINED), TRAINED)
    assert seen.tolist() == [pytest.approx([0.25, -16, 1, 0.01, 9, -0.04, 4, 0, 7])]
    gradient = torch.ones(1, 9)
    part.backward(rows(TRAINED), gradient)
    assert gradient.tolist() == [pytest.approx([1, 8, 2, 0.2, 6, 0.4, 4, 0, 1])]
    assert float(part.inputs(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))) == 0.5
    c, done = finished(LargestWeights(0.375))
    assert done.counts == [(3,)]
    assert torch.equal(c.masks[0], bits("01001010"))
    assert powered(TRAINED[0], 8, 1.0).equal(TRAINED[0])


def test_zerofl_sees_the_largest_weights_and_uploads_more() -> None:
    assert Swat(0.25).view(rows(TRAINED), TRAINED).tolist() == [[0, -4, 0, 0, 3, 0, 0, 0, 7]]
    assert float(Swat(0.25).inputs(TRAINED)) == 0.25
    c, _ = finished(Largest(0.5))
    assert torch.equal(c.masks[0], bits("01101010"))
    assert c.vectors[0].tolist() == [0, -4, 1, 0, 3, 0, 2, 0, 7]
    start = torch.tensor([[0.0, -4, 0, 0, 0, 0, 0, 0, 6]])
    c, _ = finished(Largest(0.25, "largest changes"), start=start)
    assert c.vectors[0].tolist() == [0, 0, 0, 0, 3, 0, 2, 0, 1]
    c, _ = finished(Largest(0.25, "changes of the largest weights"), start=start)
    assert torch.equal(c.masks[0], bits("01001000"))
    assert c.vectors[0].tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 1]


def test_every_output_keeps_a_weight_in_zerofl() -> None:
    uneven = torch.tensor([[5.0, -4.0, 3.0, 6.0, 0.1, -0.2, 0.1, 0.0, 7.0]])
    assert Swat(0.25).view(rows(uneven), uneven).tolist() == [[5, 0, 0, 6, 0, pytest.approx(-0.2), 0, 0, 7]]
    method, s = state("zerofl", uneven[0], density=0.25)
    assert method.views(s)["after"].vector.tolist() == [5, 0, 0, 6, 0, pytest.approx(-0.2), 0, 0, 7]


def test_no_layer_runs_away_in_zerofl() -> None:
    """BatchNorm enlarges the gradient of an output without weights several hundred times."""

    def net() -> torch.nn.Module:
        first, second = torch.nn.Conv2d(3, 32, 3, bias=False), torch.nn.Conv2d(32, 16, 3, bias=False)
        norms = torch.nn.BatchNorm2d(32), torch.nn.BatchNorm2d(16)
        relu, end = torch.nn.ReLU(), (torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 3))
        return torch.nn.Sequential(first, norms[0], relu, second, norms[1], relu, *end)

    task = fl.Task(net, [blobs(256, (3, 8, 8), 1)], blobs(30, (3, 8, 8), 2))
    run = fl.simulate(METHODS["zerofl"](density=0.05), task, 2, batch=32, lr=0.5, lr_end=0.5, workers=1, device="cpu")
    assert run.state is not None
    weights = task.layout.views(run.state.weights.vector)
    assert weights["0.weight"].norm() < 20, "it began with 3"
    assert weights["3.weight"].norm() < 20, "it began with 2"


def test_fedrts_votes_and_updates_its_betas() -> None:
    method = FedRTS(0.5, interval=10, rate=0.5, scale=10.0)
    plan = fl.Plan(EIGHT, lambda key: torch.arange(1.0, 10.0), 1, 10, 4, 2)
    s = method.init(plan)
    s = fl.State(plan, Weights.masked(Mask(EIGHT, bits("11110000")), torch.ones(9)), extra=s.extra, round=1)
    assert method._kappa(s) == (round((1 - 0.25 * (1 + math.cos(math.pi / 10))) * 4),) == (2,)
    assert method.work(s, fl.Client(0, 1)).parts == (Votes((2,)),)
    kept = Votes((2,)).tally(EIGHT, TRAINED, bits("11110000")[None])["kept"]
    assert torch.equal(kept[0], bits("01100000"))
    after = method.aggregate(s, sums((1, "11110000", [1.0, 2, 3, 4, 0, 0, 0, 0, 1]), kept=[bits("00110000").float()]))
    assert after.extra["a"].tolist() == [1, 1, 11, 11, 1, 1, 1, 1]
    assert after.extra["b"].tolist() == [11, 11, 1, 1, 1, 1, 1, 1]
    assert torch.equal(after.mask.bits, bits("11110000")), "the mask moves in adjustment rounds only"


def test_fedrts_draws_a_mask_of_the_same_size_in_adjustment_rounds() -> None:
    method, s = state("fedrts", torch.ones(9), "11110000", density=0.5)
    assert [type(part).__name__ for part in method.work(s, fl.Client(0, 1)).parts] == ["LastGradient", "Votes"]
    found = sums((1, "11110000", [1.0] * 9), kept=[[0.0] * 8], wanted=[bits("00001111").float()])
    after = method.aggregate(s, found)
    assert after.extra["a"].tolist()[4:] == [11.0] * 4, "wanted by the only client"
    assert after.mask.active == 4


def test_fedpm_sends_bits_and_averages_them_to_probabilities() -> None:
    part, signs = Scores(7), frozen(EIGHT, 7)
    assert signs.abs().tolist() == pytest.approx([math.sqrt(2 / 4)] * 8)
    scores = torch.tensor([[40.0, -40.0] * 4 + [1.0]])
    local, c = client(part)
    r = rows(scores, state=c.state)
    assert part.view(r, scores)[0].tolist() == pytest.approx([*(signs * bits("10101010")).tolist(), 1.0])
    gradient = torch.ones(1, 9)
    part.backward(rows(torch.zeros(1, 9), state=c.state), gradient)
    assert gradient[0, :8].tolist() == pytest.approx((signs / 4).tolist())
    c.vectors = scores.clone()
    close_clients(local, c)
    assert torch.equal(c.masks[0], bits("10101010"))
    method, s = state("fedpm", torch.zeros(9))
    assert method.work(replace(s, counted=9), fl.Client(0, 1)).lr == s.plan.local.lr, "the rate does not fall"
    after = method.aggregate(s, sums((1, "11000000", [0.0] * 9), (1, "10000000", [0.0] * 9)))
    assert after.weights.vector[:3].sigmoid().tolist() == pytest.approx([0.99, 0.5, 0.01])


def test_prunefl_takes_what_is_worth_its_time() -> None:
    layout = Layout.build({"prunable": [("a", (4,)), ("b", (4,))]})
    squares = torch.tensor([4.0, 1, 0.5, 0, 8, 2, 0, 0], dtype=torch.float64)
    none = bits("00000000")
    capped = best_per_time(layout, squares, (1.0, 4.0, 0.0), 1e9, 0.375, none)
    assert torch.equal(capped, bits("11001000")), "4, 2 and 1 per unit of time; the cap is three"
    few = best_per_time(layout, squares, (1.0, 4.0, 0.0), 1.0, 1.0, none)
    assert torch.equal(few, bits("10001000")), "1 is below the 12 / 6 of the first two"
    safe = best_per_time(layout, squares, (1.0, 4.0, 0.0), 1.0, 0.375, bits("00010001"))
    assert torch.equal(safe, bits("10010001")), "two are safe, and the cap has room for the best other one"
    local, c = client(SquaredGradients())
    SquaredGradients().before(rows(TRAINED, state=c.state), TRAINED)
    assert close_clients(local, c).extras[0]["squares"].value.tolist() == pytest.approx(
        TRAINED[0, :8].square().tolist()
    )


@pytest.mark.parametrize(("metric", "mask", "expected"), [(0.9, "11111110", "01101110"), (0.4, "11111110", "11111110")])
def test_lottery_ticket_is_pruned_and_rewound_if_it_is_good(metric: float, mask: str, expected: str) -> None:
    part = Ticket(1, rate=0.3, threshold=0.5, density=0.25)
    begin = torch.tensor([[0.1, -4.0, 1.0, 0.2, 3.0, -0.5, 2.0, 0.0, 7.0]])
    _, c = client(part, start=begin, mask=mask, metric=metric)
    assert torch.equal(c.masks[0], bits(expected))
    rewound = torch.where(bits(expected), 0.25, 0.0).tolist()
    assert c.start[0, :8].tolist() == (rewound if metric > 0.5 else (begin[0, :8] * bits(mask)).tolist())


WIDE = Layout.build(
    {
        "prunable": [("conv1.weight", (4, 1, 1, 1)), ("conv2.weight", (4, 4, 1, 1)), ("hidden.weight", (2, 8))],
        "dense": [("conv1.bias", (4,)), ("bn.weight", (4,)), ("fc.weight", (3, 2)), ("fc.bias", (3,))],
    }
)


def test_width_keeps_the_first_channels_everywhere() -> None:
    half = width_mask(WIDE, 0.5).bits
    assert half[:4].tolist() == [True, True, False, False], "the model's own input is never narrowed"
    assert half[4:20].view(4, 4).tolist() == [[True, True, False, False]] * 2 + [[False] * 4] * 2
    assert half[20:].view(2, 8).tolist() == [[True] * 4 + [False] * 4, [False] * 8], "two places a channel, flattened"
    kept = belonging(WIDE, 0.5)
    assert kept[36:40].tolist() == [True, True, False, False], "biases follow their channels"
    assert kept[40:44].tolist() == [True, True, False, False], "so does BatchNorm"
    assert kept[44:50].tolist() == [True, False] * 3, "the classifier loses the inputs that are dropped channels"
    assert kept[50:].tolist() == [True] * 3, "and no class"
    assert belonging(WIDE, 1.0).all()


def test_narrow_resnet_computes_what_the_smaller_network_would() -> None:
    """Zeros in the place of dropped channels, or no channels at all: the same outputs, also of the shortcuts."""
    net = build_model("resnet18", classes=10, channels=3, size=32).eval()
    layout = Layout.of(net)
    kept = belonging(layout, 0.25)
    trained = torch.where(kept, torch.randn(layout.trained_size) * 0.1, 0.0)
    views = layout.views(torch.cat([trained, torch.zeros(layout.size - layout.trained_size)]))
    small = build_model("resnet18", classes=10, channels=3, size=32).eval()
    for name, module in small.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            size = module.num_features // 4
            module.weight.data, module.bias.data = (views[f"{name}.{x}"][:size].clone() for x in ("weight", "bias"))
            module.running_mean, module.running_var = torch.zeros(size), torch.ones(size)
        elif isinstance(module, torch.nn.Conv2d):
            inputs = module.in_channels if name == "conv1" else module.in_channels // 4
            module.weight.data = views[f"{name}.weight"][: module.out_channels // 4, :inputs].clone()
    small.fc.weight.data, small.fc.bias.data = views["fc.weight"][:, :128].clone(), views["fc.bias"]
    net.load_state_dict({name: value for name, value in views.items() if "running" not in name}, strict=False)
    x = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        found = net(x)
        torch.testing.assert_close(found, small(x))
    assert float(found.abs().max()) > 0.1


def test_fjord_draws_a_width_up_to_the_clients() -> None:
    part, weights = OrderedDropout((0.5, 1.0), 1.0), torch.ones(1, WIDE.trained_size)
    level = (~belonging(WIDE, 0.5)).float()[None]
    seen = [part.view(rows(weights, WIDE, {"level": level}, count), weights) for count in range(40)]
    sizes = {int(x.sum()) for x in seen}
    assert sizes == {WIDE.trained_size, int((level == 0).sum())}, "both widths occur, and no other"
    narrow = OrderedDropout((0.5, 1.0), 0.5)
    least = int((level == 0).sum())
    assert all(narrow.view(rows(weights, WIDE, {"level": level}, i), weights).sum() == least for i in range(9))


def test_dropped_channels_of_a_narrow_model_are_zero() -> None:
    task = make_task("norm")
    method = METHODS["heterofl"](widths=(0.5, 1.0), shares=(0.5, 0.5))
    run = fl.simulate(method, task, 3, per_round=4, workers=1, batch=4)
    assert run.state is not None
    narrow = method.sub_model(run.state, 0.5)
    views = task.layout.views(narrow.vector)
    for name, tensor in views.items():
        if name.startswith("layers.") and not name.endswith(("running_mean", "running_var")):
            assert not tensor[4:].any(), name
    assert set(run.history[-1].metrics) == {"after", "width 0.5"}


def test_static_batch_norm_gathers_statistics_of_each_width() -> None:
    task = make_task("norm")
    method = METHODS["heterofl"](widths=(0.5, 1.0), shares=(0.5, 0.5))
    run = fl.simulate(method, task, 2, per_round=4, workers=1, batch=4, static_bn=True)
    assert run.state is not None
    narrow, wide = (run.state.extra[f"statistics {width}"] for width in (0.5, 1.0))
    assert isinstance(narrow, Tensor)
    assert isinstance(wide, Tensor)
    assert not torch.equal(narrow, wide)


def test_personal_accuracy_is_reported_where_models_are_personal() -> None:
    task = make_task("norm")
    for name, changes in (("fedspa", {}), ("fedspa", {"moving": True}), ("lotteryfl", {"threshold": 0.0})):
        run = fl.simulate(METHODS[name](0.3, **changes), task, 2, per_round=8, workers=1, batch=4)
        score = run.history[-1].metrics["personal"]
        assert 0 <= score.metric <= 1
        assert score.density < 1
        assert run.personal == score.metric
        assert run.scored.endswith(f"), personal {100 * score.metric:.2f} %")
    assert fl.simulate(fl.PDST(0.3), task, 1, per_round=4, workers=1, batch=4).personal is None


def test_personal_models_that_are_alike_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashfl.engine.train import Trainer

    real, calls = Trainer.outputs, [0]

    def count(*args: Any, **more: Any) -> Tensor:
        calls[0] += 1
        return real(*args, **more)

    monkeypatch.setattr(Trainer, "outputs", count)
    settings: dict[str, Any] = {"per_round": 4, "workers": 1, "batch": 4}
    common = fl.simulate(METHODS["fedspa"](0.3, masks="common"), make_task("norm"), 2, **settings)
    assert calls == [1], "eight clients, one mask"
    assert common.history[-1].metrics["personal"].density == pytest.approx(0.3, abs=0.01)
    fl.simulate(METHODS["fedspa"](0.3), make_task("norm"), 2, **settings)
    assert calls == [9], "eight masks"


def test_flops_follow_what_clients_compute_not_what_they_send() -> None:
    task = make_task("norm")
    flops = {
        name: fl.simulate(METHODS[name](**more), task, 1, per_round=4, workers=1, batch=4).history[0].flops
        for name, more in (
            ("dense", {}),
            ("topk", {"density": 0.1}),
            ("zerofl", {"density": 0.1}),
            ("pdst", {"density": 0.1}),
        )
    }
    assert flops["topk"] == flops["dense"], "training is dense"
    assert flops["zerofl"] == pytest.approx(flops["pdst"], rel=0.01), "the passes compute with a tenth of the weights"
    assert flops["pdst"] < flops["dense"] / 3


def test_personal_accuracy_weights_classes_by_the_clients_shares() -> None:
    from flashfl.engine.personal import _weighted
    from flashfl.engine.train import Trainer

    output, classes = torch.tensor([[9.0, 0, 0]] * 6), torch.tensor([0, 0, 1, 1, 2, 2])
    loss, metric = _weighted(Trainer(make_task("norm")), output, classes, [0.75, 0.25, 0.0])
    assert metric == 0.75, "always class 0, of which three quarters of the client's samples are"
    assert loss == pytest.approx(0.25 * 9, abs=0.01)


def test_heterofl_scales_narrow_layers_and_hides_absent_classes() -> None:
    part = Slice((0.5, 1.0), 0.5, scaler=True, masked_loss=True)
    local = Local(lr=0.5, parts=(part,))
    ones, mask = torch.ones(1, WIDE.size), width_mask(WIDE, 0.5).bits[None]
    asked = (lambda row: 0.0, lambda key: ones[0], lambda row: torch.tensor([0, 2, 2]))
    c = open_clients(WIDE, local, [1], [4], ones, mask, [{}], [{}], *asked)
    seen = part.view(rows(ones, WIDE, c.state), ones)[0]
    inside = torch.where(belonging(WIDE, 0.5)[:36], 2.0, 0.0)
    assert seen[:36].tolist() == inside.tolist(), "1 / 0.5 in the slice, 0 outside"
    assert seen[36:40].tolist() == [2, 2, 0, 0], "a layer's bias is part of its output"
    assert seen[40:44].tolist() == [1, 1, 0, 0], "BatchNorm is not scaled"
    assert seen[44:50].tolist() == [1, 0, 0, 0, 1, 0], "class 1 has no samples: its row is hidden, as is input 1"
    assert seen[50:].tolist() == [1, 0, 1], "so is its bias"
    gradient = torch.ones(1, WIDE.size)
    part.backward(rows(ones, WIDE, c.state), gradient)
    assert torch.equal(gradient[0], seen), "the gradient of a product with a constant"
    c.vectors = torch.full_like(ones, 3.0)
    done = close_clients(local, c)
    assert done.extras[0]["classes 0.5"].value.tolist() == [True, False, True]
    assert c.vectors[0, 44:].tolist() == [3, 3, 1, 1, 3, 3, 3, 1, 3], "what it did not train is as it was sent"


def test_heterofl_factors_are_the_scaler_and_the_masked_cross_entropy() -> None:
    """The forward pass on the factored weights is the paper's: activations over p, absent outputs 0."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 3))
    task = fl.Task(lambda: net, [blobs(6, (4,), 1)], blobs(6, (4,), 2), prunable="0.weight")
    part, layout = Slice((0.5, 1.0), 0.5, True, True), task.layout
    vector = task.draw(1)[None]
    asked = (lambda row: 0.0, lambda key: vector[0], lambda row: torch.tensor([1, 2]))
    local, mask = Local(parts=(part,)), width_mask(layout, 0.5).bits[None]
    c = open_clients(layout, local, [1], [1], vector, mask, [{}], [{}], *asked)
    seen = layout.views(part.view(rows(vector, layout, c.state), vector)[0])
    plain, x = layout.views(vector[0]), torch.rand(5, 4)
    hidden = (torch.nn.functional.linear(x, plain["0.weight"][:3], plain["0.bias"][:3]) / 0.5).relu()
    expected = torch.nn.functional.linear(hidden, plain["2.weight"][:, :3], plain["2.bias"])
    expected[:, 0] = 0.0
    torch.testing.assert_close(torch.func.functional_call(net, dict(seen), x), expected)


def test_heterofl_averages_rows_of_the_last_layer_over_clients_with_the_class() -> None:
    plan = fl.Plan(WIDE, lambda key: torch.ones(WIDE.size), 1, 10, 4, 2)
    method = METHODS["heterofl"](widths=(0.5, 1.0), shares=(0.5, 0.5))
    s, total = method.init(plan), fl.Sums(WIDE, counts=[0, 0, 0])
    clients = [(1, 0.5, 3.0, [1, 0, 1]), (3, 1.0, 7.0, [0, 0, 1]), (4, 1.0, 9.0, [1, 0, 0])]
    for i, (n, width, value, classes) in enumerate(clients):
        present = torch.tensor(classes).bool()
        kept = belonging(WIDE, width)
        vector = torch.full((WIDE.size,), value) * kept
        for span in (vector[44:50].view(3, 2), vector[50:].view(3, 1)):
            span[~present] = 1.0  # as it was sent
        vector *= kept
        weights = Weights.masked(width_mask(WIDE, width), vector)
        extra = {"kept": Extra("bits", kept), f"classes {width}": Extra("bits", present)}
        update = Update.of(i, n, weights, weights.mask.counts)
        add(total, Update(i, n, update.mask, update.values, update.counts, {}, extra))
    after = method.aggregate(s, total).weights.vector
    each = [7.5, 7.5, 57 / 7, 57 / 7]
    assert after[:4].tolist() == pytest.approx(each), "(3 + 21 + 36) / 8 in both slices; the wide ones alone beyond"
    assert after[36:44].tolist() == pytest.approx(each * 2)
    expected = [(3 + 36) / 5, 9, 1, 1, (3 + 21) / 4, 7]
    assert after[44:50].tolist() == pytest.approx(expected), "over clients with both the class and the input"
    assert after[50:].tolist() == pytest.approx([39 / 5, 1, 6])


def test_heterofl_evaluates_narrow_models_as_their_statistics_were_taken() -> None:
    """The scaler multiplies what BatchNorm sees, so statistics from training fit a model with the scaler only."""
    task = make_task("norm")
    for static in (False, True):
        method = METHODS["heterofl"](widths=(0.5, 1.0), shares=(0.5, 0.5))
        run = fl.simulate(method, task, 1, per_round=4, workers=1, batch=4, static_bn=static)
        assert run.state is not None
        plain, seen = method.sub_model(run.state, 0.5).vector, method.views(run.state)["width 0.5"].vector
        k = task.layout.prunable_size
        assert torch.equal(seen[:k], plain[:k] if static else 2 * plain[:k])
        assert torch.equal(seen[k:], plain[k:]), "BatchNorm and the classifier are not scaled"
        assert torch.equal(method.views(run.state)["after"].vector, method.sub_model(run.state, 1.0).vector)


def test_feddst_adjusts_every_few_rounds_of_the_first_part_of_the_run() -> None:
    method, s = state("feddst", torch.ones(9), "11110000", rounds=12, density=0.5, interval=3, until=0.5)
    rounds = [r for r in range(12) if method.work(replace(s, round=r), fl.Client(0, 1)).adapt is not None]
    assert rounds == [0, 3]
    assert method.work(s, fl.Client(0, 1)).adapt == LayerRegrow(0.5)
    plain = method.aggregate(replace(s, round=1), sums((1, "11110000", [2.0] * 9), (3, "11110000", [6.0] * 9)))
    assert plain.weights.vector.tolist() == [5, 5, 5, 5, 0, 0, 0, 0, 5]
    assert torch.equal(plain.mask.bits, bits("11110000"))


def test_fedspa_moves_masks_at_a_rate_that_falls_by_a_cosine() -> None:
    method, s = state("fedspa", torch.ones(9), density=0.5, moving=True, adapt=LayerRegrow(0.4))
    rates = [method.work(replace(s, round=r), fl.Client(0, 1)).adapt.rate for r in (0, 5, 10)]
    assert rates == pytest.approx([0.4, 0.2, 0.0])
    work = method.work(s, fl.Client(0, 1))
    assert work.keep == ("mask",)
    assert work.personal
    frozen_work = state("fedspa", torch.ones(9), density=0.5)[0].work(s, fl.Client(0, 1))
    assert (frozen_work.adapt, frozen_work.keep, frozen_work.personal) == (None, (), True)


def test_sparsyfed_counts_missing_weights_as_zero_and_sends_down_the_union() -> None:
    method, s = state("sparsyfed", torch.ones(9), density=0.25, power=2.0)
    first, second = (1, "11000000", [4.0, 8, 0, 0, 0, 0, 0, 0, 4]), (3, "01100000", [0.0, 8, 4, 0, 0, 0, 0, 0, 0])
    after = method.aggregate(s, sums(first, second))
    assert torch.equal(after.mask.bits, bits("11100000"))
    assert after.weights.vector.tolist() == [1, 8, 3, 0, 0, 0, 0, 0, 1]
    assert method.views(after)["after"].vector.tolist() == [1, 64, 9, 0, 0, 0, 0, 0, 1], "as the forward pass sees it"
    first_model = method.init(s.plan)
    seen = method.views(first_model)["after"].vector.tolist()
    assert seen == pytest.approx(list(range(1, 10))), "it starts where every method does"


def test_zerofl_averages_what_was_sent_and_evaluates_the_largest() -> None:
    method, s = state("zerofl", torch.full((9,), 5.0), density=0.25, mask_ratio=0.25)
    first, second = (1, "11110000", [1.0, -9, 2, 2, 0, 0, 0, 0, 4]), (3, "00001111", [0.0, 0, 0, 0, 7, 6, 1, 1, 0])
    after = method.aggregate(s, sums(first, second, (1, "11110000", [3.0, -9, 2, 2, 0, 0, 0, 0, 4])))
    assert after.weights.vector[:8].tolist() == [2, -9, 2, 2, 7, 6, 1, 1], "the mean over those who sent a weight"
    kept = method.aggregate(s, sums((1, "11110000", [1.0] * 9)))
    assert kept.weights.vector[:8].tolist() == [1] * 4 + [5] * 4, "a weight that nobody sent keeps its value"
    assert method.views(after)["after"].vector[:8].tolist() == [0, -9, 0, 0, 7, 0, 0, 0]
    changes, s = state("zerofl", torch.full((9,), 5.0), density=0.25, upload="largest changes")
    assert METHODS["zerofl"](density=0.9, mask_ratio=0.1).mask_ratio == 0.1, "they may send all"
    with pytest.raises(
        fl.FlashError, match=r"density \+ mask_ratio = .*must be above 0 and at most 1. Clients send this share"
    ):
        METHODS["zerofl"](density=0.9, mask_ratio=0.2)
    moved = changes.aggregate(s, sums((1, "11000000", [4.0] * 9), (3, "01100000", [-4.0] * 9)))
    assert moved.weights.vector.tolist() == [6, 3, 2, 5, 5, 5, 5, 5, 3], "changes are averaged over all"


def test_topk_adds_the_mean_of_what_was_sent() -> None:
    method, s = state("topk", torch.full((9,), 1.0), density=0.25)
    after = method.aggregate(s, sums((1, "11000000", [4.0] * 9), (3, "01100000", [-4.0] * 9)))
    assert after.weights.vector.tolist() == [2, -1, -2, 1, 1, 1, 1, 1, -1]
    assert after.mask.active == 8, "the server's model is dense"


def test_lotteryfl_averages_over_holders_and_keeps_the_rest() -> None:
    method, s = state("lotteryfl", torch.full((9,), 5.0), density=0.25)
    after = method.aggregate(s, sums((1, "11000000", [1.0] * 9), (3, "01100000", [3.0] * 9)))
    assert after.weights.vector.tolist() == [1, 2.5, 3, 5, 5, 5, 5, 5, 2.5]
    work = method.work(s, fl.Client(0, 1))
    assert work.personal
    assert work.keep == ("mask",)
    assert work.parts[0].active(EIGHT, 7) == (2, 7)


def test_fedrts_keeps_what_the_betas_favour() -> None:
    """With many pseudo-votes a draw is its mean, so the mask is the four weights with the highest X."""
    method, s = state("fedrts", torch.ones(9), "11110000", density=0.5, scale=1e6, rate=0.5)
    assert method._kappa(s) == (2,), "half of the four weights at t = 0"
    vectors = [9.0, 8, 1, 2, 0, 0, 0, 0, 1]
    kept = [bits("11000000").float(), bits("01010000").float()]
    wanted = [bits("00001100").float(), bits("00001010").float()]
    after = method.aggregate(s, sums((1, "11110000", vectors), (3, "11110000", vectors), kept=kept, wanted=wanted))
    x = torch.tensor([0.625, 1.0, 0.0, 0.375, 1.0, 0.25, 0.75, 0.0])
    assert after.extra["a"].tolist() == pytest.approx((1 + 1e6 * x).tolist())
    assert after.extra["b"].tolist() == pytest.approx((1 + 1e6 * (1 - x)).tolist())
    assert torch.equal(after.mask.bits, bits("11001010")), "weights 1, 4, 6 and 0"
    assert after.weights.vector[:8].tolist() == [9, 8, 0, 0, 0, 0, 0, 0], "a regrown weight starts at 0"


def test_prunefl_prunes_the_average_by_what_its_gradients_promise() -> None:
    method, s = state("prunefl", torch.ones(9), density=0.375)
    found = sums((1, "11111111", [1.0, 2, 3, 4, 5, 6, 7, 8, 9]), squares=[[0.0, 9, 1, 8, 0, 7, 2, 0]])
    after = method.aggregate(s, found)
    assert after.phase.counts, "the first pruning ends the first phase"
    assert after.weights.vector.tolist() == [0, 2, 0, 4, 0, 6, 0, 0, 9]
    later = replace(after, round=49)
    found = sums((1, "01010100", [0.0, 3, 0, 1, 0, 2, 0, 0, 9]), squares=[[9.0, 0, 8, 0, 0, 0, 0, 0]])
    assert torch.equal(method.aggregate(later, found).mask.bits, bits("11000100")), (
        "a third may be dropped: weight 3, the smallest. Weight 0 has the largest gradient"
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("fedrts", {"rate": 1.5}),  # a negative number of weights would count as good
        ("fedrts", {"scale": 0.0}),
        ("fedpm", {"rate": -1.0}),  # scores would climb their gradient
        ("prunefl", {"overhead": -1.0}),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(changes))} = "):
        fl.METHODS[name](**changes)
