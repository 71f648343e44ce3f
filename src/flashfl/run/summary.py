"""The numbers of a run and of a group of runs: one summary for comparisons, reports and the paper's tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from ..core.record import RoundRecord
from .results import Header

WORK = ("train", "aggregate", "evaluate", "record")


@dataclass(frozen=True)
class Metric:
    """What a task measures. Accuracy is shown in percent, another metric as a plain number."""

    name: str = "accuracy"
    higher_is_better: bool = True

    @staticmethod
    def of(header: Header) -> Metric:
        """The metric of a run. A task that does not name one measures accuracy."""
        return Metric(**header["task"].get("metric") or {})

    @property
    def direction(self) -> str:
        return "higher is better" if self.higher_is_better else "lower is better"

    @property
    def scale(self) -> int:
        """What a recorded value is multiplied by to be shown."""
        return 100 if self == ACCURACY else 1

    def text(self, value: float, spread: float | None = None) -> str:
        """A value as tables show it, with its spread over seeds if there is one."""
        form = ".2f" if self == ACCURACY else ".4g"
        values = [value] if spread is None else [value, spread]
        return " ± ".join(f"{self.scale * v:{form}}" for v in values)

    def label(self, value: float) -> str:
        """A value with its unit."""
        return f"{self.text(value)} %" if self == ACCURACY else self.text(value)


ACCURACY = Metric()


@dataclass(frozen=True)
class Numbers:
    """What one run, finished or not, says about itself. None: not recorded."""

    accuracy: float | None  # or another metric, after the last round that was evaluated
    best: float | None
    before: float | None  # of the model before the server cuts it to its density
    density: float | None
    up: float  # bytes of the whole run, a first stage included
    down: float
    rounds: float  # that count towards the run's length
    orders: float  # models sent to clients in these rounds
    dense: float  # bytes dense FedAvg would send in these rounds, up and down
    seconds: float
    dropped: float  # clients dropped, over all rounds
    mismatch: float | None = None  # mean over the last sixth of the rounds
    flops: float | None = None
    paper_bytes: float | None = None  # by the paper's formula, up and down
    paper_dense: float | None = None  # dense FedAvg by the same formula
    epsilon: float | None = None  # privacy spent: the epsilon that `dp_epsilon` limits
    plain: float | None = None  # of the server's model itself, where its running average is reported
    personal: float | None = None  # mean metric of the clients' own models, where a method makes such


@dataclass(frozen=True)
class Summary(Numbers):
    """The mean of every number over seeds, and the standard deviation of the metric if there are several."""

    seeds: int = 1
    std: float | None = None
    metric: Metric = ACCURACY

    @property
    def saving(self) -> float | None:
        """Dense bytes over the bytes sent."""
        return self.dense / (self.up + self.down) if self.dense and self.up + self.down else None

    @property
    def paper_saving(self) -> float | None:
        """The same by the paper's formula."""
        return self.paper_dense / self.paper_bytes if self.paper_dense and self.paper_bytes else None


def summarise(runs: Sequence[Numbers], metric: Metric = ACCURACY) -> Summary:
    """The summary of runs that differ only in their seed."""
    values = {f.name: [getattr(run, f.name) for run in runs] for f in fields(Numbers)}
    known = {name: [v for v in column if v is not None] for name, column in values.items()}
    means = {name: statistics.fmean(column) if column else None for name, column in known.items()}
    std = statistics.stdev(known["accuracy"]) if len(known["accuracy"]) > 1 else None
    return Summary(**means, seeds=len(runs), std=std, metric=metric)  # type: ignore[arg-type]


def numbers_of(header: Header, rounds: Sequence[RoundRecord]) -> Numbers:
    """The numbers of a run from its records."""
    counted = [r for r in rounds if r.counts]
    evaluated = [r.metrics for r in counted if r.score is not None and math.isfinite(r.score.metric)]
    metrics = [next(iter(views.values())).metric for views in evaluated]
    final = {view: score.metric for view, score in evaluated[-1].items()} if evaluated else {}
    moved = [r.mismatch for r in counted if r.mismatch is not None and math.isfinite(r.mismatch)]
    late = moved[-max(1, len(moved) // 6) :]
    # The paper does not count BatchNorm statistics. They travel all the same, and dense FedAvg would send them too. It
    # has no first stage, but what a method sends in one counts.
    dense, about = sum(r.paper_bytes.dense for r in counted), header["task"]
    secure = header.get("identity", {}).get("settings", {}).get("secure")
    return Numbers(
        accuracy=metrics[-1] if metrics else None,
        best=(max if Metric.of(header).higher_is_better else min)(metrics, default=None),
        before=final.get("before"),
        density=counted[-1].density if counted else None,
        up=rounds[-1].total.up,
        down=rounds[-1].total.down,
        rounds=len(counted),
        orders=sum(len(r.cohort) for r in counted),
        dense=dense * about["values"] / about["trained"],
        seconds=sum(work_seconds(rounds).values()),
        dropped=sum(len(r.failures) for r in rounds),
        mismatch=statistics.fmean(late) if late else None,
        flops=sum(r.flops for r in rounds) or None,
        paper_bytes=sum(r.paper_bytes.up + r.paper_bytes.down for r in rounds) or None,
        paper_dense=dense or None,
        epsilon=last.limited(secure) if (last := rounds[-1].privacy) and last.delta else None,
        plain=plain_of(final),
        personal=final.get("personal"),
    )


def plain_of(views: Mapping[str, float]) -> float | None:
    """The metric of the server's model itself, if the views begin with a running average of it."""
    return views.get("after") if "average" in views else None


def work_seconds(rounds: Sequence[RoundRecord]) -> dict[str, float]:
    """Seconds by kind of work, from the records of rounds: interruptions between them do not count."""
    return {kind: sum(r.seconds.get(kind, 0.0) for r in rounds) for kind in WORK}
