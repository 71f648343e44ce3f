"""Who is who: Flower's node ids are random, so every node is asked which client it is.

A node says its client id, how many samples it has, its density budget if it has one, and what it runs. Whoever does not
fit is refused by name and the others go on; a node whose id is taken is reconsidered when the one that has it leaves.
A node may be started anew under its old id, so whoever is refused is asked again now and then, and so is a client whose
reply does not fit what it has said.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from .. import __version__
from ..core.errors import ConfigError, RunStopped
from ..core.exchange import Client
from ..core.method import Method
from ..wire.frame import VERSION
from . import records
from .fixed import NONE, difference

log = logging.getLogger("flwr.flashfl")
_ERRORS = 3  # failed questions to a node before it is refused
_AGAIN = 60.0  # seconds after which those that are refused are asked again, when a round begins
_SAMPLES = 1 << 32  # of one client: sums of any cohort's fit 64 bits


@dataclass(frozen=True)
class Terms:
    """What a node must have to take part."""

    layout: str  # the model's hash
    fixed: str = NONE  # the fingerprint of its fixed tensors
    samples: int = 0  # the most that a client may register; 0: no cap but the format's own


@dataclass(frozen=True)
class Entry:
    """A node that has told who it is."""

    node: int
    client: Client
    held: int  # samples it judges models on

    @staticmethod
    def read(node: int, fields: Mapping[str, Any], terms: Terms) -> Entry:
        """What a node says of itself, or a ConfigError that says why it cannot take part."""
        try:
            client, n, held = (int(fields[name]) for name in ("client", "n", "held"))
            theirs, wire, package = str(fields["layout"]), int(fields["wire"]), str(fields["package"])
            density = float(fields["density"]) if "density" in fields else None
            other = difference(terms.fixed, str(fields.get("fixed", NONE)))
        except (KeyError, ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"its registration cannot be read ({error!r})") from None
        if not (0 <= client < 2**63 and 1 <= n <= _SAMPLES and 0 <= held <= _SAMPLES):
            raise ConfigError(f"it registers as client {client} with {n} samples and {held} held back")
        if terms.samples and n > terms.samples:
            raise ConfigError(f"client {client} registers {n} samples, flower.max_samples is {terms.samples}")
        if wire != VERSION:
            raise ConfigError(f"client {client} speaks version {wire} of the wire format, the server {VERSION}")
        if theirs != terms.layout:
            raise ConfigError(
                f"client {client} has another model: its layout is {theirs[:40]}, the server's {terms.layout}. "
                "Model, prunable weights and fixed weights must be the same on both sides"
            )
        if other is not None:
            raise ConfigError(
                f"client {client} has other fixed weights: {other[:100]!r} is not the server's. They do not travel: "
                "load them from the same file on both sides, or give the task a class or a function in place of a "
                "module, so that both sides draw them from one seed"
            )
        if package != __version__:
            log.warning("client %d runs flashfl %s, the server %s", client, package[:40], __version__)
        return Entry(node, Client(client, n, density), held)


class Roster:
    """The clients that are present, ascending by id; looked up anew when a round has passed since the last look."""

    def __init__(self, grid: Grid, terms: Terms, need: int = 1, wait: float = 300.0, poll: float = 0.2) -> None:
        self.grid, self.terms, self.need, self.wait, self.poll = grid, terms, max(1, need), wait, poll
        self.entries: dict[int, Entry] = {}  # by client id
        self.refused: dict[int, str] = {}  # node -> why
        self.densities: dict[int, float] = {}  # what the method gave clients that have none of their own
        self.size = 0  # how many clients the run was planned for
        self._asked: dict[str, int] = {}  # message id -> node
        self._told: dict[int, Entry] = {}  # node -> what it said
        self._waiting: set[int] = set()  # nodes whose id another one has
        self._errors: dict[int, int] = {}  # node -> how often asking it failed
        self._again: set[int] = set()  # nodes to be asked once more, whatever they said
        self._logged: dict[int, str] = {}  # node -> why it was last said to be refused
        self._checked = time.monotonic()  # when those that are refused were last asked again
        self._nodes: set[int] = set()
        self._admit: Callable[[Sequence[Client]], Sequence[Client]] = tuple
        self._present: tuple[Client, ...] = ()
        self.stale = True

    # What the loop and the methods see.

    fixed: tuple[Client, ...] | None = None  # clients come and go

    def admit(self, method: Method, key: int) -> None:
        """From now on, give clients the densities this method assigns."""
        self._admit = lambda clients: method.admit(clients, key)
        self._settle()

    def doubt(self, clients: Iterable[int]) -> None:
        """Ask these who they are at the next look, as they may have been started anew; what they say counts then."""
        self._again |= {self.entries[c].node for c in clients if c in self.entries}
        self.stale = self.stale or bool(self._again)

    # How they are found.

    def gather(self, count: int) -> None:
        """Wait until every node has said who it is and `count` clients are there; then the run can be planned."""
        count = max(count, self.need)
        self._until(lambda: not self._asked and len(self._present) >= count)
        if len(self._present) < self.need:
            raise RunStopped(self._too_few())
        if len(self._present) < count:
            log.warning("only %d of %d clients registered within %g s", len(self._present), count, self.wait)
        self.size = self.size or len(self._present)

    def present(self) -> tuple[Client, ...]:
        """The clients that are there, looked up on the network if a round has passed since the last look."""
        if self.stale:
            self.refresh()
            if len(self._present) < self.need:
                self._until(lambda: len(self._present) >= self.need)
            if len(self._present) < self.need:
                raise RunStopped(self._too_few())
        return self._present

    def _until(self, enough: Callable[[], bool]) -> None:
        end = time.monotonic() + self.wait
        self.refresh()
        while not enough() and time.monotonic() < end:
            time.sleep(self.poll)
            self.refresh()

    def refresh(self) -> None:
        """Ask nodes that have appeared, read what has come back, forget those that left. Does not wait."""
        self._nodes = set(self.grid.get_node_ids())
        if time.monotonic() - self._checked >= _AGAIN:
            self._checked, self._again = time.monotonic(), {*self._again, *self.refused}
        known = {*self._told, *self.refused} - self._again
        new = sorted(self._nodes - known - {*self._asked.values()})
        self._again = (self._again & self._nodes).difference(new)
        if new:
            messages = [Message(records.fields("query", {"layout": self.terms.layout}), node, "query") for node in new]
            ids = self.grid.push_messages(messages)
            self._asked |= {i: node for i, node in zip(ids, new, strict=True) if i}
        if self._asked:
            for reply in self.grid.pull_messages(list(self._asked)):
                node = self._asked.pop(reply.metadata.reply_to_message_id, None)
                if node is not None:
                    self._hear(node, reply)
        for gone in set(self._told) - self._nodes:
            del self._told[gone]
        for gone in {*self.refused, *self._errors, *self._logged} - self._nodes:
            for about in (self.refused, self._errors, self._logged):
                about.pop(gone, None)
        self._settle()
        self.stale = False

    def _hear(self, node: int, reply: Message) -> None:
        if reply.has_error():
            self._errors[node] = self._errors.get(node, 0) + 1
            # One that is known is asked again when it fails a round, another one as long as it is listed.
            if self._errors[node] >= _ERRORS and node not in self._told:
                self._refuse(node, f"it cannot say who it is ({str(reply.error.reason)[:200]})")
            return
        try:
            if (why := records.failure(reply.content)) is not None:
                raise ConfigError(why)
            entry = Entry.read(node, records.read_fields(reply.content, "client"), self.terms)
        except ConfigError as error:
            self._refuse(node, str(error))
            return
        if self._told.get(node, entry) != entry:
            log.warning("node %d was started anew: client %d with %d samples", node, entry.client.id, entry.client.n)
        self._told[node] = entry
        self.refused.pop(node, None)
        self._errors.pop(node, None)

    def _refuse(self, node: int, why: str) -> None:
        self._told.pop(node, None)
        self.refused[node] = why
        if self._logged.get(node) != why:
            log.error("node %d is refused: %s", node, why)
        self._logged[node] = why

    def _settle(self) -> None:
        """Who of those that told who they are has which id: whoever had it first, as long as it is there."""
        before = self.entries
        self.entries = {i: new for i, e in before.items() if (new := self._told.get(e.node)) and new.client.id == i}
        waiting = set()
        for node, entry in sorted(self._told.items()):
            holder = self.entries.setdefault(entry.client.id, entry).node
            if holder != node:
                waiting.add(node)
                if node not in self._waiting:
                    log.error("node %d is refused: client %d is already node %d", node, entry.client.id, holder)
        self._waiting = waiting
        for client in sorted(set(before) - set(self.entries)):
            log.warning("client %d (node %d) has left", client, before[client].node)
        self._present = self._admitted()

    def _admitted(self) -> tuple[Client, ...]:
        """The clients as the method sees them; one that it cannot take is refused."""
        known = [e.client for _, e in sorted(self.entries.items())]
        own = {c.id for c in known if c.density is not None}
        known = [c if c.id in own else replace(c, density=self.densities.get(c.id)) for c in known]
        try:
            admitted = tuple(self._admit(known))
        except ConfigError:
            unfit = [(c, why) for c in known if (why := self._unfit(c)) is not None]
            if not unfit:
                raise
            for client, why in unfit:
                self._refuse(self.entries.pop(client.id).node, why)
            return self._admitted()
        self.densities |= {c.id: c.density for c in admitted if c.density is not None and c.id not in own}
        return admitted

    def _unfit(self, client: Client) -> str | None:
        try:
            self._admit([client])
        except ConfigError as error:
            return str(error)
        return None

    def _too_few(self) -> str:
        why = "; ".join(f"node {n} was refused: {w}" for n, w in list(self.refused.items())[:3])
        return (
            f"{len(self._present)} clients are present after {self.wait:g} s and at least {self.need} are needed"
            + (f" ({why})" if why else "")
            + ". Start more SuperNodes and resume the run."
        )

    # What a checkpoint keeps.

    def save(self) -> dict[str, Any]:
        return {
            "size": self.size,
            "nodes": {str(i): str(e.node) for i, e in sorted(self.entries.items())},
            "densities": {str(i): d for i, d in sorted(self.densities.items())},
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """The plan's size and the densities given to clients are those of the run that goes on."""
        self.size = int(saved.get("size", 0))
        self.densities = {int(i): float(d) for i, d in saved.get("densities", {}).items()}
        self._settle()
