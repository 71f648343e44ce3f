"""FLOPs against numbers counted by hand and against torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import flashfl as fl
from flashfl.core.exchange import Local
from flashfl.core.layout import Layout
from flashfl.data.task import Task
from flashfl.measure.flops import Cost, layer_costs, order_flops, sample_flops, task_costs
from flashfl.models import build_model
from flashfl.sparsity import PruneRegrow
from tests.conftest import blobs


def net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.ReLU(), nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Flatten(),
        nn.Linear(16, 3),
    )  # fmt: skip


def test_costs_of_a_small_net_by_hand() -> None:
    module = net()
    layout = Layout.of(module, "conv")
    costs = layer_costs(module, layout, (torch.zeros(1, 1, 4, 4),))
    # 18 weights at 16 places, 72 at 4, 48 at 1; two FLOPs each; the first layer's input needs no gradient
    assert costs == {
        "0.weight": Cost(576, 0, 576),
        "2.weight": Cost(576, 576, 576),
        "4.weight": Cost(96, 96, 96),
    }
    assert sample_flops(layout, costs, [1.0, 1.0]) == 3 * 576 + 2 * 576 + 3 * 96
    assert sample_flops(layout, costs, [0.5, 0.25]) == 0.5 * 2 * 576 + 0.25 * 3 * 576 + 3 * 96
    dense = sample_flops(layout, costs, [0.5, 0.25], dense_gradient=True)
    assert dense == (0.5 * 576 + 576) + (0.25 * 2 * 576 + 576) + 3 * 96


def test_layers_under_weight_norm_count_like_others() -> None:
    plain, normed = nn.Linear(4, 3), nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    costs = [layer_costs(module, Layout.of(module), (torch.zeros(1, 4),)) for module in (plain, normed)]
    assert costs[0] == costs[1] == {"weight": Cost(24, 0, 24)}


class Sequences(nn.Module):
    """Attention over three places, two directions of an LSTM over them, a cell, and attention of unequal widths."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.recurrent = nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True)
        self.cell = nn.GRUCell(10, 6)
        self.across = nn.MultiheadAttention(6, 1, kdim=10, vdim=4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen, _ = self.attention(x, x, x, need_weights=False)
        steps, _ = self.recurrent(seen)
        now: torch.Tensor = self.cell(steps[:, -1])
        out: torch.Tensor = self.across(query=now[:, None], key=steps, value=seen)[0]
        return out


def test_costs_of_attention_and_recurrent_layers_by_hand() -> None:
    module = Sequences()
    layout = Layout.of(module, "*weight*")
    costs = layer_costs(module, layout, (torch.zeros(1, 3, 4),))
    assert set(costs) == {layer.name for layer in layout.prunable}
    assert costs["attention.in_proj_weight"] == Cost(2 * 48 * 3, 0, 2 * 48 * 3)
    assert costs["attention.out_proj.weight"].fwd == 2 * 16 * 3
    assert costs["recurrent.weight_ih_l0_reverse"] == Cost(*[2 * 80 * 3] * 3)
    assert costs["recurrent.weight_hh_l1"] == Cost(*[2 * 100 * 3] * 3)
    assert costs["recurrent.weight_ih_l1"].fwd == 2 * 200 * 3
    assert costs["cell.weight_ih"].fwd == 2 * 180
    assert costs["across.q_proj_weight"].fwd == 2 * 36
    assert costs["across.k_proj_weight"].fwd == 2 * 60 * 3
    assert costs["across.v_proj_weight"].fwd == 2 * 24 * 3
    assert costs["across.out_proj.weight"].fwd == 2 * 36


def test_attention_across_sequences_of_unequal_lengths() -> None:
    class Across(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.across = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.across(x[:, :2], x, x)[0]
            return out

    module = Across()
    costs = layer_costs(module, Layout.of(module, "*weight"), (torch.zeros(1, 5, 4),))
    assert costs["across.in_proj_weight"].fwd == 2 * 16 * (2 + 5 + 5)


def test_only_growth_by_score_needs_the_dense_gradient() -> None:
    module = net()
    layout = Layout.of(module, "conv")
    costs = layer_costs(module, layout, (torch.zeros(1, 1, 4, 4),))
    d = [0.1, 0.1]
    frozen = order_flops(layout, costs, Local(), 10, d)
    assert order_flops(layout, costs, Local(adapt=PruneRegrow()), 10, d) == frozen
    assert order_flops(layout, costs, Local(adapt=PruneRegrow(growth="gradient")), 10, d) > 1.5 * frozen
    only_forward = order_flops(layout, costs, Local(report="statistics"), 10, [1.0, 1.0])
    assert only_forward == 10 * (576 + 576 + 96)


def test_clients_of_several_densities_are_counted_separately() -> None:
    clients = [blobs(90, (1, 4, 4), 1), blobs(10, (1, 4, 4), 2)]
    task = Task(net, clients, blobs(9, (1, 4, 4), 3), prunable="conv", densities=[0.2, 0.8])
    method = fl.METHODS["hetero-spdst"](densities=(0.2, 0.8), shares=(0.5, 0.5), warmup_clients=0)
    run = fl.simulate(method, task, 1, per_round=2, workers=1)
    costs, layout = layer_costs(net(), task.layout, (torch.zeros(1, 1, 4, 4),)), task.layout
    expected = 0.0
    for view, n in (("density 0.2", 90), ("after", 10)):
        mask = method.view(run.state, view).mask
        expected += order_flops(layout, costs, Local(), n, mask.layer_densities)
    assert run.history[0].flops == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("local", "samples"), [(Local(epochs=3), 30), (Local(epochs=2, batch=4, max_steps=2), 16)])
def test_samples_of_an_order(local: Local, samples: int) -> None:
    module = net()
    layout = Layout.of(module, "conv")
    costs = layer_costs(module, layout, (torch.zeros(1, 1, 4, 4),))
    assert order_flops(layout, costs, local, 10, [0.5, 0.5]) == samples * sample_flops(layout, costs, [0.5, 0.5])


@pytest.mark.parametrize(("name", "options", "shape"), [
    ("resnet18", {"channels": 3, "size": 32}, (3, 32, 32)), ("digits", {}, (1, 8, 8)), ("mnistnet", {}, (1, 28, 28)),
])  # fmt: skip
def test_forward_flops_match_torch(name: str, options: dict, shape: tuple[int, ...]) -> None:
    try:
        module = build_model(name, classes=10, **options)
    except Exception as error:
        pytest.skip(str(error))
    sample = torch.zeros(1, *shape)
    found = sum(c.fwd for c in layer_costs(module, Layout.of(module), (sample,)).values())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module.eval()(sample)
    assert found == counter.get_total_flops()


def test_task_costs_use_one_of_its_samples(small_task: Task) -> None:
    costs = task_costs(small_task)
    assert {layer.name for layer in small_task.layout.prunable} < set(costs)
    assert all(cost.fwd > 0 for cost in costs.values())
