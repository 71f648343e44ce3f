"""Masks and masked weights: where a model is sparse, and the values it has there."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .layout import Layout
from .parts import part


@part
@dataclass(frozen=True)
class Recipe:
    """A random mask in a few bytes: the key that ranks the weights and how many each layer keeps (0: no N:M)."""

    key: int
    budgets: tuple[int, ...]
    nm: int = 0


@dataclass(frozen=True, eq=False)
class Mask:
    """Which prunable weights are active. An active weight may happen to be zero."""

    layout: Layout
    bits: Tensor
    known_counts: tuple[int, ...] | None = None
    recipe: Recipe | None = None

    @staticmethod
    def full(layout: Layout, device: torch.device | str = "cpu") -> Mask:
        return Mask(layout, torch.ones(layout.prunable_size, dtype=torch.bool, device=device), layout.sizes)

    @staticmethod
    def unpack(
        layout: Layout, packed: np.ndarray[Any, Any], device: torch.device | str = "cpu", recipe: Recipe | None = None
    ) -> Mask:
        """The mask whose `packed` is this array."""
        bits = np.unpackbits(packed, count=layout.prunable_size, bitorder="little").astype(bool)
        return Mask(layout, torch.from_numpy(bits).to(device), recipe=recipe)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Active weights of each layer. Counting bits on a GPU waits for the GPU."""
        return self.known_counts if self.known_counts is not None else count_layers(self.layout, self.bits)

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
    def places(self) -> Tensor:
        """The positions of the active weights."""
        if self.bits.is_cuda:
            return self.bits.nonzero().squeeze(1)
        return torch.from_numpy(np.flatnonzero(self.bits.numpy()))

    @cached_property
    def hash(self) -> str:
        """A hash of the layout and the bits, as 16 hex digits."""
        return hashlib.blake2b(self.packed.tobytes(), digest_size=8, key=self.layout.hash.encode()).hexdigest()

    def equal(self, other: Mask) -> bool:
        """Whether both masks have the same active weights."""
        if self is other or self.bits is other.bits:
            return True
        if None not in (self.known_counts, other.known_counts) and self.known_counts != other.known_counts:
            return False
        return bool(torch.equal(self.bits, other.bits.to(self.bits.device)))

    def to(self, device: torch.device | str) -> Mask:
        if self.bits.device == torch.device(device):
            return self
        return Mask(self.layout, self.bits.to(device), self.counts, self.recipe)


def count_layers(layout: Layout, bits: Tensor) -> tuple[int, ...]:
    """How many bits are set in each prunable layer."""
    return count_rows(layout, bits[None])[0]


def count_rows(layout: Layout, rows: Tensor) -> list[tuple[int, ...]]:
    """`count_layers` of each row; a GPU is waited for once."""
    spans = [layer.span for layer in layout.prunable]
    if rows.is_cuda:
        sums = torch.stack([rows[:, span].sum(1) for span in spans], 1).tolist() if spans else [()] * len(rows)
        return [tuple(row) for row in sums]
    flags = rows.numpy()  # numpy counts booleans several times faster than torch
    return [tuple(int(np.count_nonzero(row[span])) for span in spans) for row in flags]


def repacked(values: Tensor, old: Mask, new: Mask) -> Tensor:
    """Values packed under one mask, packed under another. A weight outside the old mask is 0."""
    if old.equal(new):
        return values
    k, a, b = old.layout.prunable_size, old.active, new.active
    if a == k:
        return torch.cat([values[new.places], values[k:]])
    out = values.new_zeros(len(values) - a + b)
    out[b:] = values[a:]
    if b == k:
        out[old.places] = values[:a]
    else:
        out[old.bits[new.places].nonzero().squeeze(1)] = values[new.bits[old.places].nonzero().squeeze(1)]
    return out


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows of a matrix. If all are the same tensor, a matrix of that one row, which must not be written to."""
    return rows[0][None] if all(row is rows[0] for row in rows) else torch.stack(list(rows))


def pack_bits(bits: Tensor) -> Tensor:
    """Eight flags a byte, little-endian, zeros at the end: numpy's packbits on any device."""
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8)


@dataclass(frozen=True, eq=False)
class Weights:
    """A model: a flat vector that is zero outside its mask."""

    mask: Mask
    vector: Tensor

    @property
    def layout(self) -> Layout:
        return self.mask.layout

    @staticmethod
    def dense(layout: Layout, vector: Tensor) -> Weights:
        """A model in which every weight is active."""
        return Weights(Mask.full(layout, vector.device), vector)

    @staticmethod
    def masked(mask: Mask, vector: Tensor) -> Weights:
        """A model with the weights of `vector` inside `mask`, and 0 outside."""
        out = vector.clone()
        out[: mask.layout.prunable_size].masked_fill_(~mask.bits, 0.0)  # a product would leave zeros of both signs
        return Weights(mask, out)

    def is_masked(self) -> bool:
        """Whether the vector is zero outside the mask."""
        k = self.layout.prunable_size
        return self.mask.active == k or not bool((self.vector[:k].bool() & ~self.mask.bits).any())

    @staticmethod
    def unpack(mask: Mask, values: Tensor) -> Weights:
        """The model whose `packed()` is `values`. If it is dense, no memory is copied."""
        if mask.active == mask.layout.prunable_size:
            return Weights(mask, values)
        vector = torch.zeros(mask.layout.size, dtype=values.dtype, device=values.device)
        vector[mask.places] = values[: mask.active]
        vector[mask.layout.prunable_size :] = values[mask.active :]
        return Weights(mask, vector)

    def packed(self) -> Tensor:
        """The values that messages carry: active weights in order, then all dense weights and statistics."""
        k = self.layout.prunable_size
        if self.mask.active == k:
            return self.vector
        return torch.cat([self.vector[self.mask.places], self.vector[k:]])

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
