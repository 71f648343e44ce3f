"""The convolutional network that LEAF trains on FEMNIST."""

from __future__ import annotations

from torch import Tensor, nn

from .init import at_least, initialise


class LeafCNN(nn.Module):
    """Two padded 5x5 convolutions, each followed by a 2x2 max-pool, then linear maps 3136-2048-62 on 28x28 images.

    The first and the last layer stay dense.
    """

    prunable = "inner"

    def __init__(self, classes: int = 62, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        at_least("leafcnn", size, 4)
        side = size // 4
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.hidden = nn.Linear(64 * side * side, 2048)
        self.fc = nn.Linear(2048, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        logits: Tensor = self.fc(self.hidden(x).relu())
        return logits
