"""What server and clients exchange, and what a round's updates add up to: plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from numbers import Integral, Real
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError
from .layout import Layout
from .mask import Mask, Recipe, Weights
from .parts import part

_MOST_WHOLE, _MOST_REAL = 2**31 - 1, 1e6  # far above any setting that makes sense
DROPPED = "dropped out (simulated)"  # the reason recorded for a simulated dropout
_PART = 1 << 20  # values that are added in double precision at a time
Tag = tuple[int, int, int]  # (phase number, round, attempt): which round a message belongs to


@runtime_checkable
class Adapt(Protocol):
    """A rule by which clients move their masks during training; see `sparsity.PruneRegrow`."""

    @property
    def dense_gradient(self) -> bool:
        """Whether the rule needs the gradient of inactive weights too."""
        ...

    def moments(self, epochs: int, batches: int) -> Mapping[int, Fraction]:
        """After which steps (counted from 1) the mask moves, and at what rate."""
        ...

    def collect(self, scores: Tensor, gradient: Tensor) -> None:
        """Take in the gradient [clients, K] of one step, in place; called only if `dense_gradient`."""
        ...

    def move(
        self,
        layout: Layout,
        vectors: Tensor,
        masks: Tensor,
        scores: Tensor | None,
        rate: Fraction,
        keys: Sequence[int],
        counts: Sequence[Sequence[int]],
    ) -> list[tuple[int, ...]]:
        """Move the masks [clients, K] of a stack of models in place; the new layer counts."""
        ...


@part
@dataclass(frozen=True)
class Local:
    """A client's work in one round. Clients train with SGD."""

    epochs: int = 1
    batch: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    prox: float = 0.0
    max_steps: int = 0  # at most this many batches an epoch; 0: all
    adapt: Adapt | None = None  # the rule that moves the mask during training; None: the mask is frozen
    start: Recipe | None = None  # the mask for a client that has no stored mask
    keep: tuple[str, ...] = ()  # what the client stores for its next round: nothing, or "mask"
    report: Literal["weights", "counts", "statistics"] = "weights"
    statistics: bool = True  # False: static BatchNorm, running statistics neither kept nor sent

    def __post_init__(self) -> None:
        # Each number gets its field's exact type, and -0.0 becomes 0.0: equal settings are then equal messages.
        for name, least in (("epochs", 1), ("batch", 1), ("max_steps", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise ConfigError(f"{name} = {value!r}: must be a whole number, got {type(value).__name__}")
            whole = int(value)
            if not least <= whole <= _MOST_WHOLE:
                raise ConfigError(f"{name} = {value}: must be at least {least} and at most {_MOST_WHOLE}")
            object.__setattr__(self, name, whole)
        for name in ("lr", "momentum", "weight_decay", "prox"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Real):
                raise ConfigError(f"{name} = {value!r}: must be a number, got {type(value).__name__}")
            real = float(value) + 0.0
            if not 0 <= real <= _MOST_REAL:
                raise ConfigError(f"{name} = {value}: must be a number of at least 0 and at most {_MOST_REAL:g}")
            object.__setattr__(self, name, real)
        if self.adapt is not None and not isinstance(self.adapt, Adapt):
            lacks = [name for name in ("dense_gradient", "moments", "collect", "move") if not hasattr(self.adapt, name)]
            raise ConfigError(f"adapt = {self.adapt!r}: must be a rule or None; a rule also needs {', '.join(lacks)}")
        if self.start is not None and not isinstance(self.start, Recipe):
            raise ConfigError(f"start = {self.start!r}: must be a Recipe or None")
        if tuple(self.keep) not in ((), ("mask",)):
            raise ConfigError(f"keep = {self.keep!r}: must be () or ('mask',), as clients can remember only their mask")

    def batches(self, n: int) -> int:
        """The number of batches in an epoch of n samples."""
        count = math.ceil(n / self.batch)
        return min(count, self.max_steps) if self.max_steps else count


@dataclass(frozen=True)
class Client:
    """What the server knows about a client: id, number of samples and density (None: the method decides)."""

    id: int
    n: int
    density: float | None = None


@dataclass(frozen=True)
class Extra:
    """A tensor beside the weights. Forms: masked (values at the mask's active positions), dense, bits, scalar."""

    form: Literal["masked", "dense", "bits", "scalar"]
    value: Tensor


@dataclass(frozen=True)
class Order:
    """A message from the server to one client. The built-in clients ignore `extra`."""

    weights: Weights
    local: Local
    key: int
    tag: Tag
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """A message from one client to the server: its mask, and its values as `Weights.packed` returns them.

    `mask` and `values` are None if the order asked for layer counts only.
    """

    client: int
    n: int
    mask: Mask | None
    values: Tensor | None
    counts: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)

    @staticmethod
    def of(
        client: int,
        n: int,
        weights: Weights | None,
        counts: tuple[int, ...],
        metrics: Mapping[str, float] | None = None,
    ) -> Update:
        """The update that reports these weights. A dense model's values share its memory."""
        if weights is None:
            return Update(client, n, None, None, counts, metrics or {})
        return Update(client, n, weights.mask, weights.packed(), counts, metrics or {})

    @property
    def weights(self) -> Weights | None:
        """The model reported. Builds the dense vector."""
        return None if self.mask is None or self.values is None else Weights.unpack(self.mask, self.values)


@dataclass
class Sums:
    """The sums over the updates of one round. Their size does not depend on the number of clients.

    While all updates have the same mask, only its active positions are added up. The flat vectors `weights` and
    `holders` are made when they are first read.
    """

    layout: Layout
    n: int = 0
    clients: int = 0
    counts: list[int] = field(default_factory=list)  # active weights per layer, added over clients
    loss: float = 0.0  # sum of n * mean training loss
    extra: dict[str, Tensor] = field(default_factory=dict)  # sum of n * tensor
    # Number of active weights -> sum of n * [statistics, 1], float64. Models of different size have other activations.
    statistics: dict[int, Tensor] = field(default_factory=dict)
    _mask: Mask | None = None  # the mask of all updates so far, until one has another
    _packed: Tensor | None = None  # sum of n * w, packed under that mask, float64
    _held: int = 0  # sum of n over the updates in `_packed`
    _weights: Tensor | None = None  # the flat vectors, once they are made
    _holders: Tensor | None = None

    @property
    def weights(self) -> Tensor | None:
        """Sum of n * w, float64; None if no weights were reported."""
        if self._weights is None and self._mask is not None and self._packed is not None:
            active, k = self._mask.active, self.layout.prunable_size
            self._weights = torch.zeros(self.layout.size, dtype=torch.float64, device=self._packed.device)
            self._weights[_places(self._mask)] = self._packed[:active]
            self._weights[k:] = self._packed[active:]
        return self._weights

    @property
    def holders(self) -> Tensor | None:
        """Sum of n * m over the prunable weights; None if no weights were reported."""
        if self._holders is None and self._mask is not None:
            self._holders = self._mask.bits * torch.tensor(self._held)
        return self._holders

    def flat(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """`weights` and `holders`, to be added to in place; zeros on `device` if nothing was added yet."""
        weights, holders = self.weights, self.holders
        if weights is None or holders is None:
            weights = torch.zeros(self.layout.size, dtype=torch.float64, device=device)
            holders = torch.zeros(self.layout.prunable_size, dtype=torch.int64, device=device)
        self._weights, self._holders, self._mask, self._packed = weights, holders, None, None
        return weights, holders

    def add_weights(self, mask: Mask, values: Tensor, n: int) -> None:
        """Add n times the model that `values`, packed, describe under `mask`."""
        if self._packed is None and self._weights is None:
            self._mask, self._packed = mask, torch.zeros(len(values), dtype=torch.float64, device=values.device)
        if self._mask is not None and self._packed is not None and self._mask.equal(mask):
            for at in range(0, len(values), _PART):  # torch copies what it adds in another precision
                self._packed[at : at + _PART].add_(values[at : at + _PART], alpha=n)
            self._held += n
            self._weights = self._holders = None
            return
        (weights, holders), places, active = self.flat(values.device), _places(mask), mask.active
        weights.index_add_(0, places, values[:active].double(), alpha=n)
        holders.index_add_(0, places, holders.new_tensor(n).expand(active))
        weights[mask.layout.prunable_size :].add_(values[active:], alpha=n)

    def statistics_of(self, mask: Mask, otherwise: Tensor) -> Tensor:
        """Mean statistics of the models with as many active weights as `mask`; `otherwise` if there are none."""
        found = self.statistics.get(mask.active)
        return otherwise if found is None else torch.where(found[-1] > 0, found[:-1] / found[-1], otherwise).float()

    @property
    def layer_densities(self) -> list[float]:
        """Mean density of each layer over the clients, each client counted once."""
        return [c / (self.clients * k) for c, k in zip(self.counts, self.layout.sizes, strict=True)]

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.n)


def _places(mask: Mask) -> Tensor:
    """Where the active weights lie. numpy finds them faster than torch."""
    return torch.from_numpy(np.flatnonzero(mask.bits.cpu().numpy())).to(mask.bits.device)


@dataclass(frozen=True)
class Traffic:
    """Bytes of the messages of a round, by direction and by what they carry."""

    down: int = 0
    up: int = 0
    values: int = 0
    mask: int = 0
    overhead: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.down + other.down, self.up + other.up, self.values + other.values, self.mask + other.mask,
            self.overhead + other.overhead,
        )  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What an engine brings back from one round."""

    sums: Sums
    traffic: Traffic
    failures: Mapping[int, str]  # client id -> why it was dropped
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Evaluation:
    """How good a model is: mean loss and metric over all evaluation samples."""

    loss: float
    metric: float
    bytes: int = 0  # sent to clients that evaluated the model
