"""Top-K with error feedback: dense training, sparse updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..core.client import Clients, Field, Part
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.state import State
from ..sparsity import weight_budget
from ..sparsity.select import largest
from .common import WithDensity, follow


@dataclass(frozen=True)
class LargestChanges(Part):
    """Report the largest changes of the whole model and remember the others, to be added to the next round's."""

    changes: ClassVar[bool] = True
    density: float = 0.05

    def remembers(self, layout: Layout) -> Mapping[str, Field]:
        return {"residual": Field("dense", layout.prunable_size)}

    def active(self, layout: Layout, before: int) -> tuple[int, int]:
        return (weight_budget(layout, self.density),) * 2

    def finish(self, c: Clients) -> None:
        k, change = c.layout.prunable_size, c.change()
        wanted = change[:, :k] + c.memory["residual"]
        c.masks = largest(wanted, weight_budget(c.layout, self.density))
        c.memory["residual"] = wanted.masked_fill(c.masks, 0.0)
        c.vectors = torch.cat([wanted, change[:, k:], c.vectors[:, c.layout.trained_size :]], 1)


@dataclass(frozen=True)
class TopK(WithDensity):
    """Top-K sparsification with error feedback (Stich et al., 2018; Sattler et al., 2019).

    Clients train the whole model. A client sends only the `density` * K largest entries of (its change + what it could
    not send before) and remembers the rest: u = w_i - w + e_i, sent = top_k(u), e_i = u - sent. The server adds the
    mean of what was sent: w = w + sum(n_i * sent_i) / sum(n_i).

    Silent in the papers: k counts prunable weights over the whole model, not layer by layer; the change of dense
    tensors is sent whole; a client that does not take part keeps its residual as it is.
    Bytes: up, `density` * K values and their positions, and all dense tensors. Down, the whole model: a client that
    missed rounds could not apply a difference. Clients keep 4 bytes a prunable weight between rounds.
    When: as the contrast "sparse updates, not sparse training". Not to be confused with SPDST, which trains and sends
    the same sparse model, in both directions.

    density: the share of changes that a client sends.
    """

    name: ClassVar[str] = "topk"
    exact: ClassVar[bool] = False

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(LargestChanges(self.density),))

    def aggregate(self, s: State, sums: Sums) -> State:
        return s.next(Weights(s.mask, follow(s, sums)))
