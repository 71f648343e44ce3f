"""Which weights the rules without names choose, in models of all kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashfl as fl
from flashfl.core.layout import Layout
from flashfl.models import build_model

OWN: dict[str, tuple[dict[str, Any], str]] = {
    "digits": ({}, "d232eb02ece8b573"),
    "mnistnet": ({}, "a5ba34f31d74563c"),
    "leafcnn": ({}, "af025863b31de910"),
    "resnet18": ({}, "1c5b0b08fe5055c8"),
    "vgg16": ({}, "dd96005176562f85"),
    "tiny-transformer": ({}, "8b3ca8ca4d6c590b"),
    "bert-scratch": ({}, "c41c0d11bed31fc5"),
}


@pytest.mark.parametrize("name", OWN)
def test_our_own_models_are_laid_out_as_they_always_were(name: str) -> None:
    """Checkpoints and results hold these hashes."""
    if name == "bert-scratch":
        pytest.importorskip("transformers")
    options, known = OWN[name]
    with torch.device("meta"):
        assert Layout.of(build_model(name, **options)).hash == known


def prunable(model: nn.Module, rule: str = "auto") -> list[str]:
    return [layer.name for layer in Layout.of(model, rule).prunable]


def test_attention_and_recurrent_layers_have_weight_matrices_too() -> None:
    assert prunable(nn.Sequential(nn.MultiheadAttention(8, 2, add_bias_kv=True), nn.Linear(8, 2))) == [
        "0.in_proj_weight", "0.out_proj.weight",
    ]  # fmt: skip
    assert prunable(nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4), nn.Linear(8, 2))) == [
        "0.q_proj_weight", "0.k_proj_weight", "0.v_proj_weight", "0.out_proj.weight",
    ]  # fmt: skip
    assert prunable(nn.Sequential(nn.LSTM(4, 5, proj_size=3), nn.Linear(3, 2))) == [
        "0.weight_ih_l0", "0.weight_hh_l0", "0.weight_hr_l0",
    ]  # fmt: skip
    assert prunable(nn.Sequential(nn.GRU(4, 5, 2, bidirectional=True), nn.Linear(10, 2)), "inner") == [
        "0.weight_hh_l0", "0.weight_ih_l0_reverse", "0.weight_hh_l0_reverse",
        "0.weight_ih_l1", "0.weight_hh_l1", "0.weight_ih_l1_reverse", "0.weight_hh_l1_reverse",
    ]  # fmt: skip
    assert prunable(nn.Sequential(nn.RNNCell(4, 5), nn.Linear(5, 2))) == ["0.weight_ih", "0.weight_hh"]


class Tied(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        if first:
            self.out = nn.Linear(16, 50, bias=False)
        self.emb = nn.Embedding(50, 16)
        self.h, self.g = nn.Linear(16, 16), nn.Linear(16, 16)
        if not first:
            self.out = nn.Linear(16, 50, bias=False)
        self.out.weight = self.emb.weight


@pytest.mark.parametrize("first", [False, True])
def test_a_map_tied_to_an_embedding_is_the_last_and_stays_dense(first: bool) -> None:
    assert prunable(Tied(first)) == ["h.weight", "g.weight"]
    assert prunable(Tied(first), "inner") == ["g.weight"]


def test_a_last_map_tied_to_another_layer_keeps_that_dense() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[2].weight = model[0].weight
    assert prunable(model) == ["1.weight"]


def test_parametrized_weights_stay_dense_and_may_be_the_last() -> None:
    """weight_norm divides by the length of a row, and a row without active weights has none."""
    normed = nn.utils.parametrizations.weight_norm
    assert prunable(nn.Sequential(normed(nn.Linear(4, 4)), nn.Linear(4, 4), normed(nn.Linear(4, 2)))) == ["1.weight"]
    assert prunable(nn.Sequential(nn.Conv2d(1, 2, 3), normed(nn.Conv2d(2, 2, 3))), "conv") == ["0.weight"]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(20, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.enc(self.inp(x)[:, None])[:, 0])
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.h, self.o = nn.LSTM(20, 64, 2, batch_first=True), nn.Linear(64, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(self.h(self.lstm(x[:, None])[0][:, 0]))
        return out


@pytest.mark.parametrize(("model", "saving"), [(Encoder, 10.0), (Recurrent, 10.0)])
def test_a_density_is_what_travels(model: type[nn.Module], saving: float) -> None:
    data = [(torch.randn(16, 20), torch.arange(16) % 3) for _ in range(3)]
    sparse, dense = (
        fl.simulate(method, fl.Task(model, data, data[0]), 1, per_round=2, workers=1)
        for method in (fl.PDST(density=0.05), fl.Dense())
    )
    assert dense.bytes_up > saving * sparse.bytes_up
