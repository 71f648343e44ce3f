"""A crew carries out the steps of several clients side by side: `lanes.Lanes` or `batched.Batched`.

The clients' weights lie in the first rows of a stack, and all of them have the same local settings.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from fractions import Fraction

import torch

from ...core.client import Clients
from ...core.errors import warn
from ...sparsity import move
from ..work import Work
from .batched import Batched
from .lanes import Lanes
from .stack import Stack

Crew = Lanes | Batched


def run_steps(crew: Crew, stack: Stack, works: Sequence[Work]) -> None:
    """All steps of all clients, with a stop wherever masks move."""
    moves = [list(work.moves.items()) for work in works]
    done = [0] * len(works)
    for j in range(max(map(len, moves))):
        steps = [own[j][0] if j < len(own) else at for own, at in zip(moves, done, strict=True)]
        crew.advance(works, done, steps)
        by_rate: dict[Fraction, list[int]] = {}
        for row, own in enumerate(moves):
            if j < len(own):
                by_rate.setdefault(own[j][1], []).append(row)
        for rate, rows in by_rate.items():
            _move(crew, stack, works, rows, rate, steps)
        done = steps
    crew.advance(works, done, [work.steps for work in works])


def _move(
    crew: Crew, stack: Stack, works: Sequence[Work], rows: Sequence[int], rate: Fraction, steps: Sequence[int]
) -> None:
    """Move the masks of some rows at once."""
    rule, every = works[0].local.adapt, len(works)
    assert rule is not None  # else there are no moves
    values, masks = stack.read(every), stack.logical(stack.masks[:every])
    scores = stack.logical(crew.scores(every)) if rule.dense_gradient else None
    keys, counts = [works[row].move_key(steps[row]) for row in rows], [works[row].counts for row in rows]
    some = slice(None) if len(rows) == every else torch.tensor(rows).to(stack.device, non_blocking=True)
    vectors, bits = values[some], masks[some]
    found = move(rule, stack.layout, vectors, bits, None if scores is None else scores[some], rate, keys, counts)
    values[some], masks[some] = vectors, bits
    stack.load(values, masks, every)
    crew.moved(every)
    for row, new in zip(rows, found, strict=True):
        works[row].counts = new


def faster(crews: Sequence[Crew], works: Sequence[Work], opened: Clients | None = None) -> Crew:
    """The crew that takes the least time for an epoch of these clients. The stack holds garbage afterwards."""
    times: dict[float, Crew] = {}
    for crew in crews:
        try:
            crew.prepare(works, opened)
            for _ in range(2):
                _wait(crew.device)
                began = time.perf_counter()
                crew.begin(works, opened)
                crew.advance(works, [0] * len(works), [work.batches for work in works])
                _wait(crew.device)
        except Exception as error:  # a model that cannot be batched (an `if` on a tensor, say) can still run in lanes
            if crew is crews[-1] and not times:
                raise
            warn(
                f"crew = {type(crew).__name__.lower()!r} cannot train this model ({str(error).splitlines()[0]}): the "
                "other crew does, which may be slower"
            )
            continue
        times[time.perf_counter() - began] = crew
    return times[min(times)]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
