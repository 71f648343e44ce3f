"""The masked SGD step, the same in every engine: it changes a stack of models by one gradient each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.exchange import Adapt, Local
from ..core.kernel import kernel


@dataclass(frozen=True)
class StepSettings:
    """What a step depends on, beside the learning rate. A captured step serves one of these."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    prox: float = 0.0
    lr_last: float = 1.0
    multiply: float = 0.0
    shrink: float = 0.0
    rule: Adapt | None = None  # the rule that moves masks, if it needs the gradient of every step

    @staticmethod
    def of(local: Local) -> StepSettings:
        rule = local.adapt if local.adapt is not None and local.adapt.dense_gradient else None
        return StepSettings(
            local.momentum, local.weight_decay, local.prox, local.lr_last, local.multiply, local.shrink, rule
        )

    @property
    def plain(self) -> bool:
        """Whether a step is the learning rate times the gradient, and nothing else."""
        return not (self.momentum or self.weight_decay or self.prox or self.multiply or self.shrink)


class MaskedStep:
    """SGD with momentum, weight decay and a proximal term, in place, on the weights [rows, trained] of some models.

    In the first `prunable` columns only the weights that `masks` [rows, prunable] mark are trained; None marks all.
    `half` is a copy of these columns in half precision, which follows every step. Every buffer keeps its address, so
    steps can be captured as CUDA graphs.
    """

    def __init__(self, weights: Tensor, prunable: int, masks: Tensor | None = None, half: Tensor | None = None) -> None:
        self.weights, self.prunable, self.masks, self.half = weights, prunable, masks, half
        self.settings = StepSettings()
        rows, device = len(weights), weights.device
        self.lr = torch.zeros(rows, 1, device=device)
        self.count, self.steps = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)
        self.scores: Tensor | None = None  # what the rule has collected
        self._start: Tensor | None = None
        self._velocity: Tensor | None = None
        self._inactive = None if masks is None else torch.empty_like(masks)
        # A kernel for plain SGD on one model: one pass over memory instead of several.
        self._fused = kernel("step", "masked_step") if weights.is_cuda and len(weights) == 1 and prunable else None

    def begin(self, settings: StepSettings, lr: float, steps: Sequence[int] = ()) -> None:
        """Take on new models: their weights and masks are in place. steps: how many each of them will take."""
        self.settings = settings
        self.lr.fill_(lr)
        self.count.zero_()
        if steps and settings.lr_last != 1:
            self.steps[: len(steps), 0] = torch.tensor(steps)
        if settings.momentum:
            self._velocity = torch.zeros_like(self.weights) if self._velocity is None else self._velocity.zero_()
        if settings.rule is not None:
            if self.scores is None:
                self.scores = torch.zeros(len(self.weights), self.prunable, device=self.weights.device)
            self.scores.zero_()
        self.moved()
        if settings.prox:
            self._start = self.weights.clone() if self._start is None else self._start.copy_(self.weights)

    def moved(self) -> None:
        """Follow a change of the masks: inactive weights become zero and lose their velocity."""
        if self.masks is not None and self._inactive is not None:
            torch.logical_not(self.masks, out=self._inactive)
            self.weights[:, : self.prunable].masked_fill_(self._inactive, 0.0)
            if self.settings.momentum and self._velocity is not None:
                self._velocity[:, : self.prunable].masked_fill_(self._inactive, 0.0)
        self._follow()

    def _follow(self) -> None:
        if self.half is not None:
            self.half.copy_(self.weights[:, : self.prunable])

    @torch.no_grad()
    def __call__(self, head: Tensor, rest: Tensor, busy: Tensor | None = None) -> None:
        """One step down the gradients of the prunable weights and of the others, which are overwritten.

        busy [rows, 1]: rows in which it is False stay as they are.
        """
        s, rule, scores, lr = self.settings, self.settings.rule, self.scores, self._rate(busy)
        if rule is not None and scores is not None:
            _change(scores, busy, lambda rows: rule.collect(rows, head.float()))
        if self._fused is not None and self.masks is not None and s.plain:
            half = None if self.half is None else self.half[0]
            self._fused(self.weights[0, : self.prunable], half, head[0], self.masks[0], lr)
        else:
            head = head.float()
            followed = head.clone() if s.multiply or s.shrink else None
            self._descend(slice(0, self.prunable), head, self._inactive, lr, busy)
            if followed is not None:
                sparse = self.weights[:, : self.prunable]
                sparse.mul_(torch.exp(-lr * (followed.mul_(sparse.sign()).mul_(s.multiply).add_(s.shrink))))
            self._follow()
        self._descend(slice(self.prunable, None), rest, None, lr, busy)
        if s.lr_last != 1:
            self.count += 1 if busy is None else busy

    def _rate(self, busy: Tensor | None) -> Tensor:
        """The learning rate of this step, [rows, 1]."""
        lr = self.lr
        if self.settings.lr_last != 1:
            lr = lr * (1 - (1 - self.settings.lr_last) * self.count / self.steps.clamp(min=1))
        return lr if busy is None else lr * busy

    def _descend(
        self, columns: slice, gradient: Tensor, inactive: Tensor | None, lr: Tensor, busy: Tensor | None
    ) -> None:
        """Change some columns. Only a proximal term allocates anything as large as the model."""
        s, weights = self.settings, self.weights[:, columns]
        if s.weight_decay:
            gradient.add_(weights, alpha=s.weight_decay)
        if s.prox and self._start is not None:
            gradient.add_(weights - self._start[:, columns], alpha=s.prox)
        if inactive is not None:
            gradient.masked_fill_(inactive, 0.0)
        if s.momentum and self._velocity is not None:
            velocity, change = self._velocity[:, columns], gradient
            _change(velocity, busy, lambda rows: rows.mul_(s.momentum).add_(change))
            gradient = velocity
        weights.addcmul_(gradient, lr, value=-1)


def _change(state: Tensor, busy: Tensor | None, change: Callable[[Tensor], object]) -> None:
    """Apply a change that works in place, to the busy rows only."""
    if busy is None:
        change(state)
    else:
        new = state.clone()
        change(new)
        state.copy_(torch.where(busy, new, state))
