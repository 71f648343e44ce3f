"""Which node is which client. Flower's node ids are random, so every node is asked.

A node tells its client id, its numbers of samples, its density budget if it has one, and what it runs. A node that
does not fit is refused with a reason, and the others go on. What a node said first is bound to it for the run, and kept
in checkpoints. A node that says something else later is refused, and so is a second node with the same client id. With
authentication, Flower gives each key one node id for good, so this binds a client to its key. A node may be restarted,
so refused nodes are asked again now and then, and so are clients that were dropped from a round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from flwr.app import Message
from flwr.serverapp import Grid

from ..core.engine import JSON
from ..core.errors import ConfigError, FlashError, RunStopped
from ..core.exchange import Client
from ..core.method import Method
from ..core.parts import coerce
from ..data.task import Task
from . import records
from .attendance import Attendance, FlowerOptions
from .records import log
from .registration import Entry, fingerprint

_TRIES = 3  # how often an unknown node may fail to answer before it is refused
_AGAIN = 60.0  # seconds after which refused nodes are asked again, when a round begins


@dataclass
class Node:
    """What is known about a node."""

    id: int
    entry: Entry | None = None  # what it said about itself, if it may take part
    why: str = ""  # why it was refused last
    tries: int = _TRIES  # how often to ask it who it is, until it answers
    asked: str = ""  # the id of the message that asks it


class Registry:
    """The clients of a run on Flower. Only `gather`, `present` and `refresh` use the network."""

    fixed: tuple[Client, ...] | None = None  # clients come and go

    def __init__(self, grid: Grid, task: Task, options: FlowerOptions, need: int = 1) -> None:
        self.grid, self.options, self.need = grid, options, max(1, need)
        self._terms = (task.layout.hash, fingerprint(task), options.max_samples)  # what a node must have to take part
        self.attendance = Attendance(options, self.need)
        self.nodes: dict[int, Node] = {}  # those that are there now
        self.bound: dict[int, Entry] = {}  # by client id: what its node registered first in this run
        self.densities: dict[int, float] = {}  # by client id: its own, or what the method gave it
        self.size = 0  # how many clients the run was planned for
        self.stale = True  # whether `present` must look again
        self._checked = time.monotonic()  # when refused nodes were last asked again
        self._admit: Callable[[Sequence[Client]], Sequence[Client]] = tuple

    @property
    def entries(self) -> dict[int, Entry]:
        """The registered nodes that are there now, by client id."""
        known = (node.entry for node in self.nodes.values() if node.entry is not None)
        return {entry.client.id: entry for entry in sorted(known, key=lambda entry: entry.client.id)}

    @property
    def refused(self) -> dict[int, str]:
        """Nodes that cannot take part, and why."""
        return {node.id: node.why for node in self.nodes.values() if node.why and node.entry is None}

    @property
    def _asked(self) -> dict[str, Node]:
        return {node.asked: node for node in self.nodes.values() if node.asked}

    # What the loop and the methods see.

    def admit(self, method: Method, key: int) -> None:
        """From now on, refuse clients that this method cannot take, and give the others the densities it assigns."""
        self._admit = lambda clients: method.admit(clients, key)

    def doubt(self, clients: Iterable[int]) -> None:
        """Ask these clients again who they are: they may have been restarted with other data."""
        entries = self.entries
        for client in set(clients) & set(entries):
            self.nodes[entries[client].node].tries = 1
            self.stale = True

    # How they are found.

    def gather(self, count: int) -> None:
        """Wait until `count` clients have registered and every node has answered; then the run can be planned.

        Once `count` clients are there, nodes that do not answer get the grace period and no more.
        """
        count = max(count, self.need)
        self._find(count)
        if len(self.entries) < count:
            log.warning(
                "only %d of %d clients registered within %g s, and the server waits no longer. A resumed run goes on "
                "with them. A new run needs at least per_round clients, and stops otherwise. More clients can join "
                "later. To wait longer, raise flower.wait.",
                len(self.entries), count, self.options.wait,
            )  # fmt: skip
        else:
            self._until(lambda: not self._asked, min(self.options.grace, self.options.wait))
        if self._asked:
            nodes = ", ".join(str(node.id) for node in self._asked.values())
            log.warning("continuing without nodes that have not registered: %s", nodes)
        self.size = self.size or len(self.entries)

    def present(self) -> tuple[Client, ...]:
        """The clients to choose from for the next round. Looks on the network if a round has passed since it last did.

        Clients that missed their last rounds are passed over for a while, unless too few are left without them.
        """
        if self.stale:
            self._find(self.need)
        said = [entry.client for entry in self.entries.values()]
        known = tuple(self._admit([replace(c, density=c.density or self.densities.get(c.id)) for c in said]))
        self.densities |= {c.id: c.density for c in known if c.density is not None}
        ready = tuple(c for c in known if c.id not in self.attendance.passed_over)
        return ready if len(ready) >= self.need else known

    def _find(self, count: int) -> None:
        """Look until `count` clients are there or time is up; RunStopped if there are too few then."""
        self._until(lambda: len(self.entries) >= count, self.options.wait)
        if len(self.entries) < self.need:
            why = "; ".join(f"node {n} was refused: {w}" for n, w in list(self.refused.items())[:3])
            raise RunStopped(
                f"{len(self.entries)} clients registered within {self.options.wait:g} s, at least {self.need} are "
                f"needed{why and f' ({why})'}. If nodes were refused, correct what the reasons say. Otherwise start "
                "more SuperNodes, or raise flower.wait. Then resume the run."
            )

    def _until(self, enough: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        self.refresh()
        while not enough() and time.monotonic() < end:
            time.sleep(self.options.poll)
            self.refresh()

    def refresh(self) -> None:
        """Ask new nodes who they are, read the answers, forget nodes that left. Does not wait."""
        before = self.nodes
        self.nodes = {i: before.get(i) or Node(i) for i in sorted(self.grid.get_node_ids())}
        gone = [node for node in before.values() if node.id not in self.nodes]
        for entry in [node.entry for node in gone if node.entry is not None]:
            log.warning("client %d (node %d) has left", entry.client.id, entry.node)
        if gone or time.monotonic() - self._checked >= _AGAIN:
            self._checked = time.monotonic()
            for refused in self.refused:
                self.nodes[refused].tries = _TRIES
        if new := [node for node in self.nodes.values() if node.tries and not node.asked]:
            content = records.fields("query", {"layout": self._terms[0]})
            messages = [Message(content, node.id, "query", ttl=self.options.timeout) for node in new]
            for node, message in zip(new, self.grid.push_messages(messages), strict=True):
                node.asked = message
        if asked := self._asked:
            for reply in self.grid.pull_messages(list(asked)):
                if (answering := asked.pop(reply.metadata.reply_to_message_id, None)) is not None:
                    answering.asked = ""
                    self._hear(answering, reply)
        self.stale = False

    def _hear(self, node: Node, reply: Message) -> None:
        if reply.has_error():
            node.tries -= 1
            # A registered node is not refused for this: it is asked again whenever it fails a round.
            if node.entry is None and not node.tries:
                self._refuse(node, f"it could not register ({reply.error.reason})")
            return
        try:
            if (why := records.failure(reply.content)) is not None:
                raise ConfigError(why)
            entry = Entry.read(node.id, records.read_fields(reply.content, "client"), *self._terms)
            self._admit([entry.client])
            self._bind(entry)
        except FlashError as error:
            return self._refuse(node, str(error))
        if node.entry != entry:
            log.info("node %d is %s", node.id, entry)
            self.attendance.returned(entry.client.id)
        node.entry, node.tries = entry, 0

    def _bind(self, entry: Entry) -> None:
        """Bind a node to what it registers, or raise a ConfigError if that contradicts an earlier registration."""
        own = next((e for e in self.bound.values() if e.node == entry.node), entry)
        holder = self.bound.get(entry.client.id, entry)
        if holder.node != entry.node and (holder.node in self.nodes or not self.options.rebind):
            raise ConfigError(
                f"client {entry.client.id} belongs to node {holder.node}, which registered it first. Give each "
                "SuperNode its own partition-id. If this is the same client after a restart or with a new key, make "
                f"sure that node {holder.node} no longer runs, and resume the run with flower.rebind=true."
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
        node.why, node.entry, node.tries = why, None, 0

    # What a checkpoint keeps.

    def save(self) -> dict[str, JSON]:
        return {
            "size": self.size,
            "bound": [asdict(entry) for _, entry in sorted(self.bound.items())],
            "densities": {str(i): d for i, d in sorted(self.densities.items())},
        }

    def load(self, saved: Mapping[str, JSON]) -> None:
        """Take over the planned size, who is bound to which client, and the clients' densities."""
        size, bound = coerce(saved["size"], int, "size"), coerce(saved["bound"], tuple[Entry, ...], "bound")
        densities = coerce(saved["densities"], Mapping[int, float], "densities")
        self.size, self.densities = size, densities
        now = {entry.node for entry in self.bound.values()}  # nodes that have registered since then are known better
        self.bound = {entry.client.id: entry for entry in bound if entry.node not in now} | self.bound
