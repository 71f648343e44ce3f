"""Small tasks that every test can afford."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn

from flashfl.core.layout import Layout
from flashfl.core.rng import uniform
from flashfl.data.task import Task


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test that draws from torch's, NumPy's or Python's own generator draws the same in every run."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs may choose sparse compute differently, as it is measured. Tests of it say so themselves."""
    monkeypatch.setattr("flashfl.engine.sparse.LEAST_BYTES", 1 << 40)


class DropoutNet(nn.Module):
    """Two hidden layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class NormNet(nn.Module):
    """Two convolutions with BatchNorm."""

    prunable = "conv"

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x).mean((2, 3)))


def blobs(n: int, shape: tuple[int, ...], key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three classes that differ in their mean."""
    size = int(torch.Size(shape).numel())
    x = uniform(key, n * size).view(n, size)
    y = torch.arange(n) % 3
    return (x + y[:, None] * 0.5).view(n, *shape), y


def make_task(net: str = "dropout", clients: int = 8, samples: int = 11) -> Task:
    shape = (6,) if net == "dropout" else (1, 5, 5)
    model = {"dropout": DropoutNet, "norm": NormNet}[net]
    # Clients of unequal size, so that the last batch is short and weights in the average differ.
    data = [blobs(samples + i, shape, 100 + i) for i in range(clients)]
    return Task(model, data, blobs(30, shape, 7), name=net)


@pytest.fixture(params=["dropout", "norm"])
def small_task(request: pytest.FixtureRequest) -> Task:
    return make_task(request.param)


@pytest.fixture
def eight() -> Layout:
    """One layer of eight weights and a bias."""
    return Layout.build({"prunable": [("w", (2, 4))], "dense": [("b", (1,))]})
