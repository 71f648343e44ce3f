"""What takes a tensor's place in a model.

Where there is a kernel, it answers torch's functions itself. For every other function it turns into an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class StandIn:
    """What takes a tensor's place in a model.

    handlers: what answers a function of torch. It returns NotImplemented where an ordinary tensor has to do.
    """

    handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}
    shape: torch.Size

    def dense(self) -> Tensor:
        """As an ordinary tensor."""
        raise NotImplementedError

    def dim(self) -> int:
        return len(self.shape)

    ndim = property(dim)

    def size(self, at: int | None = None) -> torch.Size | int:
        return self.shape if at is None else self.shape[at]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = cls.handlers[function](*args, **kwargs) if function in cls.handlers else NotImplemented
        if found is NotImplemented:
            plain_args, plain_kwargs = tree_map(plain, (args, dict(kwargs)))
            found = function(*plain_args, **plain_kwargs)
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)


def plain(value: Any) -> Any:
    return value.dense() if isinstance(value, StandIn) else value
