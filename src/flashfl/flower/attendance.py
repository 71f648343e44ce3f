"""Which clients reply, how long they take, when to stop waiting for them, and whom not to ask for a while."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from ..core.errors import check_range
from .records import log

_PAST = 9  # reply times that are remembered of each client
_KNOWN = 3  # reply times from which on a client's usual time is known
_SLOWER = 3.0  # how many times its usual time a client gets
_BRIEF = 1 / 6  # share of the grace period for clients whose times are known, or who missed their last round
_LONGEST = 64  # rounds a client is passed over at most


@dataclass(frozen=True)
class FlowerOptions:
    """How the server waits for clients, and which clients it refuses."""

    clients: int = 0  # clients to wait for before the first round; 0: per_round
    wait: float = 300.0  # the longest wait for these clients, in seconds
    timeout: float = 600.0  # the longest time a client has to reply, in seconds
    # A round is closed early once this share of its clients has replied and `grace` seconds more have passed, but not
    # before three times the time that share took, nor three times a missing client's usual time. Once a client's usual
    # time is known, it gets a sixth of `grace`. After a missed round that is all it gets.
    enough: float = 0.5  # a round can close early when this share of its clients has replied; 1: wait for all
    grace: float = 60.0  # how much longer to wait before a round closes early, in seconds
    poll: float = 0.2  # seconds between two checks for replies
    max_samples: int = 0  # refuse clients with more samples than this; 0: refuse only above 2^32
    # A node keeps the client id and the numbers of samples it registered first, and a client id keeps its node.
    rebind: bool = False  # let clients come back with other data or another key

    def __post_init__(self) -> None:
        check_range("[0, inf)", clients=self.clients, wait=self.wait, grace=self.grace, max_samples=self.max_samples)
        check_range("(0, inf)", timeout=self.timeout, poll=self.poll)
        check_range("(0, 1]", enough=self.enough)


@dataclass
class Post:
    """A message on its way to a client."""

    client: int
    kind: str
    again: bool = False  # whether the client has been sent it a second time, with the full mask
    sent: float = field(default_factory=time.monotonic)


class Attendance:
    """Remembers how long clients took, and who missed rounds. A restarted server starts with a clean slate."""

    def __init__(self, options: FlowerOptions, need: int = 1) -> None:
        self.options, self.need = options, need
        self.passed_over: dict[int, int] = {}  # client -> for how many more rounds
        self.late: dict[str, Post] = {}  # messages whose replies are no longer waited for, by id
        self._missed: dict[int, int] = {}  # client -> rounds it missed in a row
        self._seconds: dict[tuple[str, int], deque[float]] = {}  # by kind of message and client

    def time_allowed(self, kind: str, missing: Sequence[int], replies: Sequence[float]) -> float:
        """Seconds after which to go on without the clients in `missing`; `replies`: what the good replies took."""
        enough = max(self.need, math.ceil(self.options.enough * (len(missing) + len(replies))))
        if len(replies) < enough:
            return self.options.timeout
        soon = sorted(replies)[enough - 1]
        return min(self.options.timeout, max(self._patience(kind, client, soon) for client in missing))

    def _patience(self, kind: str, client: int, soon: float) -> float:
        """Seconds to wait for one client, if enough others have replied after `soon` seconds."""
        times, brief = self._seconds.get((kind, client), ()), _BRIEF * self.options.grace
        usual = max(soon, median(times or (0.0,)))
        if client in self._missed:
            return usual + brief
        return max(soon + (brief if len(times) >= _KNOWN else self.options.grace), _SLOWER * usual)

    def replied(self, kind: str, client: int, seconds: float) -> None:
        self._seconds.setdefault((kind, client), deque(maxlen=_PAST)).append(seconds)
        self.returned(client)

    def returned(self, client: int) -> None:
        """The client is there: forget the rounds it missed."""
        self._missed.pop(client, None)
        self.passed_over.pop(client, None)

    def round_over(self, silent: Iterable[int]) -> None:
        """A round has ended without a reply from these clients: they are passed over for a while."""
        self.passed_over = {client: left - 1 for client, left in self.passed_over.items() if left > 1}
        self.missed(silent)

    def missed(self, silent: Iterable[int]) -> None:
        for client in silent:
            count = self._missed[client] = self._missed.get(client, 0) + 1
            rounds = self.passed_over[client] = min(2 ** (count - 1), _LONGEST)
            times = "" if count == 1 else f" ({count} times in a row)"
            span = "round" if rounds == 1 else f"{rounds} rounds"
            log.warning("client %d did not reply%s; skipping it in the next %s", client, times, span)
