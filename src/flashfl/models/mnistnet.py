"""The small MNIST network of the paper."""

from __future__ import annotations

from torch import Tensor, nn

from .init import at_least, initialise


class MNISTNet(nn.Module):
    """Two 5x5 convolutions without padding, each followed by a 3x3 max-pool of stride 1, then two linear maps.

    On 28x28 images the first linear map reads 5,120 numbers. The first and the last layer stay dense.
    """

    prunable = "inner"

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        at_least("mnistnet", size, 13)
        side = size - 12  # each convolution takes 4 pixels off a side, each pool 2
        self.features = nn.Sequential(
            nn.Conv2d(channels, 10, 5),
            nn.MaxPool2d(3, stride=1),
            nn.ReLU(),
            nn.Conv2d(10, 20, 5),
            nn.MaxPool2d(3, stride=1),
            nn.ReLU(),
        )
        self.hidden = nn.Linear(20 * side * side, 50)
        self.fc = nn.Linear(50, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        logits: Tensor = self.fc(self.hidden(x).relu())
        return logits
