"""The server's half of a private round: the steps of its protocol, its bytes, its sums, and the privacy it spends."""

from __future__ import annotations

import json
import secrets
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..core.errors import ConfigError, RunStopped
from ..core.exchange import Client, Order, Outcome, Spent, Traffic
from ..core.files import put
from ..core.state import State
from ..privacy.accounting import Ledger, epsilon_known
from ..privacy.errors import Refused
from ..privacy.keys import Words
from ..privacy.messages import ADVERTISE, MASKED, UNMASK, Terms
from ..privacy.noise import LARGEST, LEAST
from ..privacy.plain import Gatherer
from ..privacy.server import Collector
from ..privacy.settings import Privacy, privacy_of
from ..privacy.vector import Packing
from ..wire import WireError, decode, encode
from .account import Account
from .encoding import Server
from .robust import PLAIN
from .settings import EngineSettings

LENGTH = struct.Struct("<BI")  # step, and the length of the part that follows
PRIVATE = "private"  # the folder of a run's private state
_SPENT = "its privacy budget is spent"


class Vault:
    """What a private run keeps from round to round, in its folder: its name, what it spent, the sum opened last.

    A sum may be opened once. If the server is interrupted before the next checkpoint, the resumed run takes the sum
    from here instead of asking clients again.
    """

    def __init__(self, privacy: Privacy, clients: int, cohort: int, folder: Path | None) -> None:
        self.privacy, self.folder = privacy, folder
        self._clients, self._cohort = clients, cohort
        self._run = ""
        self._ledger: Ledger | None = None

    @property
    def run(self) -> str:
        """A random name that keeps the rounds of different runs apart."""
        if not self._run:
            path = None if self.folder is None else self.folder / "run"
            self._run = path.read_text() if path is not None and path.exists() else secrets.token_hex(8)
            if path is not None:
                put(path, self._run.encode(), sync=True)
        return self._run

    @property
    def ledger(self) -> Ledger | None:
        """What was spent; None without differential privacy."""
        noise = self.privacy.noise
        if noise is not None and self._ledger is None:
            path = None if self.folder is None else self.folder / "spent.json"
            self._ledger = Ledger(noise.multiplier, self.privacy.delta, self._clients, self._cohort, path)
        return self._ledger

    def may_take_part(self, clients: Sequence[int]) -> list[int]:
        """The clients whose budget allows another round. Raises RunStopped if the run's budget is spent."""
        ledger, budget = self.ledger, self.privacy.budget
        if ledger is None or not budget:
            return list(clients)
        if not self.privacy.secure:
            if ledger.epsilon(more=1).sampled > budget:
                raise RunStopped(
                    f"the privacy budget dp_epsilon = {budget:g} is spent, so training ends. The model before this "
                    "round is kept."
                )
            return list(clients)
        taken: Counter[int] = ledger.taken
        return [c for c in clients if epsilon_known(ledger.multiplier, taken[c] + 1, ledger.delta) <= budget]

    def spent(self, clamped: int) -> Spent:
        """What is recorded about a round, and whether the budget allows no other."""
        ledger, budget = self.ledger, self.privacy.budget
        if ledger is None:
            return Spent(clamped=clamped)
        now = ledger.epsilon()
        over = False
        if budget and self.privacy.secure:
            able = self.may_take_part(list(ledger.taken))
            over = self._clients - len(ledger.taken) + len(able) < self._cohort
        elif budget:
            over = ledger.epsilon(more=1).sampled > budget
        return Spent(now.known, now.sampled, ledger.delta, clamped, over)

    def store(self, tag: Sequence[int], total: Words, clients: Sequence[int]) -> None:
        """Keep a sum that was opened."""
        if self.folder is not None:
            about = json.dumps([*tag[:2], list(clients)]).encode()
            data = struct.pack("<I", len(about)) + about + total.tobytes()
            put(self.folder / "opened", data, sync=True)

    def stored(self, tag: Sequence[int], kind: str) -> tuple[Words, list[int]] | None:
        """The sum that was opened in this round before the server was interrupted, and whose it is."""
        path = None if self.folder is None else self.folder / "opened"
        if path is None or not path.exists():
            return None
        data = path.read_bytes()
        (size,) = struct.unpack("<I", data[:4])
        phase, round, clients = json.loads(data[4 : 4 + size])
        return (np.frombuffer(data[4 + size :], kind).copy(), clients) if [phase, round] == list(tag[:2]) else None


