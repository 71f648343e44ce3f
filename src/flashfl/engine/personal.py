"""Personal accuracy: each client's own model on test samples weighted to the client's label shares."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from ..core.exchange import Client, Local
from ..core.mask import Weights
from ..core.record import Score
from ..data.sources import classes_of
from ..sparsity import recipe_mask
from .memory import ClientMemory
from .train import Trainer, evaluation_batches


def personal_score(
    trainer: Trainer, memory: ClientMemory, weights: Weights, clients: Iterable[tuple[Client, Local]]
) -> Score | None:
    """The mean over clients of the accuracy of `weights` under each client's own mask.

    Test samples of a class count with the client's share of that class among its training samples.
    None if there is no common test set, or if targets are not classes. A client that never took part has the mask that
    it would start with.
    """
    test = trainer.task.test
    classes = None if test is None else classes_of(test)
    if test is None or classes is None:
        return None
    most = int(classes.max()) + 1
    scores: list[Score] = []
    made: dict[Hashable, tuple[Tensor, float]] = {}  # outputs and density by mask: clients that share one are many
    for client, local in clients:
        mine = classes_of(trainer.task.train[client.id])
        if mine is None:
            return None
        shares = torch.bincount(mine[mine < most], minlength=most) * (torch.bincount(classes, minlength=most) > 0)
        if not int(shares.sum()):
            continue
        mask = memory.remembered(client.id) if "mask" in local.keep else None
        key = local.start if mask is None else mask.hash
        if key not in made:
            if mask is None and local.start is not None:
                mask = recipe_mask(weights.layout, local.start, weights.vector.device)
            model = weights if mask is None else weights.restrict(mask.to(weights.vector.device))
            batches = [torch.arange(start, stop) for _, start, stop in evaluation_batches([test])]
            output = torch.cat([trainer.outputs(model, test, index, local.statistics).cpu() for index in batches])
            made[key] = output, model.mask.density
        loss, metric = _weighted(trainer, made[key][0], classes, (shares / shares.sum()).tolist())
        scores.append(Score(loss, metric, made[key][1]))
    if not scores:
        return None
    return Score(*(statistics.fmean(column) for column in zip(*map(astuple, scores), strict=True)))


def _weighted(trainer: Trainer, output: Tensor, classes: Tensor, shares: Sequence[float]) -> tuple[float, float]:
    """Loss and accuracy of each class, weighted by the client's share of it."""
    loss = metric = 0.0
    for label, share in enumerate(shares):
        if share:
            here = classes == label
            loss += share * float(trainer.task.loss(output[here], classes[here]))
            metric += share * float((output[here].argmax(1) == label).float().mean())
    return loss, metric
