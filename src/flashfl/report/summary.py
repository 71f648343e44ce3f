"""The numbers of a group of runs: one summary for comparisons, reports and the paper's tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.record import RoundRecord

PHASES = ("train", "aggregate", "evaluate", "record")


@dataclass(frozen=True)
class Numbers:
    """What one run, finished or not, says about itself. None: not recorded."""

    accuracy: float | None  # after the last round that was evaluated
    best: float | None
    before: float | None  # of the model before the server cuts it to its density
    density: float | None
    up: float  # bytes of the whole run, the first stage included
    down: float
    rounds: int  # that count towards the run's length
    orders: int  # models sent to clients in these rounds
    dense: float  # bytes dense FedAvg would send in these rounds, up and down
    seconds: float
    dropped: int  # clients dropped, over all rounds
    mismatch: float | None = None  # mean over the last sixth of the rounds
    flops: float | None = None
    paper_bytes: float = 0.0  # by the paper's formula, up and down
    paper_dense: float = 0.0  # dense FedAvg by the same formula


@dataclass(frozen=True)
class Summary:
    """Means over the seeds of a group. None: no run recorded it."""

    seeds: int
    accuracy: float | None
    std: float | None  # of the accuracy; None for a single seed
    best: float | None
    before: float | None
    density: float | None
    up: float  # bytes of a run
    down: float
    up_round: float  # bytes of a round
    down_round: float
    up_client: float  # bytes of a client in a round
    down_client: float
    saving: float | None  # dense bytes over the bytes sent
    up_saving: float | None
    down_saving: float | None
    paper_saving: float | None  # the same by the paper's formula
    mismatch: float | None
    flops: float | None
    dropped: int
    seconds: float


def numbers_of(header: Mapping[str, Any], rounds: Sequence[RoundRecord]) -> Numbers:
    """The numbers of a run from its records."""
    counted = [r for r in rounds if r.counts]
    evaluated = [r for r in counted if r.score is not None]
    metrics = [r.score.metric for r in evaluated if r.score is not None and math.isfinite(r.score.metric)]
    before = evaluated[-1].metrics.get("before") if evaluated else None
    moved = [r.mismatch for r in counted if r.mismatch is not None and math.isfinite(r.mismatch)]
    # The paper does not count BatchNorm statistics. They travel all the same, and dense FedAvg would send them too. It
    # has no first stage, but what a method sends in one counts.
    dense, about = sum(r.paper_bytes.dense for r in counted), header["task"]
    return Numbers(
        accuracy=metrics[-1] if metrics else None,
        best=max(metrics, default=None),
        before=before.metric if before is not None else None,
        density=counted[-1].density if counted else None,
        up=rounds[-1].total.up,
        down=rounds[-1].total.down,
        rounds=len(counted),
        orders=sum(len(r.cohort) for r in counted),
        dense=dense * about["values"] / about["trained"],
        seconds=sum(phase_seconds(rounds).values()),
        dropped=sum(len(r.failures) for r in rounds),
        mismatch=mean_of(moved[-max(1, len(moved) // 6) :]),
        flops=sum(r.flops for r in rounds) or None,
        paper_bytes=sum(r.paper_bytes.up + r.paper_bytes.down for r in rounds),
        paper_dense=dense,
    )


def phase_seconds(rounds: Sequence[RoundRecord]) -> dict[str, float]:
    """Seconds by phase, from the records of rounds: interruptions between them do not count."""
    return {phase: sum(r.seconds.get(phase, 0.0) for r in rounds) for phase in PHASES}


def summarise(runs: Sequence[Numbers]) -> Summary:
    """The mean of every number over runs that differ only in their seed."""
    accuracy = [n.accuracy for n in runs if n.accuracy is not None]
    before = mean_of(n.before for n in runs) if all(n.before is not None for n in runs) else None
    up, down, dense = (statistics.fmean(x) for x in zip(*((n.up, n.down, n.dense) for n in runs), strict=True))
    orders = max(1.0, statistics.fmean(n.orders for n in runs))
    paper_bytes = sum(n.paper_bytes for n in runs)
    return Summary(
        seeds=len(runs),
        accuracy=mean_of(accuracy),
        std=statistics.stdev(accuracy) if len(accuracy) > 1 else None,
        best=mean_of(n.best for n in runs),
        before=before,
        density=mean_of(n.density for n in runs),
        up=up,
        down=down,
        up_round=statistics.fmean(n.up / max(1, n.rounds) for n in runs),
        down_round=statistics.fmean(n.down / max(1, n.rounds) for n in runs),
        up_client=up / orders,
        down_client=down / orders,
        saving=dense / (up + down) if dense and up + down else None,
        up_saving=dense / 2 / up if dense and up else None,
        down_saving=dense / 2 / down if dense and down else None,
        paper_saving=sum(n.paper_dense for n in runs) / paper_bytes if paper_bytes else None,
        mismatch=mean_of(n.mismatch for n in runs),
        flops=mean_of(n.flops for n in runs),
        dropped=sum(n.dropped for n in runs),
        seconds=statistics.fmean(n.seconds for n in runs),
    )


def mean_of(values: Iterable[float | None]) -> float | None:
    """The mean of the numbers that are there."""
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
