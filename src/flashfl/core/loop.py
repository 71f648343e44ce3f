"""The federated loop: cohort, orders, training, aggregation, evaluation. It does not know which method runs."""

from __future__ import annotations

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
Observe = Callable[[Sequence[Sent], Outcome], None]
Tick = Callable[[State, int], None]  # a round's state, and how many of its orders have gone out


def run_rounds(
    method: Method,
    state: State,
    clients: Population,
    engine: Engine,
    eval_every: int = 1,
    min_replies: int = 1,
    retries: int = 2,
    enough: Callable[[Traffic], bool] = lambda traffic: False,
    observe: Observe = lambda sent, outcome: None,
    tick: Tick = lambda state, orders: None,
) -> Iterator[tuple[State, RoundRecord]]:
    """Yield the state after each round until the method is done, or until `enough` says so about a round's traffic.

    A round with fewer than `min_replies` good updates is repeated with another cohort, at most `retries` times. Then
    the run stops, and the caller still has the last good state. `observe` sees every order and what came of it; `tick`
    is called whenever an order goes out.
    """
    trips = _Trips(method, engine, observe, tick, retries)
    while not method.done(state):
        began = time.perf_counter()
        present = clients.present()
        cohort = method.cohort(state, present)
        outcome = trips.train(state, method.orders(state, sorted(cohort, key=lambda c: c.id)))
        if outcome.sums.clients < min(min_replies, len(cohort)) or not outcome.sums.n:
            state = trips.repeat(state, outcome)
            continue
        trained = time.perf_counter()
        after = _aggregate(method, state, outcome).averaged(state)
        traffic, failures, privacy = trips.lost + outcome.traffic, dict(outcome.failures), outcome.privacy
        last = method.done(after) or enough(traffic) or (privacy is not None and privacy.over)
        if last and not after.plan.local.statistics:
            after, gathered = trips.gather_statistics(after, present)
            traffic, failures = traffic + gathered.traffic, failures | dict(gathered.failures)
            privacy = gathered.privacy
        aggregated = time.perf_counter()
        metrics, sent = _evaluate(method, after, engine, last) if last or _due(after, eval_every) else ({}, 0)
        if last and method.personal:
            works = [(client, method.work(after, client)) for client in present]
            if (own := engine.evaluate_personal(after.weights, works)) is not None:
                metrics["personal"] = own
        seconds = {
            **outcome.seconds,
            "train": trained - began,
            "aggregate": aggregated - trained,
            "evaluate": time.perf_counter() - aggregated,
        }
        ids = tuple(c.id for c in cohort)
        record = RoundRecord(
            state.phase.name, state.phase.counts, state.round, state.attempt, ids, failures, outcome.sums.mean_loss,
            traffic, trips.missed, metrics, sent, seconds, privacy,
        )  # fmt: skip
        state, trips.lost, trips.missed = after, Traffic(), {}
        yield state, record
        if last:
            return


