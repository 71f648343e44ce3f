"""A whole secure round in one process, with clients that vanish and a server that may cheat."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from flashfl.privacy.client import Party, Self
from flashfl.privacy.errors import Refused
from flashfl.privacy.keys import Directory, Identity, Words
from flashfl.privacy.messages import Terms
from flashfl.privacy.policy import Policy
from flashfl.privacy.server import Collector

Tamper = Callable[[int, int, bytes], bytes]  # step, client, an honest server's request -> what it sends instead


class World:
    """Clients with identity keys that know each other's, and a memory of the rounds they gave inputs to."""

    def __init__(self, clients: int, policy: Policy | None = None) -> None:
        self.policy = policy or Policy()
        identities = {client: Identity.new() for client in range(clients)}
        directory = Directory({client: identity.public for client, identity in identities.items()})
        self._gave: dict[int, set[str]] = {client: set() for client in identities}
        self.selves = {
            client: Self(client, identity, directory, self._remember(client)) for client, identity in identities.items()
        }
        self.refused: dict[int, Refused] = {}
        self.masked: dict[int, Words] = {}
        self.parties: dict[int, Party] = {}

    def _remember(self, client: int) -> Callable[[str, int, int], bool]:
        def gives(run: str, phase: int, round: int) -> bool:
            name = f"{run} {phase} {round}"
            new = name not in self._gave[client]
            self._gave[client].add(name)
            return new

        return gives

    def forget(self) -> None:
        """Clients no longer know which rounds they gave inputs to."""
        for rounds in self._gave.values():
            rounds.clear()

    def round(
        self,
        vectors: Mapping[int, Words],
        killed: Mapping[int, int] | None = None,
        tamper: Tamper = lambda step, client, data: data,
        attempt: int = 0,
        common: Mapping[int, bytes] | None = None,
        round: int = 0,
    ) -> Collector:
        """Run all steps. killed: client -> the step in which it no longer answers. Raises what the server raises."""
        first = next(iter(vectors.values()))
        terms = Terms("test", (2, round, attempt), len(first), first.itemsize * 8, self.policy, len(vectors))
        server, self.refused = Collector(terms), {}
        self.parties = {client: Party(terms, self.selves[client]) for client in vectors}
        for step in range(5):
            for client in sorted(vectors):
                if (killed or {}).get(client, 9) <= step or client in self.refused:
                    continue
                if step and client not in server.alive:
                    continue
                request = tamper(step, client, server.request(client)) if step else b""
                try:
                    answer = self._answer(step, client, request, vectors[client], (common or {}).get(client, b""))
                except Refused as why:
                    self.refused[client] = why
                    continue
                if step == 2:
                    self.masked[client] = np.frombuffer(answer[21:], first.dtype)
                server.received(client, answer)
            server.close()
        return server

    def _answer(self, step: int, client: int, request: bytes, vector: Words, common: bytes) -> bytes:
        """The client's answer. Its state is saved and loaded before each step, as a real client's may be."""
        party = Party.load(self.parties[client].save(), self.selves[client], self.policy)
        self.parties[client] = party
        if step == 0:
            return party.advertise()
        if step == 2:
            return party.mask(request, vector, common)
        return (None, party.share, None, party.confirm, party.unmask)[step](request)  # type: ignore[misc]


def random_vectors(clients: int, length: int = 300, bits: int = 32, seed: int = 0) -> dict[int, Words]:
    draw = np.random.default_rng(seed)
    return {client: draw.integers(0, 1 << bits, length, f"u{bits // 8}") for client in range(clients)}


def plain_sum(vectors: Mapping[int, Words], clients: object = None) -> Words:
    chosen = vectors if clients is None else clients
    total = np.zeros_like(next(iter(vectors.values())))
    for client in chosen:  # type: ignore[attr-defined]
        total = total + vectors[client]
    return total
