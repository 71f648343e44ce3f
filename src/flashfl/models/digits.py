"""The network for the embedded 8x8 digits."""

from __future__ import annotations

from torch import Tensor, nn

from .init import initialise


class DigitsNet(nn.Module):
    """Convolutions 1-32-64-128-128 (the last two of stride 2) with BatchNorm, mean pooling, one linear map.

    Every convolution is prunable.
    """

    prunable = "conv"

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 8) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        inside = channels
        for outside, stride in ((32, 1), (64, 1), (128, 2), (128, 2)):
            parts += [nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]
            inside = outside
        self.features = nn.Sequential(*parts)
        self.fc = nn.Linear(inside, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(x).mean((2, 3)))
        return logits
