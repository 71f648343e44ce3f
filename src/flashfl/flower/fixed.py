"""Whether two sides hold the same fixed tensors: frozen weights, and buffers that do not travel.

They never cross the wire, so each side tells by a few numbers what it has. Bits need not agree: tables that are
computed, and weights that are drawn from one seed, differ in their last bits between processors.
"""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor

from ..data.task import Task

NONE = "{}"  # the fingerprint of a model without fixed tensors
_PART = 1 << 20  # numbers that are looked at in double precision at a time
_GOLDEN = (math.sqrt(5) - 1) / 2
_CLOSE = 1e-4  # of a tensor's norm


def fingerprint(task: Task) -> str:
    """JSON: the name of each fixed tensor -> its shape, its norm and its product with a vector both sides know."""
    module, travelling = task.build(), {layer.name for layer in task.layout.travelling}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fixed = {name: t for name, t in sorted(tensors.items()) if name not in travelling}
    return json.dumps({name: _marks(t) for name, t in fixed.items() if not name.endswith("num_batches_tracked")})


def _marks(tensor: Tensor) -> tuple[list[int], float, float]:
    tensor = tensor.detach().cpu()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten()
    square = product = 0.0
    for at in range(0, len(flat), _PART):
        part = flat[at : at + _PART].double().nan_to_num(3.0, 2.0, -2.0)  # the masks of attention hold infinities
        known = torch.arange(at, at + len(part), dtype=torch.float64).mul_(_GOLDEN).frac_().sub_(0.5)
        square, product = square + float(part.square().sum()), product + float(part @ known)
    return list(tensor.shape), math.sqrt(square), product


def difference(ours: str, theirs: str) -> str | None:
    """The name of a tensor in which two fingerprints differ, if there is one; ValueError if theirs cannot be read."""
    mine, other = json.loads(ours), _read(theirs)
    for name in sorted({*mine, *other}):
        if name not in mine or name not in other or mine[name][0] != other[name][0]:
            return str(name)
        (_, norm, _), pairs = mine[name], zip(mine[name][1:], other[name][1:], strict=True)
        if not all(a == b or abs(a - b) <= _CLOSE * norm for a, b in pairs):
            return str(name)
    return None


def _read(text: str) -> dict[str, tuple[list[int], float, float]]:
    """A stranger's fingerprint."""
    try:
        found = json.loads(text)
        return {name: (list(shape), float(norm), float(product)) for name, (shape, norm, product) in found.items()}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"its fixed tensors cannot be read: {type(error).__name__}") from None
