"""Where samples come from: arrays shared by all clients, data sets of the user's, and shares of either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from .columns import NUMBERS, parts_of, value_of

_CHUNK = 1000  # samples of a custom data set that are fetched at a time, to read their targets
_WRAP = (
    "each a tensor or an array. If the model takes a dict or a list, wrap it in a module that takes the inputs as "
    "separate arguments"
)

Inputs = tuple[Tensor, ...]
Prepare = Callable[[Inputs], Inputs]
# (inputs, key, at): augment the samples at positions at, at+1, ... of an epoch. A pure function of its arguments, so
# that the result does not depend on how an epoch is cut into batches.
Augment = Callable[[Inputs, int, int], Inputs]


@runtime_checkable
class Source(Protocol):
    """Anything that samples can be fetched from by index."""

    def __len__(self) -> int: ...
    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[Inputs, Tensor]:
        """The samples at `index`, ready for the model; augmented under `key` unless it is None."""
        ...

    def to(self, device: torch.device | str) -> Source: ...


@runtime_checkable
class Items(Protocol):
    """A torch Dataset, or anything else with a length and items."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class Arrays:
    """Inputs and targets as whole tensors. `augment` sees the raw inputs, then `prepare` makes floats of them."""

    inputs: Inputs
    target: Tensor
    prepare: Prepare | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        lengths = {x.shape[:1] for x in (*self.inputs, self.target)}
        if len(lengths) != 1 or torch.Size() in lengths:
            shapes = ", ".join(str(tuple(x.shape)) for x in (*self.inputs, self.target))
            raise DataError(f"inputs and targets must have the same length; their shapes are {shapes}")

    def __len__(self) -> int:
        return len(self.target)

    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[Inputs, Tensor]:
        index = index.to(self.target.device)
        inputs: Inputs = tuple(x[index] for x in self.inputs)
        if key is not None and self.augment is not None:
            inputs = self.augment(inputs, key, at)
        return (self.prepare(inputs) if self.prepare else inputs), self.target[index]

    def to(self, device: torch.device | str) -> Arrays:
        return replace(self, inputs=tuple(x.to(device) for x in self.inputs), target=self.target.to(device))


@dataclass(frozen=True, eq=False)
class Lazy:
    """A data set of samples (input, ..., target), or of dicts, read when they are needed."""

    dataset: Items
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[Inputs, Tensor]:
        from torch.utils.data import default_collate

        batch = default_collate([_sample(self.dataset[i]) for i in index.tolist()])
        *inputs, target = (_single(x).to(self.device) for x in batch)
        return tuple(inputs), target

    def to(self, device: torch.device | str) -> Lazy:
        return Lazy(self.dataset, device)

    def check(self) -> None:
        """Raise if the first sample has a form that cannot be read. Errors of the data set itself wait for training."""
        try:
            sample = self.dataset[0]
        except Exception:
            return
        _sample(sample)


def _sample(sample: object) -> tuple[object, ...]:
    """A sample's inputs and target."""
    if isinstance(sample, Mapping):
        parts = parts_of(sample)
    else:
        parts = tuple(map(value_of, sample)) if isinstance(sample, tuple | list) else (sample,)
    if len(parts) < 2 or not all(isinstance(x, NUMBERS) for x in parts):
        kinds = ", ".join(type(x).__name__ for x in parts)
        raise DataError(f"cannot read a sample of ({kinds}): it must be (input, ..., target), {_WRAP}")
    return parts


@dataclass(frozen=True, eq=False)
class Subset:
    """Some samples of a source: a client's share, as indices into data it does not own."""

    source: Source
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[Inputs, Tensor]:
        return self.source.fetch(self.index[index.to(self.index.device)], key, at)

    def to(self, device: torch.device | str) -> Subset:
        return Subset(self.source.to(device), self.index.to(device))


def below(data: Source, index: Tensor) -> tuple[Source, Tensor]:
    """The source that a share is taken from in the end, and where in it the samples at `index` lie."""
    while isinstance(data, Subset):
        index = data.index[index.to(data.index.device)]
        data = data.source
    return data, index


def in_memory(data: Source) -> bool:
    """Whether a source holds its samples as arrays, so that no code of the user's runs when they are fetched."""
    return isinstance(below(data, torch.arange(0))[0], Arrays)


def classes_of(data: Source) -> Tensor | None:
    """All targets of some samples, on the CPU, if they are classes."""
    base, index = below(data, torch.arange(len(data)))
    if isinstance(base, Arrays):
        found = base.target[index.to(base.target.device)].cpu()
    else:
        found = torch.cat([data.fetch(some)[1].cpu() for some in torch.arange(len(data)).split(_CHUNK)])
    return found if found.dim() == 1 and not found.is_floating_point() else None


def source(data: object) -> Source:
    """A source from what users have: a source, a tuple of tensors or arrays, or a data set.

    Floats in tensors, arrays and data sets are cast to float32, in which models are trained. A source stays as it is.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, Sequence) and 2 <= len(data) <= 16 and all(hasattr(x, "shape") for x in data):
        try:
            *inputs, target = (_single(torch.as_tensor(x)) for x in data)
        except (TypeError, ValueError) as error:  # texts, objects, tables of pandas
            raise DataError(f"cannot read samples: {error}. Give tensors or arrays of numbers") from None
        return Arrays(tuple(inputs), target)
    mixed = isinstance(data, list | tuple) and any(hasattr(x, "shape") for x in data[:16])
    if mixed or isinstance(data, Tensor | np.ndarray | Mapping | str) or not isinstance(data, Items):
        kind = f"a tensor of shape {tuple(data.shape)}" if isinstance(data, Tensor) else f"a {type(data).__name__}"
        raise DataError(
            f"cannot read samples from {kind}: give a torch Dataset, or a tuple (inputs, ..., targets), {_WRAP}. "
            "`clients` is a list with one of these for each client"
        )
    return Lazy(data)


def _single(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def on_device(sources: Sequence[Source], device: torch.device | str) -> list[Source]:
    """The sources on a device. What several of them share is moved there once."""
    moved: dict[int, Source] = {}

    def base(data: Source) -> Source:
        if id(data) not in moved:
            moved[id(data)] = data.to(device)
        return moved[id(data)]

    return [Subset(base(s.source), s.index.to(device)) if isinstance(s, Subset) else base(s) for s in sources]
