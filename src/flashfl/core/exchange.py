"""What server and clients exchange, and what a round's updates add up to: plain data."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from fractions import Fraction
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from .client import Form, Part, reports_changes
from .errors import ConfigError, check_range
from .layout import Layout
from .mask import Mask, Recipe, Weights
from .parts import check_part, coerced, part
from .precision import Precision

DROPPED = "dropped out (simulated)"  # the reason recorded for a simulated dropout
# Which of the packed values a message carries; rest: all but the active weights.
Carries = Literal["all", "weights", "statistics", "rest"]
Tag = tuple[int, int, int]  # (phase number, round, attempt): which round a message belongs to


@runtime_checkable
class Adapt(Protocol):
    """A rule by which clients move their masks during training; see `sparsity.PruneRegrow`."""

    @property
    def dense_gradient(self) -> bool:
        """Whether the rule needs the gradient of inactive weights too."""

    def moments(self, epochs: int, batches: int) -> Mapping[int, Fraction]:
        """After which steps (counted from 1) the mask moves, and at what rate."""

    def collect(self, scores: Tensor, gradient: Tensor) -> None:
        """Take in the gradient [clients, K] of one step, in place; called only if `dense_gradient`."""

    def move(
        self,
        layout: Layout,
        vectors: Tensor,
        masks: Tensor,
        scores: Tensor | None,
        rate: Fraction,
        keys: Sequence[int],
        counts: Sequence[Sequence[int]],
    ) -> None:
        """Move the masks [clients, K] of a stack of models in place. counts: active weights of each layer."""


def _check_members(rule: object) -> None:
    """Refuse a rule that lacks a member of `Adapt`, or a class in place of a rule."""
    lacks = [name for name in ("dense_gradient", "moments", "collect", "move") if not hasattr(rule, name)]
    lacks = ["its parentheses"] if isinstance(rule, type) else lacks
    if lacks:
        raise ConfigError(
            f"adapt = {rule!r}: must be None or a rule that moves the mask, such as PruneRegrow(). Yours lacks "
            f"{', '.join(lacks)}."
        )


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
    lr_last: float = 1.0  # within the round, the learning rate falls linearly from lr towards lr_last * lr
    max_steps: int = 0  # at most this many batches an epoch; 0: all
    adapt: Adapt | None = None  # the rule that moves the mask during training; None: the mask is frozen
    start: Recipe | None = None  # the mask for a client that has no stored mask
    keep: tuple[str, ...] = ()  # what the client stores for its next round: nothing, or "mask"
    personal: bool = False  # a client is sent only the part of the model that its own mask, or `start`, covers
    report: Literal["weights", "counts", "statistics", "mask"] = "weights"  # mask: no values of active weights
    statistics: bool = True  # False: static BatchNorm, running statistics neither kept nor sent
    upload: Precision | None = None  # how the update's values travel; None: as those of the order
    parts: tuple[Part, ...] = ()  # what the client does beyond masked SGD; see `core.client`

    def __post_init__(self) -> None:
        if self.adapt is not None:
            _check_members(self.adapt)
        # Each field gets its exact type, and -0.0 becomes 0.0: equal settings are then equal messages.
        for name, value in coerced(self).items():
            object.__setattr__(self, name, value + 0 if isinstance(value, float) else value)
        check_range("[1, 2147483647]", epochs=self.epochs, batch=self.batch)
        check_range("[0, 2147483647]", max_steps=self.max_steps)
        check_range("[0, 1e6]", lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        check_range("[0, 1e6]", prox=self.prox, lr_last=self.lr_last)
        if self.keep not in ((), ("mask",)):
            raise ConfigError(
                f"keep = {self.keep}: must be () or ('mask',). For other tensors, write a part that has `remembers`"
            )
        for own in (*self.parts, *([self.adapt] if self.adapt is not None else ())):
            check_part(own)
        if self.report == "mask" and not self.statistics:
            raise ConfigError(
                "static_bn = true: not possible with this method, as clients report masks instead of weights. "
                "Set static_bn = false."
            )

    def sends(self, order: Precision) -> Precision:
        """The precision of the update's values: `upload`, or that of the order if `upload` is None.

        Only weights can travel as changes, and not if parts of the work report changes already.
        """
        how = self.upload or order
        changes = how.changes and self.report == "weights" and not reports_changes(self.parts)
        return how if changes == how.changes else replace(how, changes=changes)

    @property
    def order_carries(self) -> Carries:
        """Which values an order contains: `all`, or `weights` without BatchNorm statistics."""
        return "all" if self.statistics else "weights"

    @property
    def update_carries(self) -> Carries:
        """Which values an update contains: those of the order, `statistics`, or the `rest` (no prunable weights)."""
        return "rest" if self.report == "mask" else "statistics" if self.report == "statistics" else self.order_carries

    def batches(self, n: int) -> int:
        """The number of batches in an epoch of n samples."""
        count = math.ceil(n / self.batch)
        return min(count, self.max_steps) if self.max_steps else count


@dataclass(frozen=True)
class Client:
    """What the server knows about a client. n: number of samples. density: None if the method decides."""

    id: int
    n: int
    density: float | None = None


@dataclass(frozen=True)
class Extra:
    """A tensor beside the weights, in the form in which it travels and is stored; see `Field`."""

    form: Form
    value: Tensor


@dataclass(frozen=True)
class Order:
    """A message from the server to one client. Parts find `extra` in `Clients.given`."""

    weights: Weights
    local: Local
    key: int
    tag: Tag
    extra: Mapping[str, Extra] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """A message from one client to the server: its mask, and its values as `Weights.packed` returns them.

    `mask` and `values` are None if the client sends layer counts only. `start` is the model that the client got; the
    server adds it when it compares clients.
    """

    client: int
    n: int
    mask: Mask | None
    values: Tensor | None
    counts: tuple[int, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra: Mapping[str, Extra] = field(default_factory=dict)
    notes: Mapping[str, Extra] = field(default_factory=dict)  # what the client's parts remember; it never travels
    start: Tensor | None = None  # where the weights started from: as `values`, without statistics

    @staticmethod
    def of(
        client: int,
        n: int,
        weights: Weights | None,
        counts: tuple[int, ...],
        metrics: Mapping[str, float] | None = None,
    ) -> Update:
        """The update with these weights. If they are dense, no memory is copied."""
        mask, values = (None, None) if weights is None else (weights.mask, weights.packed())
        return Update(client, n, mask, values, counts, metrics or {})

    @property
    def weights(self) -> Weights | None:
        """The client's model, as a dense vector."""
        return None if self.mask is None or self.values is None else Weights.unpack(self.mask, self.values)


