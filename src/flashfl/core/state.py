"""What a run sets once and what the server knows between two rounds: plain immutable data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor

from .errors import FlashError, check_range, warn
from .exchange import Client, Extra, Local, Order, Tag
from .layout import Layout
from .mask import Mask, Weights
from .parts import part
from .rng import choose, flip, fold

T = TypeVar("T")
_MOMENTUM, _VARIANCE = "server momentum", "server variance"


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds with one purpose. A run has one or more phases.

    number: identifies the phase in messages and random keys.
    counts: whether its rounds are training rounds, which count towards `rounds` and change the learning rate.
    """

    name: str
    number: int
    counts: bool = True


TRAINING = Phase("training", 2)  # 1 is left to phases that prepare it


@part
@dataclass(frozen=True)
class ServerStep:
    """FedAvgM (Hsu et al., 2019) and FedAdam (Reddi et al., 2021) on the server, for any method.

    The method's next model minus the one before it is a change d. FedAvgM: m = momentum * m + d, w = w + lr * m.
    FedAdam: m = momentum * m + (1 - momentum) * d, v = adam * v + (1 - adam) * d^2, w = w + lr * m / (sqrt(v) + tau).
    By default w = w + d: the method's model itself. BatchNorm statistics are the method's. Where the mask moves, what
    leaves it loses its momentum. Momentum starts anew with each phase. Nothing more travels.
    """

    lr: float = 1.0  # the server's learning rate: the change of its model is multiplied by this
    momentum: float = 0.0  # the server's momentum
    adam: float = 0.0  # FedAdam: decay of the squared changes, such as 0.99; 0: no FedAdam
    tau: float = 1e-3  # FedAdam: added to the divisor

    def __post_init__(self) -> None:
        check_range("(0, inf)", "This is a setting of the server's step", lr=self.lr, tau=self.tau)
        check_range("[0, 1)", "This is a setting of the server's step", momentum=self.momentum, adam=self.adam)

    def apply(self, before: State, after: State) -> State:
        """`after`, which a method made of `before`, with the model that this step leads to."""
        plain = (self.lr, self.momentum, self.adam) == (1.0, 0.0, 0.0)
        if plain or before.phase != after.phase or not after.phase.counts:
            return after
        trained, k = after.layout.trained_size, after.layout.prunable_size
        start, vector = before.weights.vector[:trained], after.weights.vector.clone()
        change = vector[:trained] - start
        fresh = torch.zeros_like(change)
        new = before.kept(Tensor, _MOMENTUM, fresh) * self.momentum + change * (1 - self.momentum if self.adam else 1.0)
        new[:k].masked_fill_(~after.mask.bits, 0.0)
        extra = {**after.extra, _MOMENTUM: new}
        step = new
        if self.adam:
            seen = before.kept(Tensor, _VARIANCE, fresh)
            variance = extra[_VARIANCE] = seen * self.adam + change.square() * (1 - self.adam)
            step = new / (variance.sqrt() + self.tau)
        vector[:trained] = start + self.lr * step
        return replace(after, weights=Weights.masked(after.mask, vector), extra=extra)


@dataclass(frozen=True)
class Plan:
    """What is fixed for a run: layout, initial weights, seed, number of rounds and clients, learning rates."""

    layout: Layout
    draw: Callable[[int], Tensor]  # key -> a flat vector; methods use `initial`
    key: int
    rounds: int
    clients: int
    per_round: int
    local: Local = field(default_factory=Local)
    lr_end: float = 0.001
    device: torch.device | str = "cpu"
    flops: tuple[float, ...] = ()  # of one weight of each prunable layer and sample; last, those of all other layers
    server: ServerStep = field(default_factory=ServerStep)  # how the model follows the average
    average: float = 0.0  # what the running average of the server's model keeps of itself in a round; 0: none
    poisson: bool = False  # clients join a round independently of each other, `per_round` of them on average

    def __post_init__(self) -> None:
        check_range(f"[1, {self.clients}]", f"There are {self.clients} clients", per_round=self.per_round)
        check_range("[0, inf)", lr_end=self.lr_end)
        if 0 < self.local.lr < self.lr_end:
            warn(
                f"lr = {self.local.lr:g} is below lr_end = {self.lr_end:g}: the learning rate will grow. To let it "
                f"fall, set lr_end to {self.local.lr:g} or less."
            )

    def initial(self, draw: int = 1) -> Tensor:
        """The initial weights. All methods with the same seed get the same. Another `draw` gives others."""
        return self.draw(fold(self.key, "weights", draw)).to(self.device)

    def lr(self, round: int) -> float:
        """The learning rate of a round. It falls exponentially from lr to lr_end; constant if one of them is 0."""
        if self.local.lr <= 0 or self.lr_end <= 0:
            return self.local.lr
        return self.local.lr * math.exp(round / self.rounds * math.log(self.lr_end / self.local.lr))


