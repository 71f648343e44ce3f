"""What is recorded about one finished round: made by the loop, written to the results file, read by every report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .errors import ConfigError, DataError
from .exchange import Spent, Traffic
from .parts import build


@dataclass(frozen=True)
class Score:
    """One evaluated model: its mean loss and metric over the evaluation samples, and its density."""

    loss: float
    metric: float
    density: float


@dataclass(frozen=True)
class PaperBytes:
    """Bytes of a round by the paper's formula, and those of dense FedAvg with the same cohort."""

    up: int = 0
    down: int = 0
    dense: int = 0


@dataclass(frozen=True)
class RoundRecord:
    """One finished round: who took part, losses and scores, bytes and times."""

    phase: str
    counts: bool  # whether the round counts towards `rounds`
    round: int  # from 0, inside its phase
    attempt: int
    cohort: tuple[int, ...]
    failures: Mapping[int, str]  # client id -> why it was dropped
    loss: float  # mean training loss
    bytes: Traffic
    missed: Mapping[int, str] = field(default_factory=dict)  # who failed in attempts that had to be repeated
    metrics: Mapping[str, Score] = field(default_factory=dict)  # by view; empty if the round was not evaluated
    evaluation_bytes: int = 0  # sent to clients that evaluated the model; not part of `bytes`
    seconds: Mapping[str, float] = field(default_factory=dict)
    privacy: Spent | None = None  # of a private round

    total: Traffic = field(default_factory=Traffic)  # bytes of the run so far
    density: float = 1.0  # of the server's mask after the round
    layer_densities: tuple[float, ...] = ()
    mismatch: float | None = None  # between the server's masks before and after; None at the start of a phase
    layer_mismatch: tuple[float, ...] = ()  # empty if the mask did not change
    cohort_densities: tuple[float, ...] = ()  # mean layer densities of the clients, where they differ from the server's
    flops: float = 0.0  # of all clients' training
    paper_bytes: PaperBytes = field(default_factory=PaperBytes)
    snapshot: str = ""  # the hash of the stored mask, if it was stored

    @property
    def score(self) -> Score | None:
        """The score of the model that is reported: the first of the method's views."""
        return next(iter(self.metrics.values()), None)

    def to_json(self) -> dict[str, object]:
        """A line of the results file. Empty fields are left out. NaN and infinities become null."""
        filled = {name: value for name, value in asdict(self).items() if value not in (None, (), "", {})}
        return {"type": "round", **json.loads(json.dumps(filled), parse_constant=lambda _: None)}

    @staticmethod
    def from_json(line: Mapping[str, object]) -> RoundRecord:
        """The record of a line that `to_json` made. Raises a DataError if the line is damaged."""
        given = {name: _or_nan(value) for name, value in line.items() if name != "type"}
        try:
            return build(RoundRecord, {"failures": {}, **given}, "round")
        except (ConfigError, ValueError, OverflowError) as error:
            raise DataError(f"a round's record cannot be read ({error})") from None


def _or_nan(value: object) -> object:
    """JSON data with NaN for every null."""
    if isinstance(value, dict):
        return {k: _or_nan(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_or_nan(v) for v in value]
    return math.nan if value is None else value
