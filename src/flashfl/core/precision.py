"""How the values of a message travel: in how many bits, and how they are rounded to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .parts import part

Form = Literal["fp32", "fp16", "bf16", "int8", "int4"]
FORMS: tuple[Form, ...] = get_args(Form)
Rest = Literal["fp32", "fp16"]
Rounding = Literal["unbiased", "nearest"]


@part
@dataclass(frozen=True)
class Precision:
    """How values travel in one direction.

    values: the form of the weights. rest: the form of what `values` does not round (statistics, and under int8 and int4
    vectors); fp32 under fp32. rounding: up or down at random, without bias, or to the nearest. changes: weights as
    their difference to the model that the client was sent.
    """

    values: Form = "fp32"
    rest: Rest = "fp32"
    rounding: Rounding = "unbiased"
    changes: bool = False

    def __post_init__(self) -> None:
        if self.values == "fp32":
            object.__setattr__(self, "rest", "fp32")

    @property
    def exact(self) -> bool:
        """Whether every value arrives as it was sent."""
        return self.values == "fp32" and not self.changes


EXACT = Precision()
