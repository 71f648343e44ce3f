import numpy as np
import pytest
import torch
from torch import nn

import flashfl as fl
from flashfl.core import rng
from flashfl.core.errors import ConfigError
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Weights, pack_bits


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 8), nn.Linear(8, 2))


def test_prunable_come_first_then_dense_then_statistics() -> None:
    layout = Layout.of(net())
    assert [x.kind for x in layout.travelling] == sorted(
        (x.kind for x in layout.travelling), key=["prunable", "dense", "statistic"].index
    )
    assert [x.name for x in layout.prunable] == ["0.weight", "3.weight"]
    assert layout.size == sum(p.numel() for p in net().parameters()) + 8
    assert all(a.stop == b.start for a, b in zip(layout.layers, layout.layers[1:], strict=False))


@pytest.mark.parametrize(
    ("rule", "names"),
    [
        ("conv", ["0.weight"]),
        ("body", ["0.weight", "3.weight"]),
        ("inner", ["3.weight"]),
        ("none", []),
        ("?.weight", ["0.weight", "1.weight", "3.weight", "4.weight"]),
        (["0.*", "4.weight"], ["0.weight", "0.bias", "4.weight"]),
        (lambda name, p: p.dim() == 2, ["3.weight", "4.weight"]),
    ],
)
def test_rules_choose_what_they_say(rule: object, names: list[str]) -> None:
    assert [x.name for x in Layout.of(net(), rule).prunable] == names  # type: ignore[arg-type]


def test_a_model_may_name_the_rule_auto() -> None:
    model = net()
    model.prunable = "auto"  # type: ignore[assignment]
    assert Layout.of(model) == Layout.of(net())


def test_a_rule_that_matches_nothing_names_what_could_be_matched() -> None:
    with pytest.raises(ConfigError, match=r"prunable = .* matches no parameter.*0\.weight"):
        Layout.of(net(), "encoder.*")
    with pytest.raises(ConfigError, match=r"fixed = 'zzz' matches no .* or one of conv, body, inner, none\.$"):
        Layout.of(net(), fixed="zzz")


def test_fixed_parameters_have_no_place_in_the_vector() -> None:
    layout = Layout.of(net(), "conv", fixed="3.*")
    assert [x.name for x in layout.of_kind("fixed")] == ["3.weight", "3.bias"]
    assert layout.size == Layout.of(net()).size - 16 * 8 - 8


def test_reading_and_writing_a_module_are_inverse() -> None:
    a, b = net(), net()
    layout = Layout.of(a)
    layout.write(layout.read(a), b)
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(x, y), name


def test_hash_depends_on_names_shapes_and_kinds() -> None:
    assert Layout.of(net()).hash == Layout.of(net()).hash
    assert Layout.of(net()).hash != Layout.of(net(), "conv").hash


def test_packing_keeps_active_zeros_and_everything_unprunable(eight: Layout) -> None:
    bits = torch.tensor([1, 0, 1, 0, 0, 0, 1, 0], dtype=torch.bool)
    weights = Weights.masked(Mask(eight, bits), torch.tensor([1.0, 2, 0, 4, 5, 6, 7, 8, 9]))
    assert weights.packed().tolist() == [1, 0, 7, 9]
    assert torch.equal(Weights.unpack(weights.mask, weights.packed()).vector, weights.vector)
    assert weights.mask.counts == (3,)
    assert Mask.unpack(eight, weights.mask.packed).hash == weights.mask.hash


@pytest.mark.parametrize("count", [0, 1, 7, 8, 1003])
def test_bits_are_packed_as_numpy_packs_them(count: int) -> None:
    bits = rng.uniform(1, count) < 0.4
    assert pack_bits(bits).tolist() == np.packbits(bits.numpy(), bitorder="little").tolist()


class Unsaved(nn.Module):
    """Statistics that are in no state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("running_mean", torch.full((4,), 0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.hidden(x - self.running_mean)))


def test_statistics_that_a_module_does_not_save_travel_too() -> None:
    module = Unsaved()
    layout = Layout.of(module)
    vector = layout.read(module)
    assert vector[layout.trained_size :].tolist() == [0.5] * 4
    layout.write(vector + 1, module)
    assert module.running_mean.tolist() == [1.5] * 4
    data = [(torch.randn(9, 4), torch.arange(9) % 2) for _ in range(3)]
    run = fl.simulate(fl.PDST(0.5), fl.Task(Unsaved, data, data[0]), 1, per_round=3, workers=1)
    assert torch.isfinite(run.weights.vector).all()
