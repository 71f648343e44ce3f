"""The server's half of a private round: the steps of its protocol, its bytes, its sums, and the privacy it spends."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, FlashError, check_range
from ..core.exchange import Client, Order, Outcome, Traffic
from ..core.state import State
from ..privacy.errors import Refused
from ..privacy.keys import Words
from ..privacy.messages import Step, Terms
from ..privacy.noise import LARGEST, LEAST
from ..privacy.server import Collector, Gatherer
from ..privacy.settings import Privacy
from ..privacy.vector import Packing
from .encoding import Account, Encoding
from .memory import ClientMemory
from .vault import Vault

LENGTH = struct.Struct("<BI")  # step, and the length of the part that follows
SPENT = "its privacy budget is spent"


def check_common(orders: Sequence[tuple[Client, Order]]) -> None:
    """Refuse a round in which clients' masks differ: a weight that one client alone holds shows in the sum."""
    for client, order in orders:
        check_range("[0, 4294967295]", "Private rounds need smaller client ids", client_id=client.id)
        local, mask, (_, first) = order.local, order.weights.mask, orders[0]
        moves = (local.adapt is not None and local.report != "counts") or local.report == "mask" or local.personal
        moves = moves or any(part.active(mask.layout, mask.active) is not None for part in local.parts)
        more = order.extra or any(part.changes or part.reports(mask.layout) for part in local.parts)
        alike = local == first.local and mask.equal(first.weights.mask)
        if moves or local.keep or local.start is not None or more or not alike:
            raise ConfigError(
                f"the order of client {client.id} does not fit a private round. All clients must get the same frozen "
                "mask and the same training settings, and nothing but weights may be sent. Use a method such as dense, "
                "pdst or spdst, or switch `secure` and `dp_*` off."
            )


def check_deviation(deviation: int, error: type[FlashError] = ConfigError) -> None:
    """Refuse noise that cannot be drawn. deviation: after scaling to integers."""
    if not LEAST <= deviation <= LARGEST:
        raise error(
            f"the noise has a standard deviation of {deviation} after scaling to integers. It must be from {LEAST} to "
            f"{LARGEST}. If it is too small, raise dp_noise or lower dp_epsilon on the server. If it is too large, do "
            "the opposite."
        )


def packing(privacy: Privacy, order: Order, cohort: int) -> Packing:
    """How the reports of a round become whole numbers."""
    weights = order.weights
    how = Packing(
        weights.layout, order.local, weights.mask.active, privacy.most(cohort), privacy.ranges, privacy.noise,
        privacy.noisers(cohort), privacy.draw.cohort if privacy.draw.poisson else cohort,
    )  # fmt: skip
    if privacy.noise is not None:
        check_deviation(how.deviation)
    return how


class Private(Account):
    """How every private round begins and ends, with real bytes or without."""

    def begin(self, vault: Vault, s: State, orders: Sequence[tuple[Client, Order]]) -> Order:
        """Fix what all clients share: the model and the work, how reports become whole numbers, and the terms.

        In a Poisson round without clients, the order is what a client would be sent. Its sum is noise alone.
        """
        check_common(orders)
        self.vault, self.privacy, self.tag = vault, vault.privacy, s.tag
        order = orders[0][1] if orders else s.order(Client(0, 0), s.plan.local)
        self.start, self.cohort = order.weights, [client.id for client, _ in orders]
        self.packing = how = packing(self.privacy, order, len(orders))
        policy, ranges, noise = self.privacy.policy, self.privacy.ranges, self.privacy.noise
        self.terms = Terms(vault.run, s.tag, how.length, how.bits, policy, how.cohort, ranges, noise)
        return order

    def end(self, total: Tensor, counted: Sequence[int], why: str, revealed: bool) -> Outcome:
        """Settle the round by the sum of the clients that counted. why: it cannot be used, so the loop tries again."""
        if why:
            self.memory.heard.clear()
            why = f"the private round has no usable sum ({why})"
            self.failures = {client: self.failures.get(client, why) for client in self.cohort}
            return replace(super().close(), privacy=self.vault.spent(0), revealed=revealed)
        self.sums, clamped = self.packing.decode(total, self.start, len(counted))
        # A client that vanished after its input was in has contributed: it is not dropped.
        self.failures = {client: why for client, why in self.failures.items() if client not in counted}
        return replace(super().close(), privacy=self.vault.spent(clamped), revealed=self.privacy.secure)


