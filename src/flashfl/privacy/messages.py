"""The bytes of a secure round: a short header, then one list of fixed-size entries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import astuple, dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from ..core.errors import ConfigError
from ..core.exchange import Tag
from .errors import Malformed, TooLittleNoise, WrongRound
from .keys import KEY, SIGNATURE, TAG
from .policy import Policy
from .shamir import SHARE
from .vector import Noise, Ranges

List = np.ndarray[Any, np.dtype[Any]]
_MAGIC = b"FSA1"
HEADER = len(_MAGIC) + 1 + 16  # bytes before a message's content
STEPS = ("advertise keys", "share secrets", "send input", "confirm survivors", "remove pads", "the end")


class Step(IntEnum):
    """The steps of a round; their names for users are in STEPS."""

    ADVERTISE, SHARES, MASKED, CONFIRM, UNMASK, DONE = range(6)


CARD = np.dtype([("id", "<u4"), ("box", f"V{KEY}"), ("mask", f"V{KEY}"), ("signature", f"V{SIGNATURE}")])
BOX = np.dtype([("id", "<u4"), ("box", f"V{2 * SHARE + TAG}")])  # the id of the receiver, then of the sender
VOTE = np.dtype([("id", "<u4"), ("digest", f"V{KEY}"), ("signature", f"V{SIGNATURE}")])
SECRET = np.dtype([("id", "<u4"), ("dropped", "u1"), ("share", f"V{SHARE}")])


@dataclass(frozen=True)
class Terms:
    """What one attempt of a round is about. Its digest stands in every message and under every signature."""

    run: str
    tag: Tag
    length: int  # of the vector that is added up
    bits: int  # sums are taken in Z/2^bits
    policy: Policy = field(default_factory=Policy)
    cohort: int = 1  # clients that are asked: no more are added up
    ranges: Ranges = field(default_factory=Ranges)
    noise: Noise | None = None

    @property
    def context(self) -> bytes:
        """16 bytes that differ for every run, round, attempt and setting."""
        text = f"flashfl secure aggregation 1: {self.run!r} {self.tag} {self.length} {self.bits} {self.policy}"
        text += f" {self.cohort} {self.ranges} {self.noise}"
        return hashlib.sha256(text.encode()).digest()[:16]

    def bound(self, roster: bytes) -> bytes:
        """What secrets are bound to: these terms and the whole cohort."""
        return hashlib.sha256(b"cohort" + self.context + roster).digest()

    def to_bytes(self) -> bytes:
        noise = None if self.noise is None else astuple(self.noise)
        return json.dumps(
            [self.run, self.tag, self.length, self.bits, self.cohort, astuple(self.ranges), noise]
        ).encode()

    @staticmethod
    def from_bytes(data: bytes, policy: Policy) -> Terms:
        """The server's terms, under the client's own policy."""
        try:
            run, tag, length, bits, cohort, ranges, noise = json.loads(data)
            phase, round, attempt = map(int, tag)
            terms = Terms(
                str(run), (phase, round, attempt), int(length), int(bits), policy, int(cohort), Ranges(*ranges),
                None if noise is None else Noise(*map(float, noise)),
            )  # fmt: skip
        except (ValueError, TypeError, ConfigError):
            raise Malformed(
                "the server's terms for this round cannot be read: check that both sides run the same version of "
                "flashfl"
            ) from None
        if terms.bits not in (32, 64) or not 1 <= terms.length < 1 << 31 or not 1 <= terms.cohort < 1 << 31:
            raise Malformed(
                f"the server announces sums of {terms.length} numbers of {terms.bits} bits from {terms.cohort} "
                "clients: expected at least 1 number, 32 or 64 bits, and at least 1 client"
            )
        offered = 0.0 if terms.noise is None else terms.noise.multiplier
        if offered < policy.noise:
            raise TooLittleNoise(
                f"the server's noise is {offered:g} times dp_clip, but this client requires at least {policy.noise:g} "
                "(its setting policy-noise). Raise dp_noise on the server to at least this, and set policy.noise there "
                f"and policy-noise on every node to {policy.noise:g}. Or set this client's policy-noise to the "
                "server's policy.noise."
            )
        return terms


def frame(step: int, terms: Terms, *content: bytes) -> bytes:
    return b"".join([_MAGIC, bytes([step]), terms.context, *content])


def unframe(data: bytes, step: int, terms: Terms) -> memoryview:
    """The content of a message of this step, or why it is none."""
    if len(data) < HEADER or data[: len(_MAGIC)] != _MAGIC:
        raise Malformed("the bytes are not a message of a secure round")
    if data[len(_MAGIC)] != step:
        raise Malformed(f"expected a message of the step '{STEPS[step]}', got one of another step")
    if data[len(_MAGIC) + 1 : HEADER] != terms.context:
        raise WrongRound(
            f"the message does not belong to (phase, round, attempt) = {terms.tag}, or its sender has other privacy "
            "settings. Set the same policy on both sides: `policy.*` on the server; policy-least, policy-survive, "
            "policy-corrupt and policy-noise in --node-config."
        )
    return memoryview(data)[HEADER:]


def entries(content: memoryview, kind: np.dtype[Any]) -> List:
    """The entries of a list. Their ids must ascend."""
    if len(content) % kind.itemsize:
        raise Malformed(f"a list of {len(content)} bytes does not consist of whole entries of {kind.itemsize} bytes")
    found = np.frombuffer(content, kind)
    if len(found) > 1 and not bool((np.diff(found["id"].astype(np.int64)) > 0).all()):
        raise Malformed("the clients of a list must be in ascending order, each once")
    return found


def listing(kind: np.dtype[Any], rows: Collection[tuple[Any, ...]]) -> bytes:
    """Rows as a list of entries, ascending by id."""
    return np.array(sorted(rows), kind).tobytes()


def flags(members: Collection[int], of: Collection[int]) -> bytes:
    """One bit for each of `of`: whether it is a member."""
    return np.packbits([client in members for client in of], bitorder="little").tobytes()


def flagged(data: bytes | memoryview, of: Collection[int]) -> frozenset[int]:
    """The members that `flags` described."""
    if len(data) != (len(of) + 7) // 8:
        raise Malformed(f"{len(data)} bytes of flags for {len(of)} clients: expected {(len(of) + 7) // 8}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=len(of), bitorder="little")
    return frozenset(client for client, bit in zip(of, bits, strict=True) if bit)
