"""The parts of a client's work: what it does in a round beyond masked SGD.

A part is a frozen dataclass. Its functions are pure tensor operations on a stack of clients, so that every
engine runs it: the CPU engine on one client at a time, a GPU on many. `Local.parts` lists the parts of an order; they
are called in that order. A part defines only the functions it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from .errors import ConfigError
from .layout import Layout
from .parts import part as register
from .rng import mix, unit

Form = Literal["masked", "dense", "bits", "scalar", "indices"]


@dataclass(frozen=True)
class Field:
    """The form of a tensor that a part reports or remembers; it decides how the tensor is stored and sent.

    masked: one float for each active weight, `dense`: `size` floats, `bits`: `size` booleans, one bit each,
    `indices`: `size` booleans, sent as the positions of those that are true, `scalar`: one float.
    """

    form: Form = "dense"
    size: int = 0  # not used for masked and scalar

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ConfigError(f"Field({self.form!r}): the form must be one of {', '.join(get_args(Form))}")

    def shape(self, layout: Layout) -> tuple[int, ...]:
        """The shape of one client's tensor."""
        return () if self.form == "scalar" else (layout.prunable_size if self.form == "masked" else self.size,)


@dataclass(frozen=True)
class Place:
    """Where the trained weights lie in the columns of a matrix of models."""

    layout: Layout
    spans: tuple[slice, ...]  # the columns of each prunable layer
    index: Tensor  # [columns], int32: the position of each column in the flat vector

    @staticmethod
    def logical(layout: Layout, device: torch.device | str = "cpu") -> Place:
        """The trained weights in the order of the flat vector."""
        index = torch.arange(layout.trained_size, dtype=torch.int32, device=device)
        return Place(layout, tuple(layer.span for layer in layout.prunable), index)


@dataclass
class Rows:
    """What a part sees during a step: the models of some clients, one in each row.

    Columns are the trained weights, prunable ones first. On a GPU their order within a layer differs, and padding lies
    between layers: use `place` where positions matter. Every tensor stays at its address.
    """

    place: Place
    weights: Tensor  # [rows, columns]
    keys: Tensor  # [rows, 2], int32: two words of random key for each client
    count: Tensor  # [rows, 1], int64: steps done
    steps: Tensor  # [rows, 1], int64: steps of the whole round
    lr: Tensor  # [rows, 1]: the learning rate of this step; 0 for a client that has no batch
    state: dict[str, Tensor] = field(default_factory=dict)  # what `begin` put there, [rows, columns]


@dataclass
class Clients:
    """What a part sees before and after training: the models of some clients in logical order, one in each row."""

    layout: Layout
    keys: Sequence[int]
    steps: Sequence[int]  # of each client
    lr: float
    start: Tensor  # [clients, size]: the models that they were sent, under their masks
    vectors: Tensor  # [clients, size]: the models now; what is reported if `finish` leaves them alone
    masks: Tensor  # [clients, prunable]
    given: Mapping[str, Tensor]  # what the order brought beside the weights, [clients, ...]
    memory: dict[str, Tensor]  # what they remember, [clients, size of the field]; zeros at first
    validate: Callable[[int], float]  # row -> the metric of its model on the last fifth of the client's samples
    initial: Callable[[int], Tensor]  # key -> weights drawn as the model's initial ones, [size]
    classes: Callable[[int], Tensor | None]  # row -> the targets of its samples; None if they are not classes
    state: dict[str, Tensor] = field(default_factory=dict)  # for steps: [clients, trained] or [clients, prunable]
    report: dict[str, Tensor] = field(default_factory=dict)  # [clients, size of the field]

    def change(self) -> Tensor:
        """How far training moved the weights, [clients, trained]."""
        trained = self.layout.trained_size
        return self.vectors[:, :trained] - self.start[:, :trained]


