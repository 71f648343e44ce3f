"""An exported model is one that the user's own module can load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import flashfl as fl
from flashfl.core.errors import ConfigError, FlashError
from flashfl.core.mask import Mask, Weights
from flashfl.data.task import Task
from flashfl.native import kernels, load_sparse
from flashfl.run.export import export_model
from tests.conftest import make_task


class Frozen(nn.Module):
    """A frozen parameter, a buffer that is no statistic, and BatchNorm's counter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b, self.c = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 16), nn.Linear(16, 3)
        self.shift = nn.Parameter(torch.randn(16), requires_grad=False)
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(torch.relu(self.norm(self.a(x))) * self.scale + self.shift)))
        return out


class Tied(nn.Module):
    """One matrix under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(torch.relu(self.b(torch.relu(self.a(x)))))
        return out


@pytest.mark.parametrize("net", [Frozen, Tied])
@pytest.mark.parametrize("given", ["class", "module"])
def test_the_users_own_module_loads_the_file(net: type[nn.Module], given: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    clients = [(torch.randn(12, 6), torch.randint(0, 3, (12,))) for _ in range(4)]
    task = Task(net if given == "class" else net(), clients)
    run = fl.simulate(fl.PDST(density=0.5), task, 2, per_round=2, workers=1)
    saved = load_file(run.save(tmp_path))
    masks = load_file(tmp_path / "model.masks.safetensors")
    assert set(masks) == {layer.name for layer in task.layout.prunable}
    assert not any(saved[name][~mask].any() for name, mask in masks.items())
    module, inputs = net().eval(), clients[0][0]
    module.load_state_dict(saved)
    assert torch.equal(module(inputs), run.model()(inputs))
    assert set(saved) == set(net().state_dict())


def test_what_is_no_file_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    task = make_task()
    weights = Weights(Mask.full(task.layout), task.draw(0))
    with pytest.raises(FlashError, match="it exists and is not a file"):
        export_model(weights, task, path, "safetensors", {})
    assert path.is_fifo()


def test_run_from_python_is_exported_in_every_format(tmp_path: Path) -> None:
    run = fl.simulate(fl.PDST(density=0.3), make_task("norm"), rounds=1, per_round=2, workers=1)
    inputs = torch.randn(4, 1, 5, 5)
    loaded = make_task("norm").build()
    loaded.load_state_dict(load_file(run.export(tmp_path / "m.safetensors")))
    assert torch.equal(loaded.eval()(inputs), run.model()(inputs))
    sparse = run.export(tmp_path / "m.sparse.safetensors", "sparse")
    if kernels() is not None:
        found = load_sparse(sparse, make_task("norm").build())(inputs)
        torch.testing.assert_close(found, run.model()(inputs), rtol=1e-4, atol=1e-5)
    with pytest.raises(ConfigError, match="unknown format 'onxx'"):
        run.export(tmp_path / "m", "onxx")  # type: ignore[arg-type]
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(run.export(tmp_path / "m.onnx", "onnx"))
    found = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(found), run.model()(inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "format", "ending"),
    [("m.pt", "safetensors", ".safetensors"), ("m.ONNX", "sparse", ".sparse.safetensors"),
     ("m.safetensors", "onnx", ".onnx")],
)  # fmt: skip
def test_ending_of_another_format_is_refused(name: str, format: Any, ending: str, tmp_path: Path) -> None:
    """torch.load failed on a safetensors file called m.pt."""
    run = fl.simulate(fl.Dense(), make_task(), rounds=1, per_round=2, workers=1)
    with pytest.raises(ConfigError, match=rf"the format is '{format}'. Use the ending {ending}, or another format"):
        run.export(tmp_path / name, format)
    assert list(tmp_path.iterdir()) == []
