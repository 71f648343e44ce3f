"""What the convolutional models begin with: a check of the image's size, and their first weights."""

from __future__ import annotations

from torch import nn

from ..core.errors import ConfigError


def at_least(model: str, size: int, least: int) -> None:
    """Raise unless images are large enough for a model."""
    if size < least:
        raise ConfigError(f"{model} needs images of at least {least} pixels a side, not {size}: choose another model")


def initialise(module: nn.Module) -> None:
    """Convolutions Xavier-uniform with gain 0.5, linear maps normal with deviation 0.01, BatchNorm 1 and 0, biases 0.

    Every draw comes from torch's own generator, so whoever seeds that decides the weights.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.xavier_uniform_(part.weight, gain=0.5)
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.01)
        elif isinstance(part, nn.BatchNorm2d):
            nn.init.ones_(part.weight)
            nn.init.zeros_(part.bias)
            continue
        else:
            continue
        if part.bias is not None:
            nn.init.zeros_(part.bias)
