"""The account of a round on a device that never makes bytes: what every message would take is counted there.

Sizes are the wire format's own closed forms, so they equal what the CPU engine really encodes. Everything the host
needs is read back once, when a round is closed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..aggregate import add, add_statistics
from ..core.client import overrides
from ..core.errors import ConfigError
from ..core.exchange import Client, Local, Order, Traffic, Update
from ..core.kernel import kernel
from ..core.layout import Layout
from ..core.mask import Mask, Weights, stacked
from ..core.precision import EXACT, Precision
from ..wire import Message, encode, mask_sizes, size_with
from ..wire.geometry import HASH, geometry
from .encoding import Account
from .memory import ClientMemory
from .pipeline import Notes, tallied
from .robust import PLAIN, Robust
from .store import Kept
from .train import NOT_FINITE
from .trust import start_of
from .work import Work

_KNOWN = 1 + HASH  # bytes of a mask both sides know
_COLUMNS = 1 << 22  # weights that are added up at a time: in double precision they need room
_ROWS = 16  # masks that are stacked to be counted together


@dataclass
class _Heard:
    """The updates of some clients, still on the device."""

    works: Sequence[Work]
    bytes: list[int | Tensor]  # of each mask
    found: Tensor  # [4, clients]: whether the update is good, whether it is finite, its loss, bytes that coding saves


class Counting(Account):
    """The account of a round whose updates lie on the device, many clients to a stack."""

    def __init__(self, memory: ClientMemory, values: Precision = EXACT, robust: Robust = PLAIN) -> None:
        super().__init__(memory, values, robust)
        self.orders: list[tuple[Client, Order]] = []
        self.heard: list[_Heard] = []
        self._held: dict[int, Update] = {}  # by client, where the cohort must be known before updates can be added
        self._tallies: dict[int, Notes] = {}  # what the server derives from each update
        self._sizes: dict[tuple[str | bool | int | Precision, ...], tuple[Local | None, Traffic]] = {}

    def sent(self, client: Client, order: Order) -> Order:
        """Record an order; it is returned as it is sent."""
        order = self.personal(client, order) if order.local.personal else order
        self.orders.append((client, order))
        return order

    def trains(self, client: int) -> bool:
        """Whether a client gets as far as to train."""
        return client not in self.failures

    def received(self, works: Sequence[Work], values: Tensor, losses: Tensor, saved: Tensor | None = None) -> None:
        """Add a stack of updates to the sums, without those that are not finite, and without waiting.

        With robust sums they are held until the round is closed. saved: the bytes that coding saves of each update.
        """
        local, bits = works[0].local, stacked([work.mask.bits for work in works])
        if any(overrides(part, "tally") for part in local.parts):
            for work, row, mine in zip(works, values, bits.expand(len(works), -1), strict=True):
                self._tallies[work.client.id] = tallied(local.parts, self.layout, row, mine)
        finite = kernel("collect", "finite") if values.is_cuda else None
        good = fine = (values.isfinite().all(1) if finite is None else finite(values)) & losses.isfinite()
        if local.report != "counts":  # else neither weights nor statistics travel
            good = fine & (values.index_select(1, _variances(self.layout, values.device)) >= 0).all(1)
            if self.waits:
                for work, row in zip(works, _copied(values), strict=True):
                    self._held[work.client.id] = self._update(work, row)
            else:
                self._add(works, values, bits, good)
        saved = torch.zeros_like(losses) if saved is None else saved
        found = torch.stack([good.double(), fine.double(), losses.double(), saved.double()])
        known = [(work.order.weights.mask, self.memory.own(work.client.id)) for work in works]
        masks = self._mask_bytes([work.mask for work in works], known)
        self.heard.append(_Heard(works, masks, found))
        if "mask" not in local.keep:
            for work in works:  # a large cohort's masks would fill the device, and only masked reports need them again
                if all(extra.form != "masked" for extra in work.extra.values()):
                    work.mask = work.order.weights.mask

    def _add(self, works: Sequence[Work], values: Tensor, bits: Tensor, good: Tensor) -> None:
        layout = self.layout
        first = layout.trained_size if works[0].local.report == "statistics" else 0
        share = torch.tensor([work.n for work in works]).to(values.device, non_blocking=True) * good
        add = kernel("collect", "add") if values.is_cuda else None
        (add or _add)(values, bits, share, *self.sums.flat(values.device), first)
        sizes = [sum(work.counts) for work in works]
        for active in sorted(set(sizes)) if layout.size > layout.trained_size else ():
            mine = share * torch.tensor([size == active for size in sizes]).to(share.device, non_blocking=True)
            # A NaN times 0 would stay one.
            statistics = torch.where((mine > 0)[:, None], values[:, layout.trained_size :], 0.0)
            add_statistics(self.sums, active, mine.double() @ statistics.double(), mine.sum())

    def _update(self, work: Work, values: Tensor) -> Update:
        """An update that is held until the cohort is known."""
        sizes = {"statistics": self.layout.trained_size, "mask": self.layout.prunable_size}
        values[: sizes.get(work.local.report, 0)] = 0  # these values do not travel
        # Not the mask of `work`, which may be replaced.
        mask = Mask(self.layout, work.mask.bits.clone(), work.counts)
        return Update.of(work.client.id, work.n, Weights.masked(mask, values), work.counts)

    def _mask_bytes(self, masks: Sequence[Mask], bases: Sequence[tuple[Mask | None, ...]]) -> list[int | Tensor]:
        """What each mask takes, given masks that both sides may know. Those that recur are counted once."""
        sizes: dict[tuple[int, ...], int | Tensor] = {}  # as double: numbers of a round are read together
        leans = [tuple(base for base in some if base is not None) for some in bases]
        keys = [(id(mask), *map(id, known)) for mask, known in zip(masks, leans, strict=True)]
        different = dict(zip(keys, zip(masks, leans, strict=True), strict=True))
        for key, (mask, known) in different.items():
            if mask in known:
                sizes[key] = _KNOWN
        for count in range(3):  # rows that are counted together lean on equally many masks
            rest = [key for key, (_, known) in different.items() if len(known) == count and key not in sizes]
            for at in range(0, len(rest), _ROWS):
                some = rest[at : at + _ROWS]
                rows, known = zip(*(different[key] for key in some), strict=True)
                columns = [stacked([base.bits for base in column]) for column in zip(*known, strict=True)]
                found = mask_sizes(self.layout, stacked([mask.bits for mask in rows]), columns).double()
                for key, mask, taken in zip(some, rows, found.expand(len(some)), strict=True):
                    most = geometry(self.layout).recipe_size if mask.recipe is not None else None
                    sizes[key] = taken if most is None else taken.clamp(max=most)
        return [sizes[key] for key in keys]

    def settle(self) -> list[Update]:
        """The round's last wait: read every number that is still on the device."""
        bases = [(self.memory.base(client.id),) for client, _ in self.orders]
        numbers = self._mask_bytes([order.weights.mask for _, order in self.orders], bases)
        for heard in self.heard:
            numbers += [*heard.bytes, *heard.found.flatten()]
        on_device = [number for number in numbers if isinstance(number, Tensor)]
        together = torch.stack(on_device) if on_device else torch.empty(0)
        for each in self.orders:  # meanwhile the device is still at work
            self.traffic += self._down(*each)
        read = iter(together.tolist())
        known = iter([next(read) if isinstance(number, Tensor) else number for number in numbers])
        masks = int(sum(itertools.islice(known, len(self.orders))))
        self.traffic += Traffic(down=masks, mask=masks)
        for heard in self.heard:
            columns = (list(itertools.islice(known, len(heard.works))) for _ in range(5))
            for work, taken, good, finite, loss, saved in zip(heard.works, *columns, strict=True):
                if good:
                    self._settle(work, int(taken), int(saved), loss)
                else:
                    self._held.pop(work.client.id, None)
                    self.failed(work.client.id, "a running variance is below zero" if finite else NOT_FINITE)
        return [self._held[client] for client in sorted(self._held)]

    def _down(self, client: Client, order: Order) -> Traffic:
        """What an order takes without its mask."""
        message = Message(
            "order", self.layout, order.tag, client.id, key=order.key, start=self.memory.start(client.id),
            local=order.local, own="0" * 16 if self.memory.own(client.id) is not None else None,
            carries=order.local.order_carries, extra=order.extra,
        )  # fmt: skip
        return self._sized(message, order.weights.mask.active, self.values)

    def _sized(self, message: Message, active: int, values: Precision) -> Traffic:
        """A message's size without its mask, worked out once for all clients whose messages are as long."""
        if message.extra:
            return size_with(message, active, 0, values)
        alike = (message.kind, message.start is None, message.own is None, message.carries, active, values)
        known = self._sizes.get(alike)
        if known is None or known[0] != message.local:
            known = self._sizes[alike] = (message.local, size_with(message, active, 0, values))
        return known[1]

    def _settle(self, work: Work, mask_bytes: int, saved: int, loss: float) -> None:
        """Accept the update of a client."""
        order, local = work.order, work.local
        mean = self._mean(work, loss)
        extra = {**work.extra, **self._tallies.get(work.client.id, {})}
        update = Update(work.client.id, work.n, None, None, work.counts, {"loss": mean}, extra)
        if not self.waits:
            add(self.sums, update, work.mask)
        else:
            held = self._held.get(work.client.id, update)
            sent = work.sent  # unrounded, as the encoding account has it
            start = start_of(held, local, sent.mask, sent.packed())
            self._held[work.client.id] = replace(held, metrics=update.metrics, extra=extra, start=start)
        self.traffic += self._up(work, mask_bytes, saved, mean)
        keeps = "mask" in local.keep and local.report == "weights"
        store = self.memory.store
        own = store.keep(work.mask, own=True) if keeps else None
        notes = Kept(notes=work.notes) if work.notes else None
        self.memory.hear(work.client.id, order.tag, store.keep(order.weights.mask), own, notes)

    def _mean(self, work: Work, loss: float) -> float:
        """The mean loss of a client whose loss was added up over samples."""
        seen = min(work.batches * work.local.batch, work.n) * work.local.epochs
        return loss / (work.n if work.local.report == "statistics" else max(1, seen))

    def _up(self, work: Work, mask_bytes: int, saved: int, loss: float) -> Traffic:
        """What an update takes."""
        order, local, layout = work.order, work.local, self.layout
        message = Message(
            "update", layout, order.tag, work.client.id, n=work.n, key=order.key, metrics={"loss": loss},
            carries=local.update_carries, extra=work.extra,
        )  # fmt: skip
        values = local.sends(self.values)
        if local.report in ("weights", "mask"):
            plain = self._sized(message, sum(work.counts), values)
            return plain + Traffic(up=mask_bytes - saved, mask=mask_bytes, values=-saved)
        if local.report == "counts":
            whole = replace(message, counts=work.counts)
        else:
            whole = replace(message, values=torch.zeros(layout.size - layout.trained_size))
        return encode(whole, (), values).traffic


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
            "out of GPU memory: `clip` and `trim` hold all updates of a round at once. Lower per_round, or set device "
            "= 'cpu', which holds them in files."
        ) from None


def _add(values: Tensor, bits: Tensor, share: Tensor, weights: Tensor, holders: Tensor, first: int) -> None:
    """See `kernels.collect.add`."""
    good = (share > 0)[:, None]
    for at in range(0, len(weights), _COLUMNS):
        span = slice(at, at + _COLUMNS)
        holders[span] += (bits[:, span] * share[:, None]).sum(0)
        span = slice(max(at, first), max(at + _COLUMNS, first))
        weights[span] += share.double() @ torch.where(good, values[:, span], 0.0).double()
