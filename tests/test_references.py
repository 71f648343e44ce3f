"""Whole rounds of a system beside the same rounds in plain PyTorch, written from the papers and without the engine.

Each client has one batch, so every step is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashfl as fl
from flashfl.methods import METHODS
from flashfl.sparsity import LayerRegrow
from tests.conftest import blobs

Model = dict[str, Tensor]
NAMES = ("conv.weight", "hidden.weight")
RATE, ROUNDS = 0.5, 3


class Net(torch.nn.Module):
    """A convolution and a hidden layer, both prunable, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 6, 3)
        self.hidden, self.head = torch.nn.Linear(54, 12), torch.nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.hidden(torch.relu(self.conv(x)).flatten(1))))


DATA = [blobs(20, (1, 5, 5), 100), blobs(12, (1, 5, 5), 101)]


def task_of(clients: int) -> fl.Task:
    return fl.Task(Net, DATA[:clients], blobs(30, (1, 5, 5), 7), prunable=NAMES)


def largest(values: Tensor, share: float) -> Tensor:
    """A mask of the largest entries."""
    found = torch.zeros(values.numel(), dtype=torch.bool)
    found[values.abs().flatten().topk(max(1, round(share * values.numel()))).indices] = True
    return found.view(values.shape)


class Linear(torch.autograd.Function):
    """A layer that saves the largest entries of its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x * largest(x, share), w)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, w), [g] = ctx.saved_tensors, grads
        return g @ w, g.t() @ x, g.sum(0), None


class Conv(torch.autograd.Function):
    """A convolution that saves the largest entries of its input only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, share: float) -> Tensor:
        ctx.save_for_backward(x * largest(x, share), w)
        return F.conv2d(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, w), [g] = ctx.saved_tensors, grads
        inputs, weights = torch.nn.grad.conv2d_input(x.shape, w, g), torch.nn.grad.conv2d_weight(x, w.shape, g)
        return inputs, weights, g.sum((0, 2, 3)), None


def gradient(seen: Model, client: int = 0, shares: tuple[float, float] = (1.0, 1.0)) -> Model:
    """The gradient of the loss at the weights that the forward pass sees. shares: of inputs that are saved."""
    leaves = {name: value.clone().requires_grad_() for name, value in seen.items()}
    (x, y), (first, second) = DATA[client], shares
    h = torch.relu(Conv.apply(x, leaves["conv.weight"], leaves["conv.bias"], first)).flatten(1)
    h = torch.relu(Linear.apply(h, leaves["hidden.weight"], leaves["hidden.bias"], second))
    F.cross_entropy(F.linear(h, leaves["head.weight"], leaves["head.bias"]), y).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def each(p: Model, change: Callable[[Tensor], Tensor]) -> Model:
    """The model with its prunable weights changed."""
    return {name: change(value) if name in NAMES else value for name, value in p.items()}


def seen_by_swat(values: Tensor, share: float) -> Tensor:
    """The largest weights of a layer, and that of every output."""
    rows = values.abs().flatten(1)
    top = (rows == rows.amax(1, keepdim=True)).view(values.shape)
    return values * (largest(values, share) | top)


def over_both(p: Model, share: float) -> Model:
    """Masks of the largest prunable weights over the whole model."""
    flat = largest(torch.cat([p[name].flatten() for name in NAMES]), share)
    first = p[NAMES[0]].numel()
    return {name: part.view(p[name].shape) for name, part in zip(NAMES, (flat[:first], flat[first:]), strict=True)}


def stepped(p: Model, g: Model, masks: Model | None = None) -> Model:
    moved = {name: p[name] - RATE * g[name] for name in p}
    return {name: value * (masks or {}).get(name, torch.ones(())) for name, value in moved.items()}


def views(vector: Tensor) -> Model:
    return {name: value.clone() for name, value in task_of(1).layout.views(vector).items()}


def played(name: str, clients: int = 1, epochs: int = 1, **settings: Any) -> tuple[Model, list[Model], fl.State]:
    """The initial weights, the server's model after each round, and the method's first state."""
    task, method, seen = task_of(clients), METHODS[name](**settings), list[fl.State]()
    how: dict[str, Any] = {"per_round": clients, "workers": 1, "batch": 32, "epochs": epochs}
    fl.simulate(method, task, ROUNDS, **how, lr=RATE, lr_end=RATE, watch=lambda s, line: seen.append(s))
    plan = seen[0].plan
    return views(plan.initial()), [views(s.weights.vector) for s in seen][-ROUNDS:], method.init(plan)


