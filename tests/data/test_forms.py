"""In what forms samples may be given, and what is said of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashfl.core.errors import DataError
from flashfl.data.examples import source
from flashfl.data.task import Task, accuracy

X, Y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("data", [(X, [0, 1, 0, 1]), ({"x": X}, Y), ([X, X], Y), {"x": X, "labels": Y}])
def test_samples_in_a_form_that_cannot_be_read_are_an_error(data: Any) -> None:
    with pytest.raises(DataError, match="samples must be a tuple"):
        source(data)


@pytest.mark.parametrize("sample", [{"x": X[0], "labels": 0}, ({"x": X[0]}, 0), (X[0],)])
def test_samples_of_a_data_set_in_such_a_form_are_too(sample: Any) -> None:
    with pytest.raises(DataError, match="a sample must be"):
        source([sample] * 4).fetch(torch.arange(2))


def test_a_list_of_samples_is_a_data_set() -> None:
    inputs, target = source([(X[0], 1)] * 20).fetch(torch.arange(3))
    assert (inputs[0].shape, target.tolist()) == ((3, 2), [1, 1, 1])


def test_a_test_set_has_samples() -> None:
    with pytest.raises(DataError, match="the test set has no samples"):
        Task(net, [(X, Y)], (X[:0], Y[:0]))


def test_a_client_with_one_sample_trains_and_judges_nothing() -> None:
    task = Task(net, [(X[:1], Y[:1])], holdout=0.5)
    assert (len(task.train[0]), task.held) == (1, [])
    assert Task(net, [(X[:1], Y[:1]), (X, Y)], holdout=0.5).holders == [1]


def test_accuracy_takes_classes_where_cross_entropy_does() -> None:
    output = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(0))
    best = output.argmax(1)
    best[0] = (best[0] + 1) % 3
    assert accuracy(output, best) == 0.75
    assert accuracy(output[:, :, 0, 0], best[:, 0, 0]) == 0.75
    shares = torch.nn.functional.one_hot(best, 3).movedim(-1, 1) * 0.8 + 0.1
    assert accuracy(output, shares) == 0.75
    assert accuracy(output[:, :, 0, 0], shares[:, :, 0, 0]) == 0.75
    assert accuracy(output.movedim(1, -1), best) == 0.75  # a language model's: tokens, then words
