"""A private round on a device that makes no bytes: the same clipping, rounding and noise, without the cryptography.

Bytes are those of the real messages. With a sparse neighbour graph and dropouts they are expected values, as the real
ones depend on whom clients draw. Noise is drawn once for the whole sum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..core.exchange import DROPPED, Client, Order, Outcome, Traffic, Update
from ..core.mask import Weights
from ..core.state import State, dropout_step, drops
from ..privacy.messages import ADVERTISE, BOX, CARD, CONFIRM, HEADER, MASKED, SECRET, SHARES, STEPS, UNMASK, VOTE
from .counting import Counting
from .memory import ClientMemory
from .private import LENGTH, SPENT, agreed
from .train import NOT_FINITE
from .vault import Vault
from .work import Work

_NEVER = UNMASK + 1


class PrivateCounting(Counting):
    """The account of a private round whose updates lie on the device."""

    def __init__(
        self, memory: ClientMemory, vault: Vault, s: State, orders: Sequence[tuple[Client, Order]], dropout: float,
        present: Sequence[int],
    ) -> None:  # fmt: skip
        """present: the clients that the cohort was drawn from."""
        super().__init__(memory)
        self.vault, self.privacy = vault, vault.privacy
        order, self.packing, self.terms = agreed(vault, s, orders)
        self.start = order.weights
        self._sent = self.start.packed().clone()  # statistics that do not travel count as zero, as on a client
        if not order.local.statistics:
            self._sent[len(self._sent) - self.layout.size + self.layout.trained_size :] = 0
        # The step in which each client stops answering.
        ids = [client.id for client, _ in orders]
        self._ends = {client: dropout_step(s, client) if drops(s, client, dropout) else _NEVER for client in ids}
        self._total = torch.zeros(self.packing.length, dtype=torch.int64, device=self.start.vector.device)
        for client in set(self._ends) - set(vault.spend(s, list(self._ends), present)):
            self._ends[client] = -1
            self.failed(client, SPENT)

    def trains(self, client: int) -> bool:
        """Whether a client gets as far as to send its input. If not, it is dropped now."""
        if self._ends[client] <= MASKED and client not in self.failures:
            self.failed(client, DROPPED)
        return self._ends[client] > MASKED

    def sent(self, client: Client, order: Order) -> Order:
        return super().sent(client, order) if self._ends[client.id] >= MASKED else order

    def failed(self, client: int, why: str) -> None:
        super().failed(client, why)
        self._ends[client] = min(self._ends[client], MASKED)

    def received(self, works: Sequence[Work], values: Tensor, losses: Tensor, saved: Tensor | None = None) -> None:
        """Turn each client's report into whole numbers and add them up."""
        for work, row, loss in zip(works, values, losses.tolist(), strict=True):
            client, order, local = work.client.id, work.order, work.local
            if not (math.isfinite(loss) and bool(row.isfinite().all())):
                self.failed(client, NOT_FINITE)
                continue
            weights = None if local.report == "counts" else Weights(order.weights.mask, row)
            update = Update.of(client, work.n, weights, work.counts, {"loss": self._mean(work, loss)})
            self._total += self.packing.encode(update, self._sent, order.key)
            self.memory.hear(client, order.tag, self.memory.store.keep(order.weights.mask))

    def close(self) -> Outcome:
        steps = range(ADVERTISE, UNMASK + 1) if self.privacy.secure else (MASKED,)
        after = {step: [client for client, end in self._ends.items() if end > step] for step in steps}
        why, last = self._checked(after)
        self._count(after, last)
        counted = after[MASKED]
        if why or (self._ends and not counted):
            self.memory.heard.clear()
            reason = f"the private round has no usable sum ({why or 'no client replied'})"
            self.failures = {client: self.failures.get(client, reason) for client in self._ends}
            revealed = self.privacy.secure and last >= MASKED
            return replace(super().close(), privacy=self.vault.spent(0), revealed=revealed)
        total = self._total + self._noise(len(after[min(steps)]), len(counted))
        self.sums, clamped = self.packing.decode(total, self.start, len(counted))
        return replace(super().close(), privacy=self.vault.spent(clamped))

    def _checked(self, after: dict[int, list[int]]) -> tuple[str, int]:
        """Why the sum cannot be opened, if it cannot, and the last step that was taken."""
        if not self.privacy.secure:
            return "", MASKED
        cohort, policy = len(after[ADVERTISE]), self.privacy.policy
        least = max(policy.least, policy.threshold(cohort))
        for step, left in after.items():
            if len(left) < least:
                found = f"{len(left)} of {cohort} clients are left after the step '{STEPS[step]}'"
                return f"TooFew: {found}: at least {least} are needed, so the sum stays hidden", step
        return "", UNMASK

    def _noise(self, cohort: int, counted: int) -> Tensor | int:
        """The sum of all clients' shares of the noise, or the server's, rounded; from the operating system's chance."""
        if (noise := self.privacy.noise) is None:
            return 0
        how, device = self.packing, self._total.device
        shares = counted if self.privacy.secure else 1
        each = noise.deviation(how.sections[0].scale, how.length, self.privacy.noisers(cohort))
        chance = torch.Generator(device).manual_seed(int.from_bytes(os.urandom(8), "little") >> 1)
        drawn = torch.randn(how.length, dtype=torch.float64, device=device, generator=chance)
        return (drawn * (each * math.sqrt(shares))).round().to(torch.int64)

    def _count(self, after: dict[int, list[int]], last: int) -> None:
        """The bytes of every message of the protocol but the orders."""
        how, privacy, everyone = self.packing, self.privacy, [c for c, end in self._ends.items() if end >= 0]
        invitation, vector = len(self.terms.to_bytes()), how.length * how.bits // 8
        if not privacy.secure:
            self._tally(MASKED, len(everyone), 2 * LENGTH.size + invitation + HEADER, len(after[MASKED]), vector)
            return
        cohort, sharing = len(after[ADVERTISE]), len(after[SHARES])
        k = privacy.policy.neighbours(cohort)[0] if cohort > 1 else 0
        boxes = k * max(0, sharing - 1) / max(1, cohort - 1)  # that reach each client, on average
        some = (cohort + 7) // 8
        rows = (
            (ADVERTISE, len(everyone), LENGTH.size + invitation, CARD.itemsize),
            (SHARES, cohort, LENGTH.size + HEADER + cohort * CARD.itemsize, 32 + k * BOX.itemsize),
            (MASKED, sharing, 2 * LENGTH.size + HEADER + some + boxes * BOX.itemsize, vector),
            (CONFIRM, len(after[MASKED]), LENGTH.size + HEADER + 2 * some, VOTE.itemsize - 4),
            (UNMASK, len(after[CONFIRM]), LENGTH.size + HEADER + len(after[CONFIRM]) * VOTE.itemsize,
             boxes * SECRET.itemsize),
        )  # fmt: skip
        for step, asked, down, up in rows:
            if step <= last:
                self._tally(step, asked, down, len(after[step]), up)

    def _tally(self, step: int, asked: int, down: float, answers: int, up: float) -> None:
        heads, content = round(asked * down), round(answers * up)
        values = content if step == MASKED else 0
        sent = content + answers * HEADER
        self.traffic += Traffic(down=heads, up=sent, values=values, overhead=heads + sent - values)
