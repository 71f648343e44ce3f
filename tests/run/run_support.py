"""A run that ends as suddenly as by a kill."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from flashfl.core.state import State
from flashfl.run import checkpoint


class Killed(BaseException):
    """The kill."""


class After:
    """A watch that raises after some rounds."""

    def __init__(self, rounds: int, what: BaseException | type[BaseException]) -> None:
        self.left, self.what = rounds, what

    def __call__(self, state: State, line: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.what


@contextmanager
def killed() -> Iterator[None]:
    """What runs within is killed: nothing is written on the way out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Keeper, "on_the_way_out", lambda self: nullcontext())
        with pytest.raises(Killed):
            yield
