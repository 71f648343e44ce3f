"""A private round on a device that makes no bytes: the same clipping, rounding and noise, without the cryptography.

Bytes are those of the real messages. With a sparse neighbour graph and dropouts they are expected values, as the real
ones depend on whom clients draw. Noise is drawn once for the whole sum.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.exchange import DROPPED, Client, Order, Outcome, Traffic, Update
from ..core.mask import Weights
from ..core.state import State, dropout_step, drops
from ..privacy.messages import BOX, CARD, HEADER, SECRET, STEPS, VOTE, Step
from .counting import Counting
from .memory import ClientMemory
from .private import LENGTH, SPENT, Private
from .train import NOT_FINITE
from .vault import Vault
from .work import Work


class PrivateCounting(Private, Counting):
    """The account of a private round whose updates lie on the device."""

    def __init__(
        self, memory: ClientMemory, vault: Vault, s: State, orders: Sequence[tuple[Client, Order]], dropout: float,
        present: Sequence[int],
    ) -> None:  # fmt: skip
        """present: the clients that the cohort was drawn from."""
        super().__init__(memory)
        self.begin(vault, s, orders)
        self._sent = self.start.packed()
        # The step in which each client stops answering.
        self._ends = {c: dropout_step(s, c) if drops(s, c, dropout) else Step.DONE for c in self.cohort}
        self._total = torch.zeros(self.packing.length, dtype=torch.int64, device=self.start.vector.device)
        for client in set(self.cohort) - set(vault.spend(s, self.cohort, present)):
            self._ends[client] = -1
            self.failed(client, SPENT)

    def trains(self, client: int) -> bool:
        """Whether a client gets as far as to send its input. If not, it is dropped now."""
        if self._ends[client] <= Step.MASKED and client not in self.failures:
            self.failed(client, DROPPED)
        return self._ends[client] > Step.MASKED

    def sent(self, client: Client, order: Order) -> Order:
        return super().sent(client, order) if self._ends[client.id] >= Step.MASKED else order

    def failed(self, client: int, why: str) -> None:
        super().failed(client, why)
        self._ends[client] = min(self._ends[client], Step.MASKED)

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
        steps = range(Step.ADVERTISE, Step.DONE) if self.privacy.secure else (Step.MASKED,)
        after = {step: [client for client, end in self._ends.items() if end > step] for step in steps}
        why, last = self._checked(after)
        self._count(after, last)
        counted = after[Step.MASKED]
        if self.cohort and not counted:
            why = why or "no client replied"
        total = self._total + self._noise(len(after[min(steps)]), len(counted))
        return self.end(total, counted, why, revealed=self.privacy.secure and last >= Step.MASKED)

    def _checked(self, after: dict[int, list[int]]) -> tuple[str, int]:
        """Why the sum cannot be opened, if it cannot, and the last step that was taken."""
        if not self.privacy.secure:
            return "", Step.MASKED
        cohort, policy = len(after[Step.ADVERTISE]), self.privacy.policy
        least = max(policy.least, policy.threshold(cohort))
        for step, left in after.items():
            if len(left) < least:
                found = f"{len(left)} of {cohort} clients are left after the step '{STEPS[step]}'"
                return f"TooFew: {found}: at least {least} are needed, so the sum stays hidden", step
        return "", Step.UNMASK

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
        how, privacy, asked = self.packing, self.privacy, sum(end >= 0 for end in self._ends.values())
        invitation, vector, first = len(self.terms.to_bytes()), how.length * how.bits // 8, LENGTH.size + HEADER
        left = {step: len(clients) for step, clients in after.items()}
        if privacy.secure:
            cohort, sharing = left[Step.ADVERTISE], left[Step.SHARES]
            k = privacy.policy.neighbours(cohort)[0] if cohort > 1 else 0
            boxes = k * max(0, sharing - 1) / max(1, cohort - 1)  # that reach each client, on average
            some = (cohort + 7) // 8
            votes = left[Step.CONFIRM] * VOTE.itemsize
            # Each step: how many are asked, the bytes of a request, and of an answer without its header.
            rows = {
                Step.ADVERTISE: (asked, LENGTH.size + invitation, CARD.itemsize),
                Step.SHARES: (cohort, first + cohort * CARD.itemsize, 32 + k * BOX.itemsize),
                Step.MASKED: (sharing, LENGTH.size + first + some + boxes * BOX.itemsize, vector),
                Step.CONFIRM: (left[Step.MASKED], first + 2 * some, VOTE.itemsize - 4),
                Step.UNMASK: (left[Step.CONFIRM], first + votes, boxes * SECRET.itemsize),
            }
        else:
            rows = {Step.MASKED: (asked, LENGTH.size + invitation + first, vector)}
        for step, (number, down, up) in rows.items():
            if step <= last:
                requests, content, heads = round(number * down), round(left[step] * up), left[step] * HEADER
                values = content if step == Step.MASKED else 0
                self.traffic += Traffic(requests, content + heads, values, overhead=requests + content + heads - values)
