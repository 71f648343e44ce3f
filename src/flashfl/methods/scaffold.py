"""SCAFFOLD: dense training whose steps are corrected by control variates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.client import Clients, Field, Part, Rows
from ..core.exchange import Client, Extra, Local, Sums
from ..core.layout import Layout
from ..core.state import Plan, State
from .dense import Dense


@dataclass(frozen=True)
class ControlVariate(Part):
    """Adds c - c_i to every gradient; afterwards c_i becomes c_i - c + (start - end) / (sum of learning rates).

    lr_last: as in `Local`.
    """

    lr_last: float = 1.0

    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        return {"control": Field("dense", layout.trained_size)}

    reports = remembers

    def begin(self, c: Clients) -> None:
        c.state["correction"] = c.given["control"] - c.memory["control"]

    def before(self, r: Rows, gradient: Tensor) -> None:
        gradient.add_(r.state["correction"])

    def finish(self, c: Clients) -> None:
        steps = torch.tensor(c.steps, device=c.start.device)[:, None]
        mean = 1 - (1 - self.lr_last) * (steps - 1) / (2 * steps)  # of the learning rates, over the first
        change = -c.given["control"] - c.change() / (steps * mean * max(c.lr, 1e-12))
        c.report["control"] = change
        c.memory["control"] = c.memory["control"] + change


@dataclass(frozen=True)
class Scaffold(Dense):
    """SCAFFOLD (Karimireddy et al., ICML 2020), with option II for the clients' control variates.

    The server sends c beside the model. A client steps along g - c_i + c and afterwards sets
    c_i' = c_i - c + (w - w_i) / (steps * lr), which it remembers. It reports c_i' - c_i. The server averages models,
    and c = c + (S / N) * mean(c_i' - c_i), with S of N clients in the round.

    Silent in the paper: means are weighted by n, as for models; statistics of BatchNorm are averaged as ever; with
    momentum the difference of the weights is used all the same; if the learning rate falls within the round, its mean.
    Bytes: twice the whole model in both directions. Clients keep 4 bytes a trained weight between rounds.
    When: clients' data differ much and bytes do not matter. Not to be confused with FedProx (`--prox`), which needs no
    memory.
    """

    name: ClassVar[str] = "scaffold"

    def init(self, plan: Plan) -> State:
        s = super().init(plan)
        return State(plan, s.weights, extra={"control": torch.zeros_like(s.weights.vector[: s.layout.trained_size])})

    def download(self, s: State) -> Mapping[str, Extra]:
        return {"control": Extra("dense", s.kept(Tensor, "control"))}

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(ControlVariate(s.plan.local.lr_last),))

    def aggregate(self, s: State, sums: Sums) -> State:
        share = sums.clients / s.plan.clients
        control = s.kept(Tensor, "control") + share * (sums.extra["control"] / sums.n).float()
        return s.next(super().aggregate(s, sums).weights, control=control)
