"""Which node is which client. Flower's node ids are random, so every node is asked.

A node tells its client id, its number of samples, its density budget if it has one, and what it runs. A node that does
not fit is refused with a reason, and the others go on. If two nodes claim one client id, the second waits until the
first leaves. A node may be restarted under its old id, so refused nodes are asked again now and then, and so are
clients whose replies do not fit what they registered.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from flwr.app import Message
from flwr.serverapp import Grid

from ..core.engine import JSON
from ..core.errors import ConfigError, FlashError, RunStopped
from ..core.exchange import Client
from ..core.method import Method
from . import records
from .attendance import Attendance, FlowerOptions
from .registration import Entry, Terms

log = logging.getLogger("flwr.flashfl")
_ERRORS = 3  # how often an unknown node may fail to answer before it is refused
_AGAIN = 60.0  # seconds after which refused nodes are asked again, when a round begins


class Registry:
    """The clients of a run on Flower. Only `gather`, `present` and `refresh` use the network."""

    fixed: tuple[Client, ...] | None = None  # clients come and go

    def __init__(self, grid: Grid, terms: Terms, options: FlowerOptions, need: int = 1) -> None:
        self.grid, self.terms, self.options, self.need = grid, terms, options, max(1, need)
        self.attendance = Attendance(options, self.need)
        self.entries: dict[int, Entry] = {}  # by client id
        self.refused: dict[int, str] = {}  # node -> why
        self.densities: dict[int, float] = {}  # what the method gave clients that have none of their own
        self.size = 0  # how many clients the run was planned for
        self.stale = True  # whether `present` must look again
        self._asked: dict[str, int] = {}  # message id -> node
        self._told: dict[int, Entry] = {}  # node -> what it said
        self._waiting: set[int] = set()  # nodes whose client id another node has
        self._errors: dict[int, int] = {}  # node -> how often asking it failed
        self._again: set[int] = set()  # nodes to ask once more, whatever they said
        self._logged: dict[int, str] = {}  # node -> the reason that was logged last
        self._checked = time.monotonic()  # when refused nodes were last asked again
        self._nodes: set[int] = set()
        self._admit: Callable[[Sequence[Client]], Sequence[Client]] = tuple
        self._known: tuple[Client, ...] = ()  # registered and admitted, ascending by id

    # What the loop and the methods see.

    def admit(self, method: Method, key: int) -> None:
        """From now on, give clients the densities this method assigns."""
        self._admit = lambda clients: method.admit(clients, key)
        self._settle()

    def doubt(self, clients: Iterable[int]) -> None:
        """Ask these clients again who they are: they may have been restarted with other data."""
        self._again |= {self.entries[c].node for c in clients if c in self.entries}
        self.stale = self.stale or bool(self._again)

    # How they are found.

    def gather(self, count: int) -> None:
        """Wait until `count` clients have registered and every node has answered; then the run can be planned.

        Once `count` clients are there, nodes that do not answer get the grace period and no more.
        """
        count = max(count, self.need)
        self._until(lambda: len(self._known) >= count, self.options.wait)
        if len(self._known) < self.need:
            raise RunStopped(self._too_few())
        if len(self._known) < count:
            log.warning("only %d of %d clients registered within %g s", len(self._known), count, self.options.wait)
        else:
            self._until(lambda: not self._asked, min(self.options.grace, self.options.wait))
        if self._asked:
            nodes = ", ".join(map(str, sorted(self._asked.values())))
            log.warning("going on without nodes that have not said which client they are: %s", nodes)
        self.size = self.size or len(self._known)

    def present(self) -> tuple[Client, ...]:
        """The clients to choose from for the next round. Looks on the network if a round has passed since it last did.

        Clients that missed their last rounds are passed over for a while, unless too few are left without them.
        """
        if self.stale:
            self.refresh()
            if len(self._known) < self.need:
                self._until(lambda: len(self._known) >= self.need, self.options.wait)
            if len(self._known) < self.need:
                raise RunStopped(self._too_few())
        ready = tuple(c for c in self._known if c.id not in self.attendance.passed_over)
        return ready if len(ready) >= self.need else self._known

    def _until(self, enough: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        self.refresh()
        while not enough() and time.monotonic() < end:
            time.sleep(self.options.poll)
            self.refresh()

    def refresh(self) -> None:
        """Ask new nodes who they are, read the answers, forget nodes that left. Does not wait."""
        self._nodes = set(self.grid.get_node_ids())
        if time.monotonic() - self._checked >= _AGAIN:
            self._checked, self._again = time.monotonic(), {*self._again, *self.refused}
        known = {*self._told, *self.refused} - self._again
        new = sorted(self._nodes - known - {*self._asked.values()})
        self._again = (self._again & self._nodes).difference(new)
        if new:
            content = records.fields("query", {"layout": self.terms.layout})
            ids = self.grid.push_messages([Message(content, node, "query", ttl=self.options.timeout) for node in new])
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
            # A registered node is not refused for this: it is asked again whenever it fails a round.
            if self._errors[node] >= _ERRORS and node not in self._told:
                self._refuse(node, f"it cannot say who it is ({reply.error.reason})")
            return
        try:
            if (why := records.failure(reply.content)) is not None:
                raise ConfigError(why)
            entry = Entry.read(node, records.read_fields(reply.content, "client"), self.terms)
        except FlashError as error:
            self._refuse(node, str(error))
            return
        if self._told.get(node, entry) != entry:
            log.warning("node %d was restarted: client %d with %d samples", node, entry.client.id, entry.client.n)
        if self._told.get(node) != entry:
            self.attendance.returned(entry.client.id)
        self._told[node] = entry
        self.refused.pop(node, None)
        self._errors.pop(node, None)

    def _refuse(self, node: int, why: str) -> None:
        why = records.printable(why)
        self._told.pop(node, None)
        self.refused[node] = why
        if self._logged.get(node) != why:
            log.error("node %d is refused: %s", node, why)
        self._logged[node] = why

    def _settle(self) -> None:
        """Give each client id to the node that claimed it first, as long as that node is there."""
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
        self._known = self._admitted()

    def _admitted(self) -> tuple[Client, ...]:
        """The registered clients with the densities the method gives them. Clients it cannot take are refused."""
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
            f"{len(self._known)} clients are present after {self.options.wait:g} s and at least {self.need} are needed"
            + (f" ({why})" if why else "")
            + ". Start more SuperNodes and resume the run."
        )

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
