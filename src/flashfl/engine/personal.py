"""Personal accuracy: each client's own model on test samples weighted to the client's label shares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import torch
from torch import Tensor

from ..core.exchange import Client, Local
from ..core.mask import Weights
from ..core.record import Score
from ..data.sources import Source
from ..sparsity import recipe_mask
from .memory import ClientMemory
from .train import Trainer, evaluation_batches


def personal_score(
    trainer: Trainer, memory: ClientMemory, weights: Weights, clients: Iterable[tuple[Client, Local]]
) -> Score | None:
    """The mean over clients of the accuracy of `weights` under each client's own mask.

    A test sample of class y counts with the client's share of y among its training samples over the test set's share.
    None if there is no common test set, or if targets are not classes. A client that never took part has the mask that
    it would start with.
    """
    test = trainer.task.test
    classes = None if test is None else _targets(test)
    if test is None or classes is None:
        return None
    found, densities = [], []
    most = int(classes.max()) + 1
    there = torch.bincount(classes, minlength=most).double() / len(classes)
    for client, local in clients:
        mask = memory.remembered(client.id) if "mask" in local.keep else None
        if mask is None and local.start is not None:
            mask = recipe_mask(weights.layout, local.start, weights.vector.device)
        model = weights if mask is None else weights.restrict(mask.to(weights.vector.device))
        mine = _targets(trainer.task.train[client.id])
        if mine is None:
            return None
        here = torch.bincount(mine[mine < most], minlength=most).double() / len(mine)
        share = torch.where(there > 0, here / there.clamp(min=1e-12), 0.0)[classes]
        right = torch.cat(
            [
                trainer.outputs(model, test, torch.arange(start, stop), local.statistics).argmax(1).cpu()
                for start, stop in evaluation_batches(len(test))
            ]
        )
        if total := float(share.sum()):
            found.append(float((share * (right == classes)).sum()) / total)
            densities.append(model.mask.density)
    return Score(float("nan"), statistics.fmean(found), statistics.fmean(densities)) if found else None


def _targets(data: Source) -> Tensor | None:
    """All targets of some samples, if they are classes."""
    found = [data.fetch(torch.arange(start, stop))[1].cpu() for start, stop in evaluation_batches(len(data))]
    whole = torch.cat(found)
    return whole if whole.dim() == 1 and not whole.is_floating_point() else None
