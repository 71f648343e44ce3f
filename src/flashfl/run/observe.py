"""What a run records about each round beside accuracy and bytes: masks and how they move, FLOPs, snapshots."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from ..core.client import reports_another_mask
from ..core.errors import warn
from ..core.exchange import Client, Local, Traffic
from ..core.layout import Layout
from ..core.loop import Trip
from ..core.mask import Mask
from ..core.method import Method
from ..core.record import PaperBytes, RoundRecord
from ..core.state import State
from ..data.task import Task
from ..engine.store import MaskStore
from ..measure.comms import dense_bytes, paper_bytes
from ..measure.flops import Cost, order_flops, task_costs
from ..sparsity import common, jaccard

SNAPSHOTS = "snapshots"
MOST_SNAPSHOTS = 32
SNAPSHOT_BYTES = 64 << 20  # the most that snapshots may take in a run's folder


def snapshots(folder: Path, layers: Iterable[tuple[str, Sequence[int]]]) -> MaskStore:
    """The stored masks of a run. `layers`: the names and shapes of its prunable layers."""
    layout = Layout.build({"prunable": [(name, tuple(shape)) for name, shape in layers]})
    return MaskStore.in_folder(layout, folder / SNAPSHOTS)


class Observer:
    """Watches states and the orders between them, and completes the records of rounds.

    It holds nothing that a resumed run would have to restore, and waits for a GPU at most once a round.
    """

    def __init__(self, method: Method, task: Task, state: State, folder: Path | None = None) -> None:
        self.method, self.layout, self._task = method, task.layout, task
        shapes = [(layer.name, layer.shape) for layer in self.layout.prunable]
        self._snapshots = snapshots(folder, shapes) if folder else None
        self._before = state

    @cached_property
    def costs(self) -> Mapping[str, Cost]:
        """FLOPs of each layer; empty for a model that cannot be tried on one sample."""
        try:
            with torch.random.fork_rng(devices=[]):
                return task_costs(self._task)
        except Exception as error:  # a measurement must not end a run, whatever a custom model does
            warn(
                f"FLOPs are not counted, because the model could not be tried on one sample ({error}). Training is not "
                "affected."
            )
            return {}

    def complete(self, record: RoundRecord, state: State, total: Traffic, trips: Sequence[Trip] = ()) -> RoundRecord:
        """The record with everything that can be said about the state after its round, and about its trips."""
        began = time.perf_counter()
        before, self._before = self._before, state
        densities = tuple(round(d, 6) for d in state.mask.layer_densities)
        moved, by_layer = _mismatch(before, state)
        cohort, flops, counted = self._work(trips)
        record = replace(
            record,
            total=total,
            density=state.mask.density,
            layer_densities=densities,
            mismatch=moved,
            layer_mismatch=by_layer,
            cohort_densities=cohort if not record.counts or cohort != densities else (),
            flops=flops,
            paper_bytes=counted,
            snapshot=self._snapshot(state),
        )
        seconds = {**record.seconds, "record": time.perf_counter() - began}
        return replace(record, seconds={name: round(spent, 4) for name, spent in seconds.items()})

    def _work(self, trips: Sequence[Trip]) -> tuple[tuple[float, ...], float, PaperBytes]:
        """The clients' mean layer densities, their FLOPs, and their bytes by the paper's formula."""
        cohort: tuple[float, ...] = ()
        flops = up = down = dense = 0.0
        for sent, outcome in trips:
            sums, replied = outcome.sums, outcome.sums.clients
            known = bool(replied and any(sums.counts))  # orders that ask for statistics report no counts
            alike = len({mask.active for _, _, mask in sent}) == 1
            for client, local, mask in sent:
                # By layer only the cohort's mean is known. It fits no client if their models differ in size.
                mean = [c / replied for c in sums.counts] if known and alike else list(mask.counts)
                here, there = paper_bytes(self.layout, local, mean if local.personal else mask.counts, mean)
                down, dense = down + here, dense + dense_bytes(self.layout)
                if client.id not in outcome.failures:
                    up, dense = up + there, dense + dense_bytes(self.layout)
                    trained = mask.counts if reports_another_mask(local.parts) else mean
                    flops += self._flops(client, local, trained)
            if known:
                cohort = tuple(round(d, 6) for d in sums.layer_densities)
        return cohort, float(f"{flops:.6g}"), PaperBytes(round(up), round(down), round(dense))

    def _flops(self, client: Client, local: Local, counts: Sequence[float]) -> float:
        densities: Sequence[float] = [c / k for c, k in zip(counts, self.layout.sizes, strict=True)]
        for part in local.parts:
            densities = part.computes(densities)
        return order_flops(self.layout, self.costs, local, client.n, densities)

    def _snapshot(self, state: State) -> str:
        """Store the mask if it is time to; its hash. Dense models need none."""
        if self._snapshots is None or not state.counted:
            return ""
        due = state.counted % snapshot_every(state) == 0 or self.method.done(state)
        if not due or state.mask.active == self.layout.prunable_size:
            return ""
        try:
            return self._snapshots.put(Mask(self._snapshots.layout, state.mask.bits))
        except OSError as error:
            warn(
                f"a mask could not be stored for plots ({error}), so this run stores no more of them. Its model, "
                "results and checkpoints are not affected."
            )
            self._snapshots = None
            return ""


def _mismatch(before: State, after: State) -> tuple[float | None, tuple[float, ...]]:
    """Between the masks of two consecutive states of one phase: of the model, and of each layer if there is any."""
    if before.phase != after.phase or not after.phase.counts:
        return None, ()
    if before.mask is after.mask:
        return 0.0, ()
    both, a, b = common(before.mask, after.mask), before.mask.counts, after.mask.counts
    return jaccard(sum(both), sum(a), sum(b)), tuple(round(jaccard(*x), 6) for x in zip(both, a, b, strict=True))


def snapshot_every(state: State) -> int:
    """Rounds between two snapshots: at most MOST_SNAPSHOTS in all, and never more than SNAPSHOT_BYTES."""
    room = SNAPSHOT_BYTES // (state.layout.prunable_size // 8 + 1)
    return max(1, math.ceil(state.plan.rounds / max(2, min(MOST_SNAPSHOTS, room))))
