"""VGG16 with BatchNorm for small images."""

from __future__ import annotations

from torch import Tensor, nn

from .init import at_least, initialise

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # a max-pool ends each group


class VGG16(nn.Module):
    """Thirteen 3x3 convolutions with BatchNorm in five pooled groups, then linear maps 512-512-512-classes.

    Larger images than 32x32 are averaged down before the linear maps. The convolutions and the hidden linear maps are
    prunable; BatchNorm, biases and the last linear map stay dense.
    """

    prunable = "body"

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        super().__init__()
        at_least("vgg16", size, 32)
        parts: list[nn.Module] = []
        inside = channels
        for group in _WIDTHS:
            for outside in group:
                parts += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
                inside = outside
            parts.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*parts)
        self.hidden = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU())
        self.fc = nn.Linear(512, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.hidden(self.features(x).mean((2, 3))))
        return logits
