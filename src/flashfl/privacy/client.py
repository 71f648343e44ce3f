"""A client's half of the secure aggregation protocol, without any transport: bytes in, bytes out.

The protocol is that of Bonawitz et al. (CCS 2017) for an active server, with the client-chosen sparse neighbour graph
of Bell et al. (CCS 2020). Five steps: advertise keys, share secrets, send masked input, confirm survivors, unmask.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import numpy as np

from . import errors
from .keys import KEY, Directory, Identity, Words, add_streams, agree, public_of, seal, unseal
from .messages import BOX, CARD, SECRET, STEPS, VOTE, List, Step, Terms, entries, flagged, frame, listing, unframe
from .policy import Policy
from .shamir import SHARE, split

_MOST_CHOSEN = 4  # a client may be drawn by this many times as many others as it draws itself


@dataclass(frozen=True)
class Self:
    """Who a client is: its id, its signing key, the others' public keys, and the rounds it gave an input to."""

    id: int
    identity: Identity
    directory: Directory
    gives: Callable[[str, int, int], bool]  # records (run, phase, round); False if it gave an input to it before


@dataclass
class Party:
    """One client in one attempt of a round. Its fields are the client's secrets: `save` keeps them between messages."""

    terms: Terms
    me: Self
    step: int = Step.ADVERTISE
    box_key: bytes = field(default_factory=lambda: os.urandom(KEY), repr=False)
    mask_key: bytes = field(default_factory=lambda: os.urandom(KEY), repr=False)
    seed: bytes = field(default_factory=lambda: os.urandom(KEY), repr=False)  # of the self-mask
    roster: bytes = b""
    chosen: tuple[int, ...] = ()  # the neighbours that hold this client's shares
    sharing: tuple[int, ...] = ()  # clients that finished the second step
    held: dict[int, bytes] = field(default_factory=dict, repr=False)  # by client: a share of its mask key and its seed
    survivors: tuple[int, ...] = ()
    common: bytes = b""  # digest of what all clients of the round must have been sent

    def advertise(self) -> bytes:
        """Step 1: fresh public keys, signed."""
        self._begin(Step.ADVERTISE)
        signature = self.me.identity.sign(_card(self.terms, *self._mine))
        return frame(Step.ADVERTISE, self.terms, listing(CARD, [(*self._mine, signature)]))

    def share(self, roster: bytes) -> bytes:
        """Step 2: check the cohort, draw neighbours, send each an encrypted share of both secrets."""
        self._begin(Step.SHARES)
        self.roster = bytes(unframe(roster, Step.SHARES, self.terms))
        self._check_roster()
        k, threshold = self.terms.policy.neighbours(len(self.cohort))
        others = [client for client in self.cohort if client != self.me.id]
        self.chosen = tuple(sorted(secrets.SystemRandom().sample(others, k)))
        places = [self.cohort[client] + 1 for client in self.chosen]
        parts = zip(split(self.mask_key, threshold, places), split(self.seed, threshold, places), strict=True)
        boxes = [
            (other, seal(self._box_key(self.me.id, other), key + seed, self._bound))
            for other, (key, seed) in zip(self.chosen, parts, strict=True)
        ]
        return frame(Step.SHARES, self.terms, hashlib.sha256(self.seed).digest(), listing(BOX, boxes))

    def mask(self, inbox: bytes, vector: Words, common: bytes) -> bytes:
        """Step 3: the vector, hidden by a keystream for each neighbour and one of the client's own.

        common: digest of what every client must have been sent, such as the model. It is signed in the next step.
        """
        self._begin(Step.MASKED)
        if len(vector) != self.terms.length or vector.dtype != np.dtype(f"<u{self.terms.bits // 8}"):
            raise errors.WrongRound(
                f"the input has {len(vector)} numbers of type {vector.dtype}, but the server announced "
                f"{self.terms.length} of {self.terms.bits} bits"
            )
        content, size = unframe(inbox, Step.MASKED, self.terms), (len(self.cohort) + 7) // 8
        self.sharing = tuple(sorted(flagged(content[:size], self.cohort)))
        self._check_enough(self.sharing, Step.SHARES)
        self._open_boxes(entries(content[size:], BOX))
        phase, round, _ = self.terms.tag
        if not self.me.gives(self.terms.run, phase, round):
            raise errors.SecondInput(
                f"the server asks for round {round + 1} of this phase, but this client already sent its update for "
                "this round or a later one. Two sums of one round could reveal single updates, so it sends none. A "
                "server that was interrupted in this round goes on with the next one. If clients go on refusing, the "
                "server was resumed from an old checkpoint: resume it from the newest one, or start a new run."
            )
        self.common = common
        keys = {other: self._mask_key(other) for other in self._neighbours()}
        hidden = vector.copy()
        add = [self.seed, *(key for other, key in keys.items() if other > self.me.id)]
        add_streams(hidden, add, (key for other, key in keys.items() if other < self.me.id))
        return frame(Step.MASKED, self.terms, hidden.tobytes())

    def confirm(self, survivors: bytes) -> bytes:
        """Step 4: sign who survived. A client signs one list only, and only one it is on."""
        if self.step > Step.CONFIRM:
            raise errors.AsksForBoth(
                "the server sent a second list of survivors in one attempt. With two lists it could unmask the update "
                "of one client, so this client stops."
            )
        self._begin(Step.CONFIRM)
        content, size = unframe(survivors, Step.CONFIRM, self.terms), (len(self.cohort) + 7) // 8
        alive, dropped = flagged(content[:size], self.cohort), flagged(content[size:], self.cohort)
        if both := alive & dropped:
            raise errors.AsksForBoth(
                f"the server lists client {min(both)} both as a survivor and as dropped. It could then get both of "
                "this client's secrets and see its update, so this client stops."
            )
        if alive | dropped != set(self.sharing):
            raise errors.DifferentCohorts(
                "the server's lists of survivors and of dropped clients do not match the clients that shared their "
                "secrets"
            )
        if self.me.id not in alive:
            raise errors.DifferentCohorts(
                "this client sent its update, but the server's list of survivors does not name it"
            )
        self.survivors = tuple(sorted(alive))
        self._check_enough(self.survivors, Step.MASKED)
        return frame(Step.CONFIRM, self.terms, self._view, self.me.identity.sign(_vote(self.terms, self._view)))

    def unmask(self, votes: bytes) -> bytes:
        """Step 5: if enough others saw the same, reveal one share of each client: of its seed or of its mask key."""
        self._begin(Step.UNMASK)
        found = entries(unframe(votes, Step.UNMASK, self.terms), VOTE)
        for client, digest, signature in found.tolist():
            if client not in self.survivors:
                raise errors.DifferentCohorts(
                    f"client {client} signed the list of survivors, but the list does not name it"
                )
            self.me.directory.check(client, _vote(self.terms, digest), signature)
            if digest != self._view:
                raise errors.DifferentCohorts(
                    f"client {client} saw another cohort, list of survivors or model than this client. The server must "
                    "send the same to all."
                )
        self._check_enough(found["id"].tolist(), Step.CONFIRM)
        rows = [
            (client, client not in self.survivors, both[SHARE:] if client in self.survivors else both[:SHARE])
            for client, both in self.held.items()
        ]
        return frame(Step.UNMASK, self.terms, listing(SECRET, rows))

    def _begin(self, step: int) -> None:
        """Each step happens once, in order. A step that is refused ends the attempt for this client."""
        if self.step != step:
            raise errors.WrongStep(
                f"a message of the step '{STEPS[step]}' came while this client is at '{STEPS[self.step]}'"
            )
        self.step = step + 1

    @cached_property
    def _mine(self) -> tuple[int, bytes, bytes]:
        """This client's id and its two public keys."""
        return self.me.id, public_of(self.box_key), public_of(self.mask_key)

    @cached_property
    def _cards(self) -> List:
        return entries(memoryview(self.roster), CARD)

    @cached_property
    def cohort(self) -> dict[int, int]:
        """Every client of the cohort, ascending, with its position."""
        return {client: at for at, client in enumerate(self._cards["id"].tolist())}

    def _check_roster(self) -> None:
        if len(self.cohort) < self.terms.policy.least:
            raise errors.CohortTooSmall(
                f"the cohort has {len(self.cohort)} clients, but this client requires at least "
                f"{self.terms.policy.least} (policy.least)"
            )
        if len(self.cohort) > self.terms.cohort:
            raise errors.WrongRound(
                f"the cohort has {len(self.cohort)} clients, and the server announced {self.terms.cohort}: their sum "
                "could overflow"
            )
        for client, box, mask, signature in self._cards.tolist():
            self.me.directory.check(client, _card(self.terms, client, box, mask), signature)
            if client == self.me.id and (client, box, mask) != self._mine:
                raise errors.BadSignature(
                    "the cohort's list has a key for this client that differs from the one it sent"
                )
        if self.me.id not in self.cohort:
            raise errors.DifferentCohorts("this client is not in the cohort that it was sent")

    def _check_enough(self, clients: Sequence[int], step: Step) -> None:
        least = self.terms.policy.threshold(len(self.cohort))
        if len(clients) < least:
            raise errors.CohortTooSmall(
                f"{len(clients)} of {len(self.cohort)} clients are left after the step '{STEPS[step]}', at least "
                f"{least} are needed (policy.survive)"
            )

    @cached_property
    def _bound(self) -> bytes:
        """What shares are bound to: the terms and the whole cohort."""
        return self.terms.bound(self.roster)

    @property
    def _view(self) -> bytes:
        """A digest of all that this client was shown: the cohort, who shared, who survived, and the model."""
        seen = json.dumps([self.sharing, self.survivors]).encode()
        return hashlib.sha256(b"view" + self._bound + hashlib.sha256(self.common).digest() + seen).digest()

    def _box_key(self, sender: int, receiver: int) -> bytes:
        other = receiver if sender == self.me.id else sender
        purpose = b"share" + self._bound + sender.to_bytes(4, "little") + receiver.to_bytes(4, "little")
        return agree(self.box_key, self._cards["box"][self.cohort[other]].tobytes(), purpose)

    def _mask_key(self, other: int) -> bytes:
        return mask_key(self.mask_key, self._cards["mask"][self.cohort[other]].tobytes(), self._bound)

    def _neighbours(self) -> list[int]:
        """Clients that this one drew or that drew it, without those that dropped out before sharing."""
        return sorted((set(self.chosen) | set(self.held)) & set(self.sharing))

    def _open_boxes(self, boxes: List) -> None:
        if len(boxes) > _MOST_CHOSEN * len(self.chosen):
            raise errors.Malformed(
                f"{len(boxes)} clients chose this client as a neighbour, at most {_MOST_CHOSEN * len(self.chosen)} are "
                "allowed"
            )
        for sender, box in boxes.tolist():
            if sender not in self.sharing or sender == self.me.id:
                raise errors.BadShare(f"a share comes from client {sender}, which is not in the cohort")
            try:
                self.held[sender] = unseal(self._box_key(sender, self.me.id), box, self._bound)
            except errors.Refused as error:
                raise type(error)(f"client {sender}: {error}") from None

    def save(self) -> bytes:
        """The attempt's secrets, for the client's own storage."""
        saved = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "me"}
        return json.dumps(saved | {"terms": self.terms.to_bytes()}, default=bytes.hex).encode()

    @staticmethod
    def load(saved: bytes, me: Self, policy: Policy) -> Party:
        """The party that `save` described."""
        found: dict[str, Any] = json.loads(saved)
        terms, step = Terms.from_bytes(bytes.fromhex(found.pop("terms")), policy), found.pop("step")
        held = {int(client): bytes.fromhex(both) for client, both in found.pop("held").items()}
        rest: dict[str, Any] = {
            name: tuple(x) if isinstance(x, list) else bytes.fromhex(x) for name, x in found.items()
        }
        return Party(terms, me, step, held=held, **rest)


def mask_key(mine: bytes, other: bytes, bound: bytes) -> bytes:
    """The key of the keystream that two neighbours share. The server derives it for one that dropped out."""
    return agree(mine, other, b"mask" + bound)


def _card(terms: Terms, client: int, box: bytes, mask: bytes) -> bytes:
    """What a client signs with its keys."""
    return b"card" + terms.context + client.to_bytes(4, "little") + box + mask


def _vote(terms: Terms, view: bytes) -> bytes:
    """What a client signs about the survivors."""
    return b"vote" + terms.context + view
