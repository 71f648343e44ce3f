"""flashplus: SPDST with a better recipe, for the most accuracy per byte. Not from a paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from ..core.errors import ConfigError, check_range
from ..core.exchange import Client, Local, Order, Sums
from ..core.mask import Weights
from ..core.state import TRAINING, State
from ..sparsity import calibrate, random_mask
from ..sparsity.steps import Multiply
from .jmwst import JMWST
from .spdst import SPDST

_STEP = "last step"
_STAGES = 8  # the densities that a mask which grows goes through


@dataclass(frozen=True)
class FlashPlus(JMWST):
    """SPDST with more weights, fewer bits for each weight, and another training recipe.

    It sets training settings that you can override: a running average of the server's model, weight decay, a learning
    rate that falls less far, and uploads of changes in 4 bits. The recipe was tuned on CIFAR-10 at alpha 1 only. Most
    of the gain comes from training, not from bits: the recipe helps dense models too (docs/flashplus.md).

    Bytes: as SPDST at the same density, but about 4 bits for each weight instead of 32.
    When: you want the best model for a given number of bytes, such as `--budget 2.3MB`.
    Not to be confused with SPDST and JMWST, which are the paper's methods, with the paper's recipe.

    r_int: masks move every r_int rounds; 0: they never move. look_ahead: clients start from the server's model plus
    this share of its last change (FedACG). multiply: strength of a multiplying step after each SGD step (HAM); 0: none.
    shrink: how strongly prunable weights shrink in such steps. init_scale: initial sparse weights are multiplied by
    this. grow: over the run, the density rises from density * (1 - grow) to density * (1 + grow). The other settings
    are SPDST's.
    """

    name: ClassVar[str] = "flashplus"
    recipe: ClassVar[Mapping[str, object]] = {
        "average": 0.98, "weight_decay": 5e-4, "lr_end": 0.01, "values": "int4", "rest": "fp16", "upload": "changes",
    }  # fmt: skip
    r_int: int = 0
    look_ahead: float = 0.85
    multiply: float = 0.0
    shrink: float = 0.0
    init_scale: float = 1.0
    grow: float = 0.0

    def __post_init__(self) -> None:
        SPDST.__post_init__(self)
        check_range("[0, inf)", r_int=self.r_int, freeze_after=self.freeze_after)
        check_range("[0, inf)", multiply=self.multiply, shrink=self.shrink)
        check_range("(0, inf)", init_scale=self.init_scale)
        check_range("[0, 1)", look_ahead=self.look_ahead, grow=self.grow)
        check_range("(0, 1]", "The density rises to this", **{"density * (1 + grow)": self.density * (1 + self.grow)})
        if self.grow and (self.nm or self.r_int or self.mask_init != "random"):
            raise ConfigError(
                f"grow = {self.grow}: only a random mask without a pattern can grow, and only if clients never move "
                "it. Set nm = 0, r_int = 0 and mask_init = 'random'. Or set grow = 0."
            )

    @property
    def common(self) -> bool:
        return self.r_int == 0 or super().common

    def moves(self, s: State) -> bool:
        return self.r_int > 0 and super().moves(s)

    def work(self, s: State, client: Client) -> Local:
        work = super().work(s, client)
        if s.phase != TRAINING or not (self.multiply or self.shrink):
            return work
        return replace(work, parts=(*work.parts, Multiply(self.multiply, self.shrink)))

    def orders(self, s: State, cohort: Sequence[Client]) -> Iterator[tuple[Client, Order]]:
        ahead = self.ahead(s)
        return ((client, s.order(client, self.work(s, client), ahead)) for client, _ in self.models(s, cohort))

    def ahead(self, s: State) -> Weights:
        """The model that clients start from: the server's, or where its last step leads."""
        if _STEP not in s.extra:
            return s.weights
        vector, trained = s.weights.vector.clone(), s.layout.trained_size
        vector[:trained] += self.look_ahead * s.kept(Tensor, _STEP)
        return Weights.masked(s.mask, vector)

    def begin(self, s: State, densities: Sequence[float]) -> State:
        start = replace(self, density=self.density_at(s, 0), grow=0.0) if self.grow else self
        state = super(FlashPlus, start).begin(s, densities)
        state.weights.vector[: s.layout.prunable_size] *= self.init_scale  # drawn just now, and nobody else's
        return state

    def aggregate(self, s: State, sums: Sums) -> State:
        after, trained = super().aggregate(s, sums), s.layout.trained_size
        if s.phase != TRAINING:
            return after
        if self.look_ahead:
            step = after.weights.vector[:trained] - s.weights.vector[:trained]
            after = replace(after, extra={**after.extra, _STEP: step})
        return self.grown(after)

    def density_at(self, s: State, round: int) -> float:
        """The density of a mask that grows, in a round of the training phase."""
        stage = min(_STAGES - 1, round * _STAGES // s.plan.rounds)
        return self.density * (1 + self.grow * (2 * stage / (_STAGES - 1) - 1))

    def grown(self, s: State) -> State:
        """The state with the mask that its round should have. New weights start at 0."""
        recipe = s.mask.recipe
        if not self.grow or recipe is None or self.density_at(s, s.round) == self.density_at(s, s.round - 1):
            return s
        budgets = calibrate(s.layout, s.mask.layer_densities, self.density_at(s, s.round))
        return replace(s, weights=Weights.masked(random_mask(s.plan, budgets, recipe.key), s.weights.vector))
