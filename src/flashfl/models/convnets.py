"""Plain convolutional networks, and how convolutional networks draw their first weights."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.errors import check_range


def initialise(module: nn.Module) -> None:
    """Convolutions Xavier-uniform with gain 0.5, linear layers normal with deviation 0.01, BatchNorm 1, biases 0.

    Every draw comes from torch's own generator, so its seed decides the weights.
    """
    for part in module.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.xavier_uniform_(part.weight, gain=0.5)
        elif isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.01)
        if isinstance(part, nn.Conv2d | nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)  # torch's BatchNorm begins with 1 and 0 by itself


class _TwoConvolutions(nn.Module):
    """Two convolutions with pooling, then two linear layers. The first and the last layer stay dense."""

    prunable = "inner"

    def __init__(self, features: list[nn.Module], inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.hidden = nn.Linear(inputs, width)
        self.fc = nn.Linear(width, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x).flatten(1)
        logits: Tensor = self.fc(self.hidden(x).relu())
        return logits


class MNISTNet(_TwoConvolutions):
    """The paper's network for MNIST: 5x5 convolutions without padding, 3x3 max-pools of stride 1, 50 hidden units."""

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 28) -> None:
        check_range("[13, inf)", "mnistnet needs larger images", size=size)
        side = size - 12  # each convolution takes 4 pixels off a side, each pool 2
        first = [nn.Conv2d(channels, 10, 5), nn.MaxPool2d(3, stride=1), nn.ReLU()]
        second = [nn.Conv2d(10, 20, 5), nn.MaxPool2d(3, stride=1), nn.ReLU()]
        super().__init__([*first, *second], 20 * side * side, 50, classes)


class LeafCNN(_TwoConvolutions):
    """LEAF's network for FEMNIST: padded 5x5 convolutions, 2x2 max-pools, 2,048 hidden units."""

    def __init__(self, classes: int = 62, channels: int = 1, size: int = 28) -> None:
        check_range("[4, inf)", "leafcnn needs larger images", size=size)
        side = size // 4
        first = [nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__([*first, *second], 64 * side * side, 2048, classes)


def _convolution(inside: int, outside: int, stride: int = 1, bias: bool = True) -> list[nn.Module]:
    """A padded 3x3 convolution with BatchNorm and ReLU."""
    return [nn.Conv2d(inside, outside, 3, stride, padding=1, bias=bias), nn.BatchNorm2d(outside), nn.ReLU()]


class _Pooled(nn.Module):
    """Convolutions, the mean over each channel, perhaps hidden linear layers, and the last one."""

    def __init__(self, features: list[nn.Module], hidden: list[nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.features = nn.Sequential(*features)
        self.hidden = nn.Sequential(*hidden)
        self.fc = nn.Linear(width, classes)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.hidden(self.features(x).mean((2, 3))))
        return logits


class DigitsNet(_Pooled):
    """For the 8x8 digits: convolutions 1-32-64-128-128 with BatchNorm, mean pooling, one linear layer.

    The last two convolutions have stride 2. Every convolution is prunable.
    """

    prunable = "conv"

    def __init__(self, classes: int = 10, channels: int = 1, size: int = 8) -> None:
        widths = ((channels, 32, 1), (32, 64, 1), (64, 128, 2), (128, 128, 2))
        parts = [part for width in widths for part in _convolution(*width, bias=False)]
        super().__init__(parts, [], 128, classes)


class VGG16(_Pooled):
    """VGG16 for small images: thirteen 3x3 convolutions with BatchNorm, linear layers 512-512-512-classes.

    Images larger than 32x32 are averaged down before the linear layers. The convolutions and the hidden linear layers
    are prunable; BatchNorm, biases and the last layer stay dense.
    """

    prunable = "body"
    widths = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # a max-pool ends each group

    def __init__(self, classes: int = 10, channels: int = 3, size: int = 32) -> None:
        check_range("[32, inf)", "vgg16 needs larger images", size=size)
        parts: list[nn.Module] = []
        for group in self.widths:
            for outside in group:
                parts += _convolution(channels, outside)
                channels = outside
            parts.append(nn.MaxPool2d(2))
        super().__init__(parts, [nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()], 512, classes)