class PrivateRound(Private, Encoding):
    """The account of a private round.

    Post what `requests` gives, hand answers to `received` and missing ones to `failed`; `advance` ends the step. When
    it returns False the round is over: `close`.
    """

    def __init__(
        self, vault: Vault, memory: ClientMemory, s: State, orders: Sequence[tuple[Client, Order]],
        present: Sequence[int],
    ) -> None:  # fmt: skip
        """present: the clients that the cohort was drawn from."""
        super().__init__(memory)
        order = self.begin(vault, s, orders)
        self.orders = {client.id: (replace(client, n=0), order) for client, order in orders}  # n stays with clients
        secure = self.privacy.secure
        self._round = Collector(self.terms) if secure else Gatherer(self.terms, self.packing.deviation)
        self._why = ""  # why nothing can be opened
        self._before = vault.stored(s.tag, self.packing.length)
        if self._before is not None:  # on Flower, other clients may be present now: its numbers keep their scale
            self.packing = packing(self.privacy, order, self._before.cohort)
        else:
            for client in set(self.cohort) - set(vault.spend(s, self.cohort, present)):
                self.failed(client, SPENT)

    @property
    def step(self) -> int:
        return self._round.step

    def _waiting(self) -> list[int]:
        """The clients whose answers are due in this step, ascending."""
        if self._before is not None:
            return []
        asked = self.cohort if self._round.alive is None else self._round.alive
        return sorted(set(asked) - self._round.heard - set(self.failures))

    def requests(self) -> Iterator[tuple[int, bytes]]:
        """What each client is sent in this step, in ascending id."""
        return ((client, self.request(client)) for client in self._waiting())

    def request(self, client: int, order: bytes | None = None) -> bytes:
        """The bytes of a request; order: with these bytes of the order instead of its usual ones."""
        if self.step == Step.ADVERTISE:
            parts = [self.terms.to_bytes()]
        elif self.step != Step.MASKED:
            parts = [self._round.request(client)]
        else:
            order = order or self.sent(*self.orders[client])
            parts = [b"" if self.privacy.secure else self.terms.to_bytes(), self._round.request(client)]
        head = b"".join(LENGTH.pack(self.step, len(part)) + part for part in parts)
        self.traffic += Traffic(down=len(head), overhead=len(head))
        return head + (order or b"")

    def received(self, client: int, data: bytes, notes: str | None = None) -> None:
        """A client's answer. If it is not a good one, the client is dropped."""
        size = self.packing.length * self.packing.bits // 8 if self.step == Step.MASKED else 0
        self.traffic += Traffic(up=len(data), values=min(size, len(data)), overhead=max(0, len(data) - size))
        self._orders.pop(client, None)  # there is one in the step that sends orders
        try:
            self._round.received(client, data)
        except Refused as error:
            self.failed(client, f"{type(error).__name__}: {error}")

    def lacking(self, client: int, data: bytes) -> bytes:
        """A client lacks a mask: the request with the full one. Raises a WireError if the client says so twice."""
        return self.request(client, super().lacking(client, data))

    def largest_update(self, client: int) -> int:
        """Bytes of the largest answer of a client in this step."""
        return 4096 + max(self.packing.length * self.packing.bits // 8, 256 * len(self.orders))

    def advance(self) -> bool:
        """End the step. False: there is no other."""
        if self._before is not None:
            return False
        for client in self._waiting():
            self.failed(client, "no answer")
        try:
            self._round.close()
        except Refused as error:
            self._why = f"{type(error).__name__}: {error}"
            return False
        return self.privacy.secure and self.step <= Step.UNMASK

    def close(self) -> Outcome:
        """Open the sum. If that is impossible nothing counts, and the loop repeats the round."""
        words, counted = self._before[:2] if self._before is not None else self._opened()
        total = torch.from_numpy(words.view(f"<i{words.itemsize}").astype(np.int64))  # signed numbers from here on
        if counted:
            self._why = self.packing.problem(total, len(counted))
        if not self._why and self._before is None:
            self.vault.store(self.tag, words, counted, self.packing.cohort)
            for client in counted:
                self.memory.hear(client, self.tag, self.memory.store.keep(self.start.mask))
        return self.end(total, counted, self._why, revealed=self.privacy.secure and self.step >= Step.MASKED)

    def _opened(self) -> tuple[Words, list[int]]:
        """The sum and its clients, also those that dropped out after their input. Without any, `_why` says why."""
        counted = sorted(self._round.counted)
        if self.orders and not counted:
            self._why = self._why or "no client replied"
        if not self._why:
            try:
                return self._round.opened(), counted
            except Refused as error:
                self._why = f"{type(error).__name__}: {error}"
        return np.zeros(0, np.uint32), []
