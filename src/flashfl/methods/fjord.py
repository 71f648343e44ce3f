"""FjORD: ordered dropout, a width drawn anew in each step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.client import Clients, Rows, draw_one
from ..core.exchange import Client, Local
from ..core.state import State
from ..sparsity.width import belonging
from .widths import Width, Widths


@dataclass(frozen=True)
class OrderedDropout(Width):
    """In each step the forward pass sees the channels of a width drawn from those up to the client's own."""

    def begin(self, c: Clients) -> None:
        wider = [~belonging(c.layout, width, c.start.device) for width in self.widths]
        c.state["level"] = torch.stack(wider).sum(0, dtype=torch.float32).expand(len(c.start), -1)

    def _kept(self, r: Rows) -> Tensor:
        return r.state["level"] <= (draw_one(r) * (self.widths.index(self.width) + 1)).floor()

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        return weights * self._kept(r)

    def before(self, r: Rows, gradient: Tensor) -> None:
        gradient.mul_(self._kept(r))


@dataclass(frozen=True)
class FjORD(Widths):
    """FjORD (Horvath et al., NeurIPS 2021): ordered dropout, without self-distillation.

    As HeteroFL, a client of width p holds the first ceil(p C) channels of every layer. In each step it draws one of the
    widths up to p, each equally likely, and trains that slice only. So the first channels matter most, and every
    narrower model inside a client's works. The server averages each weight over the clients that hold it.

    Silent or left out: self-distillation from the widest model; all slices of a client share its BatchNorm statistics
    in training (the paper keeps them for each width), and each client width has its own on the server; FLOPs are
    counted as if every step had the client's full width.
    Bytes: the masked weights, about p^2 of the model in both directions. A mask is sent once.
    When: one training run must give models of several sizes. Not to be confused with HeteroFL, where a client always
    trains its full width.
    """

    name: ClassVar[str] = "fjord"

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(OrderedDropout(self.widths, client.density or self.widths[-1]),))
