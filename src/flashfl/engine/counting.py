"""The account of a round on a device that never makes bytes: what every message would take is counted there.

Sizes are the wire format's own closed forms, so they equal what the CPU engine really encodes. Everything the host
needs is read back once, when a round is closed.
"""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..aggregate import add_statistics
from ..core.errors import ConfigError
from ..core.exchange import Client, Local, Order, Outcome, Traffic
from ..core.kernel import kernel
from ..core.layout import Layout
from ..core.mask import Mask
from ..wire import Message, encode, mask_sizes, size_with
from ..wire.geometry import HASH, geometry
from ..wire.message import Parts
from ..wire.values import Carries, Form
from .account import Account
from .memory import ClientMemory
from .robust import OnDevice, Row, trim_rows
from .train import NOT_FINITE
from .trust import Trust

_KNOWN = 1 + HASH  # bytes of a mask both sides know
_COLUMNS = 1 << 22  # weights that are added up at a time: in double precision they need room
_ROWS = 16  # masks that are stacked to be counted together

T = TypeVar("T")


class Seat(Protocol):
    """A client at work, as engines on a device describe it."""

    client: Client
    order: Order
    mask: Mask
    n: int
    batches: int  # an epoch
    counts: tuple[int, ...]


@dataclass
class _Heard:
    """The updates of some clients, still on the device."""

    seats: Sequence[Seat]
    bytes: list[int | Tensor]  # of each mask
    good: Tensor  # finite, and no variance is below zero
    finite: Tensor  # weights and loss are finite
    losses: Tensor
    values: Tensor | None = None  # [clients, size], where the cohort must be known before they can be added
    bits: Tensor | None = None  # [clients, prunable], or one row that all share


