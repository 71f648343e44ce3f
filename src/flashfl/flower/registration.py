"""What a node says about itself when it registers, and whether it fits the run.

Fixed tensors (frozen weights, and buffers that do not travel) never cross the wire, so each side describes its own by
a few numbers. The bits need not agree: tables that are computed, and weights drawn from one seed, differ in their last
bits between processors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import __version__
from ..core.errors import ConfigError, check_range
from ..core.exchange import Client
from ..data.task import Task
from ..wire.frame import VERSION
from .records import Field, log, printable

_SAMPLES = 1 << 32  # of one client: sums over any cohort fit 64 bits
_GOLDEN = (math.sqrt(5) - 1) / 2
_CLOSE = 1e-4  # of a tensor's norm


@dataclass(frozen=True)
class Entry:
    """A registered node."""

    node: int
    client: Client
    held: int  # samples it evaluates models on

    def __post_init__(self) -> None:
        client, n, density = self.client.id, self.client.n, self.client.density
        if not (0 <= client < 2**63 and 1 <= n <= _SAMPLES and 0 <= self.held <= _SAMPLES):
            raise ConfigError(
                f"it registers as client {client} with {n} samples and {self.held} held back: the client must be from "
                "0 to 2^63 - 1, samples from 1 to 2^32, and those held back from 0 to 2^32"
            )
        if density is not None:
            check_range("(0, 1]", density=density)

    @staticmethod
    def read(node: int, fields: Mapping[str, Field], layout: str, fixed: str, most: int) -> Entry:
        """What a node says about itself, or a ConfigError that says why it cannot take part.

        layout: the hash of the server's model. fixed: the fingerprint of its fixed tensors. most: the most samples a
        client may register; 0: no limit but the format's.
        """
        try:
            client, n, held = (int(fields[name]) for name in ("client", "n", "held"))
            theirs, wire, package = str(fields["layout"]), int(fields["wire"]), str(fields["package"])
            density = float(fields["density"]) if "density" in fields else None
            other = difference(fixed, str(fields["fixed"]))
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ConfigError(
                f"its registration cannot be read ({error!r}): check that server and node have the same version of "
                "flashfl, and that the node runs its client_app"
            ) from None
        entry = Entry(node, Client(client, n, density), held)
        if most and n > most:
            raise ConfigError(
                f"client {client} registers {n} samples, but flower.max_samples = {most}. Raise "
                "flower.max_samples on the server, or give the client fewer samples."
            )
        if wire != VERSION:
            raise ConfigError(
                f"client {client} speaks version {wire} of the wire format, the server {VERSION}: install the same "
                "version of flashfl on both sides"
            )
        if theirs != layout:
            raise ConfigError(
                f"client {client} has another model: its layout is {theirs[:40]}, the server's {layout}. "
                "Model, prunable weights and fixed weights must be the same on both sides"
            )
        if other is not None:
            raise ConfigError(
                f"client {client} has other fixed weights: {other[:100]!r} differs from the server's. Fixed weights "
                "are never sent. Load them from the same file on both sides. Or give the task a class instead of a "
                "module: both sides then draw the weights from the same seed."
            )
        if package != __version__:
            log.warning(
                "client %d runs flashfl %s, the server %s: results may differ. Install the same version on both",
                client, printable(package, 40), __version__,
            )  # fmt: skip
        return entry

    def __str__(self) -> str:
        more = "" if self.client.density is None else f", density {self.client.density:g}"
        return f"client {self.client.id} with {self.client.n} samples, {self.held} held back{more}"


def fingerprint(task: Task) -> str:
    """JSON: the name of each fixed tensor -> its shape, its norm and its product with a vector both sides know."""
    module, travelling = task.build(), {layer.name for layer in task.layout.travelling}
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    fixed = {name: t for name, t in sorted(tensors.items()) if name not in travelling}
    return json.dumps({name: _marks(t) for name, t in fixed.items() if not name.endswith("num_batches_tracked")})


def _marks(tensor: Tensor) -> tuple[list[int], float, float]:
    tensor = tensor.detach().cpu()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).flatten().double()
    flat = flat.nan_to_num(3.0, 2.0, -2.0)  # the masks of attention hold infinities
    known = torch.arange(len(flat), dtype=torch.float64).mul_(_GOLDEN).frac_().sub_(0.5)
    return list(tensor.shape), float(flat.norm()), float(flat @ known)


def difference(ours: str, theirs: str) -> str | None:
    """The name of a tensor in which two fingerprints differ, if there is one."""
    mine, other = _read(ours), _read(theirs)
    for name in sorted({*mine, *other}):
        if name not in mine or name not in other:
            return name
        (shape, norm, product), (its_shape, its_norm, its_product) = mine[name], other[name]
        near = _CLOSE * norm
        same = math.isclose(norm, its_norm, abs_tol=near) and math.isclose(product, its_product, abs_tol=near)
        if shape != its_shape or not same:
            return name
    return None


def _read(text: str) -> dict[str, tuple[list[int], float, float]]:
    found = json.loads(text)
    return {name: (list(shape), float(norm), float(product)) for name, (shape, norm, product) in found.items()}
