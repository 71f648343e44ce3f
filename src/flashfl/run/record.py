"""What a run writes down about each round beside accuracy and bytes: masks and how they move, FLOPs, snapshots."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..core.loop import Engine
from ..core.state import Client, Local, Mask, Order, Outcome, State, Weights
from ..data.task import Task
from ..measure.comms import dense_bytes, paper_bytes
from ..measure.flops import Cost, order_flops, task_costs
from ..measure.mismatch import counts_of, jaccard, shared
from ..measure.snapshots import Snapshots

SNAPSHOTS = "snapshots"
MOST_SNAPSHOTS = 32
SNAPSHOT_BYTES = 64 << 20  # at most this much in a run's folder, were every mask as large as a mask can be

Seen = tuple[Client, Local, Mask]


class Recorder:
    """Looks at consecutive states and at the orders between them; what it finds goes into the results file.

    It waits for a GPU at most once a round, and holds nothing that a resumed run would have to restore.
    """

    def __init__(self, task: Task, clients: Sequence[Client], folder: Path | None = None) -> None:
        self.layout = task.layout
        self._task, self._sizes = task, {c.id: c.n for c in clients}
        self._snapshots = Snapshots(folder / SNAPSHOTS) if folder else None
        self._costs: Mapping[str, Cost] | None = None
        self._mask: Mask | None = None
        self._counts: tuple[int, ...] = ()
        self._stage = 0
        self._kept: tuple[Mask | None, str] = (None, "")
        self._clear()

    def _clear(self) -> None:
        self._flops = self._seconds = 0.0
        self._paper = {"up": 0.0, "down": 0.0, "dense": 0.0}
        self._cohort: list[float] = []
        self._judging = 0

    def begin(self, state: State) -> None:
        """The state a run starts or goes on from."""
        self._mask, self._stage, self._counts = state.mask, state.stage, counts_of(state.mask)

    def tap(self, engine: Engine) -> Engine:
        """The same engine, its orders and outcomes noted as they pass."""
        return _Tapped(engine, self)

    def worked(self, seen: Sequence[Seen], outcome: Outcome) -> None:
        """One call of the engine is over: its FLOPs, and its bytes by the paper's formula."""
        began = time.perf_counter()
        sums, replied = outcome.sums, outcome.sums.clients
        told = bool(replied and any(sums.counts))  # gathering statistics reports no counts
        sizes = {sum(self._known(mask)) for _, _, mask in seen}
        for client, local, mask in seen:
            down = self._known(mask)
            # Layer by layer only the mean over the cohort is known; where models differ in size it is nobody's.
            up = [c / replied for c in sums.counts] if told and len(sizes) == 1 else list(down)
            bytes_down, bytes_up = paper_bytes(self.layout, local, down, up)
            self._paper["down"] += bytes_down
            self._paper["dense"] += dense_bytes(self.layout)
            if client.id in outcome.failures:
                continue
            self._paper["up"] += bytes_up
            self._paper["dense"] += dense_bytes(self.layout)
            densities = [c / k for c, k in zip(up, self.layout.sizes, strict=True)]
            self._flops += order_flops(self.layout, self.costs, local, self._sizes.get(client.id, client.n), densities)
        if told:
            self._cohort = [round(d, 6) for d in sums.layer_densities]
        self._seconds += time.perf_counter() - began

    def judged(self, sent: int) -> None:
        """A model has been judged, perhaps by clients to whom it had to travel in so many bytes."""
        self._judging += sent

    def _known(self, mask: Mask) -> tuple[int, ...]:
        """A mask's layer counts, without waiting for a GPU where they have been read before."""
        return self._counts if mask is self._mask else mask.counts

    @property
    def costs(self) -> Mapping[str, Cost]:
        """What each layer costs, found out once; a model that cannot be tried on one sample has no FLOPs."""
        if self._costs is None:
            try:
                with torch.random.fork_rng(devices=[]):
                    self._costs = task_costs(self._task)
            except Exception as error:  # a measure must not end a run, whatever a user's model does
                warnings.warn(f"FLOPs are not counted: the model failed on one sample ({error})", RuntimeWarning)
                self._costs = {}
        return self._costs

    def complete(self, line: Mapping[str, Any], state: State) -> dict[str, Any]:
        """A round's line with everything that can be said of its state."""
        began = time.perf_counter()
        seen = self._observe(state)
        if self._flops:
            seen["flops"] = float(f"{self._flops:.6g}")
        seen["paper_bytes"] = {k: round(v) for k, v in self._paper.items()}
        if self._cohort and (line["stage"] == 1 or self._cohort != seen["layer_densities"]):
            seen["cohort_densities"] = self._cohort
        if name := self._snapshot(state):
            seen["snapshot"] = name
        if self._judging:
            seen["judging"] = self._judging
        spent = self._seconds + time.perf_counter() - began
        self._clear()
        return {**line, **seen, "seconds": {**line["seconds"], "record": round(spent, 4)}}

    def _observe(self, state: State) -> dict[str, Any]:
        """Density, layer densities, and the mismatch to the mask one round earlier (of stage 2)."""
        before, after, stage = self._mask, state.mask, self._stage
        old = self._counts
        if before is None or before is after:
            common, counts = None, self._counts if before is after else counts_of(after)
        else:
            common, counts = shared(before, after)
        self._mask, self._counts, self._stage = after, counts, state.stage
        seen: dict[str, Any] = {
            "density": sum(counts) / max(1, self.layout.prunable_size),
            "layer_densities": [round(c / k, 6) for c, k in zip(counts, self.layout.sizes, strict=True)],
        }
        if before is not None and stage == state.stage == 2:
            seen["mismatch"], seen["layer_mismatch"] = 0.0, []
            if common is not None:
                seen["mismatch"] = jaccard(sum(common), sum(old), sum(counts))
                seen["layer_mismatch"] = [round(jaccard(*x), 6) for x in zip(common, old, counts, strict=True)]
        return seen

    def _snapshot(self, state: State) -> str:
        """Keep the mask if it is time to; its name. Dense models need none."""
        due = state.stage == 2 and (state.round % snapshot_every(state) == 0 or state.done)
        if self._snapshots is None or not due or sum(self._counts) == self.layout.prunable_size:
            return ""
        if self._kept[0] is not state.mask:
            try:
                self._kept = (state.mask, self._snapshots.put(state.mask.bits.cpu().numpy()))
            except OSError as error:
                warnings.warn(f"mask snapshots are given up: one could not be written ({error})", RuntimeWarning)
                self._snapshots = None
                return ""
        return self._kept[1]


def snapshot_every(state: State) -> int:
    """Rounds between two snapshots: even, at most MOST_SNAPSHOTS, and never more than SNAPSHOT_BYTES in all."""
    room = SNAPSHOT_BYTES // (state.layout.prunable_size // 8 + 1)
    return max(1, math.ceil(state.plan.rounds / max(2, min(MOST_SNAPSHOTS, room))))


class _Tapped:
    """An engine whose orders a recorder sees on their way."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self._engine, self._recorder = engine, recorder

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        seen: list[Seen] = []

        def passing() -> Iterator[tuple[Client, Order]]:
            for client, order in orders:
                seen.append((client, order.local, order.weights.mask))
                yield client, order

        outcome = self._engine.train(s, passing())
        self._recorder.worked(seen, outcome)
        return outcome

    def undo(self) -> None:
        self._engine.undo()

    def evaluate(self, weights: Weights, statistics: bool = True) -> dict[str, float]:
        before = getattr(self._engine, "judging", 0)
        found = self._engine.evaluate(weights, statistics)
        self._recorder.judged(getattr(self._engine, "judging", 0) - before)
        return found
