"""A client's half of a private round: train, turn the report into whole numbers, hide them, and follow the protocol."""

from __future__ import annotations

import hashlib
import json
import struct
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from ..core.exchange import Update
from ..core.files import put
from ..core.parts import to_json
from ..data.sources import Source
from ..privacy.client import Party, Self
from ..privacy.errors import Malformed, Refused, TooLittleNoise, Unmasked, WrongStep
from ..privacy.keys import Directory, Identity, Words
from ..privacy.messages import Step, Terms, frame
from ..privacy.noise import discrete_gaussian
from ..privacy.policy import Policy
from ..privacy.vector import Packing
from ..wire import Message
from .client import ClientSide, Reply
from .memory import Rounds
from .private import LENGTH, check_deviation
from .store import temporary_folder
from .train import ClientFailed


class FolderDrawer:
    """Files in a folder. Simulated clients have one each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, name: str) -> bytes | None:
        path = self.folder / name
        return path.read_bytes() if path.exists() else None

    def __setitem__(self, name: str, data: bytes) -> None:
        put(self.folder / name, data)


# A client's own storage, out of the server's sight. On Flower it is a dict in the client's context.
Drawer = FolderDrawer | dict[str, bytes]


class PrivateSide:
    """Answers the requests of private rounds for one client."""

    def __init__(
        self, side: ClientSide, client: int, drawer: Drawer, policy: Policy, identity: Identity, directory: Directory,
        secure: bool,
    ) -> None:  # fmt: skip
        """secure: never send an input without masks."""
        self.side, self.client, self.drawer, self.policy, self.secure = side, client, drawer, policy, secure
        self.me = Self(client, identity, directory, self._gives)

    def _gives(self, run: str, phase: int, round: int) -> bool:
        """Record that this client gives its input to this round; False if it did to this or to a later one."""
        known: dict[str, list[int]] = json.loads(self.drawer.get("gave") or b"{}")
        if known.get(run, [0, -1]) >= [phase, round]:
            return False
        known[run] = [phase, round]
        self.drawer["gave"] = json.dumps(known).encode()
        return True

    def answer(self, data: Source, request: bytes, memory: Rounds) -> Reply:
        """The answer to a request. Raises ClientFailed, with the name of the refusal, if there is none."""
        try:
            return self._answer(data, request, memory)
        except Refused as error:
            self.drawer["party"] = b""  # a client that refuses has no part in this attempt any more
            raise ClientFailed(f"{type(error).__name__}: {error}") from None

    def _answer(self, data: Source, request: bytes, memory: Rounds) -> Reply:
        step, first, rest = _take(request)
        if step == Step.MASKED and first:  # the terms: a round without masks
            if self.secure:
                raise Unmasked(
                    "the server asks for an unprotected update, but this client takes part in secure rounds only. Set "
                    "secure = true on the server."
                )
            return self._train(data, Terms.from_bytes(first, self.policy), None, *_take(rest)[1:], memory)
        if step == Step.ADVERTISE:
            party = Party(Terms.from_bytes(first, self.policy), self.me)
            reply = Reply(party.advertise(), memory)
        else:
            saved = self.drawer.get("party")
            if not saved:
                raise WrongStep(
                    "this client has no part in this attempt of the round: it missed the first step, refused an "
                    "earlier one, has finished, or was restarted without its state. It can take part in the next "
                    "attempt"
                )
            party = Party.load(saved, self.me, self.policy)
            if step == Step.MASKED:
                reply = self._train(data, party.terms, party, *_take(rest)[1:], memory)
            elif step == Step.SHARES:
                reply = Reply(party.share(first), memory)
            elif step == Step.CONFIRM:
                reply = Reply(party.confirm(first), memory)
            elif step == Step.UNMASK:
                reply = Reply(party.unmask(first), memory)
            else:
                raise Malformed(f"step {step} does not exist in this protocol")
        self.drawer["party"] = party.save() if party.step < Step.DONE else b""  # a finished attempt needs no secrets
        return reply

    def _train(
        self, data: Source, terms: Terms, party: Party | None, inbox: bytes, order: bytes, memory: Rounds
    ) -> Reply:
        def pack(update: Update, sent: Message, start: Tensor) -> bytes:
            words = self._words(update, sent, start, terms, party)
            if party is None:
                return frame(Step.MASKED, terms, words.tobytes())
            return party.mask(inbox, words, common_of(sent, start))

        return self.side.work(self.client, data, order, memory, pack)

    def _words(self, update: Update, sent: Message, start: Tensor, terms: Terms, party: Party | None) -> Words:
        """The report in Z/2^b, with this client's share of the noise."""
        local, mask = sent.work, sent.mask
        assert mask is not None
        honest = 1 if party is None else terms.policy.honest(terms.cohort)
        how = Packing(sent.layout, local, mask.active, terms.cohort, terms.ranges, terms.noise, honest)
        tail = sent.layout.size - sent.layout.trained_size
        if not local.statistics:  # they were not sent; what is reported of them is their value
            start = torch.cat([start, start.new_zeros(tail)])
        numbers = how.encode(update, start, sent.key).numpy()
        if terms.noise is not None and party is not None:
            scale, members = how.sections[0].scale, terms.policy.honest(len(party.cohort))
            deviation = terms.noise.deviation(scale, how.length, members)
            check_deviation(deviation, TooLittleNoise)
            numbers += discrete_gaussian(deviation, how.length)
        return numbers.astype(f"<u{terms.bits // 8}")


def common_of(sent: Message, start: Tensor) -> bytes:
    """A digest of what every client of a round must have been sent: the mask, the values, the work."""
    assert sent.mask is not None
    work = json.dumps(to_json(sent.local), sort_keys=True).encode()
    digest = hashlib.sha256(sent.mask.packed.tobytes() + start.numpy().tobytes() + work)
    return digest.digest()


def _take(request: bytes) -> tuple[int, bytes, bytes]:
    """The step, the first part of a request, and the rest. Whoever reads a part finds that it is cut off."""
    try:
        step, length = LENGTH.unpack_from(request)
    except struct.error:
        raise Malformed("the request is cut off") from None
    end = LENGTH.size + length
    return step, request[LENGTH.size : end], request[end:]


class Simulated:
    """What simulated clients have of their own: identity keys, and a folder each. The server sees neither."""

    def __init__(self, clients: int, policy: Policy, folder: Path | None, secure: bool) -> None:
        """folder: of the server's private state; without one, clients' folders are temporary."""
        self.policy, self.folder, self.secure = policy, (folder or temporary_folder(self)) / "clients", secure
        self._keys = {client: Identity.new().private for client in range(clients)}

    @cached_property
    def _directory(self) -> Directory:
        return Directory({client: Identity(key).public for client, key in self._keys.items()})

    def side(self, side: ClientSide, client: int) -> PrivateSide:
        """One of them, for as long as it answers a request."""
        drawer, identity = FolderDrawer(self.folder / str(client)), Identity(self._keys[client])
        return PrivateSide(side, client, drawer, self.policy, identity, self._directory, self.secure)
