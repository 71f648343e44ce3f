"""What the parties know and exchange: plain immutable data."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from .errors import ConfigError, FlashError
from .layout import Layout
from .parts import part
from .rng import fold

T = TypeVar("T")
DROPPED = "dropped out (simulated)"  # why a client was left out that was made to fail
Tag = tuple[int, int, int]  # (stage, round, attempt): which round of work something belongs to


@part
@dataclass(frozen=True)
class Recipe:
    """A random mask in a few bytes: the key that ranks the weights and how many each layer keeps (0: no N:M)."""

    key: int
    budgets: tuple[int, ...]
    nm: int = 0


@dataclass(frozen=True, eq=False)
class Mask:
    """Which prunable weights are active. Explicit state: an active weight may well be zero."""

    layout: Layout
    bits: Tensor
    known_counts: tuple[int, ...] | None = None
    recipe: Recipe | None = None

    @staticmethod
    def full(layout: Layout, device: torch.device | str = "cpu") -> Mask:
        return Mask(layout, torch.ones(layout.prunable_size, dtype=torch.bool, device=device), layout.sizes)

    @staticmethod
    def unpack(layout: Layout, packed: np.ndarray[Any, Any], device: torch.device | str = "cpu") -> Mask:
        """The mask that `packed` described."""
        bits = np.unpackbits(packed, count=layout.prunable_size, bitorder="little").astype(bool)
        return Mask(layout, torch.from_numpy(bits).to(device))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Active weights of each layer; reading it from bits on a GPU waits for the GPU."""
        if self.known_counts is not None:
            return self.known_counts
        sums = [self.bits[x.start : x.stop].sum() for x in self.layout.prunable]
        return tuple(torch.stack(sums).tolist()) if sums else ()

    @property
    def active(self) -> int:
        return sum(self.counts)

    @property
    def density(self) -> float:
        return self.active / max(1, self.layout.prunable_size)

    @property
    def layer_densities(self) -> tuple[float, ...]:
        return tuple(c / k for c, k in zip(self.counts, self.layout.sizes, strict=True))

    @cached_property
    def packed(self) -> np.ndarray[Any, Any]:
        """One bit a weight, little-endian within each byte."""
        if self.bits.is_cuda:  # packed there, an eighth has to come over
            return pack_bits(self.bits).cpu().numpy()
        return np.packbits(self.bits.numpy(), bitorder="little")

    @cached_property
    def hash(self) -> str:
        """16 hex digits over the layout and the bits."""
        return hashlib.blake2b(self.packed.tobytes(), digest_size=8, key=self.layout.hash.encode()).hexdigest()

    def equal(self, other: Mask) -> bool:
        return self is other or self.bits is other.bits or bool(torch.equal(self.bits, other.bits))

    def to(self, device: torch.device | str) -> Mask:
        if self.bits.device == torch.device(device):
            return self
        return Mask(self.layout, self.bits.to(device), self.counts, self.recipe)


def pack_bits(bits: Tensor) -> Tensor:
    """Eight flags a byte, little-endian, zeros at the end: numpy's packbits on any device."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Weights:
    """A model: a flat vector that is zero wherever its mask is not active."""

    mask: Mask
    vector: Tensor

    @property
    def layout(self) -> Layout:
        return self.mask.layout

    @staticmethod
    def masked(mask: Mask, vector: Tensor) -> Weights:
        """`vector` cut down to `mask`."""
        out = vector.clone()
        out[: mask.layout.prunable_size].masked_fill_(~mask.bits, 0.0)  # a product would leave zeros of both signs
        return Weights(mask, out)

    def is_masked(self) -> bool:
        """Whether it is what it should be: zero outside its mask."""
        k = self.layout.prunable_size
        return self.mask.active == k or not bool((self.vector[:k].bool() & ~self.mask.bits).any())

    @staticmethod
    def unpack(mask: Mask, values: Tensor) -> Weights:
        """The model whose `packed()` is `values`, which a dense model shares."""
        if mask.active == mask.layout.prunable_size:
            return Weights(mask, values)
        vector = torch.zeros(mask.layout.size, dtype=values.dtype, device=values.device)
        head = vector[: mask.layout.prunable_size]
        head[mask.bits] = values[: mask.active]
        vector[mask.layout.prunable_size :] = values[mask.active :]
        return Weights(mask, vector)

    def packed(self) -> Tensor:
        """What has to travel: the active weights in order, then everything unprunable. Of a dense model the vector."""
        k = self.layout.prunable_size
        if self.mask.active == k:
            return self.vector
        return torch.cat([self.vector[:k][self.mask.bits], self.vector[k:]])

    def restrict(self, mask: Mask) -> Weights:
        return self if mask is self.mask else Weights.masked(mask, self.vector)

    @property
    def statistics(self) -> Tensor:
        return self.vector[self.layout.trained_size :]

    def with_statistics(self, statistics: Tensor) -> Weights:
        """The same weights with other BatchNorm statistics."""
        if not len(statistics):
            return self
        vector = self.vector.clone()
        vector[self.layout.trained_size :] = statistics
        return Weights(self.mask, vector)

    def to(self, device: torch.device | str) -> Weights:
        return Weights(self.mask.to(device), self.vector.to(device))


@part
@dataclass(frozen=True)
class Local:
    """A client's work, as data."""

    epochs: int = 1
    batch: int = 32
    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    prox: float = 0.0
    max_steps: int = 0  # at most this many batches an epoch; 0: all
    adapt: Any = None  # a registered rule that moves the mask during training, or None: the mask is frozen
    start: Recipe | None = None  # the mask of a client that remembers none
    keep: tuple[str, ...] = ()  # what the client remembers for the next time: "mask"
    report: Literal["weights", "counts", "statistics"] = "weights"
    statistics: bool = True  # False: static BatchNorm, running statistics neither kept nor sent

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} = {getattr(self, name)}: must be at least 1")
        for name in ("lr", "momentum", "weight_decay", "prox", "max_steps"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"{name} = {value}: must be a number of at least 0")
        if other := set(self.keep) - {"mask"}:
            raise ConfigError(f"keep = {', '.join(sorted(other))}: a client can remember its mask only")

    def batches(self, n: int) -> int:
        """How many batches an epoch of n samples has."""
        count = math.ceil(n / self.batch)
        return min(count, self.max_steps) if self.max_steps else count


