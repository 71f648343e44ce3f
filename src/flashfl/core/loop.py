"""The federated loop: cohort, orders, training, aggregation, evaluation. It does not know which method runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from .engine import Engine, Population
from .errors import FlashError, RunStopped
from .exchange import Client, Local, Order, Outcome, Traffic
from .mask import Mask
from .method import Method
from .record import RoundRecord, Score
from .state import State

Sent = tuple[Client, Local, Mask]  # an order as an observer sees it
Trip = tuple[Sequence[Sent], Outcome]  # one call of the engine: what was ordered, and what came of it
Tick = Callable[[str, int], None]  # the phase, and how many of the round's orders have gone out

_ADVICE = (
    "Fix the cause, then resume the run: if it has a folder, its finished rounds are kept. If a setting must change, "
    "start a new run."
)


def run_rounds(
    method: Method,
    state: State,
    clients: Population,
    engine: Engine,
    eval_every: int = 1,
    min_replies: int = 1,
    retries: int = 2,
    bytes_left: float = math.inf,
    tick: Tick = lambda phase, orders: None,
) -> Iterator[tuple[State, RoundRecord, Sequence[Trip]]]:
    """Yield the state after each round, its record and its trips, until the method is done or no bytes are left.

    A round with fewer than `min_replies` good updates is repeated with another cohort, at most `retries` times. Then
    the run stops, and the caller still has the last good state. `tick` is called whenever an order goes out.
    """
    trips: list[Trip] = []  # of this round: attempts that failed, the one that did not, the gathering of statistics
    while not method.done(state):
        began = time.perf_counter()
        present = clients.present()
        cohort = method.cohort(state, present)
        orders = method.orders(state, sorted(cohort, key=lambda c: c.id))
        outcome = _train(engine, state, orders, trips, tick)
        if outcome.sums.clients < min(min_replies, len(cohort)) or not outcome.sums.n:
            state = _repeat(engine, state, trips, min_replies, retries)
            continue
        trained = time.perf_counter()
        missed = {c: why for _, lost in trips[:-1] for c, why in lost.failures.items()}
        after = checked(method, method.aggregate(state, outcome.sums), state).settled(state)
        failures, privacy, traffic = dict(outcome.failures), outcome.privacy, _traffic(trips)
        last = method.done(after) or traffic.total >= bytes_left or (privacy is not None and privacy.over)
        if last and not after.plan.local.statistics:
            after, gathered = _gather_statistics(method, engine, after, present, trips, retries, tick)
            failures, privacy, traffic = failures | dict(gathered.failures), gathered.privacy, _traffic(trips)
        bytes_left -= traffic.total
        aggregated = time.perf_counter()
        scores, sent = _evaluate(method, after, engine, present, last) if last or _due(after, eval_every) else ({}, 0)
        seconds = {"train": trained - began, "aggregate": aggregated - trained}
        seconds["evaluate"] = time.perf_counter() - aggregated
        record = RoundRecord(
            state.phase.name, state.phase.counts, state.round, state.attempt, tuple(c.id for c in cohort), failures,
            outcome.sums.mean_loss, traffic, missed, scores, sent, {**outcome.seconds, **seconds}, privacy,
        )  # fmt: skip
        yield after, record, trips
        state, trips = after, []
        if last:
            return


def _train(engine: Engine, s: State, orders: Iterator[tuple[Client, Order]], trips: list[Trip], tick: Tick) -> Outcome:
    """Have the orders carried out. Notes the trip."""
    sent: list[Sent] = []

    def noted() -> Iterator[tuple[Client, Order]]:
        for client, order in orders:
            sent.append((client, order.local, order.weights.mask))
            tick(s.phase.name, len(sent))
            yield client, order

    outcome = engine.train(s, noted())
    trips.append((sent, outcome))
    return outcome


def _traffic(trips: Sequence[Trip]) -> Traffic:
    return sum((outcome.traffic for _, outcome in trips), Traffic())


def _repeat(engine: Engine, s: State, trips: Sequence[Trip], min_replies: int, retries: int) -> State:
    """The state to try the round again with, or RunStopped after too many attempts."""
    engine.memory.rollback()
    if s.attempt >= retries:
        sent, outcome = trips[-1]
        raise RunStopped(
            f"{_which(s)} failed {s.attempt + 1} times: {outcome.sums.clients} of {len(sent)} clients sent a usable "
            f"reply, fewer than min_replies = {min_replies} ({_reasons(trips)}). {_ADVICE}"
        )
    return _next_attempt(s, trips[-1][1])


def _which(s: State) -> str:
    """The name of a round, for messages."""
    return f"round {s.counted + 1}" if s.phase.counts else f"a round of the phase {s.phase.name!r}"


def _next_attempt(s: State, outcome: Outcome) -> State:
    """The state to ask clients from again. They give a secure sum no second input under one round number."""
    return s.skip() if outcome.revealed else s.again()


def _gather_statistics(
    method: Method, engine: Engine, s: State, clients: Sequence[Client], trips: list[Trip], retries: int, tick: Tick
) -> tuple[State, Outcome]:
    """The last step with static BatchNorm: every client reports its data's statistics under the final weights."""
    local = replace(s.plan.local, report="statistics", statistics=True, adapt=None, keep=(), start=None, parts=())
    asked = s
    while True:
        orders = ((c, asked.order(c, local, w)) for c, w in method.models(s, clients))
        outcome = _train(engine, asked, orders, trips, tick)
        if outcome.sums.clients or s.layout.size == s.layout.trained_size:
            break
        if asked.attempt >= retries:
            raise RunStopped(
                "static_bn = true: no client could report BatchNorm statistics at the end of the run "
                f"({_reasons(trips[-1:])}). {_ADVICE}"
            )
        asked = _next_attempt(asked, outcome)
    # The average before the server's cut has no statistics of its own, so it can no longer be evaluated. If the run is
    # extended, a secure round needs a number that the gathering has not used.
    after = method.with_statistics(replace(s, before=None, round=asked.round + outcome.revealed), outcome.sums)
    if after.average is not None:  # a second gathering would cost bytes, and the two models are close by now
        after = replace(after, average=after.average.with_statistics(after.weights.statistics))
    return after, outcome


