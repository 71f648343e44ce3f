"""The final model as a safetensors file that a module of its kind can load, and its masks as another beside it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor, nn

from ..core.errors import ConfigError, FlashError
from ..core.files import put
from ..core.loop import checked
from ..core.mask import Weights
from ..core.rng import fold


def export_weights(weights: Weights, module: nn.Module, path: Path, about: Mapping[str, str]) -> Path:
    """Write dense tensors (zeros outside the mask) to `path` and, for prunable ones, booleans to `masks_beside(path)`.

    module: a fresh one of the task. It takes the weights, and all its tensors are written, so that a module of its kind
    can load the file: those that are fixed, every buffer, and each name of a tensor that has several.
    """
    if path.exists() and not path.is_file():
        raise FlashError(f"{path} cannot be written: it is not a file")
    weights.layout.write(weights.vector.cpu(), module)
    tensors: dict[str, Tensor] = {
        name: value.detach().clone(memory_format=torch.contiguous_format)  # safetensors takes no shared memory
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor)
    }
    bits = weights.mask.bits.cpu()
    masks = {
        layer.name: bits[layer.start : layer.stop].view(layer.shape).clone().to(torch.bool)
        for layer in weights.layout.prunable
    }
    note = {"flashfl": json.dumps({"density": weights.mask.density, **about})}
    for file, content in ((masks_beside(path), masks), (path, tensors)):
        try:
            put(file, save(content, note))
        except (OSError, SafetensorError) as error:
            raise FlashError(f"{file} cannot be written: {error}") from None
    return path


def masks_beside(path: Path) -> Path:
    """Where the masks of a model's file lie: a module does not know such names, and would not load them."""
    return path.with_name(f"{path.stem}.masks{path.suffix}")


def export_run(folder: Path, target: Path | None = None, view: str = "") -> Path:
    """A model of a run's last checkpoint, as a file: the reported one unless a view is named."""
    from ..data.tasks import build_task
    from . import checkpoint
    from .config import RunConfig, plan_of
    from .results import RESULTS, Results

    header = Results.read(folder).header
    if not header.get("config"):
        made = folder / "model.safetensors"
        where = f"its model is in {made} already" if made.exists() and not view else "use run.save() where it was run"
        raise ConfigError(f"{folder} was made in Python and does not say how its task was made; {where}")
    for name in ("config", "identity"):
        if not isinstance(header.get(name), dict):
            raise ConfigError(f"{folder} is damaged: the first line of its {RESULTS} has no table {name!r}")
    config = RunConfig.from_json(header["config"])
    task = build_task(config.task, fold(config.train.seed, "task"))
    point = checkpoint.load(folder / "checkpoints", plan_of(config.train, task, len(task.clients)), header["identity"])
    weights = config.method.view(checked(config.method, point.state), view)
    about = {"method": config.method.name, "round": str(point.state.round), "task": task.name}
    name = f"model-{view.replace(' ', '-')}.safetensors" if view else "model.safetensors"
    return export_weights(weights, task.build(), target or folder / name, about)
