"""A sparse model as a file: the active weights and where they lie, and every other tensor as it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..core.errors import FlashError
from ..core.layout import Layout
from ..core.mask import Mask, Weights
from .library import kernels, status
from .model import SparseModel

_VALUES, _PLACES = "flashfl.values.", "flashfl.places."


def sparse_bytes(weights: Weights, module: nn.Module, about: Mapping[str, str]) -> bytes:
    """The content of the file. Places are positions in the flattened tensor.

    module: holds the model's weights; its other tensors are written whole.
    """
    sparse = {layer.name for layer in weights.layout.prunable}
    tensors = {
        name: value.detach().clone(memory_format=torch.contiguous_format)
        for name, value in module.state_dict().items()
        if isinstance(value, Tensor) and name not in sparse
    }
    places, vector = weights.mask.places.cpu(), weights.vector.cpu()
    for layer, own in zip(weights.layout.prunable, places.split(list(weights.mask.counts)), strict=True):
        tensors[_VALUES + layer.name] = vector[own]
        tensors[_PLACES + layer.name] = (own - layer.start).to(torch.int32)
    note = {"density": weights.mask.density, "sparse": sorted(sparse), **about}
    return save(tensors, {"flashfl": json.dumps(note)})


def load_sparse(path: str | Path, module: nn.Module) -> SparseModel:
    """The model of a file that `flashfl export --format sparse` wrote, ready for inference on native kernels.

    module: a new one of the same kind. It is changed; call the model that is returned instead. That is no module: it
    has no `eval`, and is in evaluation mode.
    """
    if kernels() is None:
        raise FlashError(f"{status()}. Or export with --format safetensors and load that into the module.")
    try:
        with safe_open(str(path), "pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no dict
    except (OSError, SafetensorError) as error:
        raise FlashError(f"{path} cannot be read: {error}") from None
    names = [name.removeprefix(_VALUES) for name in tensors if name.startswith(_VALUES)]
    if not names:
        raise FlashError(f"{path} holds no sparse model: write one with flashfl export --format sparse")
    layout = Layout.of(module, names)
    _check(path, tensors, layout)
    module.load_state_dict({n: t for n, t in tensors.items() if not n.startswith((_VALUES, _PLACES))}, strict=False)
    vector = layout.read(module)
    bits = torch.zeros(layout.prunable_size, dtype=torch.bool)
    for layer in layout.prunable:
        places = tensors[_PLACES + layer.name].long() + layer.start
        bits[places] = True
        vector[places] = tensors[_VALUES + layer.name]
    weights = Weights.masked(Mask(layout, bits), vector)
    return SparseModel(module.eval(), layout, weights.mask, weights.packed())


def _check(path: str | Path, tensors: Mapping[str, Tensor], layout: Layout) -> None:
    """Raise unless every sparse tensor fits the module."""
    for layer in layout.prunable:
        values, places = tensors[_VALUES + layer.name], tensors.get(_PLACES + layer.name)
        fits = places is not None and values.shape == places.shape and values.dim() == 1
        if not fits or (len(values) and not (int(places.min()) >= 0 and int(places.max()) < layer.size)):  # type: ignore[union-attr]
            raise FlashError(
                f"{path}: its values for {layer.name} do not fit the module's, which have the shape {layer.shape}. "
                "Give a module of the same class and sizes as the trained one."
            )