def _reasons(trips: Sequence[Trip]) -> str:
    """Why a few clients failed. The first attempt names the cause: later ones may fail because of it."""
    found: dict[int, str] = {}
    for client, why in (one for _, outcome in trips for one in outcome.failures.items()):
        found.setdefault(client, why)
    return "; ".join(f"client {c}: {why}" for c, why in list(found.items())[:3])


def _due(state: State, every: int) -> bool:
    return state.phase.counts and state.counted > 0 and state.counted % every == 0


def checked(method: Method, state: State, before: State | None = None) -> State:
    """The state a method made, or an error that says what is wrong with it."""
    name = f"{_name(method)}.{'aggregate' if before else 'init'}"
    if not isinstance(state, State):
        raise FlashError(f"{name} returned {type(state).__name__}: expected a State")
    if state.phase not in method.phases:
        raise FlashError(
            f"{name} returned a state of phase {state.phase.name!r}: expected one of {_name(method)}.phases, "
            f"{[phase.name for phase in method.phases]}"
        )
    if before is not None and (state.phase, state.round) == (before.phase, before.round):
        raise FlashError(f"{name} returned a state of the same round: return s.next(...) or s.enter(...)")
    vector, size = state.weights.vector, state.layout.size
    if vector.dtype != torch.float32 or vector.shape != (size,):
        raise FlashError(f"{name}: weights are {vector.dtype} {tuple(vector.shape)}, expected float32 ({size},)")
    if not bool(vector.isfinite().all()):
        raise FlashError(
            f"{name} returned weights that are NaN or infinite: check its arithmetic, such as a division by 0"
        )
    return state


def _name(method: Method) -> str:
    return method.name or type(method).__name__


def _evaluate(
    method: Method, s: State, engine: Engine, clients: Sequence[Client], last: bool
) -> tuple[dict[str, Score], int]:
    """The scores of all views, at the end those of personal models too, and the bytes that were sent for them."""
    use_running = s.plan.local.statistics or last  # static BatchNorm has no statistics before the end
    scores, sent = {}, 0
    for name, weights in method.reported(s).items():
        if not weights.is_masked():
            which = " (s.weights)" if weights is s.weights else ""
            raise FlashError(
                f"{_name(method)}.views[{name!r}]{which} has weights outside its mask. These are never sent, so the "
                "score would be wrong. Build the model with Weights.masked(mask, vector)."
            )
        found = engine.evaluate(weights, use_running)
        scores[name] = Score(found.loss, found.metric, weights.mask.density)
        sent += found.bytes
    if last and method.personal:
        works = [(client, method.work(s, client)) for client in clients]
        if (own := engine.evaluate_personal(s.weights, works)) is not None:
            scores["personal"] = own
    return scores, sent
