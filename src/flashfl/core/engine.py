"""What a method runs on: an engine that carries out orders, and the clients there are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from .exchange import Client, Evaluation, Local, Order, Outcome
from .mask import Weights
from .method import Method
from .record import Score
from .state import State

# What checkpoints hold beside tensors: plain JSON.
JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]


class Memory(Protocol):
    """What an engine knows about its clients between rounds: for each the last round it took part in, and its masks."""

    def snapshot(self) -> None:
        """A round is over. `save` describes this moment until the next snapshot."""

    def rollback(self) -> None:
        """Forget the round just carried out: it will be repeated."""

    def save(self) -> dict[str, JSON]:
        """The last snapshot as JSON that names masks in the store by hash."""

    def load(self, saved: Mapping[str, JSON]) -> None:
        """Restore what `save` gave."""

    def keep_only(self, pinned: set[str]) -> None:
        """Delete stored masks that neither a client nor `pinned`, the checkpoints' list, needs."""


class Engine(Protocol):
    """Carries out orders, owns what clients remember, counts bytes."""

    @property
    def device(self) -> torch.device: ...

    @property
    def memory(self) -> Memory: ...

    def prepare(self, s: State) -> Mapping[str, JSON]:
        """Choose how a new run computes, before its first round. The choice goes into the results' header."""

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        """Carry out the orders. They are made as they are needed, in ascending client id."""

    def evaluate(self, weights: Weights, statistics: bool = True) -> Evaluation:
        """How good a model is; without `statistics` BatchNorm uses each batch's own."""

    def evaluate_personal(self, weights: Weights, clients: Sequence[tuple[Client, Local]]) -> Score | None:
        """How good the model is under each client's own mask, on samples like the client's; None: cannot be told."""

    def close(self) -> None: ...


class Population(Protocol):
    """The clients of a run. In a simulation they are fixed; on Flower they come and go."""

    @property
    def size(self) -> int:
        """How many clients the run is planned for."""

    @property
    def fixed(self) -> tuple[Client, ...] | None:
        """The clients, if they are the same for the whole run; they are then part of the run's identity."""

    def admit(self, method: Method, key: int) -> None:
        """From now on, give clients the densities this method assigns."""

    def present(self) -> Sequence[Client]:
        """The clients that can take part in the next round; on Flower this asks the network."""

    def save(self) -> dict[str, JSON]: ...

    def load(self, saved: Mapping[str, JSON]) -> None: ...


class FixedPopulation:
    """Clients that are always there."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = tuple(clients)

    @property
    def size(self) -> int:
        return len(self._clients)

    @property
    def fixed(self) -> tuple[Client, ...] | None:
        return self._clients

    def admit(self, method: Method, key: int) -> None:
        self._clients = method.admit(self._clients, key)

    def present(self) -> Sequence[Client]:
        return self._clients

    def save(self) -> dict[str, JSON]:
        return {}

    def load(self, saved: Mapping[str, JSON]) -> None:
        pass