@dataclass(frozen=True)
class Part:
    """The base of all parts; by default it does nothing. Subclasses need `@dataclass(frozen=True)`."""

    changes: ClassVar[bool] = False  # whether `finish` turns the reported weights into changes of the weights

    def __init_subclass__(cls) -> None:
        register(cls)  # so that messages can name it

    # -- what it says before training --

    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        """What the client keeps until its next round. `Clients.memory` holds it; it never travels."""
        return {}

    def reports(self, layout: Layout) -> Mapping[str, Field]:
        """What the client sends beside its weights: `finish` fills `Clients.report`, the server finds `sums.extra`."""
        return {}

    def active(self, layout: Layout, before: int) -> tuple[int, int] | None:
        """The least and the most weights in the mask that `finish` reports; None: the mask that was trained."""
        return None

    def computes(self, densities: Sequence[float]) -> Sequence[float]:
        """The layer densities that the passes compute with, for counting FLOPs. By default the mask's."""
        return densities

    # -- once a round, in logical order --

    def begin(self, c: Clients) -> None:
        """Before the first step: change `vectors` and `masks`. Tensors put into `c.state` are there in every step."""

    def finish(self, c: Clients) -> None:
        """After the last step: change what is reported (`vectors`, `masks`, `report`) and remembered (`memory`)."""

    # -- in every step; on a GPU inside a captured graph --

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        """What the forward pass sees of `weights` [rows, columns]. By default the weights themselves."""
        return weights

    def backward(self, r: Rows, gradient: Tensor) -> None:
        """Turn the gradient of what the forward pass saw into that of the weights, in place. By default: the same."""

    def before(self, r: Rows, gradient: Tensor) -> None:
        """Change the gradient [rows, columns] before the step, or add it up in `r.state`, in place.

        Inactive weights have their gradient here, too.
        """

    def after(self, r: Rows, gradient: Tensor) -> None:
        """Change the weights after the step, in place. `gradient` is what the step followed, 0 at inactive weights."""

    def inputs(self, weight: Tensor) -> Tensor | None:
        """The share of a layer's input that is kept for the gradient of its weight; None: all of it."""
        return None

    # -- on the server --

    def tally(self, layout: Layout, vectors: Tensor, masks: Tensor) -> Mapping[str, Tensor]:
        """What the server derives from each update [clients, size], to be added to `sums.extra`. It does not travel."""
        return {}


def overrides(part: Part, *names: str) -> bool:
    """Whether a part defines one of these functions itself."""
    return any(getattr(type(part), name) is not getattr(Part, name) for name in names)


def fields_of(parts: Sequence[Part], which: Literal["remembers", "reports"], layout: Layout) -> dict[str, Field]:
    """What some parts report or remember, by name."""
    return {name: form for part in parts for name, form in getattr(part, which)(layout).items()}


def reports_changes(parts: Sequence[Part]) -> bool:
    """Whether clients report changes of the weights instead of weights."""
    return any(part.changes for part in parts)


def moves_mask(parts: Sequence[Part]) -> bool:
    """Whether clients may report another mask than the one that was trained."""
    return any(overrides(part, "active") for part in parts)


def reports_another_mask(parts: Sequence[Part]) -> bool:
    """Whether clients train one mask and report another."""
    return any(overrides(part, "active") and overrides(part, "finish") for part in parts)


def active_range(parts: Sequence[Part], layout: Layout, before: int) -> tuple[int, int]:
    """The least and the most active weights that a client may report, if it trained `before` of them."""
    said = [bounds for part in parts if (bounds := part.active(layout, before)) is not None]
    return said[-1] if said else (before, before)


def draw(r: Rows, purpose: int = 0) -> Tensor:
    """A random number in [0, 1) for each weight, row and step, [rows, columns]: keyed, equal on all devices."""
    return _uniform(r, r.place.index[None, :], purpose)


def draw_one(r: Rows, purpose: int = 0) -> Tensor:
    """A random number in [0, 1) for every row and step, [rows, 1]."""
    return _uniform(r, torch.zeros_like(r.keys[:, :1]), purpose)


def _uniform(r: Rows, index: Tensor, purpose: int) -> Tensor:
    x = mix(index ^ r.keys[:, :1])
    x = mix(x + r.keys[:, 1:])
    return unit(mix(x + (r.count.to(torch.int32) * 64 + purpose)))