@dataclass(frozen=True, repr=False)
class State:
    """Everything the server knows between two rounds. `round` counts from 0 in each phase."""

    plan: Plan
    weights: Weights
    phase: Phase = TRAINING
    round: int = 0
    attempt: int = 0
    extra: Mapping[str, Mask | Tensor] = field(default_factory=dict)
    counted: int = 0  # finished rounds of all phases that count
    before: Weights | None = None  # the average before the server cut it to its mask, if it did; not in checkpoints
    average: Weights | None = None  # the running average of `weights` over rounds, which the loop keeps; see `averaged`

    def __post_init__(self) -> None:
        for name, value in self.extra.items():
            if not isinstance(value, Mask | Tensor):
                raise FlashError(
                    f"state.extra[{name!r}] is {type(value).__name__}: expected a Mask or a Tensor, which checkpoints "
                    "can store. Wrap a number as torch.tensor(value)."
                )

    def __repr__(self) -> str:
        density = f"density {self.mask.density:.4f}"
        return f"State({self.phase.name}, round {self.round} of {self.plan.rounds}, {density})"

    @property
    def layout(self) -> Layout:
        """The place of each tensor in the flat vector."""
        return self.plan.layout

    @property
    def mask(self) -> Mask:
        """The mask of the server's model."""
        return self.weights.mask

    @property
    def tag(self) -> Tag:
        return (self.phase.number, self.round, self.attempt)

    def key(self, *parts: str | int) -> int:
        """A random key for one purpose in this round."""
        return fold(self.plan.key, *parts, *self.tag)

    def sample(
        self, clients: Sequence[Client], count: int | None = None, purpose: str = "cohort"
    ) -> tuple[Client, ...]:
        """`count` random clients, sorted by id; all of them if there are fewer.

        Without a count: the usual cohort.
        """
        ids = [c.id for c in clients]
        chosen = set(self.drawn(ids) if count is None else choose(self.key(purpose), ids, count))
        return tuple(sorted((c for c in clients if c.id in chosen), key=lambda c: c.id))

    def drawn(self, ids: Sequence[int]) -> list[int]:
        """The ids of a random cohort, sorted: `per_round` of them, or so many on average (dp_sampling poisson)."""
        plan, key = self.plan, self.key("cohort")
        return flip(key, ids, plan.per_round / plan.clients) if plan.poisson else choose(key, ids, plan.per_round)

    def kept(self, kind: type[T], name: str, otherwise: T | None = None) -> T:
        """The mask or tensor that the method stored under this name; `otherwise` if there is none."""
        found = self.extra.get(name, otherwise)
        if not isinstance(found, kind):
            raise FlashError(
                f"the state's `extra` has no {kind.__name__} {name!r}. Store it in `init`, with State(..., extra=...), "
                "or with s.next(...) or s.enter(...). s.enter drops what it is not given. If the run was resumed after "
                "a change of the method, start it again."
            )
        return found

    def next(self, weights: Weights, before: Weights | None = None, **extra: Mask | Tensor) -> State:
        """The state one round later. `before`: a second model to evaluate. `extra`: masks and tensors to store."""
        return replace(
            self, weights=weights, round=self.round + 1, attempt=0, before=before, extra={**self.extra, **extra},
            counted=self.counted + self.phase.counts,
        )  # fmt: skip

    def enter(self, phase: Phase, weights: Weights, **extra: Mask | Tensor) -> State:
        """The first round of another phase."""
        counted = self.counted + self.phase.counts
        return replace(
            self, weights=weights, phase=phase, round=0, attempt=0, before=None, average=None, extra=extra,
            counted=counted,
        )  # fmt: skip

    def settled(self, last: State) -> State:
        """The state after the server's step and the running average. `last`: the state before the round.

        With static BatchNorm nobody reports statistics, so the model keeps its own.
        """
        after = self.plan.server.apply(last, self)
        if not self.plan.local.statistics and after.phase == last.phase:
            own = last.weights.statistics
            before = after.before and after.before.with_statistics(own)
            after = replace(after, weights=after.weights.with_statistics(own), before=before)
        return after.averaged(last)

    def averaged(self, last: State) -> State:
        """The state with the running average after one more round. `last`: the state before the round.

        ema = b * ema + (1 - b) * w, where b is `plan.average`, but at most (t - 1) / (t + 9) in round t of a phase: a
        short run would still hold its first models otherwise. Statistics are averaged like weights. A weight that
        leaves the mask leaves the average, and one that enters starts at its current value. Each phase has an average
        of its own.
        """
        old, new, t = last.average, self.weights, self.round
        if not self.plan.average or self.phase != last.phase:
            return replace(self, average=None)
        if old is None:
            return replace(self, average=new)
        keep = min(self.plan.average, (t - 1) / (t + 9))
        vector, k = new.vector.lerp(old.vector, keep), self.layout.prunable_size
        if old.mask is not new.mask:
            vector[:k] = torch.where(old.mask.bits & new.mask.bits, vector[:k], new.vector[:k])
        return replace(self, average=Weights(new.mask, vector))

    def again(self) -> State:
        """The same round again, with new random keys and another cohort."""
        return replace(self, attempt=self.attempt + 1)

    def skip(self) -> State:
        """The next round, with the same model. A failed secure round is repeated under a new number."""
        return replace(self, round=self.round + 1, attempt=self.attempt + 1)

    def order(
        self,
        client: Client,
        local: Local,
        weights: Weights | None = None,
        extra: Mapping[str, Extra] | None = None,
    ) -> Order:
        """An order of this round for one client, with a random key for this client."""
        key = self.key("client", client.id)
        return Order(weights if weights is not None else self.weights, local, key, self.tag, extra or {})


def drops(s: State, client: int, share: float) -> bool:
    """Whether a simulated client fails in this round: keyed, so that a repeated run loses the same ones."""
    return share > 0 and s.key("dropout", client) % 1_000_000 < share * 1_000_000


def dropout_step(s: State, client: int) -> int:
    """In which of the five steps of a private round a client fails that is chosen to fail."""
    return s.key("dropout step", client) % 5
