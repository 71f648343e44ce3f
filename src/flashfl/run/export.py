"""A run's model as a file: safetensors that a module of its kind can load, active weights alone, or ONNX."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor, nn

from ..core.errors import ConfigError, FlashError, unknown, warn
from ..core.files import put
from ..core.loop import checked
from ..core.mask import Weights
from ..core.rng import fold
from ..data.sources import Inputs
from ..data.task import Task
from ..data.tasks import build_task
from ..native.file import sparse_bytes
from . import checkpoint
from .config import make_config, plan_of
from .results import RESULTS, Results

Format = Literal["safetensors", "sparse", "onnx"]
_ENDINGS: dict[Format, str] = {"safetensors": ".safetensors", "sparse": ".sparse.safetensors", "onnx": ".onnx"}
_KNOWN = {".safetensors", ".onnx", ".pt", ".pth", ".ckpt", ".pkl", ".npz", ".h5"}  # endings that name a format


def export_model(weights: Weights, task: Task, path: Path, format: Format, about: Mapping[str, str]) -> Path:
    """Write a model of the task to `path`."""
    if format not in _ENDINGS:
        raise unknown("format", format, _ENDINGS)
    if (ending := path.suffix.lower()) in _KNOWN and not _ENDINGS[format].endswith(ending):
        raise ConfigError(
            f"{path} ends in {path.suffix}, but the format is {format!r}. Use the ending {_ENDINGS[format]}, or "
            f"another format: {', '.join(_ENDINGS)}."
        )
    module = task.build().eval()
    weights.layout.write(weights.vector.cpu(), module)
    if format == "safetensors":
        content = _dense_files(weights, module, path, about)
    elif format == "sparse":
        content = {path: sparse_bytes(weights, module, about)}
    else:
        samples = task.train[0] if task.test is None else task.test
        content = {path: _onnx_bytes(module, samples.fetch(torch.arange(min(2, len(samples))))[0])}
    for file, data in content.items():
        put(file, data)
    return path


def _dense_files(weights: Weights, module: nn.Module, path: Path, about: Mapping[str, str]) -> dict[Path, bytes]:
    """Dense tensors (zeros outside the mask) for `path`, and booleans of prunable ones for `masks_beside(path)`.

    module: has the weights. All its tensors are written, so that a module of its kind can load the file: those that are
    fixed, every buffer, and each name of a tensor that has several.
    """
    if path.exists() and not path.is_file():
        raise FlashError(f"{path} cannot be written: it exists and is not a file. Choose another name, or move it away")
    tensors: dict[str, Tensor] = {
        name: value.detach().clone(memory_format=torch.contiguous_format)  # safetensors takes no shared memory
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    bits = weights.mask.bits.cpu()
    masks = {layer.name: bits[layer.span].view(layer.shape).clone().to(torch.bool) for layer in weights.layout.prunable}
    note = {"flashfl": json.dumps({"density": weights.mask.density, **about})}
    return {masks_beside(path): save(masks, note), path: save(tensors, note)}


def masks_beside(path: Path) -> Path:
    """Where the masks of a model's file lie: a module does not know such names, and would not load them."""
    return path.with_name(f"{path.stem}.masks{path.suffix}")


def export_run(folder: Path, target: Path | None = None, view: str = "", format: Format = "safetensors") -> Path:
    """A model of a run's last checkpoint, as a file: the reported one unless a view is named."""
    results = Results.read(folder)
    header = results.header
    if not header.get("config"):
        made, plain = folder / "model.safetensors", format == "safetensors" and not view
        again = f"fl.simulate(method, task, rounds, folder={str(folder)!r}, resume=True) gives the run again"
        there = f"In Python, {again}. Then call run.export(path, {format!r}, {view!r})."
        where = f"Its model is in {made} already." if plain and made.exists() else there
        raise ConfigError(f"{folder} was made in Python, so only Python can build its model. {where}")
    if "identity" not in header:
        raise ConfigError(f"{folder} is damaged: the first line of its {RESULTS} has no table 'identity'")
    config = make_config({name: table for name, table in header["config"].items() if name != "flower"})  # of old apps
    task = build_task(config.task, fold(config.train.seed, "task"))
    point = checkpoint.load(folder / "checkpoints", plan_of(config.train, task, len(task.clients)), header["identity"])
    weights = config.method.view(checked(config.method, point.state), view)
    about = {"method": config.method.name, "round": str(point.state.round), "task": task.name}
    name = f"model-{view.replace(' ', '-')}" if view else "model"
    path = export_model(weights, task, target or folder / f"{name}{_ENDINGS[format]}", format, about)
    _warn_if_early(point.state.counted, results, config.train.rounds)
    return path


def _warn_if_early(done: int, results: Results, rounds: int) -> None:
    """Warn if the exported model, of round `done`, is not the final one of the run."""
    recorded = sum(record.counts for record in results.rounds)
    if done >= (rounds if results.end is None else recorded):  # a run that ended may have stopped early, at a limit
        return
    further = f", and the results go on to round {recorded}" if recorded > done else ""
    warn(
        f"this is not the final model: the last checkpoint is of round {done} of {rounds}{further}; resume the run "
        "to its end, then export again"
    )


def _onnx_bytes(module: nn.Module, inputs: Inputs) -> bytes:
    """The module as ONNX, for any number of samples."""
    try:
        import onnxscript  # noqa: F401 (torch needs it)
    except ImportError:
        raise ConfigError('--format onnx needs the packages onnx and onnxscript: pip install "flashfl[onnx]"') from None
    samples = {0: torch.export.Dim("samples")}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's exporter warns about its own insides
        file = Path(folder) / "model.onnx"
        try:
            torch.onnx.export(
                module, tuple(inputs), str(file), dynamo=True, external_data=False, verbose=False,
                dynamic_shapes=tuple(samples for _ in inputs),
            )  # fmt: skip
        except torch.onnx.OnnxExporterError:  # torch 2.6 fails at BatchNorm with an onnxscript of today
            names = [f"input{i}" for i in range(len(inputs))]
            torch.onnx.export(
                module, tuple(inputs), str(file), dynamo=False, input_names=names,
                dynamic_axes={name: {0: "samples"} for name in names},
            )  # fmt: skip
        return file.read_bytes()
