"""Samples that are dicts, as Hugging Face's data sets have them: which column is the input, which the label."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from ..core.errors import DataError
from .pictures import as_tensor, is_picture

LABELS = ("label", "labels", "target", "targets", "fine_label", "class", "y")
NUMBERS = (int, float, np.number, np.bool_, np.ndarray, Tensor)
_IDS = ("id", "idx", "uid", "guid", "uuid")


def is_id(column: object) -> bool:
    name = str(column).lower()
    return name in _IDS or name.endswith("_id")


def value_of(value: object) -> object:
    """A sample's value with a picture, or a list of numbers, as a tensor."""
    if is_picture(value):
        return as_tensor(value)
    if isinstance(value, list):
        with suppress(TypeError, ValueError, RuntimeError):  # no numbers, or rows of different lengths
            return torch.as_tensor(value)
    return value


def parts_of(sample: Mapping[str, object]) -> tuple[object, ...]:
    """A sample's input and label; of a tokenized text, the ids, their mask and the label.

    The label is the column with a usual name, else the only one with a single number. The input is the only column
    with a picture, a tensor, an array or a list of numbers.
    """
    values = {column: value_of(value) for column, value in sample.items()}
    shapes = {c: np.shape(value) for c, value in values.items() if isinstance(value, NUMBERS) and not is_id(c)}
    labels = [c for c in LABELS if c in values][:1] or [c for c, shape in shapes.items() if not shape]
    inputs = [c for c, shape in shapes.items() if shape and c not in labels]
    if "input_ids" in inputs:
        inputs = [c for c in ("input_ids", "attention_mask") if c in inputs]
    if len(labels) != 1 or (len(inputs) != 1 and "input_ids" not in inputs):
        kinds = ", ".join(f"{column} ({type(value).__name__})" for column, value in sample.items())
        raise DataError(
            f"a sample is a dict with the columns {kinds}. It is not clear which is the input and which the label. "
            "Give pairs instead, such as [(s['image'], s['label']) for s in data]. Tokenize texts first"
        )
    return tuple(values[column] for column in (*inputs, *labels))
