"""The accounts of an engine that never makes bytes: what every message would take, counted on the device.

Sizes are the wire format's own closed forms, so they equal what the CPU engine really encodes. Everything the host
needs is read back once, when a round is closed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..aggregate import add_statistics
from ..core.exchange import Client, Local, Order, Outcome, Sums, Tag, Traffic
from ..core.kernel import kernel
from ..core.layout import Layout
from ..core.mask import Mask
from ..core.state import State
from ..wire import Message, ServerLedger, mask_sizes, size, size_with
from ..wire.geometry import HASH, geometry
from ..wire.message import Parts
from ..wire.values import Form
from .memories import Memories
from .server import HISTORY_BYTES
from .store import MaskStore
from .train import NOT_FINITE

_KNOWN = 1 + HASH  # bytes of a mask both sides know
_COLUMNS = 1 << 22  # weights that are added up at a time: in double precision they need room
_ROWS = 16  # masks that are stacked to be counted together


@dataclass
class _Heard:
    """The updates of some clients, still on the device."""

    seats: list[Any]
    bytes: list[int | Tensor]  # of each mask
    good: Tensor  # and no variance is below zero
    finite: Tensor  # weights and loss are
    losses: Tensor


class Books:
    """A server's ledger and its clients' memories, for masks that live on a device."""

    def __init__(
        self, layout: Layout, values: Form = "fp32", folder: Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.values, self.device = layout, values, torch.device(device)
        self.ledger = ServerLedger(layout, bytes=HISTORY_BYTES)
        self.memories = Memories(MaskStore(layout, folder), self)
        self.own: dict[int, tuple[Tag, Mask, Mask]] = {}  # client -> round, its order's mask, the mask it kept
        self._marked: dict[int, tuple[Tag, Mask, Mask]] | None = None
        self._before: dict[int, tuple[Tag, Mask, Mask]] = {}
        self._variances: Tensor | None = None

    def variances(self, device: torch.device) -> Tensor:
        """Where the running variances lie."""
        if self._variances is None:
            layers = [x for x in self.layout.of_kind("statistic") if x.name.rsplit(".", 1)[-1] == "running_var"]
            places = [torch.arange(x.start, x.stop) for x in layers]
            self._variances = (torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)).to(device)
        return self._variances

    def open(self, s: State) -> Round:
        self.memories.begin()
        self._before = dict(self.own)
        return Round(self)

    def rollback(self) -> None:
        self.memories.rollback()
        self.own = dict(self._before)

    def remembered(self, client: int, order: Order) -> Mask | None:
        """The mask a client kept, if the order starts from the round it kept it in."""
        kept = self.own.get(client)
        return kept[2] if kept and "mask" in order.local.keep and kept[0] == self.ledger.start(client) else None

    def snapshot(self) -> None:
        """A round is over: `save` describes this moment until the next snapshot."""
        self._marked = dict(self.own)
        self.memories.snapshot()

    def save(self) -> dict[str, Any]:
        """As the CPU engine's; masks go to the store only now."""
        put, own_masks = self.memories.store.put, self.own if self._marked is None else self._marked
        for client, (tag, order, own) in own_masks.items():
            self.memories.clients[client] = [(tag, put(order), put(own))]
        return self.memories.save(self.memories.clients)

    def load(self, memory: Mapping[str, Any]) -> None:
        self._marked = None
        self.memories.load(memory, self.device)
        store = self.memories.store
        for client, rounds in self.memories.clients.items():
            for tag, order, own in rounds:
                if own is not None and own in store and order in store:
                    self.own[client] = (tag, store[order].to(self.device), store[own].to(self.device))

    def keep_only(self, pinned: set[str]) -> None:
        self.memories.keep_only(pinned)


