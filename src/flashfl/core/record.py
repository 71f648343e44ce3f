"""What is recorded about one finished round: made by the loop, written to the results file, read by every report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TypeVar

from .errors import DataError
from .exchange import Traffic

T = TypeVar("T")


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
    """One finished round. The loop fills the first part; the run's observer adds the second."""

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
        """As a line of the results file. Fields that are empty are left out; NaN and infinities become null."""
        line: dict[str, object] = {"type": "round"}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and value not in ((), "") and not (isinstance(value, Mapping) and not value):
                line[f.name] = _plain(value)
        return line

    @staticmethod
    def from_json(line: Mapping[str, object]) -> RoundRecord:
        """The record that `to_json` described, or a DataError that names what is wrong with it."""
        try:
            return _read(line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise DataError(f"a round's record cannot be read ({type(error).__name__}: {error})") from None


def _plain(value: object) -> object:
    if isinstance(value, Traffic | Score | PaperBytes):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: object) -> float:
    """A float; null stands for a number that was not finite."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _table(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{str(value)[:40]!r} is not a table")
    return value


def _numbers(value: object) -> tuple[float, ...]:
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is not a list of numbers")
    return tuple(map(_number, value))


def _read(line: Mapping[str, object]) -> RoundRecord:
    cohort = line["cohort"]
    if not isinstance(cohort, list):
        raise TypeError("cohort is not a list of client ids")
    mismatch = line.get("mismatch")
    return RoundRecord(
        phase=str(line["phase"]),
        counts=bool(line["counts"]),
        round=_whole(line["round"]),
        attempt=_whole(line["attempt"]),
        cohort=tuple(map(_whole, cohort)),
        failures={int(k): str(v) for k, v in _table(line.get("failures", {})).items()},
        loss=_number(line.get("loss")),
        bytes=_counts(Traffic, line["bytes"]),
        missed={int(k): str(v) for k, v in _table(line.get("missed", {})).items()},
        metrics={k: _score(v) for k, v in _table(line.get("metrics", {})).items()},
        evaluation_bytes=_whole(line.get("evaluation_bytes", 0)),
        seconds={k: _number(v) for k, v in _table(line.get("seconds", {})).items()},
        total=_counts(Traffic, line.get("total", {})),
        density=_number(line.get("density", 1.0)),
        layer_densities=_numbers(line.get("layer_densities", [])),
        mismatch=None if mismatch is None else _number(mismatch),
        layer_mismatch=_numbers(line.get("layer_mismatch", [])),
        cohort_densities=_numbers(line.get("cohort_densities", [])),
        flops=_number(line.get("flops", 0.0)),
        paper_bytes=_counts(PaperBytes, line.get("paper_bytes", {})),
        snapshot=str(line.get("snapshot", "")),
    )


def _score(value: object) -> Score:
    table = _table(value)
    return Score(*(_number(table[name]) for name in ("loss", "metric", "density")))


def _counts(kind: type[T], value: object) -> T:
    """A dataclass of whole numbers."""
    return kind(**{name: _whole(number) for name, number in _table(value).items()})
