"""The masked SGD step, the same in every engine: it changes a stack of models by one gradient each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

import torch
from torch import Tensor

from ..core.client import Part, Place, Rows, overrides
from ..core.exchange import Adapt, Local
from ..core.kernel import kernel
from ..core.rng import words

_HOOKS = ("view", "backward", "before", "after", "inputs")  # what parts do in steps
_PLAIN = Local()


def _in_steps(parts: Sequence[Part]) -> tuple[Part, ...]:
    return tuple(part for part in parts if overrides(part, *_HOOKS))


def _rule(local: Local) -> Adapt | None:
    """The rule that moves masks, if it needs the gradient of every step."""
    return local.adapt if local.adapt is not None and local.adapt.dense_gradient else None


class MaskedStep:
    """SGD with momentum, weight decay and a proximal term, in place, on the weights [rows, trained] of some models.

    In the first `prunable` columns only the weights that `masks` [rows, prunable] mark are trained; None marks all.
    `half` is a copy of these columns in half precision, which follows every step. Every buffer keeps its address, so
    steps can be captured as CUDA graphs. `place` says where weights lie; only parts need it.
    """

    def __init__(
        self,
        weights: Tensor,
        prunable: int,
        masks: Tensor | None = None,
        half: Tensor | None = None,
        place: Place | None = None,
    ) -> None:
        self.weights, self.prunable, self.masks, self.half = weights, prunable, masks, half
        self.local = _PLAIN
        rows, device = len(weights), weights.device
        self.lr = torch.zeros(rows, 1, device=device)
        self.count, self.steps = torch.zeros(2, rows, 1, dtype=torch.int64, device=device)
        self._place, self._keys = place, torch.zeros(rows, 2, dtype=torch.int32, device=device)
        self.state: dict[str, Tensor] = {}  # what parts carry through the steps
        self._buffers: dict[str, Tensor] = {}  # where it lies
        self.scores: Tensor | None = None  # what the rule has collected
        self._parts: tuple[Part, ...] = ()
        self._views: tuple[Part, ...] = ()
        # As large as the weights once they are needed; `_kept` holds these while the forward pass sees something else.
        self._start = self._velocity = self._kept = torch.empty(0)
        self._inactive = None if masks is None else torch.empty_like(masks)
        # A kernel for SGD with weight decay on one model: one pass over memory instead of several.
        self._fused = kernel("step", "masked_step") if weights.is_cuda and rows == 1 and prunable else None

    @staticmethod
    def key_of(local: Local) -> Hashable:
        """What a step depends on, beside the learning rate. A captured step serves one such key."""
        return (local.momentum, local.weight_decay, local.prox, local.lr_last, _rule(local), _in_steps(local.parts))

    @property
    def key(self) -> Hashable:
        return self.key_of(self.local)

    def begin(
        self,
        local: Local,
        keys: Sequence[int] = (),
        steps: Sequence[int] = (),
        state: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Take on new models: their weights and masks are in place.

        keys: of the randomness in parts. steps: how many each model will take. state: what parts put there; rows beyond
        those given have none.
        """
        self.local = local
        self._parts = _in_steps(local.parts)
        self._views = tuple(part for part in self._parts if overrides(part, "view"))
        self.lr.fill_(local.lr)
        self.count.zero_()
        if steps and (self._parts or local.lr_last != 1):
            self.steps[: len(steps), 0] = torch.tensor(steps)
        if self._parts and keys:
            self._keys[: len(keys)] = words(keys, self._keys.device)
        for name, value in (state or {}).items():
            if name not in self._buffers:
                self._buffers[name] = value.new_zeros(len(self.weights), value.shape[1])
            self._buffers[name][: len(value)] = value
        self.state = {name: self._buffers[name] for name in state or {}}
        if local.momentum:
            self._velocity = self._velocity.zero_() if len(self._velocity) else torch.zeros_like(self.weights)
        if _rule(local) is not None:
            if self.scores is None:
                self.scores = torch.zeros(len(self.weights), self.prunable, device=self.weights.device)
            self.scores.zero_()
        if self._views and not len(self._kept):
            self._kept = torch.zeros_like(self.weights)
        self.moved()
        if local.prox:
            self._start = self._start.copy_(self.weights) if len(self._start) else self.weights.clone()

    def moved(self) -> None:
        """Follow a change of the masks: inactive weights become zero and lose their velocity."""
        if self.masks is not None and self._inactive is not None:
            torch.logical_not(self.masks, out=self._inactive)
            self.weights[:, : self.prunable].masked_fill_(self._inactive, 0.0)
            if self.local.momentum:
                self._velocity[:, : self.prunable].masked_fill_(self._inactive, 0.0)
        self._follow()

    def _follow(self) -> None:
        if self.half is not None:
            self.half.copy_(self.weights[:, : self.prunable])

    @torch.no_grad()
    def show(self) -> None:
        """Before the forward pass: put what parts let it see in the place of the weights."""
        if not self._views:
            return
        self._kept.copy_(self.weights)
        rows, seen = self._rows(self.lr), self._kept
        for part in self._views:
            seen = part.view(rows, seen)
        self.weights.copy_(seen)
        self._follow()

    @torch.no_grad()
    def __call__(self, head: Tensor, rest: Tensor, busy: Tensor | None = None) -> None:
        """One step down the gradients of the prunable weights and of the others, which are overwritten.

        busy [rows, 1]: rows in which it is False stay as they are.
        """
        local, rule, scores, lr = self.local, _rule(self.local), self.scores, self._rate(busy)
        rows = None
        if self._parts:
            rows = self._rows(lr)
            head, rest = self._before(rows, torch.cat([head.float(), rest], 1), busy)
        if rule is not None and scores is not None:
            _change(scores, busy, lambda rows: rule.collect(rows, head.float()))
        # Plain: the learning rate times the gradient, and weight decay.
        plain = not (local.momentum or local.prox or self._parts)
        if self._fused is not None and self.masks is not None and plain:
            half = None if self.half is None else self.half[0]
            self._fused(self.weights[0, : self.prunable], half, head[0], self.masks[0], lr, local.weight_decay)
            self._descend(slice(self.prunable, None), rest, None, lr, busy)
        else:
            followed = [
                self._descend(slice(0, self.prunable), head.float(), self._inactive, lr, busy),
                self._descend(slice(self.prunable, None), rest, None, lr, busy),
            ]
            if rows is not None and any(overrides(part, "after") for part in self._parts):
                gradient = torch.cat(followed, 1)
                for part in self._parts:
                    part.after(rows, gradient)
            self._follow()
        if rows is not None or local.lr_last != 1:
            self.count += 1 if busy is None else busy

    def _rate(self, busy: Tensor | None) -> Tensor:
        """The learning rate of this step, [rows, 1]."""
        lr = self.lr
        if self.local.lr_last != 1:
            lr = lr * (1 - (1 - self.local.lr_last) * self.count / self.steps.clamp(min=1))
        return lr if busy is None else lr * busy

    def _rows(self, lr: Tensor) -> Rows:
        assert self._place is not None
        return Rows(self._place, self.weights, self._keys, self.count, self.steps, lr, self.state)

    def _before(self, rows: Rows, gradient: Tensor, busy: Tensor | None) -> tuple[Tensor, Tensor]:
        """What parts make of the gradient. Idle rows keep their state."""
        if self._views:
            self.weights.copy_(self._kept)
        for part in reversed(self._parts):
            part.backward(rows, gradient)
        kept = {} if busy is None else {name: value.clone() for name, value in self.state.items()}
        for part in self._parts:
            part.before(rows, gradient)
        for name, value in kept.items():
            assert busy is not None
            self.state[name].copy_(torch.where(busy, self.state[name], value))
        return gradient[:, : self.prunable], gradient[:, self.prunable :]

    def _descend(
        self, columns: slice, gradient: Tensor, inactive: Tensor | None, lr: Tensor, busy: Tensor | None
    ) -> Tensor:
        """Change some columns; the gradient that was followed. Only a proximal term allocates a model's size."""
        local, weights = self.local, self.weights[:, columns]
        if local.weight_decay:
            gradient.add_(weights, alpha=local.weight_decay)
        if local.prox:
            gradient.add_(weights - self._start[:, columns], alpha=local.prox)
        if inactive is not None:
            gradient.masked_fill_(inactive, 0.0)
        if local.momentum:
            velocity, change = self._velocity[:, columns], gradient
            _change(velocity, busy, lambda rows: rows.mul_(local.momentum).add_(change))
            gradient = velocity
        weights.addcmul_(gradient, lr, value=-1)
        return gradient


def _change(state: Tensor, busy: Tensor | None, change: Callable[[Tensor], object]) -> None:
    """Apply a change that works in place, to the busy rows only."""
    if busy is None:
        change(state)
    else:
        new = state.clone()
        change(new)
        state.copy_(torch.where(busy, new, state))
