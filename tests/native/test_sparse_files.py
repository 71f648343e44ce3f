"""Exported models: active weights alone for our kernels, ONNX for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashfl.cli import main
from flashfl.core.errors import ConfigError, FlashError
from flashfl.models import build_model
from flashfl.native import library, load_sparse
from flashfl.run.export import export_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the digits, made by the command line."""
    place = tmp_path_factory.mktemp("run")
    quick = "--rounds 1 --clients 4 --per-round 2 --density 0.1 --workers 1 --eval-every 1 --method pdst"
    assert main(["run", "--out", str(place), "--overwrite", *quick.split()]) == 0
    return place


def reference(folder: Path) -> torch.nn.Module:
    from safetensors.torch import load_file

    module = build_model("digits").eval()
    module.load_state_dict(load_file(export_run(folder)))
    return module


@pytest.mark.skipif(library.kernels() is None, reason=library.status())
def test_a_sparse_file_is_small_and_gives_the_same_outputs(folder: Path) -> None:
    path = export_run(folder, format="sparse")
    x, module = torch.rand(21, 1, 8, 8), reference(folder)
    model = load_sparse(path, build_model("digits"))
    with torch.no_grad():
        torch.testing.assert_close(model(x), module(x), rtol=1e-4, atol=1e-5)
    assert path.name == "model.sparse.safetensors"
    assert path.stat().st_size < 0.35 * (folder / "model.safetensors").stat().st_size


@pytest.mark.skipif(library.kernels() is None, reason=library.status())
def test_loading_a_file_that_does_not_fit_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(FlashError, match="no sparse model"):
        load_sparse(export_run(folder), build_model("digits"))
    with pytest.raises(FlashError, match="cannot be read"):
        load_sparse(tmp_path / "nothing", build_model("digits"))
    with pytest.raises((FlashError, ConfigError)):
        load_sparse(export_run(folder, format="sparse"), build_model("mnistnet"))


def test_without_kernels_loading_says_what_to_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flashfl.native.file.kernels", lambda: None)
    with pytest.raises(FlashError, match="--format safetensors"):
        load_sparse(export_run(folder, format="sparse"), build_model("digits"))


def test_onnx_gives_the_same_outputs_for_any_number_of_samples(folder: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    path = export_run(folder, format="onnx")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    module = reference(folder)
    for n in (1, 5, 40):
        x = torch.rand(n, 1, 8, 8)
        [found] = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(found), module(x), rtol=1e-4, atol=1e-5)


def test_onnx_without_its_packages_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(ConfigError, match=r"flashfl\[onnx\]"):
        export_run(folder, format="onnx")
