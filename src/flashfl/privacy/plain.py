"""Reports that are added up without masks: for differential privacy alone, where the server adds the noise."""

from __future__ import annotations

import numpy as np

from .errors import Malformed, WrongStep
from .keys import Words
from .messages import STEPS, Step, Terms, frame, unframe
from .noise import discrete_gaussian


class Gatherer:
    """The server's half of a round with one step: every client sends its vector as it is.

    In each step, hand every answer to `received`. Then `close` ends the step. `request` gives what each client gets
    next. Vectors are added as they arrive, so memory does not grow with the cohort.
    """

    def __init__(self, terms: Terms, deviation: int = 0, step: int = Step.MASKED) -> None:
        """deviation: of the noise that the server adds; 0: none. step: the first one."""
        self.terms, self.step, self._deviation = terms, step, deviation
        self.alive: set[int] | None = None  # clients that answered in the step that was closed last; None: all may
        self.heard: set[int] = set()
        self.counted: set[int] = set()  # clients whose vectors are in the sum
        self.total: Words = np.zeros(terms.length, f"<u{terms.bits // 8}")

    def received(self, client: int, data: bytes) -> None:
        """A client's answer in the current step. Raises why it cannot be used; the client then counts as dropped."""
        if client in self.heard or (self.alive is not None and client not in self.alive):
            raise WrongStep(
                f"client {client} already answered in the step '{STEPS[self.step]}', or was dropped earlier"
            )
        self._take(client, unframe(data, self.step, self.terms))
        self.heard.add(client)

    def _take(self, client: int, content: memoryview) -> None:
        """Add a client's vector."""
        if len(content) != self.total.nbytes:
            raise Malformed(f"client {client} sent {len(content)} bytes of input, expected {self.total.nbytes}")
        self.total += np.frombuffer(content, self.total.dtype)
        self.counted.add(client)

    def close(self) -> None:
        """End the current step: whoever has not answered dropped out."""
        self.alive, self.heard, self.step = self.heard, set(), self.step + 1

    def request(self, client: int) -> bytes:
        return frame(Step.MASKED, self.terms)

    def opened(self) -> Words:
        """The sum with its noise."""
        if self._deviation:
            self.total += discrete_gaussian(self._deviation, len(self.total)).astype(self.total.dtype)
        return self.total
