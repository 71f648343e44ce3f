"""A client's local work in one round: its batches, its keys, and when its mask moves. Every engine follows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor

from ..core.exchange import Client, Extra, Local, Order
from ..core.mask import Mask, Weights
from ..core.rng import fold, permutation
from ..data.sources import Inputs, Source


@dataclass
class Schedule:
    """The steps of one client. They are counted from 1 over all epochs."""

    local: Local
    key: int
    n: int  # samples
    batches: int  # per epoch

    @property
    def steps(self) -> int:
        return self.local.epochs * self.batches

    def size(self, batch: int) -> int:
        """Samples in one batch of an epoch. The last may be short."""
        return min(self.local.batch, self.n - batch * self.local.batch)

    @property
    def seed(self) -> int:
        """The seed of everything random in the model and in custom data sets."""
        return fold(self.key, "torch") >> 1

    def shuffle_key(self, epoch: int) -> int:
        return fold(self.key, "shuffle", epoch)

    def shuffled(self, epoch: int, device: torch.device | str = "cpu") -> Tensor:
        """The order in which an epoch takes the samples."""
        return permutation(self.shuffle_key(epoch), self.n, device)

    def fetch(self, data: Source, epoch: int, order: Tensor, at: int, count: int) -> tuple[Inputs, Tensor]:
        """`count` samples from position `at` of an epoch on, augmented. order: the epoch's, from `shuffled`."""
        return data.fetch(order[at : at + count], fold(self.key, "augment", epoch), at)

    @cached_property
    def moves(self) -> dict[int, Fraction]:
        """After which steps the mask moves, and at what rate, in ascending order."""
        rule = self.local.adapt
        found = rule.moments(self.local.epochs, self.batches) if rule is not None else {}
        return {step: found[step] for step in sorted(found) if 1 <= step <= self.steps}

    def move_key(self, step: int) -> int:
        """The key of the randomness in the move after a step."""
        return fold(self.key, "adapt", *divmod(step - 1, self.batches))


@dataclass
class Work(Schedule):
    """One client among several that train side by side."""

    client: Client
    order: Order
    mask: Mask
    counts: tuple[int, ...]  # active weights per layer, kept up to date while the mask moves
    sent: Weights  # the order's model before it was rounded to travel
    extra: Mapping[str, Extra] = field(default_factory=dict)  # what its parts report
    notes: Mapping[str, Extra] = field(default_factory=dict)  # what its parts remember
