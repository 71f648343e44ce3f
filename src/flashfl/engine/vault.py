"""What a private run keeps from round to round."""

from __future__ import annotations

import json
import secrets
import struct
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ..core.errors import CheckpointError, ConfigError, RunStopped, check_range
from ..core.exchange import Spent, Tag
from ..core.files import put
from ..core.state import State
from ..privacy.accounting import Draw, Ledger, epsilon_known
from ..privacy.settings import Privacy, privacy_of
from .settings import EngineSettings

if TYPE_CHECKING:
    from ..privacy.keys import Words  # needs an extra

PRIVATE = "private"  # the folder of a run's private state


class Opened(NamedTuple):
    """A sum that was opened, the clients in it, and the cohort that its numbers were scaled for."""

    total: Words
    clients: list[int]
    cohort: int


class Vault:
    """What a private run keeps from round to round, in its folder: its name, what it spent, the sum opened last.

    A sum may be opened once. If the server is interrupted before the next checkpoint, the resumed run takes the sum
    from here instead of asking clients again.
    """

    def __init__(self, privacy: Privacy, folder: Path | None) -> None:
        self.privacy, self.folder = privacy, folder

    def _file(self, name: str) -> Path | None:
        return None if self.folder is None else self.folder / name

    @cached_property
    def run(self) -> str:
        """A random name that keeps the rounds of different runs apart."""
        path = self._file("run")
        name = path.read_text() if path is not None and path.exists() else secrets.token_hex(8)
        if path is not None:
            put(path, name.encode(), sync=True)
        return name

    @cached_property
    def ledger(self) -> Ledger | None:
        """What was spent; None without differential privacy."""
        if (noise := self.privacy.noise) is None:
            return None
        return Ledger(noise.multiplier, self.privacy.delta, self.privacy.draw, self._file("spent.json"))

    def spend(self, s: State, cohort: Sequence[int], present: Sequence[int]) -> list[int]:
        """Count a round for the clients of the cohort whose budget allows it, and return them.

        Raises RunStopped if the run's budget is spent. present: whom the cohort was drawn from. It amplifies only if it
        is what the run's key draws from these.
        """
        if (ledger := self.ledger) is None:
            return list(cohort)
        if not self.privacy.secure and self._over(ledger):
            raise RunStopped(
                f"another round would spend more than dp_epsilon = {self.privacy.budget:g}, so training ends. The "
                "model before this round is kept."
            )
        if (found := ledger.draws.total()) < s.counted:
            raise CheckpointError(
                f"{ledger.path} is missing, or older than the run (it has {found} of {s.counted} rounds). The "
                "privacy spent so far is unknown: put the file back, or start a new run"
            )
        chosen, planned = self._able(ledger, cohort), self.privacy.draw
        how = planned if planned.poisson else Draw(len(present), len(cohort))
        usual = s.phase.counts and s.drawn(present) == sorted(cohort)
        ledger.spend(chosen, how if usual else Draw(poisson=planned.poisson))
        return chosen

    def _able(self, ledger: Ledger, clients: Iterable[int]) -> list[int]:
        """The clients that can take part in another round. In secure rounds each has a budget of its own."""
        if not (budget := self.privacy.budget) or not self.privacy.secure:
            return list(clients)
        return [c for c in clients if epsilon_known(ledger.multiplier, ledger.taken[c] + 1, ledger.delta) <= budget]

    def _over(self, ledger: Ledger) -> bool:
        """Whether the budget allows no other round."""
        budget, draw = self.privacy.budget, self.privacy.draw
        if self.privacy.secure:
            return draw.clients - len(ledger.taken) + len(self._able(ledger, ledger.taken)) < draw.cohort
        return budget > 0 and ledger.epsilon(more=1).sampled > budget

    def spent(self, clamped: int) -> Spent:
        """What is recorded about a round, and whether the budget allows no other."""
        if (ledger := self.ledger) is None:
            return Spent(clamped=clamped)
        return replace(ledger.epsilon(), clamped=clamped, over=self._over(ledger))

    def store(self, tag: Tag, total: Words, clients: Sequence[int], cohort: int) -> None:
        """Keep a sum that was opened. cohort: what its numbers were scaled for."""
        if (path := self._file("opened")) is not None:
            about = json.dumps([*tag[:2], total.itemsize, cohort, list(clients)]).encode()
            put(path, struct.pack("<I", len(about)) + about + total.tobytes(), sync=True)

    def stored(self, tag: Tag, length: int) -> Opened | None:
        """The sum that was opened in this round before the server was interrupted. It is given out once.

        If too few clients are in it, the round is repeated, and then it must not come back.
        """
        return self._left.pop((*tag[:2], length), None)

    @cached_property
    def _left(self) -> dict[tuple[int, int, int], Opened]:
        """The sum that an earlier process opened last, by phase, round and length."""
        path = self._file("opened")
        if path is None or not path.exists():
            return {}
        try:
            data = path.read_bytes()
            (size,) = struct.unpack("<I", data[:4])
            phase, round, width, cohort, clients = json.loads(data[4 : 4 + size])
            total = np.frombuffer(data[4 + size :], f"<u{width}").copy()
            check_range("[1, inf)", cohort=cohort)
            return {(phase, round, len(total)): Opened(total, [int(client) for client in clients], cohort)}
        except (OSError, ValueError, TypeError, struct.error, ConfigError) as error:
            raise CheckpointError(f"{path} is damaged ({error}): delete it and resume") from None


def open_vault(config: EngineSettings, clients: int, masks: Path | None) -> Vault | None:
    """The vault of a run with these settings, beside the folder of its masks; None if nothing is private."""
    privacy = privacy_of(config, clients)
    if privacy is None:
        return None
    from ..privacy import keys  # noqa: F401 (if the extra is not installed, this says so before the first round)

    return Vault(privacy, None if masks is None else masks.with_name(PRIVATE))
