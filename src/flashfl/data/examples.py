"""Samples held as arrays, shared by all clients, fetched in batches on the device they live on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..core.errors import DataError

_ASKED = "each a tensor or an array: a model with inputs in a dict or a list needs a wrapper that takes them one by one"

_NONE = torch.zeros(0, dtype=torch.int64)

Inputs = tuple[Tensor, ...]
Prepare = Callable[[Inputs], Inputs]
# (inputs, key, at): augment the samples that stand at positions at, at+1, ... of an epoch; a pure function of its
# arguments, so the result does not depend on how an epoch is cut into batches.
Augment = Callable[[Inputs, int, int], Inputs]


@runtime_checkable
class Source(Protocol):
    """Anything samples can be fetched from by index."""

    def __len__(self) -> int: ...
    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[Inputs, Tensor]:
        """The samples at `index`, ready for the model; augmented under `key` unless it is None."""
        ...

    def to(self, device: torch.device | str) -> Source: ...


@dataclass(frozen=True, eq=False)
class Arrays:
    """Inputs and targets as whole tensors; `augment` sees raw inputs, then `prepare` makes floats of them."""

    inputs: Inputs
    target: Tensor
    prepare: Prepare | None = None
    augment: Augment | None = None

    def __post_init__(self) -> None:
        lengths = {len(x) for x in (*self.inputs, self.target)}
        if len(lengths) != 1:
            raise DataError(f"inputs and targets differ in length: {sorted(lengths)}")

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
    """A torch Dataset of (input, ..., target) samples, read and collated when they are needed."""

    dataset: Any
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return len(self.dataset)

    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[Inputs, Tensor]:
        from torch.utils.data import default_collate

        batch = default_collate([self.dataset[i] for i in index.tolist()])
        if not isinstance(batch, Sequence) or len(batch) < 2 or not all(hasattr(x, "to") for x in batch):
            raise DataError(f"a sample must be (input, ..., target), {_ASKED}")
        *inputs, target = batch
        return tuple(_single(x).to(self.device) for x in inputs), _single(target).to(self.device)

    def to(self, device: torch.device | str) -> Lazy:
        return Lazy(self.dataset, device)


@dataclass(frozen=True, eq=False)
class Subset:
    """Some of a source's samples: a client's share, as indices into data it does not own."""

    source: Source
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    def fetch(self, index: Tensor, key: int | None = None, at: int = 0) -> tuple[Inputs, Tensor]:
        return self.source.fetch(self.index[index.to(self.index.device)], key, at)

    def to(self, device: torch.device | str) -> Subset:
        return Subset(self.source.to(device), self.index.to(device))


def below(data: Source, index: Tensor) -> tuple[Source, Tensor]:
    """The source that all shares are taken from, and where in it the samples at `index` lie."""
    while isinstance(data, Subset):
        index = data.index[index.to(data.index.device)]
        data = data.source
    return data, index


def in_memory(data: Source) -> bool:
    """Whether a source holds its samples as arrays, and nobody's code runs when they are fetched."""
    return isinstance(below(data, _NONE)[0], Arrays)


def source(data: Any) -> Source:
    """A source from what users have: a source, a tuple of tensors or arrays, or a torch Dataset.

    What floats in tensors, arrays and data sets is cast to float32, in which models are trained; a source is as given.
    """
    if isinstance(data, Source):
        return data
    if isinstance(data, Sequence) and 2 <= len(data) <= 16 and all(hasattr(x, "shape") for x in data):
        *inputs, target = (_single(torch.as_tensor(x)) for x in data)
        return Arrays(tuple(inputs), target)
    mixed = isinstance(data, list | tuple) and any(hasattr(x, "shape") for x in data[:16])
    if mixed or (isinstance(data, Mapping) and 0 not in data):
        raise DataError(f"samples must be a tuple (inputs, ..., targets), {_ASKED}")
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return Lazy(data)
    raise DataError(
        f"cannot read samples from {type(data).__name__}: give a tuple (inputs, targets) of tensors or a torch Dataset"
    )


def _single(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def on_device(sources: Sequence[Source], device: torch.device | str) -> list[Source]:
    """The sources on a device; what several of them share is moved there once."""
    moved: dict[int, Source] = {}

    def base(data: Source) -> Source:
        if id(data) not in moved:
            moved[id(data)] = data.to(device)
        return moved[id(data)]

    return [Subset(base(s.source), s.index.to(device)) if isinstance(s, Subset) else base(s) for s in sources]
