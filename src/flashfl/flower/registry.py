"""Which node is which client. Flower's node ids are random, so every node is asked.

A node tells its client id, its numbers of samples, its density budget if it has one, and what it runs. A node that
does not fit is refused with a reason, and the others go on. What a node said first is bound to it for the run, and kept
in checkpoints. A node that says something else later is refused, and so is a second node with the same client id. With
authentication, Flower gives each key one node id for good, so this binds a client to its key. A node may be restarted,
so refused nodes are asked again now and then, and so are clients that were dropped from a round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from flwr.app import Message
from flwr.serverapp import Grid

from ..core.engine import JSON
from ..core.errors import CheckpointError, ConfigError, FlashError, RunStopped
from ..core.exchange import Client
from ..core.method import Method
from ..core.parts import coerce
from ..data.task import Task
from . import records
from .attendance import Attendance, FlowerOptions
from .registration import Entry, fingerprint

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

    def __init__(self, grid: Grid, task: Task, options: FlowerOptions, need: int = 1) -> None:
        self.grid, self.options, self.need = grid, options, max(1, need)
        self._terms = (task.layout.hash, fingerprint(task), options.max_samples)  # what a node must have to take part
        self.attendance = Attendance(options, self.need)
        self.nodes: dict[int, Node] = {}  # those that are there now
        self.bound: dict[int, Entry] = {}  # by client id: what its node registered first in this run
        self.entries: dict[int, Entry] = {}  # those of them whose nodes are there now
        self.densities: dict[int, float] = {}  # what the method gave clients that have none of their own
        self.size = 0  # how many clients the run was planned for
        self.stale = True  # whether `present` must look again
        self._checked = time.monotonic()  # when refused nodes were last asked again
        self._admit: Callable[[Sequence[Client]], Sequence[Client]] = tuple
        self._known: tuple[Client, ...] = ()  # registered and admitted, ascending by id

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
            log.warning("continuing without nodes that have not registered: %s", nodes)
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
                f"{len(self._known)} clients registered within {self.options.wait:g} s, at least {self.need} are "
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
        before = set(self.nodes)
        self.nodes = {i: self.nodes.get(i, Node(i)) for i in sorted(self.grid.get_node_ids())}
        if before - set(self.nodes) or time.monotonic() - self._checked >= _AGAIN:
            self._checked = time.monotonic()
            for refused in self.refused:
                self.nodes[refused].ask = True
        new = [node for node in self.nodes.values() if node.ask and not node.asked]
        if new:
            content = records.fields("query", {"layout": self._terms[0]})
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
                self._refuse(node, f"it could not register ({reply.error.reason})")
            elif node.entry is None:
                node.ask = True
            return
        try:
            if (why := records.failure(reply.content)) is not None:
                raise ConfigError(why)
            entry = Entry.read(node.id, records.read_fields(reply.content, "client"), *self._terms)
            self._bind(entry)
        except FlashError as error:
            node.entry = None
            self._refuse(node, str(error))
            return
        if node.entry != entry:
            self.attendance.returned(entry.client.id)
        node.entry, node.errors = entry, 0

    def _bind(self, entry: Entry) -> None:
        """Bind a node to what it registers, or raise a ConfigError if that contradicts an earlier registration."""
        own = next((e for e in self.bound.values() if e.node == entry.node), entry)
        holder = self.bound.get(entry.client.id, entry)
        if holder.node != entry.node and holder.node in self.nodes:
            raise ConfigError(
                f"client {entry.client.id} is already node {holder.node}, which is connected: give each SuperNode its "
                "own partition-id"
            )
        if not self.options.rebind and holder.node != entry.node:
            raise ConfigError(
                f"client {entry.client.id} belongs to node {holder.node}, which registered it first. Give each "
                "SuperNode its own partition-id. If the client has a new key, or its SuperNode was restarted and is "
                "not authenticated, resume the run with flower.rebind=true."
            )
        if own != entry:
            if not self.options.rebind:
                raise ConfigError(
                    f"it registers as {entry}, but it was {own} before. A node must keep its client and its number of "
                    "samples for the whole run. If you changed it on purpose, resume the run with flower.rebind=true."
                )
            log.warning("node %d was restarted: it is %s now, and was %s", entry.node, entry, own)
            del self.bound[own.client.id]
        self.bound[entry.client.id] = entry

    def _refuse(self, node: Node, why: str) -> None:
        why = records.printable(why)
        if node.why != why:
            log.error("node %d is refused: %s", node.id, why)
        node.why = why

    def _settle(self) -> None:
        """Which of the bound clients are there now."""
        before = self.entries
        told = {node.entry for node in self.nodes.values()}
        self.entries = {client: entry for client, entry in self.bound.items() if entry in told}
        for client in sorted(set(before) - set(self.entries)):
            log.warning("client %d (node %d) has left", client, before[client].node)
        self._known = self._admitted()

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
                    del self.bound[client.id]
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
            "bound": [asdict(entry) for _, entry in sorted(self.bound.items())],
            "densities": {str(i): d for i, d in sorted(self.densities.items())},
        }

    def load(self, saved: Mapping[str, JSON]) -> None:
        """Take over the planned size, who is bound to which client, and the clients' densities."""
        try:
            size, bound = coerce(saved["size"], int, "size"), coerce(saved["bound"], tuple[Entry, ...], "bound")
            densities = coerce(saved["densities"], Mapping[int, float], "densities")
            if size < 0 or not all(0 < density <= 1 for density in densities.values()):
                raise ValueError("a number is out of bounds")
        except Exception as error:  # the content may be a stranger's, and fail in any way
            raise CheckpointError(f"the clients in the checkpoint cannot be read ({error!r})") from None
        self.size, self.densities = size, densities
        self.bound = {
            **{entry.client.id: entry for entry in bound},
            **self.bound,
        }  # those that have registered since then are known better
        self._settle()