def check_common(orders: Sequence[tuple[Client, Order]]) -> None:
    """Refuse a round in which clients' masks differ: a weight that one client alone holds shows in the sum."""
    first = orders[0][1]
    if (highest := max(client.id for client, _ in orders)) >= 1 << 32:
        raise ConfigError(f"client id {highest}: private rounds need ids below 2^32")
    for client, order in orders:
        local, layout = order.local, order.weights.layout
        moves = (local.adapt is not None and local.report != "counts") or local.report == "mask" or local.personal
        moves = moves or any(part.active(layout, order.weights.mask.active) is not None for part in local.parts)
        if any(part.changes or part.reports(layout) for part in local.parts):
            raise ConfigError(
                f"client {client.id} is asked for more than its weights, which `secure` and `dp_*` cannot protect: "
                f"{USE}"
            )
        if moves or local.keep or local.start is not None:
            raise ConfigError(f"client {client.id} may change its mask in this round, so masks differ: {USE}")
        if not order.weights.mask.equal(first.weights.mask) or order.local != first.local or order.extra:
            raise ConfigError(
                f"client {client.id} gets another model or other work than client {orders[0][0].id}: {USE}"
            )


USE = "use a method with one frozen mask for all, such as dense, pdst or spdst, or switch `secure` and `dp_*` off"


def packing(privacy: Privacy, order: Order, cohort: int) -> Packing:
    """How the reports of a round become whole numbers."""
    weights = order.weights
    how = Packing(
        weights.layout, order.local, weights.mask.active, cohort, privacy.ranges, privacy.noise,
        privacy.noisers(cohort),
    )  # fmt: skip
    if privacy.noise is not None and not LEAST <= how.deviation <= LARGEST:
        raise ConfigError(
            f"noise of {privacy.noise.multiplier:.3g} times the clip cannot be drawn exactly for {cohort} clients: "
            f"in the whole numbers that clients send, its standard deviation would be {how.deviation}, allowed are "
            f"{LEAST} to {LARGEST}. Change dp_noise or dp_epsilon"
        )
    return how


def signed(total: Words) -> Tensor:
    """A sum in Z/2^b as signed numbers."""
    return torch.from_numpy(total.view(f"<i{total.itemsize}").astype(np.int64))


def open_vault(config: EngineSettings, clients: int, masks: Path | None) -> Vault | None:
    """The vault of a run with these settings, beside the folder of its masks; None if nothing is private."""
    privacy = privacy_of(config, clients)
    folder = None if masks is None else masks.with_name(PRIVATE)
    return None if privacy is None else Vault(privacy, clients, min(config.per_round, clients), folder)