@dataclass
class Sums:
    """What the updates of one round add up to. Its size does not depend on the number of clients."""

    layout: Layout
    n: int = 0
    clients: int = 0
    counts: list[int] = field(default_factory=list)  # active weights per layer, added over clients
    loss: float = 0.0  # sum of n * mean training loss
    extra: dict[str, Tensor] = field(default_factory=dict)  # sum of n * tensor
    # Number of active weights -> sum of n * [statistics, 1], float64. Models of different size have other activations.
    statistics: dict[int, Tensor] = field(default_factory=dict)
    weights: Tensor | None = None  # sum of n * w, float64; None if no weights were reported
    holders: Tensor | None = None  # sum of n * m over the prunable weights

    def flat(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """The tensors `weights` and `holders`, to add updates to in place."""
        if self.weights is None or self.holders is None:
            self.weights = torch.zeros(self.layout.size, dtype=torch.float64, device=device)
            self.holders = torch.zeros(self.layout.prunable_size, dtype=torch.int64, device=device)
        return self.weights, self.holders

    def statistics_of(self, mask: Mask, otherwise: Tensor) -> Tensor:
        """Mean BatchNorm statistics of models with as many active weights as `mask`; `otherwise` if there are none."""
        found = self.statistics.get(mask.active)
        return otherwise if found is None else torch.where(found[-1] > 0, found[:-1] / found[-1], otherwise).float()

    @property
    def layer_densities(self) -> list[float]:
        """Mean density of each layer over the clients. All clients count alike."""
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

    @property
    def total(self) -> int:
        return self.down + self.up

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Spent:
    """What is known about privacy after a private round.

    known: epsilon against somebody who knows the cohorts, such as the server. sampled: against somebody who does not.
    """

    known: float = 0.0
    sampled: float = 0.0
    delta: float = 0.0  # 0: no differential privacy
    clamped: int = 0  # values beyond their declared range; not reported under differential privacy
    over: bool = False  # the budget allows no other round

    def limited(self, secure: bool) -> float:
        """The epsilon that `dp_epsilon` limits: with `secure` it is `known`, as the server knows the cohorts."""
        return self.known if secure else self.sampled


@dataclass(frozen=True)
class Outcome:
    """What an engine brings back from one round."""

    sums: Sums
    traffic: Traffic
    failures: Mapping[int, str]  # client id -> why it was dropped
    seconds: Mapping[str, float] = field(default_factory=dict)
    privacy: Spent | None = None  # of a private round
    revealed: bool = False  # clients gave their inputs to a secure sum: they give no other in this round


@dataclass(frozen=True)
class Evaluation:
    """How good a model is: mean loss and metric over all evaluation samples."""

    loss: float
    metric: float
    bytes: int = 0  # sent to clients that evaluated the model
