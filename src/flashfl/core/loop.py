"""The federated loop: cohort, orders, work, aggregation, again. It asks nobody which method is running."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from .errors import FlashError, RunStopped
from .method import Method
from .parts import is_ours
from .state import Client, Mask, Order, Outcome, State, Traffic, Weights


class Engine(Protocol):
    """Carries out orders, owns what clients remember, counts bytes."""

    def train(self, s: State, orders: Iterable[tuple[Client, Order]]) -> Outcome:
        """Have the orders carried out; they are made as they are needed, in ascending client id."""
        ...

    def undo(self) -> None:
        """The round just carried out will be repeated: whoever took part remembers what it did before it."""
        ...

    def evaluate(self, weights: Weights, statistics: bool = True) -> dict[str, float]: ...


@dataclass(frozen=True)
class Record:
    """What is worth telling about one finished round."""

    stage: int
    round: int
    attempt: int
    cohort: tuple[int, ...]
    failures: Mapping[int, str]
    traffic: Traffic
    loss: float  # mean training loss
    seconds: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # view -> loss, metric, density
    missed: Mapping[int, str] = field(default_factory=dict)  # who failed in attempts that had to be repeated, and why


def run_rounds(
    method: Method,
    state: State,
    clients: Sequence[Client],
    engine: Engine,
    eval_every: int = 1,
    min_replies: int = 1,
    retries: int = 2,
    enough: Callable[[Traffic], bool] = lambda traffic: False,
) -> Iterator[tuple[State, Record]]:
    """Yield the state after each round until the method is done, or `enough` says so of a round's traffic.

    A round in which fewer than `min_replies` clients succeed is repeated with a fresh cohort, `retries` times; then
    the run stops, and the caller still has the last good state.
    """
    lost, missed = Traffic(), dict[int, str]()  # what travelled in attempts that failed, and who was left out there
    while not state.done:
        began = time.perf_counter()
        cohort = method.cohort(state, clients)
        outcome = engine.train(state, _orders(method, state, cohort))
        if outcome.sums.clients < max(1, min(min_replies, len(cohort))):
            engine.undo()
            _raise_if_hopeless(state, outcome, retries)
            missed |= outcome.failures
            state, lost = state.again(), lost + outcome.traffic
            continue
        trained = time.perf_counter()
        after, traffic = _aggregate(method, state, outcome), lost + outcome.traffic
        last, failures = after.done or enough(traffic), dict(outcome.failures)
        if last and not after.plan.local.statistics:
            after, gathered = gather_statistics(method, after, clients, engine, retries)
            traffic, failures = traffic + gathered.traffic, failures | dict(gathered.failures)
        aggregated = time.perf_counter()
        metrics = _judge(method, after, engine, last) if last or _due(after, eval_every) else {}
        seconds = {
            **outcome.seconds,
            "train": trained - began,
            "aggregate": aggregated - trained,
            "evaluate": time.perf_counter() - aggregated,
        }
        record = Record(
            *state.tag,
            tuple(c.id for c in cohort),
            failures,
            traffic,
            outcome.sums.mean_loss,
            seconds,
            metrics,
            missed,
        )
        state, lost, missed = after, Traffic(), {}
        yield state, record
        if last:
            return


def _orders(method: Method, state: State, cohort: Sequence[Client]) -> Iterator[tuple[Client, Order]]:
    for client in sorted(cohort, key=lambda c: c.id):
        order = method.order(state, client)
        if not isinstance(order, Order):
            raise FlashError(f"{_name(method)}.order gives {type(order).__name__}, not an Order")
        yield client, order


def _raise_if_hopeless(state: State, outcome: Outcome, retries: int) -> None:
    if state.attempt >= retries:
        raise RunStopped(
            f"round {state.round} of stage {state.stage} failed {state.attempt + 1} times, too few clients replied "
            f"({_reasons(outcome)}). The state before it is kept."
        )


def _reasons(outcome: Outcome) -> str:
    return "; ".join(f"client {c}: {why}" for c, why in list(outcome.failures.items())[:3])


def _due(state: State, every: int) -> bool:
    return state.stage == 2 and state.round > 0 and state.round % every == 0


def _aggregate(method: Method, s: State, outcome: Outcome) -> State:
    """The next state. With static BatchNorm nobody reports statistics, so the server's stay what the model brought."""
    after = checked(method, method.aggregate(s, outcome.sums), s)
    if s.plan.local.statistics or after.stage != s.stage:
        return after
    own = s.weights.statistics
    return replace(
        after, weights=after.weights.with_statistics(own), before=after.before and after.before.with_statistics(own)
    )


def checked(method: Method, state: State, before: State | None = None) -> State:
    """What a method gave as the next state (or the first), if it is one."""
    name = f"{_name(method)}.{'aggregate' if before else 'init'}"
    if not isinstance(state, State):
        raise FlashError(f"{name} gives {type(state).__name__}, not a State")
    if before is not None and (state.stage, state.round) == (before.stage, before.round):
        raise FlashError(f"{name} gives a state of the same round: make it with s.next(...) or s.enter(...)")
    vector, mask, layout = state.weights.vector, state.mask, state.layout
    if vector.dtype != torch.float32 or vector.shape != (layout.size,):
        raise FlashError(f"{name}: weights are {vector.dtype} {tuple(vector.shape)}, not float32 ({layout.size},)")
    if mask.bits.dtype != torch.bool or mask.bits.shape != (layout.prunable_size,):
        raise FlashError(
            f"{name}: a mask is {mask.bits.dtype} {tuple(mask.bits.shape)}, not bool ({layout.prunable_size},)"
        )
    if not is_ours(method):
        if not bool(vector.isfinite().all()):
            raise FlashError(f"{name} gives weights that are not finite")
        if tuple(mask.counts) != (found := Mask(layout, mask.bits).counts):
            raise FlashError(f"{name}: a mask is said to have {mask.counts} active weights by layer, and has {found}")
    return state


def _name(method: Method) -> str:
    return method.name or type(method).__name__


def _judge(method: Method, state: State, engine: Engine, last: bool) -> dict[str, dict[str, float]]:
    use_running = state.plan.local.statistics or last  # static BatchNorm has no statistics before the end
    views = method.views(state)
    if not views:
        raise FlashError(f"{_name(method)}.views gives no model to judge")
    for name, weights in views.items():
        if not weights.is_masked():
            raise FlashError(
                f"{_name(method)} gives a model ({name}) with weights outside its mask, by "
                "which it would be judged and which never travel: make it with Weights.masked(mask, vector)"
            )
    return {
        name: {**engine.evaluate(weights, use_running), "density": weights.mask.density}
        for name, weights in views.items()
    }


def gather_statistics(
    method: Method, state: State, clients: Sequence[Client], engine: Engine, retries: int = 2
) -> tuple[State, Outcome]:
    """Static BatchNorm's last act: every client reports the statistics of its data under the final weights."""
    local = replace(state.plan.local, report="statistics", statistics=True, adapt=None, keep=(), start=None)
    asked, traffic = state, Traffic()
    while True:
        outcome = engine.train(asked, ((c, asked.order(c, local, method.held(state, c))) for c in clients))
        traffic += outcome.traffic
        if outcome.sums.clients or state.layout.size == state.layout.trained_size:
            break
        if asked.attempt >= retries:
            raise RunStopped(
                f"no client could report the statistics that static BatchNorm needs in the end ({_reasons(outcome)})"
            )
        asked = asked.again()
    outcome = replace(outcome, traffic=traffic)
    # The average before subsampling has no statistics of its own, so it is no longer one to judge.
    return method.with_statistics(replace(state, before=None), outcome.sums), outcome