def assert_close(expected: Model, found: Model, tolerance: float = 1e-6) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("upload", ["weights", "changes of the largest weights", "largest changes"])
def test_zerofl(upload: str) -> None:
    p, rounds, _ = played("zerofl", density=0.25, mask_ratio=0.25, upload=upload)
    for found in rounds:
        new = stepped(p, gradient(each(p, lambda w: seen_by_swat(w, 0.25)), shares=(0.25, 0.25)))
        for name in NAMES:
            sent = largest(new[name] - p[name] if upload == "largest changes" else new[name], 0.5)
            new[name] = torch.where(sent, new[name], p[name])
        assert_close(p := new, found)


def test_sparsyfed() -> None:
    p, rounds, _ = played("sparsyfed", density=0.3)
    p = each(p, lambda v: v.sign() * v.abs() ** (1 / 1.25))
    for found in rounds:
        seen = each(p, lambda w: w.sign() * w.abs() ** 1.25)
        first, second = (float((seen[name] != 0).float().mean()) for name in NAMES)
        g = gradient(seen, shares=(first, second))
        p = stepped(p, {n: g[n] * 1.25 * p[n].abs() ** 0.25 if n in NAMES else g[n] for n in g})
        p |= {name: p[name] * kept for name, kept in over_both(p, 0.3).items()}
        assert_close(p, found, 1e-3)  # the share of inputs is rounded up here and to the nearest there


def test_ssfl() -> None:
    p, rounds, _ = played("ssfl", clients=2, density=0.3)
    one, two = gradient(p, 0), gradient(p, 1)
    scores = {n: (20 * (one[n] * p[n]).abs() + 12 * (two[n] * p[n]).abs()) / 32 for n in p}
    masks = over_both(scores, 0.3)
    p |= {name: p[name] * kept for name, kept in masks.items()}
    for found in rounds:
        ends = [stepped(p, gradient(p, client), masks) for client in (0, 1)]
        assert_close(p := {n: (20 * ends[0][n] + 12 * ends[1][n]) / 32 for n in p}, found)


def test_feddst() -> None:
    """Two epochs of one batch: in the first two rounds the mask moves after the first."""
    p, rounds, start = played("feddst", epochs=2, density=0.1, interval=1, until=0.6, adapt=LayerRegrow(0.25))
    bits = torch.cat([start.mask.bits.float(), torch.zeros(start.layout.size - start.layout.prunable_size)])
    masks = {name: value.bool() for name, value in views(bits).items() if name in NAMES}
    assert start.mask.counts == tuple(fl.allocate(start.layout, "erk", 0.1))
    p |= {name: p[name] * mask for name, mask in masks.items()}
    for found in rounds:
        for epoch in (0, 1):
            g = gradient(p)
            p = stepped(p, g, masks)
            if epoch or found is rounds[-1]:
                continue
            for n in NAMES:
                old = masks[n]
                count = math.ceil(0.25 * int(old.sum()))
                low = p[n].abs().masked_fill(~old, 9.0).flatten().topk(count, largest=False).indices
                grown = g[n].abs().masked_fill(old, -1.0).flatten().topk(count).indices
                masks[n] = old.flatten().index_fill(0, low, False).index_fill(0, grown, True).view(old.shape)
                p[n] = p[n] * (masks[n] & old)
        assert_close(p, found)


def test_top_k_with_error_feedback() -> None:
    p, rounds, _ = played("topk", clients=2, density=0.2)
    left = [{n: torch.zeros_like(p[n]) for n in NAMES} for _ in DATA]
    for found in rounds:
        total = {n: torch.zeros_like(w) for n, w in p.items()}
        for client, n in enumerate((20, 12)):
            change = {k: -RATE * g for k, g in gradient(p, client).items()}
            change |= {k: change[k] + left[client][k] for k in NAMES}
            sent = over_both(change, 0.2)
            left[client] = {k: change[k] * ~sent[k] for k in NAMES}
            total = {k: total[k] + n * change[k] * sent.get(k, torch.ones(())) for k in total}
        assert_close(p := {k: p[k] + total[k] / 32 for k in p}, found)


def test_scaffold() -> None:
    p, rounds, _ = played("scaffold", clients=2)
    zero = {n: torch.zeros_like(w) for n, w in p.items()}
    server, own = zero, [zero, zero]
    for found in rounds:
        mean, moved = dict(zero), dict(zero)
        for client, n in enumerate((20, 12)):
            g = gradient(p, client)
            corrected = {k: g[k] - own[client][k] + server[k] for k in g}
            new = {k: own[client][k] - server[k] + corrected[k] for k in g}  # one step: (w - w_i) / lr is its gradient
            mean = {k: mean[k] + n * (p[k] - RATE * corrected[k]) / 32 for k in g}
            moved = {k: moved[k] + n * (new[k] - own[client][k]) / 32 for k in g}
            own[client] = new
        p, server = mean, {k: server[k] + moved[k] for k in server}
        assert_close(p, found)