class PrivateRound(Account):
    """The account of a private round.

    Post what `requests` gives, hand answers to `received` and missing ones to `failed`; `advance` ends the step. When
    it returns False the round is over: `close`.
    """

    def __init__(self, vault: Vault, server: Server, s: State, orders: Sequence[tuple[Client, Order]]) -> None:
        super().__init__(server.memory, PLAIN)
        check_common(orders)
        self.vault, self.server, self.privacy, self.tag = vault, server, vault.privacy, s.tag
        self.orders = {client.id: (replace(client, n=0), order) for client, order in orders}  # n stays with clients
        self.start = orders[0][1].weights
        self.packing = packing(self.privacy, orders[0][1], len(orders))
        how, privacy = self.packing, self.privacy
        self.terms = Terms(
            vault.run, s.tag, how.length, how.bits, privacy.policy, len(orders), privacy.ranges, privacy.noise
        )
        self._round: Collector | Gatherer
        self._round = Collector(self.terms) if privacy.secure else Gatherer(self.terms, how.deviation)
        self._waiting: set[int] = set()
        self._reminded: set[int] = set()
        self._revealed = False
        self._why = ""  # why nothing can be opened
        self._before = vault.stored(s.tag, f"<u{how.bits // 8}")
        if self._before is None:
            self._choose()

    def _choose(self) -> None:
        """Leave out clients whose privacy budget is spent, and count the round for the others."""
        chosen = self.vault.may_take_part(list(self.orders))
        for client in set(self.orders) - set(chosen):
            self.failed(client, _SPENT)
        if self.vault.ledger is not None:
            self.vault.ledger.spend(chosen)

    @property
    def step(self) -> int:
        return self._round.step

    def requests(self) -> Iterator[tuple[int, bytes]]:
        """What each client is sent in this step, in ascending id."""
        if self._before is not None:
            return
        first = self.step == ADVERTISE or not self.privacy.secure
        self._waiting = (set(self.orders) if first else set(self._round.alive)) - set(self.failures)
        self._revealed = self.privacy.secure and self.step == UNMASK
        for client in sorted(self._waiting):
            yield client, self.request(client)

    def request(self, client: int, order: bytes | None = None) -> bytes:
        """The bytes of a request; order: with these bytes of the order instead of its usual ones."""
        if self.step == ADVERTISE:
            parts = [self.terms.to_bytes()]
        elif self.step != MASKED:
            parts = [self._round.request(client)]
        else:
            if order is None:
                encoded = self.server.encode(self.server.message(*self.orders[client]))
                self.traffic += encoded.parts.traffic("order")
                order = encoded.data
            parts = [b"" if self.privacy.secure else self.terms.to_bytes(), self._round.request(client)]
        head = b"".join(LENGTH.pack(self.step, len(part)) + part for part in parts)
        self.traffic += Traffic(down=len(head), overhead=len(head))
        return head + (order or b"")

    def received(self, client: int, data: bytes, notes: str | None = None) -> None:
        """A client's answer. If it is not a good one, the client is dropped."""
        size = self.packing.length * self.packing.bits // 8 if self.step == MASKED else 0
        self.traffic += Traffic(up=len(data), values=min(size, len(data)), overhead=max(0, len(data) - size))
        self._waiting.discard(client)
        try:
            self._round.received(client, data)
        except Refused as error:
            self.failed(client, f"{type(error).__name__}: {error}")
            return
        if self.step == MASKED:
            self.accepted(client, self.tag, self.start.mask, None)

    def lacking(self, client: int, data: bytes) -> bytes:
        """A client lacks a mask: the request with the full one. Raises a WireError if the client says so twice."""
        lack = decode(data, self.layout)
        if lack.kind != "lack" or lack.parts is None or lack.client != client or client in self._reminded:
            raise WireError(
                "the client says that it lacks a mask, but it was sent the full mask, or its message is not valid"
            )
        self._reminded.add(client)
        self.traffic += lack.parts.traffic("lack")
        self.memory.forget(client)
        encoded = encode(self.server.message(*self.orders[client]), (), self.server.values)
        self.traffic += encoded.parts.traffic("order")
        return self.request(client, encoded.data)

    def largest(self) -> int:
        """Bytes of the largest answer in this step."""
        return 4096 + max(self.packing.length * self.packing.bits // 8, 256 * len(self.orders))

    def failed(self, client: int, why: str) -> None:
        """A client is dropped. If its masked input is in, it still counts in the sum."""
        if self.step > MASKED and client in self._accepted:
            kept = self._accepted[client]
            super().failed(client, why)
            self._accepted[client] = kept
        else:
            super().failed(client, why)
        self._waiting.discard(client)

    def advance(self) -> bool:
        """End the step. False: there is no other."""
        if self._before is not None:
            return False
        for client in sorted(self._waiting):
            self.failed(client, "no answer")
        try:
            self._round.close()
        except Refused as error:
            self._why = f"{type(error).__name__}: {error}"
            return False
        return self.privacy.secure and self.step <= UNMASK

    def close(self) -> Outcome:
        """Open the sum. If that is impossible nothing counts, and the loop repeats the round."""
        if self._before is not None:
            total, counted = self._before
        else:
            total, counted = self._opened()
        if self._why or not counted:
            self._accepted.clear()
            why = f"the sum could not be opened ({self._why or 'nobody answered'})"
            self.failures = {client: self.failures.get(client, why) for client in self.orders}
            return replace(super().close(), privacy=self.vault.spent(0), revealed=self._revealed)
        if self._before is None:
            self.vault.store(self.tag, total, counted)
        self.sums, clamped = self.packing.decode(signed(total), self.start, len(counted))
        # A client that vanished after its input was in has contributed: it is not dropped.
        self.failures = {client: why for client, why in self.failures.items() if client not in counted}
        return replace(super().close(), privacy=self.vault.spent(clamped))

    def _opened(self) -> tuple[Words, list[int]]:
        counted = sorted(self._accepted)
        if not self._why and counted:
            try:
                return self._round.opened(), counted
            except Refused as error:
                self._why = f"{type(error).__name__}: {error}"
        return np.zeros(0, np.uint32), []
