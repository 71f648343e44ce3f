"""HeteroFL: clients of different strength train narrower versions of one model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..core.client import Clients, Field, Rows
from ..core.exchange import Client, Local, Sums
from ..core.layout import Layout
from ..core.mask import Weights
from ..core.state import State
from ..sparsity.width import belonging, classifier, scaled
from .widths import Width, Widths


@dataclass(frozen=True)
class Slice(Width):
    """Train the channels of a width, with the scaler and the masked cross-entropy if asked for.

    Both are factors on weights. The scaler divides a narrowed layer's output by the width: so its weight and bias. The
    masked loss sets the outputs of classes that the client lacks to 0: so their rows of the last matrix.
    """

    scaler: bool = False
    masked_loss: bool = False

    def reports(self, layout: Layout) -> Mapping[str, Field]:
        rows = classifier(layout)[0].shape[0] if self.masked_loss and classifier(layout) else 0
        return {self.classes: Field("bits", rows)} if rows else {}

    @property
    def classes(self) -> str:
        """The name of the report, one for each width: not all of them have every input of the classifier."""
        return f"classes {self.width}"

    def _present(self, c: Clients) -> Tensor:
        """Which classes each client has, [clients, classes]; all if its targets are not classes of the model."""
        rows = classifier(c.layout)[0].shape[0]
        found = torch.ones(len(c.keys), rows, dtype=torch.bool)
        for row, targets in enumerate(map(c.classes, range(len(c.keys)))):
            if targets is not None and len(targets) and int(targets.min()) >= 0 and int(targets.max()) < rows:
                found[row] = torch.bincount(targets, minlength=rows) > 0
        return found.to(c.start.device)

    def begin(self, c: Clients) -> None:
        factor = belonging(c.layout, self.width, c.start.device).float().repeat(len(c.keys), 1)
        if self.scaler:
            factor *= torch.where(scaled(c.layout).to(factor.device), self.widths[-1] / self.width, 1.0)
        if self.reports(c.layout):
            present = c.report[self.classes] = self._present(c)
            for span in _rows(c.layout, factor):
                span.mul_(present[:, :, None])
        c.state["factor"] = factor

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        return weights * r.state["factor"]

    def backward(self, r: Rows, gradient: Tensor) -> None:
        gradient.mul_(r.state["factor"])

    def finish(self, c: Clients) -> None:
        if self.reports(c.layout):
            present, c.vectors = c.report[self.classes], c.vectors.clone()
            for span, start in zip(_rows(c.layout, c.vectors), _rows(c.layout, c.start), strict=True):
                span.copy_(torch.where(present[:, :, None], span, start))  # weight decay may have moved them


def _rows(layout: Layout, models: Tensor) -> list[Tensor]:
    """The last matrix and its bias in some models [models, ...], each as [models, classes, inputs]."""
    return [models[:, x.span].view(len(models), x.shape[0], -1) for x in classifier(layout)]


@dataclass(frozen=True)
class HeteroFL(Widths):
    """HeteroFL (Diao et al., ICLR 2021): nested width slices of one model.

    A client of width p trains the first ceil(p C) channels of every layer; BatchNorm parameters and biases of the other
    channels are 0. In training, a scaler divides the output of each narrowed layer by p, so that layers see inputs of
    the size that the widest model has; outputs of classes that the client has no samples of are 0 (masked
    cross-entropy). The server averages each weight over the clients that have it, w = sum(n m w) / sum(n m), also for
    BatchNorm and biases, and rows of the last layer over the clients that have the class. A weight that nobody trained
    in the round keeps its value.

    Silent or changed: p counts relative to the widest client; each width has its own BatchNorm statistics, unless the
    run uses `static_bn`, which is the paper's choice; the scaler changes nothing where BatchNorm follows; narrow models
    are evaluated with the scaler if their statistics were taken under it, otherwise without, as in the paper; the
    classifier is sent whole, with zeros for the inputs that a narrow model lacks.
    Bytes: the masked weights, about p^2 of the model in both directions, and one bit a class up. A mask is sent once.
    When: clients differ in memory and arithmetic, and cannot use unstructured sparsity. Not to be confused with
    hetero-SPDST, whose sub-models keep all channels, or FjORD, which draws a width in each step.

    widths, shares: the widths, and the share of clients that get each (on the command line: --widths 0.5,1 --shares
    0.3,0.7). A client may also state its own as its density.
    scaler: divide outputs of narrowed layers by the width in training. masked_loss: a client's loss ignores classes
    that it has no samples of; the server learns which classes a client has.
    """

    name: ClassVar[str] = "heterofl"
    scaler: bool = True
    masked_loss: bool = True

    def work(self, s: State, client: Client) -> Local:
        return self.local(s, parts=(self._slice(client.density or self.widths[-1]),))

    def _slice(self, width: float) -> Slice:
        return Slice(self.widths, width, self.scaler, self.masked_loss)

    def aggregate(self, s: State, sums: Sums) -> State:
        after, names = super().aggregate(s, sums), {width: self._slice(width).classes for width in self.widths}
        found = {width: sums.extra[name][:, None] for width, name in names.items() if name in sums.extra}
        if not found:
            return after
        vector, old = after.weights.vector.clone(), s.weights.vector
        kept = {width: belonging(s.layout, width, vector.device) for width in found}
        for layer in classifier(s.layout):
            span, shape = layer.span, (layer.shape[0], -1)
            having = torch.stack([n * kept[width][span].view(shape) for width, n in found.items()]).sum(0)
            share = (having.flatten() / sums.extra["kept"][span].clamp(min=1)).float()
            # Clients without the class left its row as it was, so the mean change is that of the others times `share`.
            changed = old[span] + (vector[span] - old[span]) / share.clamp(min=1e-9)
            vector[span] = torch.where(share > 0, changed, old[span])
        return replace(after, weights=Weights(after.mask, vector))

    def views(self, s: State) -> Mapping[str, Weights]:
        """Narrow models have the scaler if their statistics were taken under it."""
        found = super().views(s)
        if not self.scaler or not s.plan.local.statistics or s.layout.size == s.layout.trained_size:
            return found
        factors = {f"width {width}": self.widths[-1] / width for width in self.widths}
        return {name: _times(model, factors.get(name, 1.0)) for name, model in found.items()}


def _times(model: Weights, factor: float) -> Weights:
    """The model with the outputs of its narrowed layers multiplied."""
    layout, vector = model.mask.layout, model.vector.clone()
    vector[: layout.trained_size] *= torch.where(scaled(layout).to(vector.device), factor, 1.0)
    return Weights(model.mask, vector)
