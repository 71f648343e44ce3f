"""A user's file: a method whose part uses every power that the built-in ones have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

import flashfl as fl
from flashfl.core.client import Clients, Field, Part, Rows, draw
from flashfl.core.exchange import Extra
from flashfl.core.layout import Layout
from flashfl.core.parts import part
from flashfl.sparsity.select import lowest, magnitude


@part
@dataclass(frozen=True)
class Noisy(Part):
    """Drops a tenth of the weights at random in each step, follows a pull, and sends half of what it trained."""

    share: float = 0.5

    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        return {
            "seen": Field("scalar"),
            "last": Field("bits", layout.prunable_size),
            "mean": Field("dense", layout.trained_size),
        }

    def reports(self, layout: Layout) -> Mapping[str, Field]:
        return {"seen": Field("scalar"), "high": Field("indices", layout.prunable_size), "size": Field("masked")}

    def active(self, layout: Layout, before: int) -> tuple[int, int]:
        return 10, before

    def begin(self, c: Clients) -> None:
        c.state["total"] = c.given["pull"] * 0.1 + 0.9 * c.memory["mean"]

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        return weights * (draw(r) < 0.9)

    def before(self, r: Rows, gradient: Tensor) -> None:
        gradient.add_(r.state["total"], alpha=0.01)
        r.state["total"].add_(gradient, alpha=0.001)

    def after(self, r: Rows, gradient: Tensor) -> None:
        r.weights.mul_(1 - 0.001 * r.lr)

    def finish(self, c: Clients) -> None:
        k = c.layout.prunable_size
        c.memory["seen"] = c.memory["seen"] + 1
        c.memory["mean"] = c.state["total"]
        half = [max(10, int(m.sum()) // 2) for m in c.masks]
        c.masks = lowest(-magnitude(c.vectors[:, :k]), torch.tensor(half, device=c.masks.device), c.masks)
        c.memory["last"] = c.masks
        c.report = {"seen": c.memory["seen"], "high": c.vectors[:, :k].abs() > 0.2, "size": c.vectors[:, :k].abs()}

    def tally(self, layout: Layout, vectors: Tensor, masks: Tensor) -> Mapping[str, Tensor]:
        return {"kept": masks, "square": vectors[:, : layout.prunable_size] ** 2}


@dataclass(frozen=True)
class Mine(fl.Method):
    """Half of what was trained travels."""

    name: ClassVar[str] = "mine"
    exact: ClassVar[bool] = False
    density: float = 0.5

    def init(self, plan: fl.Plan) -> fl.State:
        w = fl.Weights.dense(plan.layout, plan.initial())
        return fl.State(plan, w, extra={"pull": torch.zeros_like(w.vector[: plan.layout.trained_size])})

    def download(self, s: fl.State) -> Mapping[str, Extra]:
        return {"pull": Extra("dense", s.kept(Tensor, "pull"))}

    def work(self, s: fl.State, client: fl.Client) -> fl.Local:
        return self.local(s, parts=(Noisy(),))

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        k, v = s.layout.prunable_size, fl.wfa(sums)
        v[:k] = torch.where(sums.extra["kept"] > 0, v[:k], s.weights.vector[:k])
        pull = s.kept(Tensor, "pull").clone()
        pull[:k] = (sums.extra["square"] / sums.n).float() + (sums.extra["high"] / sums.n).float() * float(
            sums.extra["seen"] / sums.n
        )
        return s.next(fl.Weights(s.mask, v), pull=pull)


fl.METHODS["mine"] = Mine
