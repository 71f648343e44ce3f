"""The server's half of the secure aggregation protocol, without any transport: bytes in, bytes out.

It learns who took part and one sum. Masked inputs are added as they arrive, so memory does not grow with the cohort.
"""

from __future__ import annotations

import hashlib

import numpy as np

from .client import mask_key
from .errors import BadShare, Malformed, TooFew, WrongStep
from .keys import KEY, SIGNATURE, Exchange, Words, add_streams
from .messages import (
    ADVERTISE,
    BOX,
    CARD,
    CONFIRM,
    MASKED,
    SECRET,
    SHARES,
    STEPS,
    UNMASK,
    VOTE,
    Terms,
    entries,
    flags,
    frame,
    listing,
    unframe,
)  # fmt: skip
from .shamir import restore


class Collector:
    """One attempt of a round on the server.

    In each step, hand every answer to `received`. Then `close` ends the step. It raises TooFew if too few answers came;
    the round must then be repeated with another attempt, and nothing has been opened. `request` gives what each client
    gets next.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms, self.step = terms, ADVERTISE
        self.alive: set[int] = set()  # clients that answered in the step that was closed last
        self._heard: set[int] = set()
        self._cards: dict[int, tuple[bytes, bytes, bytes]] = {}
        self._roster = b""
        self._boxes: dict[int, dict[int, bytes]] = {}  # receiver -> sender -> box
        self._commitments: dict[int, bytes] = {}
        self._sharing: set[int] = set()
        self._survivors: set[int] = set()
        self._votes: list[tuple[int, bytes, bytes]] = []
        self._shares: dict[int, dict[int, bytes]] = {}  # by owner and holder
        self.total: Words = np.zeros(terms.length, f"<u{terms.bits // 8}")

    @property
    def cohort(self) -> list[int]:
        """The clients that advertised keys, ascending."""
        return sorted(self._cards)

    def received(self, client: int, data: bytes) -> None:
        """A client's answer in the current step. Raises why it cannot be used; the client then counts as dropped."""
        if client in self._heard or (self.step != ADVERTISE and client not in self.alive):
            raise WrongStep(
                f"client {client} already answered in the step '{STEPS[self.step]}', or was dropped earlier"
            )
        content = unframe(data, self.step, self.terms)
        (self._card, self._share, self._masked, self._vote, self._revealed)[self.step](client, content)
        self._heard.add(client)

    def close(self) -> None:
        """End the current step: whoever has not answered dropped out."""
        self.alive, self._heard = self._heard, set()
        cohort = len(self._cards)
        least = max(self.terms.policy.least, self.terms.policy.threshold(cohort))
        if len(self.alive) < least:
            raise TooFew(
                f"{len(self.alive)} of {cohort} clients are left after the step '{STEPS[self.step]}', at least {least} "
                "are needed. The sum of this attempt stays hidden."
            )
        if self.step == ADVERTISE:
            self._roster = listing(CARD, [(client, *card) for client, card in self._cards.items()])
        elif self.step == SHARES:
            self._sharing = set(self.alive)
        elif self.step == MASKED:
            self._survivors = set(self.alive)
        self.step += 1

    def request(self, client: int) -> bytes:
        """What a client needs for its answer in the current step."""
        if self.step == SHARES:
            return frame(SHARES, self.terms, self._roster)
        if self.step == MASKED:
            boxes = [(sender, box) for sender, box in self._boxes.get(client, {}).items() if sender in self._sharing]
            return frame(MASKED, self.terms, flags(self._sharing, self.cohort), listing(BOX, boxes))
        if self.step == CONFIRM:
            lists = (self._survivors, self._sharing - self._survivors)
            return frame(CONFIRM, self.terms, *(flags(some, self.cohort) for some in lists))
        if self.step == UNMASK:
            return frame(UNMASK, self.terms, listing(VOTE, self._votes))
        raise WrongStep(
            "the server has no message for this step. In the first step clients get the terms only; after the last "
            "step nothing is sent."
        )

    def _card(self, client: int, content: memoryview) -> None:
        found = entries(content, CARD)
        if len(found) != 1 or int(found["id"][0]) != client:
            raise Malformed(f"client {client} must send one entry, with its own id")
        _, box, mask, signature = found.tolist()[0]
        self._cards[client] = (box, mask, signature)

    def _share(self, client: int, content: memoryview) -> None:
        boxes = entries(content[KEY:], BOX)
        k, _ = self.terms.policy.neighbours(len(self._cards))
        if len(boxes) != k or not set(boxes["id"].tolist()) <= self._cards.keys() - {client}:
            raise Malformed(f"client {client} must send a share to each of {k} other clients of the cohort")
        self._commitments[client] = bytes(content[:KEY])
        for receiver, box in boxes.tolist():
            self._boxes.setdefault(receiver, {})[client] = box

    def _masked(self, client: int, content: memoryview) -> None:
        if len(content) != self.total.nbytes:
            raise Malformed(f"client {client} sent {len(content)} bytes of masked input, expected {self.total.nbytes}")
        self.total += np.frombuffer(content, self.total.dtype)

    def _vote(self, client: int, content: memoryview) -> None:
        if len(content) != KEY + SIGNATURE:
            raise Malformed(f"client {client} sent {len(content)} bytes instead of a digest and a signature")
        self._votes.append((client, bytes(content[:KEY]), bytes(content[KEY:])))

    def _revealed(self, client: int, content: memoryview) -> None:
        found = entries(content, SECRET)
        for owner, dropped, share in found.tolist():
            if owner not in self._sharing or bool(dropped) == (owner in self._survivors):
                raise Malformed(f"client {client} reveals a share that it was not asked for")
            self._shares.setdefault(owner, {})[client] = share

    def opened(self) -> Words:
        """After the last step: the sum of the survivors' vectors in Z/2^bits."""
        if self.step <= UNMASK:
            raise WrongStep(f"the sum can be opened after the last step, not after '{STEPS[self.step - 1]}'")
        secrets = {owner: self._restored(owner) for owner in sorted(self._sharing)}
        add_streams(self.total, [], [secrets[client] for client in sorted(self._survivors)])
        bound = hashlib.sha256(b"cohort" + self.terms.context + self._roster).digest()
        for client in sorted(self._sharing - self._survivors):
            mine, others = Exchange(secrets[client]), self._neighbours(client) & self._survivors
            keys = {other: mask_key(mine, self._cards[other][1], bound) for other in others}
            # A survivor added its stream if the dropped client's id is higher, and subtracted it otherwise.
            below, above = ([keys[other] for other in keys if (other < client) == low] for low in (True, False))
            add_streams(self.total, above, below)
        return self.total

    def _neighbours(self, client: int) -> set[int]:
        chosen = {receiver for receiver, boxes in self._boxes.items() if client in boxes}
        return chosen | set(self._boxes.get(client, ()))

    def _restored(self, owner: int) -> bytes:
        """A survivor's seed, or the mask key of a client that dropped out."""
        _, threshold = self.terms.policy.neighbours(len(self._cards))
        shares, places = self._shares.get(owner, {}), {client: at + 1 for at, client in enumerate(self.cohort)}
        if len(shares) < threshold:
            raise TooFew(f"{len(shares)} shares of client {owner}'s secret came back: at least {threshold} are needed")
        some = sorted(shares)[:threshold]
        try:
            secret = restore({places[holder]: shares[holder] for holder in some})
        except ValueError as error:
            raise BadShare(f"the shares of client {owner}'s secret do not fit together ({error})") from None
        if owner in self._survivors:
            good = hashlib.sha256(secret).digest() == self._commitments[owner]
        else:
            good = Exchange(secret).public == self._cards[owner][1]
        if not good:
            raise BadShare(
                f"the shares of client {owner}'s secret do not match: at least one client sent a wrong share"
            )
        return secret
