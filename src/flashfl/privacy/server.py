"""The server's half of a private round, without any transport: bytes in, bytes out.

In a secure round it learns who took part and one sum.
"""

from __future__ import annotations

import hashlib
from functools import cached_property

import numpy as np

from .client import mask_key
from .errors import BadShare, Malformed, TooFew, WrongStep
from .keys import KEY, SIGNATURE, Words, add_streams, public_of
from .messages import BOX, CARD, SECRET, STEPS, VOTE, Step, Terms, entries, flags, frame, listing, unframe
from .noise import discrete_gaussian
from .shamir import restore


class Gatherer:
    """The server's half of a round without masks: it has one step, in which clients send their vectors as they are.

    Such rounds are for differential privacy alone: the server adds the noise. In each step, hand every answer to
    `received`. Then `close` ends the step. `request` gives what each client gets next. Vectors are added as they
    arrive, so memory does not grow with the cohort.
    """

    def __init__(self, terms: Terms, deviation: int = 0, step: int = Step.MASKED) -> None:
        """deviation: of the noise that the server adds; 0: none. step: the first one."""
        self.terms, self.step, self._deviation = terms, step, deviation
        self.alive: set[int] | None = None  # clients that answered in the step that was closed last; None: all may
        self.heard: set[int] = set()
        self.counted: set[int] = set()  # clients whose vectors are in the sum
        self.total: Words = np.zeros(terms.length, f"<u{terms.bits // 8}")

    def received(self, client: int, data: bytes) -> None:
        """A client's answer in the current step. Raises why it cannot be used; the client then counts as dropped."""
        if client in self.heard or (self.alive is not None and client not in self.alive):
            raise WrongStep(
                f"client {client} already answered in the step '{STEPS[self.step]}', or was dropped earlier"
            )
        self._take(client, unframe(data, self.step, self.terms))
        self.heard.add(client)

    def _take(self, client: int, content: memoryview) -> None:
        """Add a client's vector."""
        if len(content) != self.total.nbytes:
            raise Malformed(f"client {client} sent {len(content)} bytes of input, expected {self.total.nbytes}")
        self.total += np.frombuffer(content, self.total.dtype)
        self.counted.add(client)

    def close(self) -> None:
        """End the current step: whoever has not answered dropped out."""
        self.alive, self.heard, self.step = self.heard, set(), self.step + 1

    def request(self, client: int) -> bytes:
        return frame(Step.MASKED, self.terms)

    def opened(self) -> Words:
        """The sum with its noise."""
        if self._deviation:
            self.total += discrete_gaussian(self._deviation, len(self.total)).astype(self.total.dtype)
        return self.total


class Collector(Gatherer):
    """The server's half of one attempt of a secure round.

    `close` raises TooFew if too few answers came; the round must then be repeated with another attempt, and nothing has
    been opened.
    """

    def __init__(self, terms: Terms) -> None:
        super().__init__(terms, step=Step.ADVERTISE)
        self._cards: dict[int, tuple[int, bytes, bytes, bytes]] = {}
        self._boxes: dict[int, dict[int, bytes]] = {}  # receiver -> sender -> box
        self._commitments: dict[int, bytes] = {}  # by client that shared its secrets
        self._votes: list[tuple[int, bytes, bytes]] = []
        self._shares: dict[int, dict[int, bytes]] = {}  # by owner, and by the holder's place

    @property
    def cohort(self) -> list[int]:
        """The clients that advertised keys, ascending."""
        return sorted(self._cards)

    @cached_property
    def _roster(self) -> bytes:
        return listing(CARD, self._cards.values())

    @property
    def _dropped(self) -> set[int]:
        """Clients that shared their secrets, but whose vectors are not in the sum."""
        return self._commitments.keys() - self.counted

    def _take(self, client: int, content: memoryview) -> None:
        (self._card, self._share, super()._take, self._vote, self._revealed)[self.step](client, content)

    def close(self) -> None:
        cohort, left = len(self._cards), len(self.heard)
        least = max(self.terms.policy.least, self.terms.policy.threshold(cohort))
        if left < least:
            raise TooFew(
                f"{left} of {cohort} clients that sent keys are left after the step '{STEPS[self.step]}', at least "
                f"{least} are needed (policy.least, policy.survive). The sum of this attempt stays hidden."
            )
        super().close()

    def request(self, client: int) -> bytes:
        """What a client needs for its answer in the current step, from the second on; the first needs the terms."""
        if self.step == Step.SHARES:
            return frame(Step.SHARES, self.terms, self._roster)
        if self.step == Step.MASKED:
            boxes = self._boxes.get(client, {}).items()
            return frame(Step.MASKED, self.terms, flags(self._commitments, self.cohort), listing(BOX, boxes))
        if self.step == Step.CONFIRM:
            lists = (self.counted, self._dropped)
            return frame(Step.CONFIRM, self.terms, *(flags(some, self.cohort) for some in lists))
        return frame(Step.UNMASK, self.terms, listing(VOTE, self._votes))

    def _card(self, client: int, content: memoryview) -> None:
        found = entries(content, CARD)
        if len(found) != 1 or int(found["id"][0]) != client:
            raise Malformed(f"client {client} must send one entry, with its own id")
        [self._cards[client]] = found.tolist()

    def _share(self, client: int, content: memoryview) -> None:
        boxes = entries(content[KEY:], BOX)
        k, _ = self.terms.policy.neighbours(len(self._cards))
        if len(boxes) != k or not set(boxes["id"].tolist()) <= self._cards.keys() - {client}:
            raise Malformed(f"client {client} must send a share to each of {k} other clients of the cohort")
        self._commitments[client] = bytes(content[:KEY])
        for receiver, box in boxes.tolist():
            self._boxes.setdefault(receiver, {})[client] = box

    def _vote(self, client: int, content: memoryview) -> None:
        if len(content) != KEY + SIGNATURE:
            raise Malformed(f"client {client} sent {len(content)} bytes instead of a digest and a signature")
        self._votes.append((client, bytes(content[:KEY]), bytes(content[KEY:])))

    def _revealed(self, client: int, content: memoryview) -> None:
        found, place = entries(content, SECRET), self.cohort.index(client) + 1
        for owner, dropped, share in found.tolist():
            if owner not in self._commitments or bool(dropped) == (owner in self.counted):
                raise Malformed(f"client {client} reveals a share that it was not asked for")
            self._shares.setdefault(owner, {})[place] = share

    def opened(self) -> Words:
        """After the last step: the sum of the survivors' vectors in Z/2^bits."""
        secrets = {owner: self._restored(owner) for owner in sorted(self._commitments)}
        add_streams(self.total, [], [secrets[client] for client in sorted(self.counted)])
        bound = self.terms.bound(self._roster)
        for client in sorted(self._dropped):
            others = self._neighbours(client) & self.counted
            keys = {other: mask_key(secrets[client], self._cards[other][2], bound) for other in others}
            # A survivor added its stream if the dropped client's id is higher, and subtracted it otherwise.
            above = [key for other, key in keys.items() if other > client]
            below = [key for other, key in keys.items() if other < client]
            add_streams(self.total, above, below)
        return self.total

    def _neighbours(self, client: int) -> set[int]:
        chosen = {receiver for receiver, boxes in self._boxes.items() if client in boxes}
        return chosen | set(self._boxes.get(client, ()))

    def _restored(self, owner: int) -> bytes:
        """A survivor's seed, or the mask key of a client that dropped out."""
        _, threshold = self.terms.policy.neighbours(len(self._cards))
        shares = self._shares.get(owner, {})
        if len(shares) < threshold:
            raise TooFew(f"{len(shares)} shares of client {owner}'s secret came back: at least {threshold} are needed")
        try:
            secret = restore(dict(sorted(shares.items())[:threshold]))
        except ValueError as error:
            raise BadShare(f"the shares of client {owner}'s secret do not fit together ({error})") from None
        if owner in self.counted:
            good = hashlib.sha256(secret).digest() == self._commitments[owner]
        else:
            good = public_of(secret) == self._cards[owner][2]
        if not good:
            raise BadShare(
                f"the shares of client {owner}'s secret do not match: at least one client sent a wrong share"
            )
        return secret