@dataclass(frozen=True)
class Client:
    """What the server knows of a client; a density of None means the method decides."""

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
    """Server to one client. Our clients do nothing with extras, which are for clients of one's own."""

    weights: Weights
    local: Local
    key: int
    tag: Tag
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One client to the server; `weights` is None where only layer counts were asked for."""

    client: int
    n: int
    weights: Weights | None
    counts: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What a run sets once: the model's layout and initial draw, the seed, the sizes and the schedule."""

    layout: Layout
    draw: Callable[[int], Tensor]  # key -> a flat vector of initial weights
    key: int
    rounds: int
    clients: int
    per_round: int
    local: Local = Local()
    lr_end: float = 0.001
    device: torch.device | str = "cpu"

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds = {self.rounds}: must be at least 1")
        if not 1 <= self.per_round <= self.clients:
            raise ConfigError(
                f"per_round = {self.per_round}: must be between 1 and the number of clients, {self.clients}"
            )
        if not (math.isfinite(self.lr_end) and self.lr_end >= 0):
            raise ConfigError(f"lr_end = {self.lr_end}: must be a number of at least 0")

    def lr(self, round: int) -> float:
        """Exponential from lr at round 0 towards lr_end at the last; constant if either is 0."""
        if self.local.lr <= 0 or self.lr_end <= 0:
            return self.local.lr
        return self.local.lr * math.exp(round / self.rounds * math.log(self.lr_end / self.local.lr))


@dataclass(frozen=True)
class State:
    """Everything the server knows between two rounds; `round` counts inside its stage from 0."""

    plan: Plan
    weights: Weights
    stage: int = 2
    round: int = 0
    attempt: int = 0
    extra: Mapping[str, Mask | Tensor] = field(default_factory=dict)
    before: Weights | None = None  # the average before subsampling, where it differs; not kept
    _made: dict[str, Weights] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name, value in self.extra.items():
            if not isinstance(value, Mask | Tensor):
                raise FlashError(
                    f"a method keeps {name!r} as {type(value).__name__}: a state holds masks and tensors only, which "
                    "checkpoints can write (torch.tensor(value) for a number)"
                )

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @property
    def mask(self) -> Mask:
        return self.weights.mask

    @property
    def tag(self) -> Tag:
        return (self.stage, self.round, self.attempt)

    @property
    def done(self) -> bool:
        return self.stage == 2 and self.round >= self.plan.rounds

    def key(self, *parts: str | int) -> int:
        """Randomness for one purpose in this round."""
        return fold(self.plan.key, *parts, *self.tag)

    def kept(self, kind: type[T], name: str) -> T:
        """What the method keeps under this name."""
        found = self.extra[name]
        assert isinstance(found, kind)
        return found

    def once(self, name: str, make: Callable[[], Weights]) -> Weights:
        """A model that follows from this state, made when it is first asked for: all clients that get it share it."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def next(self, weights: Weights, before: Weights | None = None, **extra: Mask | Tensor) -> State:
        """The state one round later."""
        return replace(
            self, weights=weights, round=self.round + 1, attempt=0, before=before, extra={**self.extra, **extra}
        )

    def enter(self, stage: int, weights: Weights, **extra: Mask | Tensor) -> State:
        """The first round of another stage."""
        return replace(self, weights=weights, stage=stage, round=0, attempt=0, before=None, extra=extra)

    def again(self) -> State:
        """The same round once more, with fresh randomness: a new cohort."""
        return replace(self, attempt=self.attempt + 1)

    def order(self, client: Client, local: Local, weights: Weights | None = None) -> Order:
        """An order of this round for one client; its key is the client's own."""
        key = self.key("client", client.id)
        return Order(weights if weights is not None else self.weights, local, key, self.tag)


@dataclass
class Sums:
    """Additive statistics of the updates of one round: all a server needs, whatever the number of clients."""

    layout: Layout
    n: int = 0
    clients: int = 0
    counts: list[int] = field(default_factory=list)  # active weights per layer, added over clients
    weights: Tensor | None = None  # sum of n * w, float64
    holders: Tensor | None = None  # sum of n * m over the prunable weights
    loss: float = 0.0  # sum of n * mean training loss
    extra: dict[str, Tensor] = field(default_factory=dict)  # sum of n * tensor
    # A model's number of active weights -> sum of n * [statistics, 1], float64: smaller models see other activations.
    statistics: dict[int, Tensor] = field(default_factory=dict)

    def statistics_of(self, mask: Mask, otherwise: Tensor) -> Tensor:
        """Mean statistics of the models as large as this mask; `otherwise` if nobody reported any."""
        found = self.statistics.get(mask.active)
        return otherwise if found is None else torch.where(found[-1] > 0, found[:-1] / found[-1], otherwise).float()

    @property
    def layer_densities(self) -> list[float]:
        """Mean density of each layer over the clients, each client counted once."""
        return [c / (self.clients * k) for c, k in zip(self.counts, self.layout.sizes, strict=True)]

    @property
    def mean_loss(self) -> float:
        return self.loss / max(1, self.n)


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
    failures: Mapping[int, str]  # client id -> why it was left out
    seconds: Mapping[str, float] = field(default_factory=dict)
