"""ResNet18 for small images."""

from __future__ import annotations

from torch import Tensor, nn

from .convnets import initialise
from .norm import batch_norm


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut. The shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        y = batch_norm(self.bn1, self.conv1(x))
        if len(self.shortcut):
            x = batch_norm(self.shortcut[1], self.shortcut[0](x), relu=False)
        return batch_norm(self.bn2, self.conv2(y), x)


class ResNet18(nn.Module):
    """ResNet18 for images of 32x32 or 64x64: the first convolution is 3x3 with stride 1, and there is no max-pool.

    Every convolution is prunable, also the first and the shortcuts. BatchNorm and the linear layer stay dense.
    """

    prunable = "conv"

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        blocks, inside = [], 64
        for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
            blocks += [Block(inside, outside, stride), Block(outside, outside, 1)]
            inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(512, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(batch_norm(self.bn1, self.conv1(x)))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits
