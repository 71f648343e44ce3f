"""Models: their sizes, which weights are prunable, how they begin."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flashfl.core.errors import ConfigError
from flashfl.core.layout import Layout
from flashfl.models import MODELS, build_model

IMAGE_MODELS = {
    # name: (options, input, parameters, prunable)
    "digits": ({}, (1, 8, 8), 241_898, 239_904),
    "mnistnet": ({}, (1, 28, 28), 261_840, 261_000),
    "leafcnn": ({}, (1, 28, 28), 6_603_710, 6_473_728),
    "resnet18": ({}, (3, 32, 32), 11_173_962, 11_159_232),
    "vgg16": ({}, (3, 32, 32), 15_253_578, 15_234_752),
}


def saving(layout: Layout, density: float, statistics: bool = False) -> float:
    """Values of the dense model over values of one at `density`."""
    beside = layout.size - layout.prunable_size if statistics else layout.trained_size - layout.prunable_size
    return (layout.prunable_size + beside) / (round(density * layout.prunable_size) + beside)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_sizes_and_outputs(name: str) -> None:
    options, shape, parameters, prunable = IMAGE_MODELS[name]
    model = build_model(name, **options)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert Layout.of(model).prunable_size == prunable
    assert model(torch.zeros(2, *shape)).shape == (2, 62 if name == "leafcnn" else 10)


def test_value_savings_match_paper() -> None:
    resnet = Layout.of(build_model("resnet18", classes=10))
    assert round(saving(resnet, 0.1), 2) == 9.88
    assert round(saving(resnet, 0.05), 1) == 19.5
    assert sum(layer.size for layer in resnet.of_kind("statistic")) == 9600
    assert round(saving(resnet, 0.05, statistics=True), 1) == 19.2
    assert round(saving(Layout.of(build_model("leafcnn")), 0.05), 1) == 14.6


def test_resnet18_prunes_every_convolution_and_nothing_else() -> None:
    layout = Layout.of(build_model("resnet18"))
    assert len(layout.prunable) == 20
    assert layout.prunable[0].name == "conv1.weight"
    assert sum(layer.shape[-1] == 1 for layer in layout.prunable) == 3  # the shortcuts


def test_resnet18_takes_larger_images_and_more_classes() -> None:
    model = build_model("resnet18", classes=200, channels=3, size=64)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 200)


@pytest.mark.parametrize(("name", "first", "last"), [("mnistnet", "features.0", "fc"), ("leafcnn", "features.0", "fc")])
def test_first_and_last_layer_stay_dense(name: str, first: str, last: str) -> None:
    names = [layer.name for layer in Layout.of(build_model(name)).prunable]
    assert names == ["features.3.weight", "hidden.weight"]
    assert first + ".weight" not in names
    assert last + ".weight" not in names


def test_vgg16_prunes_convolutions_and_hidden_layers() -> None:
    names = [layer.name for layer in Layout.of(build_model("vgg16")).prunable]
    assert len(names) == 15
    assert names[-2:] == ["hidden.0.weight", "hidden.2.weight"]


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_initialisation(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name)
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            fan = (part.in_channels + part.out_channels) * part.kernel_size[0] ** 2
            bound = 0.5 * math.sqrt(6 / fan)
            assert part.weight.abs().max() <= bound
            assert part.weight.abs().max() > 0.9 * bound
            assert part.bias is None or not part.bias.any()
        elif isinstance(part, nn.Linear):
            assert part.weight.std().item() == pytest.approx(0.01, rel=0.2)
            assert not part.bias.any()
        elif isinstance(part, nn.BatchNorm2d):
            assert part.weight.eq(1).all()
            assert not part.bias.any()


def test_torch_seed_decides_the_weights() -> None:
    def draw(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return Layout.of(model := build_model("digits")).read(model)

    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'resnet18'"):
        build_model("resnet81")


def test_text_model_does_not_take_images() -> None:
    with pytest.raises(ConfigError, match="'tiny-transformer' does not fit a data set of images"):
        build_model("tiny-transformer", classes=2, channels=3, size=32)


def test_tiny_transformer_prunes_matrices_of_its_layers() -> None:
    model = build_model("tiny-transformer", classes=2, vocab=50, length=12)
    layout = Layout.of(model)
    assert layout.prunable_size == 2 * (4 * 64 * 64 + 2 * 64 * 256)
    assert len(layout.prunable) == 2 * 6
    assert not layout.of_kind("fixed", "statistic")


def test_tiny_transformer_ignores_padding() -> None:
    model = build_model("tiny-transformer", vocab=50, length=12)
    ids = torch.arange(1, 25).view(2, 12)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    assert torch.allclose(model(ids, mask), model(torch.where(mask == 1, ids, 7), mask), atol=1e-6)
    assert torch.allclose(model(ids, mask)[1:], model(ids[1:, :5], mask[1:, :5]), atol=1e-6)


def test_too_small_images_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"size = 8: must be at least 13\. mnistnet needs larger"):
        build_model("mnistnet", size=8)


def test_every_model_is_tested() -> None:
    assert set(MODELS) == {*IMAGE_MODELS, "bert", "bert-scratch", "tiny-transformer"}


def test_model_without_files_refuses_a_model_path() -> None:
    with pytest.raises(ConfigError, match="model_path = 'x': not possible with model = 'digits'"):
        build_model("digits", classes=10, path="x")
