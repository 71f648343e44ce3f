"""Models by name. Each says which of its weights are prunable and draws its own initial weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from ..core.errors import ConfigError, unknown
from . import bert
from .digits import DigitsNet
from .leafcnn import LeafCNN
from .mnistnet import MNISTNet
from .resnet import ResNet18
from .tiny import TinyTransformer
from .vgg import VGG16

MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits": DigitsNet,
    "mnistnet": MNISTNet,
    "leafcnn": LeafCNN,
    "resnet18": ResNet18,
    "vgg16": VGG16,
    "bert": bert.pretrained,
    "bert-scratch": bert.scratch,
    "tiny-transformer": TinyTransformer,
}

# Those that come with weights, which are kept, and the model of the same shapes that is drawn at random.
PRETRAINED: dict[str, str] = {"bert": "bert-scratch"}

SQUARE = ("mnistnet", "leafcnn")  # those that take square images only


def build_model(name: str, **options: Any) -> nn.Module:
    """The model `name` for `classes` classes, and `channels` and `size` of images or `vocab` and `length` of text."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    takes = inspect.signature(MODELS[name]).parameters
    for option in options:
        if option not in takes:
            raise ConfigError(f"model {name!r} does not take {option!r}; it takes {', '.join(takes)}")
    return MODELS[name](**options)


__all__ = [
    "MODELS",
    "PRETRAINED",
    "SQUARE",
    "VGG16",
    "DigitsNet",
    "LeafCNN",
    "MNISTNet",
    "ResNet18",
    "TinyTransformer",
    "build_model",
]
