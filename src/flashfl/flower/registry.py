"""Which node is which client. Flower's node ids are random, so every node is asked.

A node tells its client id, its number of samples, its density budget if it has one, and what it runs. A node that does
not fit is refused with a reason, and the others go on. If two nodes claim one client id, the second waits until the
first leaves. A node may be restarted under its old id, so refused nodes are asked again now and then, and so are
clients that were dropped from a round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.app import Message
from flwr.serverapp import Grid

from ..core.engine import JSON
from ..core.errors import ConfigError, FlashError, RunStopped
from ..core.exchange import Client
from ..core.method import Method
from ..engine.robust import most_samples
from . import records
from .attendance import Attendance, FlowerOptions
from .registration import Entry, Terms

log = logging.getLogger("flwr.flashfl")
_ERRORS = 3  # how often an unknown node may fail to answer before it is refused
_AGAIN = 60.0  # seconds after which refused nodes are asked again, when a round begins


@dataclass
class Node:
    """What is known about a node."""

    id: int
    entry: Entry | None = None  # what it said about itself, if it may take part
    why: str = ""  # why it was refused last
    ask: bool = True  # whether to ask it who it is
    asked: str = ""  # the id of the message that asks it
    errors: int = 0  # how often asking it failed


class Registry:
    """The clients of a run on Flower. Only `gather`, `present` and `refresh` use the network."""

    fixed: tuple[Client, ...] | None = None  # clients come and go

    def __init__(self, grid: Grid, terms: Terms, options: FlowerOptions, need: int = 1) -> None:
        self.grid, self.terms, self.options, self.need = grid, terms, options, max(1, need)
        self.attendance = Attendance(options, self.need)
        self.nodes: dict[int, Node] = {}  # those that are there now
        self.entries: dict[int, Entry] = {}  # by client id: of several nodes that claim one, the first
        self.densities: dict[int, float] = {}  # what the method gave clients that have none of their own
        self.size = 0  # how many clients the run was planned for
        self.stale = True  # whether `present` must look again
        self._checked = time.monotonic()  # when refused nodes were last asked again
        self._admit: Callable[[Sequence[Client]], Sequence[Client]] = tuple
        self._known: tuple[Client, ...] = ()  # registered and admitted, ascending by id
        self._noted: dict[int, int] = {}  # client -> its samples, where they are many more than the others'

    @property
    def refused(self) -> dict[int, str]:
        """Nodes that cannot take part, and why."""
        return {node.id: node.why for node in self.nodes.values() if node.why and node.entry is None}

    @property
    def _asked(self) -> dict[str, Node]:
        return {node.asked: node for node in self.nodes.values() if node.asked}

    # What the loop and the methods see.

    def admit(self, method: Method, key: int) -> None:
        """From now on, give clients the densities this method assigns."""
        self._admit = lambda clients: method.admit(clients, key)
        self._settle()

    def doubt(self, clients: Iterable[int]) -> None:
        """Ask these clients again who they are: they may have been restarted with other data."""
        for client in clients:
            if client in self.entries:
                self.nodes[self.entries[client].node].ask = self.stale = True

    # How they are found.

    def gather(self, count: int) -> None:
        """Wait until `count` clients have registered and every node has answered; then the run can be planned.

        Once `count` clients are there, nodes that do not answer get the grace period and no more.
        """
        count = max(count, self.need)
        self._find(count)
        if len(self._known) < count:
            log.warning("only %d of %d clients registered within %g s", len(self._known), count, self.options.wait)
        else:
            self._until(lambda: not self._asked, min(self.options.grace, self.options.wait))
        if self._asked:
            nodes = ", ".join(str(node.id) for node in self._asked.values())
            log.warning("going on without nodes that have not said which client they are: %s", nodes)
        self.size = self.size or len(self._known)

    def present(self) -> tuple[Client, ...]:
        """The clients to choose from for the next round. Looks on the network if a round has passed since it last did.

        Clients that missed their last rounds are passed over for a while, unless too few are left without them.
        """
        if self.stale:
            self._find(self.need)
        ready = tuple(c for c in self._known if c.id not in self.attendance.passed_over)
        return ready if len(ready) >= self.need else self._known

    def _find(self, count: int) -> None:
        """Look until `count` clients are there or time is up; RunStopped if there are too few then."""
        self._until(lambda: len(self._known) >= count, self.options.wait)
        if len(self._known) < self.need:
            why = "; ".join(f"node {n} was refused: {w}" for n, w in list(self.refused.items())[:3])
            raise RunStopped(
                f"{len(self._known)} clients are present after {self.options.wait:g} s and at least {self.need} are "
                f"needed{why and f' ({why})'}. Start more SuperNodes and resume the run."
            )

    def _until(self, enough: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        self.refresh()
        while not enough() and time.monotonic() < end:
            time.sleep(self.options.poll)
            self.refresh()

    def refresh(self) -> None:
        """Ask new nodes who they are, read the answers, forget nodes that left. Does not wait."""
        self.nodes = {i: self.nodes.get(i, Node(i)) for i in sorted(self.grid.get_node_ids())}
        if time.monotonic() - self._checked >= _AGAIN:
            self._checked = time.monotonic()
            for refused in self.refused:
                self.nodes[refused].ask = True
        new = [node for node in self.nodes.values() if node.ask and not node.asked]
        if new:
            content = records.fields("query", {"layout": self.terms.layout})
            messages = [Message(content, node.id, "query", ttl=self.options.timeout) for node in new]
            for node, message in zip(new, self.grid.push_messages(messages), strict=True):
                node.asked, node.ask = message, not message
        if asked := self._asked:
            for reply in self.grid.pull_messages(list(asked)):
                if (answering := asked.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    answering.asked = ""
                    self._hear(answering, reply)
        self._settle()
        self.stale = False

    def _hear(self, node: Node, reply: Message) -> None:
        if reply.has_error():
            node.errors += 1
            # A registered node is not refused for this: it is asked again whenever it fails a round.
            if node.entry is None and node.errors >= _ERRORS:
                self._refuse(node, f"it cannot say who it is ({reply.error.reason})")
            elif node.entry is None:
                node.ask = True
            return
        try:
            if (why := records.failure(reply.content)) is not None:
                raise ConfigError(why)
            entry = Entry.read(node.id, records.read_fields(reply.content, "client"), self.terms)
        except FlashError as error:
            node.entry = None
            self._refuse(node, str(error))
            return
        if node.entry != entry:
            client = entry.client
            self.attendance.returned(client.id)
            if node.entry is not None:
                log.warning("node %d was restarted: client %d with %d samples", node.id, client.id, client.n)
        node.entry, node.errors = entry, 0

    def _refuse(self, node: Node, why: str) -> None:
        why = records.printable(why)
        if node.why != why:
            log.error("node %d is refused: %s", node.id, why)
        node.why = why

    def _settle(self) -> None:
        """Give each client id to the node that claimed it first, as long as that node is there."""
        before, self.entries = self.entries, {}
        holders = {(client, entry.node) for client, entry in before.items()}
        told = [node.entry for node in self.nodes.values() if node.entry is not None]
        for entry in sorted(told, key=lambda e: (e.client.id, e.node) not in holders):
            holder = self.entries.setdefault(entry.client.id, entry).node
            if holder != entry.node:
                self._refuse(self.nodes[entry.node], f"client {entry.client.id} is already node {holder}")
        for client in sorted(set(before) - set(self.entries)):
            log.warning("client %d (node %d) has left", client, before[client].node)
        self._known = self._admitted()
        self._note_counts()

    def _note_counts(self) -> None:
        """Say which clients register so many samples that they will be bounded."""
        counts = [client.n for client in self._known]
        most = most_samples(counts) if self.terms.bounded and len(counts) > 2 else max(counts, default=0)
        for client in self._known:
            if client.n > most and self._noted.get(client.id) != client.n:
                self._noted[client.id] = client.n
                log.warning(
                    "client %d registers %d samples; it counts as at most %d, twice the median",
                    client.id,
                    client.n,
                    most,
                )

    def _admitted(self) -> tuple[Client, ...]:
        """The registered clients with the densities the method gives them. Clients it cannot take are refused."""
        known = [e.client for _, e in sorted(self.entries.items())]
        own = {c.id for c in known if c.density is not None}
        known = [c if c.id in own else replace(c, density=self.densities.get(c.id)) for c in known]
        try:
            admitted = tuple(self._admit(known))
        except ConfigError:
            for client in known:
                try:
                    self._admit([client])
                except ConfigError as error:
                    node = self.nodes[self.entries.pop(client.id).node]
                    node.entry = None
                    self._refuse(node, str(error))
            if len(self.entries) == len(known):
                raise
            return self._admitted()
        self.densities |= {c.id: c.density for c in admitted if c.density is not None and c.id not in own}
        return admitted

    # What a checkpoint keeps.

    def save(self) -> dict[str, JSON]:
        return {
            "size": self.size,
            "nodes": {str(i): str(e.node) for i, e in sorted(self.entries.items())},
            "densities": {str(i): d for i, d in sorted(self.densities.items())},
        }

    def load(self, saved: Mapping[str, JSON]) -> None:
        """Take over the planned size and the clients' densities from the run that goes on."""
        size, densities = saved.get("size"), saved.get("densities")
        self.size = size if isinstance(size, int) else 0
        given = densities.items() if isinstance(densities, Mapping) else ()
        self.densities = {int(i): float(d) for i, d in given if isinstance(d, int | float)}
        self._settle()