@dataclass
class Round:
    """The accounts of one round."""

    books: Books
    orders: list[tuple[Client, Order]] = field(default_factory=list)
    heard: list[_Heard] = field(default_factory=list)
    failures: dict[int, str] = field(default_factory=dict)
    _sizes: dict[tuple[Any, ...], tuple[Local, Parts]] = field(default_factory=dict)

    def sent(self, client: Client, order: Order) -> None:
        self.orders.append((client, order))

    def failed(self, client: int, why: str) -> None:
        self.failures[client] = why

    def received(self, seats: list[Any], values: Tensor, losses: Tensor, sums: Sums) -> None:
        """Add a stack of updates to the sums, without those that are not finite, and no waiting."""
        bits = stacked([seat.mask.bits for seat in seats])
        finite = kernel("collect", "finite") if values.is_cuda else None
        fine = (finite or _finite)(values) & losses.isfinite()
        good = fine
        if seats[0].order.local.report != "counts":  # else neither weights nor statistics travel
            good = fine & (values.index_select(1, self.books.variances(values.device)) >= 0).all(1)
            self._add(seats, values, bits, good, sums)
        self.heard.append(_Heard(seats, self._mask_bytes(seats, bits), good, fine, losses))
        if "mask" not in seats[0].order.local.keep:
            for seat in seats:  # a large cohort's masks would fill the device, and nobody needs them again
                seat.mask = seat.order.weights.mask

    def _add(self, seats: Sequence[Any], values: Tensor, bits: Tensor, good: Tensor, sums: Sums) -> None:
        layout = self.books.layout
        if sums.weights is None or sums.holders is None:
            sums.weights = torch.zeros(layout.size, dtype=torch.float64, device=values.device)
            sums.holders = torch.zeros(layout.prunable_size, dtype=torch.int64, device=values.device)
        first = layout.trained_size if seats[0].order.local.report == "statistics" else 0
        share = torch.tensor([seat.n for seat in seats]).to(values.device, non_blocking=True) * good
        add = kernel("collect", "add") if values.is_cuda else None
        (add or _add)(values, bits, share, sums.weights, sums.holders, first)
        if layout.size > layout.trained_size:
            self._add_statistics(seats, values[:, layout.trained_size :], share, sums)

    def _add_statistics(self, seats: Sequence[Any], values: Tensor, share: Tensor, sums: Sums) -> None:
        """Models of one size together."""
        sizes = [sum(seat.counts) for seat in seats]
        for active in sorted(set(sizes)):
            mine = share
            if len(set(sizes)) > 1:
                mine = share * torch.tensor([k == active for k in sizes]).to(share.device, non_blocking=True)
            good = torch.where((mine > 0)[:, None], values, 0.0)  # what is not finite would stay so times 0
            add_statistics(sums, active, mine.double() @ good.double(), mine.sum())

    def _mask_bytes(self, seats: Sequence[Any], bits: Tensor) -> list[int | Tensor]:
        """What each update's mask takes: a hash where it is the order's, else counted against what both sides hold."""
        if all(seat.mask is seat.order.weights.mask for seat in seats):
            return [_KNOWN] * len(seats)
        bits = bits.expand(len(seats), -1)
        bases = [stacked([seat.order.weights.mask.bits for seat in seats])]
        own = [self.books.ledger.own(seat.client.id) for seat in seats]
        known = [i for i, mask in enumerate(own) if mask is not None]
        found = mask_sizes(self.books.layout, bits, bases).bytes
        if known:
            rows = torch.stack([own[i].bits for i in known])  # type: ignore[union-attr]
            place = torch.tensor(known).to(bits.device, non_blocking=True)
            other = mask_sizes(self.books.layout, bits[place], [rows]).bytes
            found = found.index_copy(0, place, torch.minimum(found[place], other))
        return [_with_recipe(seat.mask, bytes_) for seat, bytes_ in zip(seats, found, strict=True)]

    def _order_bytes(self) -> list[int | Tensor]:
        """What the mask of each order takes, given what its client holds; each pair of masks is looked at once."""
        layout, ledger = self.books.layout, self.books.ledger
        pairs = [(order.weights.mask, ledger.base(client.id)) for client, order in self.orders]
        sizes: dict[tuple[int, int], int | Tensor] = {}
        for mask in {id(mask): mask for mask, _ in pairs}.values():
            bases = {id(base): base for other, base in pairs if other is mask}
            for some in chunks([base for base in bases.values() if base is not None and base is not mask], _ROWS):
                held = [torch.stack([base.bits for base in some])]
                found = mask_sizes(layout, mask.bits[None], held).bytes
                sizes |= {
                    (id(mask), id(base)): size for base, size in zip(some, _with_recipe(mask, found), strict=True)
                }
            if id(None) in bases:
                sizes[id(mask), id(None)] = _with_recipe(mask, mask_sizes(layout, mask.bits[None]).bytes)[0]
            sizes[id(mask), id(mask)] = _KNOWN
        return [sizes[id(mask), id(base)] for mask, base in pairs]

    def close(self, sums: Sums) -> Outcome:
        """The round's last wait: read every number that is still on the device, then settle the accounts."""
        sent = self._order_bytes()
        counted = [b for b in sent if isinstance(b, Tensor)]
        counted += [b for heard in self.heard for b in heard.bytes if isinstance(b, Tensor)]
        parts = [torch.stack(counted).double()] if counted else []
        for heard in self.heard:
            parts += [heard.good.double(), heard.finite.double(), heard.losses.double()]
        on_device = torch.cat(parts) if parts else None
        traffic = sum((self._down(*each) for each in self.orders), Traffic())  # the device is still at work
        numbers = iter([] if on_device is None else on_device.tolist())
        masks = sum(int(next(numbers)) if isinstance(b, Tensor) else b for b in sent)
        traffic += Traffic(down=masks, mask=masks)
        up = [[int(next(numbers)) if isinstance(b, Tensor) else b for b in heard.bytes] for heard in self.heard]
        for heard, sizes in zip(self.heard, up, strict=True):
            rows = len(heard.seats)
            good, finite, losses = ([next(numbers) for _ in range(rows)] for _ in range(3))
            for seat, taken, fine, loss, is_good in zip(heard.seats, sizes, finite, losses, good, strict=True):
                why = "" if is_good else "a running variance is below zero" if fine else NOT_FINITE
                traffic += self._settle(seat, taken, why, loss, sums)
        return Outcome(sums, traffic, dict(sorted(self.failures.items())))

    def _down(self, client: Client, order: Order) -> Traffic:
        """What an order took, but for its mask."""
        ledger, local, active = self.books.ledger, order.local, order.weights.mask.active
        start, owns = ledger.start(client.id), ledger.own(client.id) is not None

        def message() -> Message:
            return Message(
                "order", self.books.layout, order.tag, client.id, key=order.key, start=start, local=local,
                own="0" * 16 if owns else None, carries="all" if local.statistics else "weights", extra=order.extra,
            )  # fmt: skip

        alike = None if order.extra else ("order", start is None, owns, active)
        return self._sized(alike, local, message, active).traffic("order")

    def _sized(self, alike: tuple[Any, ...] | None, local: Local, message: Callable[[], Message], active: int) -> Parts:
        """A message's size but for its mask: worked out once for all clients whose messages are `alike`."""
        known = self._sizes.get(alike) if alike is not None else None
        if known is None or known[0] != local:
            known = (local, size_with(message(), active, 0, self.books.values))
            if alike is not None:
                self._sizes[alike] = known
        return known[1]

    def _settle(self, seat: Any, mask_bytes: int, why_not: str, loss: float, sums: Sums) -> Traffic:
        """Count a client in, or say why not; what its update took."""
        order: Order = seat.order
        local = order.local
        steps = min(seat.batches * local.batch, seat.n) * local.epochs
        mean = loss / max(1, steps) if local.report != "statistics" else loss / seat.n
        if why_not:
            self.failed(seat.client.id, why_not)
            return Traffic()
        sums.n += seat.n
        sums.clients += 1
        sums.counts = [a + b for a, b in zip(sums.counts, seat.counts, strict=True)]
        sums.loss += seat.n * mean
        keeps = "mask" in local.keep and local.report == "weights"
        taken = self._up(seat, mask_bytes, mean)
        self.books.ledger.accept(seat.client.id, order.tag, order.weights.mask, own=seat.mask if keeps else None)
        if keeps:
            self.books.own[seat.client.id] = (order.tag, order.weights.mask, seat.mask)
        return taken

    def _up(self, seat: Any, mask_bytes: int, loss: float) -> Traffic:
        order: Order = seat.order
        local, layout, values, active = order.local, self.books.layout, self.books.values, sum(seat.counts)
        carries: Any = "all" if local.statistics else "weights"

        def message() -> Message:
            return Message(
                "update", layout, order.tag, seat.client.id, n=seat.n, key=order.key, metrics={"loss": loss},
                carries="statistics" if local.report == "statistics" else carries,
                counts=seat.counts if local.report == "counts" else None,
            )  # fmt: skip

        if local.report == "weights":
            plain = self._sized(("update", active), local, message, active)
            return replace(plain, mask=mask_bytes).traffic("update")
        whole = message()
        if local.report == "statistics":
            whole = replace(whole, values=torch.zeros(layout.size - layout.trained_size))
        return size(whole, (), values).traffic("update")


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows of a matrix; where all are the same tensor a matrix of that one row, which is not to be written to."""
    return rows[0][None] if all(row is rows[0] for row in rows) else torch.stack(list(rows))


def _finite(values: Tensor) -> Tensor:
    """See `kernels.collect.finite`."""
    return values.isfinite().all(1)


def _add(values: Tensor, bits: Tensor, share: Tensor, weights: Tensor, holders: Tensor, first: int) -> None:
    """See `kernels.collect.add`."""
    good = (share > 0)[:, None]
    for at in range(0, len(weights), _COLUMNS):
        span = slice(at, at + _COLUMNS)
        holders[span] += (bits[:, span] * share[:, None]).sum(0)
        span = slice(max(at, first), max(at + _COLUMNS, first))
        weights[span] += share.double() @ torch.where(good, values[:, span], 0.0).double()


def _with_recipe(mask: Mask, sizes: Tensor) -> Tensor:
    """A mask that can be made again from a key need not take more than that."""
    return sizes if mask.recipe is None else sizes.clamp(max=geometry(mask.layout).recipe_size)


def chunks(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of at most `size` items, as they come."""
    them = iter(items)
    while chunk := list(itertools.islice(them, size)):
        yield chunk
