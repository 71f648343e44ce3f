"""Models by name. Each says which of its weights are prunable, and draws its own initial weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from torch import nn

from ..core.errors import ConfigError, unknown
from . import bert
from .convnets import VGG16, DigitsNet, LeafCNN, MNISTNet
from .resnet import ResNet18
from .tiny import TinyTransformer

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
PRETRAINED = {"bert": "bert-scratch"}  # those that come with weights, and the model of the same shapes without
SQUARE = ("mnistnet", "leafcnn")  # those that take square images only


def build_model(name: str, **options: int | float | str | bool) -> nn.Module:
    """The model `name` for `classes` classes. Options: `channels` and `size` of images, `vocab` and `length` of texts,
    and whatever else the model takes."""
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    takes = inspect.signature(MODELS[name]).parameters
    if "path" in options.keys() - takes.keys():
        raise ConfigError(
            f"model_path = {options['path']!r}: not possible with model = {name!r}, which has no files. Remove it, or "
            "choose a model that has, such as bert."
        )
    if others := options.keys() - takes.keys():
        kind = "texts" if "vocab" in others else "images"
        fit = [other for other, make in MODELS.items() if options.keys() <= inspect.signature(make).parameters.keys()]
        if not fit:
            raise ConfigError(f"model {name!r} does not take {', '.join(sorted(others))}; it takes {', '.join(takes)}")
        raise ConfigError(f"model = {name!r} does not fit a data set of {kind}. Models for {kind}: {', '.join(fit)}.")
    return MODELS[name](**options)