class _Trips:
    """Calls of an engine, and what was lost in attempts that had to be repeated."""

    def __init__(self, method: Method, engine: Engine, observe: Observe, tick: Tick, retries: int) -> None:
        self.method, self.engine, self.observe, self.tick, self.retries = method, engine, observe, tick, retries
        self.lost = Traffic()
        self.missed: dict[int, str] = {}  # who failed in repeated attempts, and why

    def train(self, s: State, orders: Iterator[tuple[Client, Order]]) -> Outcome:
        sent: list[Sent] = []

        def seen() -> Iterator[tuple[Client, Order]]:
            for client, order in orders:
                sent.append((client, order.local, order.weights.mask))
                self.tick(s, len(sent))
                yield client, order

        outcome = self.engine.train(s, seen())
        self.observe(sent, outcome)
        return outcome

    def repeat(self, s: State, outcome: Outcome) -> State:
        """The state to try the round again with, or RunStopped after too many attempts."""
        self.engine.memory.rollback()
        if s.attempt >= self.retries:
            raise RunStopped(
                f"round {s.round} ({s.phase.name}) failed {s.attempt + 1} times: too few clients replied "
                f"({_reasons(outcome)}). The state before this round is kept. Remove the cause and resume the run."
            )
        self.missed |= outcome.failures
        self.lost += outcome.traffic
        return s.skip() if outcome.revealed else s.again()

    def gather_statistics(self, s: State, clients: Sequence[Client]) -> tuple[State, Outcome]:
        """The last step with static BatchNorm: every client reports its data's statistics under the final weights."""
        local = replace(s.plan.local, report="statistics", statistics=True, adapt=None, keep=(), start=None, parts=())
        asked, traffic = s, Traffic()
        while True:
            orders = ((c, asked.order(c, local, w)) for c, w in self.method.models(s, clients))
            outcome = self.train(asked, orders)
            traffic += outcome.traffic
            if outcome.sums.clients or s.layout.size == s.layout.trained_size:
                break
            if asked.attempt >= self.retries:
                raise RunStopped(
                    f"static_bn = true: BatchNorm statistics are gathered at the end, and no client could report any "
                    f"({_reasons(outcome)}). The state before this is kept. Remove the cause and resume the run."
                )
            asked = asked.again()
        outcome = replace(outcome, traffic=traffic)
        # The average before the server's cut has no statistics of its own, so it can no longer be evaluated.
        after = self.method.with_statistics(replace(s, before=None), outcome.sums)
        if after.average is not None:  # a second gathering would cost bytes, and the two models are close by now
            after = replace(after, average=after.average.with_statistics(after.weights.statistics))
        return after, outcome


def _reasons(outcome: Outcome) -> str:
    return "; ".join(f"client {c}: {why}" for c, why in list(outcome.failures.items())[:3])


def _due(state: State, every: int) -> bool:
    return state.phase.counts and state.counted > 0 and state.counted % every == 0


def _aggregate(method: Method, s: State, outcome: Outcome) -> State:
    """The next state. With static BatchNorm nobody reports statistics, so the server keeps the model's own."""
    after = s.plan.server.apply(s, checked(method, method.aggregate(s, outcome.sums), s))
    if s.plan.local.statistics or after.phase != s.phase:
        return after
    own = s.weights.statistics
    return replace(
        after, weights=after.weights.with_statistics(own), before=after.before and after.before.with_statistics(own)
    )


def checked(method: Method, state: State, before: State | None = None) -> State:
    """The state a method made, or an error that says what is wrong with it."""
    name = f"{_name(method)}.{'aggregate' if before else 'init'}"
    if not isinstance(state, State):
        raise FlashError(f"{name} gives {type(state).__name__}: expected a State")
    if state.phase not in method.phases:
        raise FlashError(f"{name} gives a state of phase {state.phase.name!r}, which is not in {_name(method)}.phases")
    if before is not None and (state.phase, state.round) == (before.phase, before.round):
        raise FlashError(f"{name} gives a state of the same round: make it with s.next(...) or s.enter(...)")
    vector, size = state.weights.vector, state.layout.size
    if vector.dtype != torch.float32 or vector.shape != (size,):
        raise FlashError(f"{name}: weights are {vector.dtype} {tuple(vector.shape)}, expected float32 ({size},)")
    if not bool(vector.isfinite().all()):
        raise FlashError(f"{name} gives weights that are not finite")
    return state


def _name(method: Method) -> str:
    return method.name or type(method).__name__


def _evaluate(method: Method, state: State, engine: Engine, last: bool) -> tuple[dict[str, Score], int]:
    """The scores of all views, and the bytes that were sent for them."""
    use_running = state.plan.local.statistics or last  # static BatchNorm has no statistics before the end
    scores, sent = {}, 0
    for name, weights in method.reported(state).items():
        if not weights.is_masked():
            raise FlashError(
                f"{_name(method)}.views[{name!r}] has weights outside its mask. They never travel, so the score would "
                "be wrong. Make the model with Weights.masked(mask, vector)."
            )
        found = engine.evaluate(weights, use_running)
        scores[name] = Score(found.loss, found.metric, weights.mask.density)
        sent += found.bytes
    return scores, sent
