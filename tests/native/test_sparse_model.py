"""Whole models on native kernels agree with dense masked training."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flashfl.core.layout import Layout, tensors_of
from flashfl.core.mask import Mask, Weights
from flashfl.models import build_model
from flashfl.native import SparseModel

pytestmark = pytest.mark.usefixtures("native")


class Odd(nn.Module):
    """Parts that have no kernel, between parts that have one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding="same")
        self.strided = nn.Conv2d(6, 8, (3, 2), (2, 1), padding=1, dilation=(1, 2))
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, padding_mode="reflect")
        self.turned = nn.ConvTranspose2d(8, 5, 2)
        self.norm = nn.BatchNorm2d(5, affine=False, momentum=None)
        self.scale = nn.Parameter(torch.ones(5, 1, 1))
        self.drop = nn.Dropout(0.5)
        self.hidden = nn.Linear(5, 12)
        self.last = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.avg_pool2d(F.relu(self.first(x), inplace=True), 2)
        x = self.depthwise(F.gelu(self.strided(x)))
        x = self.drop(self.norm(self.turned(x)) * self.scale)
        x = x.amax((2, 3)) if x.shape[0] > 3 else x.mean((2, 3))
        x = self.hidden(x)
        x += self.last.weight.sum()
        out: Tensor = self.last(x.tanh())
        return out


def odd() -> nn.Module:
    return Odd()


def residual() -> nn.Module:
    return build_model("resnet18", classes=3, channels=2)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits": (lambda: build_model("digits"), (1, 8, 8)),
    "mnistnet": (lambda: build_model("mnistnet"), (1, 28, 28)),
    "leafcnn": (lambda: build_model("leafcnn"), (1, 28, 28)),
    "vgg16": (lambda: build_model("vgg16"), (3, 32, 32)),
    "resnet18": (residual, (2, 16, 16)),
    "odd": (odd, (2, 9, 12)),
}


def pair(name: str, density: float) -> tuple[nn.Module, SparseModel, Weights]:
    """The same masked model, dense and sparse."""
    make, _ = CASES[name]
    torch.manual_seed(0)
    dense = make()
    layout = Layout.of(dense, getattr(dense, "prunable", "auto"))
    own = tensors_of(dense)
    vector = torch.cat([own[x.name].detach().flatten().float() for x in layout.layers if x.kind != "fixed"])
    weights = Weights.masked(Mask(layout, torch.rand(layout.prunable_size) < density), vector)
    layout.write(weights.vector, dense)
    sparse = SparseModel(make().train(), layout, weights.mask, weights.packed())
    return dense.train(), sparse, weights


def gradient(module: nn.Module, weights: Weights) -> Tensor:
    """The dense model's gradient, packed."""
    own, layout = dict(module.named_parameters()), weights.layout
    flat = torch.cat([own[x.name].grad.flatten() for x in layout.of_kind("prunable", "dense")])
    k = layout.prunable_size
    return torch.cat([flat[:k][weights.mask.bits], flat[k:]])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("density", "n"), [(0.1, 20), (0.5, 3)])
def test_a_whole_model_agrees_with_dense_masked_training(name: str, density: float, n: int) -> None:
    dense, sparse, weights = pair(name, density)
    x, target = torch.randn(n, *CASES[name][1]), torch.randint(0, 3, (n,))
    outputs = []
    for model in (dense, sparse):
        torch.manual_seed(1)  # dropout
        outputs.append(model(x))
        F.cross_entropy(outputs[-1], target).backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-3, atol=1e-5)
    ours, theirs = sparse.grad, gradient(dense, weights)
    # In deep networks a rounding can turn a ReLU around; the operators themselves are compared to 1e-4 elsewhere.
    assert float((ours - theirs).norm()) <= (2e-2 if name in ("resnet18", "vgg16") else 1e-4) * float(theirs.norm())
    own = tensors_of(dense)
    statistics = [own[x.name].flatten() for x in weights.layout.of_kind("statistic")]
    torch.testing.assert_close(sparse.vector[len(sparse.grad) :], torch.cat(statistics or [torch.zeros(0)]))


def test_evaluation_mode_agrees_with_dense() -> None:
    dense, sparse, _ = pair("digits", 0.2)
    x = torch.randn(33, 1, 8, 8)
    with torch.no_grad():
        torch.testing.assert_close(sparse.module.eval() and sparse(x), dense.eval()(x), rtol=1e-4, atol=1e-5)


def test_memory_follows_the_active_weights() -> None:
    _, sparse, weights = pair("leafcnn", 0.05)
    assert len(sparse.vector) == len(weights.packed()) < 0.2 * weights.layout.size
    assert len(sparse.grad) == weights.mask.active + weights.layout.trained_size - weights.layout.prunable_size
    assert sum(p.numel() for p in sparse.module.parameters()) < 0.1 * weights.layout.size


def test_another_mask_takes_the_place_of_the_first() -> None:
    dense, sparse, weights = pair("digits", 0.2)
    x = torch.randn(8, 1, 8, 8)
    other = Weights.masked(
        Mask(weights.layout, torch.rand(len(weights.mask.bits)) < 0.3), torch.randn_like(weights.vector).abs()
    )
    sparse(x)  # lists of the first mask are made
    for chosen in (other, weights, weights):
        sparse.load(chosen.mask, chosen.packed())
        weights.layout.write(chosen.vector, dense)
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-3, atol=1e-4)