class Counting(Account):
    """The account of a round whose updates lie on the device, many clients to a stack."""

    def __init__(self, memory: ClientMemory, values: Form = "fp32", trust: Trust | None = None) -> None:
        """trust: only its `clip` and `trim` count, as simulated clients are honest."""
        super().__init__(memory, trust or Trust(factor=0))
        self.values = values
        self.orders: list[tuple[Client, Order]] = []
        self.heard: list[_Heard] = []
        self._holds = self.trust.clip > 0 or self.trust.trim > 0
        self._sizes: dict[tuple[str | bool | int, ...], tuple[Local, Parts]] = {}

    def sent(self, client: Client, order: Order) -> None:
        self.orders.append((client, order))

    def received(self, seats: Sequence[Seat], values: Tensor, losses: Tensor) -> None:
        """Add a stack of updates to the sums, without those that are not finite, and without waiting.

        With clipping or trimming they are held until the round is closed.
        """
        bits = stacked([seat.mask.bits for seat in seats])
        finite = kernel("collect", "finite") if values.is_cuda else None
        fine = (finite or _finite)(values) & losses.isfinite()
        heard = _Heard(seats, self._mask_bytes(seats, bits), fine, fine, losses)
        if seats[0].order.local.report != "counts":  # else neither weights nor statistics travel
            heard.good = fine & (values.index_select(1, _variances(self.layout, values.device)) >= 0).all(1)
            if self._holds:
                heard.values, heard.bits = _copied(values), bits
            else:
                self._add(seats, values, bits, heard.good)
        self.heard.append(heard)
        if "mask" not in seats[0].order.local.keep:
            for seat in seats:  # a large cohort's masks would fill the device, and nobody needs them again
                seat.mask = seat.order.weights.mask

    def _add(self, seats: Sequence[Seat], values: Tensor, bits: Tensor, good: Tensor) -> None:
        layout = self.layout
        first = layout.trained_size if seats[0].order.local.report == "statistics" else 0
        share = torch.tensor([seat.n for seat in seats]).to(values.device, non_blocking=True) * good
        add = kernel("collect", "add") if values.is_cuda else None
        (add or _add)(values, bits, share, *self.sums.flat(values.device), first)
        if layout.size > layout.trained_size:
            self._add_statistics(seats, values[:, layout.trained_size :], share)

    def _add_statistics(self, seats: Sequence[Seat], values: Tensor, share: Tensor) -> None:
        """Models with the same number of active weights together."""
        sizes = [sum(seat.counts) for seat in seats]
        for active in sorted(set(sizes)):
            mine = share
            if len(set(sizes)) > 1:
                mine = share * torch.tensor([k == active for k in sizes]).to(share.device, non_blocking=True)
            good = torch.where((mine > 0)[:, None], values, 0.0)  # a NaN times 0 would stay one
            add_statistics(self.sums, active, mine.double() @ good.double(), mine.sum())

    def _mask_bytes(self, seats: Sequence[Seat], bits: Tensor) -> list[int | Tensor]:
        """What each update's mask takes: a hash if it is the order's, else counted against masks both sides know."""
        if all(seat.mask is seat.order.weights.mask for seat in seats):
            return [_KNOWN] * len(seats)
        bits = bits.expand(len(seats), -1)
        bases = [stacked([seat.order.weights.mask.bits for seat in seats])]
        own = [self.memory.own(seat.client.id) for seat in seats]
        known = [i for i, mask in enumerate(own) if mask is not None]
        found = mask_sizes(self.layout, bits, bases).bytes
        if known:
            rows = torch.stack([own[i].bits for i in known])  # type: ignore[union-attr]
            place = torch.tensor(known).to(bits.device, non_blocking=True)
            other = mask_sizes(self.layout, bits[place], [rows]).bytes
            found = found.index_copy(0, place, torch.minimum(found[place], other))
        return [_with_recipe(seat.mask, bytes_) for seat, bytes_ in zip(seats, found, strict=True)]

    def _order_bytes(self) -> list[int | Tensor]:
        """What the mask of each order takes, given what its client holds. Each pair of masks is counted once."""
        layout = self.layout
        pairs = [(order.weights.mask, self.memory.base(client.id)) for client, order in self.orders]
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

    def close(self) -> Outcome:
        """The round's last wait: read every number that is still on the device, then settle the account."""
        sent = self._order_bytes()
        counted = [b for b in sent if isinstance(b, Tensor)]
        counted += [b for heard in self.heard for b in heard.bytes if isinstance(b, Tensor)]
        parts = [torch.stack(counted).double()] if counted else []
        for heard in self.heard:
            parts += [heard.good.double(), heard.finite.double(), heard.losses.double()]
        on_device = torch.cat(parts) if parts else None
        for each in self.orders:  # meanwhile the device is still at work
            self.traffic += self._down(*each)
        numbers = iter([] if on_device is None else on_device.tolist())
        masks = sum(int(next(numbers)) if isinstance(b, Tensor) else b for b in sent)
        self.traffic += Traffic(down=masks, mask=masks)
        up = [[int(next(numbers)) if isinstance(b, Tensor) else b for b in heard.bytes] for heard in self.heard]
        for heard, sizes in zip(self.heard, up, strict=True):
            rows = len(heard.seats)
            good, finite, losses = ([next(numbers) for _ in range(rows)] for _ in range(3))
            for seat, taken, fine, loss, is_good in zip(heard.seats, sizes, finite, losses, good, strict=True):
                if not is_good:
                    self.failed(seat.client.id, "a running variance is below zero" if fine else NOT_FINITE)
                else:
                    self._settle(seat, taken, loss)
        if self._holds:
            self._add_held()
        return super().close()

    def _add_held(self) -> None:
        """Clip and add the updates of the whole cohort."""
        held = [heard for heard in self.heard if heard.values is not None]
        if self.trust.clip:
            self._clip(held)
        if self.trust.trim:
            self._trim(held)
            return
        for heard in held:
            assert heard.values is not None
            assert heard.bits is not None
            self._add(heard.seats, heard.values, heard.bits, heard.good)

    def _clip(self, held: Sequence[_Heard]) -> None:
        """Shorten long changes, in place. A weight that the order did not have counts as 0 before."""
        trained, k = self.layout.trained_size, self.layout.prunable_size
        changes: list[tuple[Tensor, Tensor, float]] = []
        for heard in held:
            assert heard.values is not None
            assert heard.bits is not None
            if heard.seats[0].order.local.report == "statistics":
                continue
            bits = heard.bits.expand(len(heard.seats), -1)
            for seat, row, mine in zip(heard.seats, heard.values[:, :trained], bits, strict=True):
                if seat.client.id in self.failures:
                    continue
                start = seat.order.weights.vector[:trained].clone()
                start[:k] *= mine
                changes.append((row, start, float(torch.linalg.vector_norm((row - start).double()))))
        most = self.trust.clip * statistics.median(norm for *_, norm in changes) if changes else 0.0
        for row, start, norm in changes:
            if norm > most:
                row.copy_(start + (row - start) * (most / norm))

    def _trim(self, held: Sequence[_Heard]) -> None:
        rows, values, bits = [], [], []
        for heard in held:
            assert heard.values is not None
            assert heard.bits is not None
            if heard.seats[0].order.local.report == "statistics":
                heard.values[:, : self.layout.trained_size] = 0
            every = heard.bits.expand(len(heard.seats), -1)
            for seat, row, mine in zip(heard.seats, heard.values, every, strict=True):
                if seat.client.id not in self.failures:
                    rows.append(Row(seat.n, sum(seat.counts)))
                    values.append(row)
                    bits.append(mine)
        if rows:
            trim_rows(self.sums, OnDevice(rows, values, bits), self.trust.trim, values[0].device)

    def _down(self, client: Client, order: Order) -> Traffic:
        """What an order takes without its mask."""
        local, active = order.local, order.weights.mask.active
        start, owns = self.memory.start(client.id), self.memory.owns(client.id)

        def message() -> Message:
            return Message(
                "order", self.layout, order.tag, client.id, key=order.key, start=start, local=local,
                own="0" * 16 if owns else None, carries="all" if local.statistics else "weights", extra=order.extra,
            )  # fmt: skip

        alike = None if order.extra else ("order", start is None, owns, active)
        return self._sized(alike, local, message, active).traffic("order")

    def _sized(
        self, alike: tuple[str | bool | int, ...] | None, local: Local, message: Callable[[], Message], active: int
    ) -> Parts:
        """A message's size without its mask, worked out once for all clients whose messages are `alike`."""
        known = self._sizes.get(alike) if alike is not None else None
        if known is None or known[0] != local:
            known = (local, size_with(message(), active, 0, self.values))
            if alike is not None:
                self._sizes[alike] = known
        return known[1]

    def _settle(self, seat: Seat, mask_bytes: int, loss: float) -> None:
        """Accept the update of a client."""
        order, local, sums = seat.order, seat.order.local, self.sums
        steps = min(seat.batches * local.batch, seat.n) * local.epochs
        mean = loss / max(1, steps) if local.report != "statistics" else loss / seat.n
        sums.n += seat.n
        sums.clients += 1
        sums.counts = [a + b for a, b in zip(sums.counts, seat.counts, strict=True)]
        sums.loss += seat.n * mean
        self.traffic += self._up(seat, mask_bytes, mean)
        keeps = "mask" in local.keep and local.report == "weights"
        own = self.memory.keep(seat.mask, own=True) if keeps else None
        self._accepted[seat.client.id] = (order.tag, self.memory.keep(order.weights.mask), own)

    def _up(self, seat: Seat, mask_bytes: int, loss: float) -> Traffic:
        """What an update takes."""
        order, local, layout, active = seat.order, seat.order.local, self.layout, sum(seat.counts)
        carries: Carries = "statistics" if local.report == "statistics" else "all" if local.statistics else "weights"

        def message() -> Message:
            return Message(
                "update", layout, order.tag, seat.client.id, n=seat.n, key=order.key, metrics={"loss": loss},
                carries=carries, counts=seat.counts if local.report == "counts" else None,
            )  # fmt: skip

        if local.report == "weights":
            plain = self._sized(("update", active), local, message, active)
            return replace(plain, mask=mask_bytes).traffic("update")
        whole = message()
        if local.report == "statistics":
            whole = replace(whole, values=torch.zeros(layout.size - layout.trained_size))
        return encode(whole, (), self.values).parts.traffic("update")


@functools.lru_cache(maxsize=8)
def _variances(layout: Layout, device: torch.device) -> Tensor:
    """Where the running variances lie."""
    layers = [x for x in layout.of_kind("statistic") if x.name.rsplit(".", 1)[-1] == "running_var"]
    places = [torch.arange(x.start, x.stop) for x in layers]
    return (torch.cat(places) if places else torch.zeros(0, dtype=torch.int64)).to(device)


def _copied(values: Tensor) -> Tensor:
    try:
        return values.clone()
    except torch.OutOfMemoryError:
        raise ConfigError(
            "clip and trim hold all updates of a round, and these do not fit into the memory of the GPU: choose fewer "
            "clients with per_round, or device = 'cpu', which holds them in files"
        ) from None


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Rows of a matrix. If all are the same tensor, a matrix of that one row, which must not be written to."""
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
    """A mask with a recipe takes at most as much as its recipe."""
    return sizes if mask.recipe is None else sizes.clamp(max=geometry(mask.layout).recipe_size)


def chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of at most `size` items, as they come."""
    them = iter(items)
    while chunk := list(itertools.islice(them, size)):
        yield chunk
