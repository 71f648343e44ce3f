"""Reports that are added up without masks: for differential privacy alone, where the server adds the noise."""

from __future__ import annotations

import numpy as np

from .errors import Malformed, WrongStep
from .keys import Words
from .messages import MASKED, Terms, frame, unframe
from .noise import discrete_gaussian


class Gatherer:
    """The server's half of a round with one step: every client sends its vector as it is."""

    def __init__(self, terms: Terms, deviation: int) -> None:
        """deviation: of the noise that the server adds; 0: none."""
        self.terms, self.step, self.alive, self._heard = terms, MASKED, set[int](), set[int]()
        self._deviation = deviation
        self.total: Words = np.zeros(terms.length, f"<u{terms.bits // 8}")

    def received(self, client: int, data: bytes) -> None:
        content = unframe(data, MASKED, self.terms)
        if client in self._heard or self.step != MASKED:
            raise WrongStep(f"client {client} has answered already")
        if len(content) != self.total.nbytes:
            raise Malformed(f"client {client} sent {len(content)} bytes, expected {self.total.nbytes}")
        self.total += np.frombuffer(content, self.total.dtype)
        self._heard.add(client)

    def close(self) -> None:
        self.alive, self.step = set(self._heard), self.step + 1

    def request(self, client: int) -> bytes:
        return frame(MASKED, self.terms)

    def opened(self) -> Words:
        """The sum with its noise."""
        if self._deviation:
            self.total += discrete_gaussian(self._deviation, len(self.total)).astype(self.total.dtype)
            self._deviation = 0
        return self.total
