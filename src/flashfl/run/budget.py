"""A budget of bytes instead of a density: how dense a model may be, and in how many bits its values travel."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path

import torch

from ..core.errors import ConfigError, warn
from ..core.exchange import Client, Local, Traffic
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.method import Method
from ..core.precision import Form
from ..core.state import TRAINING, Plan, State
from ..data.task import Task
from ..wire import Message, size_with
from ..wire.geometry import geometry
from .config import TrainConfig, plan_of
from .results import Results

_SLACK = 96  # bytes: settings are texts whose numbers differ in length, and a first message has a longer mask
_TOLERATED = 1.01  # the mask of a method that moves it is only estimated
_DENSEST = 0.5  # with more weights than that, more bits for each are worth more than more weights
CHOICES: tuple[Form, ...] = ("int4", "int8", "fp16", "fp32")  # from the fewest bits to the most


@dataclass(frozen=True)
class Cost:
    """What a client and round of a method take on average, each way, as closed forms of the density."""

    method: Method
    plan: Plan

    @cached_property
    def work(self) -> list[Local]:
        """The work of a client in each round of the training phase."""
        start = self.method.init(self.plan)
        if not start.phase.counts:  # what a first phase will find is not known
            start = State(self.plan, Weights.dense(self.plan.layout, torch.zeros(self.plan.layout.size)), TRAINING)
        rounds = range(self.plan.rounds)
        return [self.method.work(replace(start, round=r, counted=r), Client(0, 1)) for r in rounds]

    def bytes(self, density: float, train: TrainConfig) -> tuple[int, int]:
        """Bytes of a client and round, (down, up), averaged over the run with a first phase.

        train: in how many bits values travel.
        """
        layout = self.plan.layout
        active = math.ceil(density * layout.prunable_size)
        moving = sum(work.adapt is not None or "mask" in work.keep for work in self.work) / len(self.work)
        masks = math.ceil(moving * _mask_bytes(layout, density)) + geometry(layout).known_size
        longest, tag = max(self.work, key=lambda work: len(repr(work))), (TRAINING.number, self.plan.rounds, 0)
        carries = longest.order_carries
        order = Message("order", layout, tag, 0, start=tag, own="0" * 16, local=longest, carries=carries)
        update = Message("update", layout, tag, 0, metrics={"loss": 0.0}, carries=carries)
        down, up = size_with(order, active, masks, train.down).total, size_with(update, active, masks, train.up).total
        # A first phase sends the model to some clients, and static BatchNorm to all of them at the end.
        more = getattr(self.method, "warmup_clients", 0) if len(self.method.phases) > 1 else 0
        more += 0 if longest.statistics else self.plan.clients
        last = 0 if longest.statistics else 4 * (layout.size - layout.trained_size)
        share = more / (self.plan.rounds * self.plan.per_round)
        return math.ceil(down + share * (down + last)) + _SLACK, math.ceil(up + share * last) + _SLACK

    def densest(self, train: TrainConfig) -> float:
        """The largest density, in steps of 0.01 %, that stays within the budget; 0 if none does."""
        steps = range(1, 10_001)
        return bisect_right(steps, train.budget, key=lambda step: max(self.bytes(step / 10_000, train))) / 10_000


def _mask_bytes(layout: Layout, density: float) -> float:
    """About what a mask takes that its receiver does not know: its entropy and 5 %, at most a bit a weight."""
    entropy = -sum(p * math.log2(p) for p in (density, 1 - density) if p > 0)
    return min(geometry(layout).bitmap_size, 1.05 * layout.prunable_size * entropy / 8 + 8 * len(layout.prunable) + 16)


def within_budget(
    method: Method, task: Task, train: TrainConfig, folder: Path | None = None
) -> tuple[Method, TrainConfig, str]:
    """The method with the density, and the settings with the bits, that stay within `train.budget`; and a sentence.

    Bits that are set stay as they are. Otherwise, and with the default fp32, the fewest bits are taken, unless they
    would make the model denser than one half. folder: of a run that goes on, perhaps for more rounds. It keeps the
    density that fits the rounds it was begun with.
    """
    if train.private:
        raise ConfigError(
            f"budget = {train.budget}: not possible with `secure` or `dp_*`, which encode updates in their own "
            "way. Set budget = 0, and a density."
        )
    own = next((f for f in fields(method) if f.name == "density" and f.init and not f.metadata.get("derived")), None)
    if own is None:
        raise ConfigError(
            f"budget = {train.budget}: {method.name} has no density to choose. Use a sparse method, or set no budget. "
            "In a comparison, give the budget to single methods, such as --spdst.budget 2.3MB "
            "instead of --budget 2.3MB."
        )
    begun = replace(train, rounds=_begun(folder, train.rounds))
    plan = plan_of(begun, task, max(train.per_round, len(task.train)), method=method)
    cost = Cost(method, plan)
    chosen = train.values == "fp32" and not (train.values_up or train.values_down)
    for form in CHOICES if chosen else (train.values,):
        rest = "fp16" if chosen and form != "fp32" else train.rest
        made = replace(train, values=form, rest=rest)
        density = cost.densest(made)
        if density <= _DENSEST:
            break
    if density == 0:
        least = max(cost.bytes(1e-4, made))
        raise ConfigError(
            f"budget = {train.budget}: too small. With values {made.down.values} down and {made.up.values} up, and "
            f"rest {made.rest}, the dense part of the model of {task.name} alone needs about {least} bytes a message. "
            "Raise the budget."
        )
    found = replace(method, density=density)  # type: ignore[call-arg]
    _check_sent(found, plan, density, train.budget)
    given = method.density  # type: ignore[attr-defined]
    instead = f" instead of {given:g}" if given not in (own.default, density) else ""
    down, up = cost.bytes(density, made)
    said = (
        f"budget of {train.budget} bytes a client and round each way: density {density:g}{instead}, "
        f"values {made.down.values} down and {made.up.values} up, about {down} bytes down and {up} up"
    )
    return found, made, said


def _check_sent(method: Method, plan: Plan, density: float, budget: int) -> None:
    """Refuse a method whose clients are sent a denser model than its `density` says."""
    start = method.init(plan)
    if method.work(start, Client(0, 1)).start is not None:  # each is sent the part that its own mask covers
        return
    if (sent := start.mask.density) > density + 1 / plan.layout.prunable_size:
        raise ConfigError(
            f"budget = {budget}: {method.name} sends clients a model of density {sent:.2g}, whatever its own density "
            "is. Use another method, such as spdst."
        )


def _begun(folder: Path | None, rounds: int) -> int:
    """The rounds that the run in a folder was begun with; `rounds` if there is none."""
    if folder is None or (held := Results.held(folder)) is None:
        return rounds
    now = held.header.get("identity", {}).get("settings", {}).get("rounds")
    first = next(iter(held.header.get("extended", ())), now)
    return first if isinstance(first, int) and first > 0 else rounds


def warn_if_over(method: Method, train: TrainConfig, traffic: Traffic) -> None:
    """Warn if a finished run took more bytes than its budget allows: some messages hold more than a density says."""
    rounds = train.rounds * train.per_round
    down, up = traffic.down // rounds, traffic.up // rounds
    if train.budget and max(down, up) > _TOLERATED * train.budget:
        warn(
            f"{method.name} took more than budget = {train.budget}: {down} bytes down and {up} bytes up for each "
            "client and round, as its density does not decide all that is sent. To stay within it, run "
            "again with a lower budget."
        )
