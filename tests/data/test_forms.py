"""The forms in which samples may be given, and the errors for others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from flashfl.core.errors import ConfigError, DataError
from flashfl.data.sources import Arrays, source
from flashfl.data.task import Task, accuracy

X, Y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.long)


def net() -> torch.nn.Module:
    return torch.nn.Linear(2, 2)


@pytest.mark.parametrize("data", [(X, [0, 1, 0, 1]), ({"x": X}, Y), ([X, X], Y), {"x": X, "labels": Y}])
def test_samples_in_unknown_form_are_refused(data: Any) -> None:
    with pytest.raises(DataError, match=r"cannot read samples from a \w+: give a torch Dataset, or a tuple"):
        source(data)


@pytest.mark.parametrize("sample", [({"x": X[0]}, 0), (X[0],), (X[0], "cat"), (X[0], np.str_("cat"))])
def test_data_set_samples_in_unknown_form_are_refused(sample: Any) -> None:
    with pytest.raises(DataError, match=r"cannot read a sample of .*: it must be"):
        source([sample] * 4).fetch(torch.arange(2))


def test_list_of_samples_is_a_data_set() -> None:
    inputs, target = source([(X[0], 1)] * 20).fetch(torch.arange(3))
    assert (inputs[0].shape, target.tolist()) == ((3, 2), [1, 1, 1])


@pytest.mark.parametrize(
    ("sample", "shapes"),
    [
        ({"x": X[0], "labels": 1}, [(2,)]),
        ({"x": X[0], "kind": np.int64(1), "title": np.str_("a b")}, [(2,)]),
        ({"id": 7, "img": np.zeros((3, 4), dtype=np.float32), "fine_label": np.int64(1), "coarse": 0}, [(3, 4)]),
        ({"pixels": [0.5, 0.5, 1.0], "kind": torch.tensor(1)}, [(3,)]),
        ({"image": [[0.5], [1.0]], "doc_id": 3, "age": 1}, [(2, 1)]),
        ({"text": "a b", "label": 1, "attention_mask": [1, 1], "type_ids": [0, 0], "input_ids": [5, 6]}, [(2,)] * 2),
    ],
)
def test_dict_samples_are_read_if_columns_are_obvious(sample: Any, shapes: list[tuple[int, ...]]) -> None:
    task = Task(net, [[sample] * 4], [sample] * 2)
    inputs, target = task.train[0].fetch(torch.arange(3))
    assert [tuple(x.shape) for x in inputs] == [(3, *shape) for shape in shapes]
    assert target.tolist() == [1, 1, 1]
    if "input_ids" in sample:
        assert inputs[0][0].tolist() == [5, 6]


@pytest.mark.parametrize(
    "sample",
    [
        {"left": X[0], "right": X[0], "label": 1},
        {"text": "a b", "label": 1},
        {"x": X[0], "age": 1, "weight": 2},
        {"x": X[0]},
    ],
)
def test_dict_samples_with_unclear_columns_name_them_and_how_to_choose(sample: Any) -> None:
    with pytest.raises(
        DataError, match=r"clients\[0\]: a sample is a dict with the columns .*Give pairs instead"
    ) as error:
        Task(net, [[sample] * 4])
    assert all(f"{column} (" in str(error.value) for column in sample)
    with pytest.raises(DataError, match="the test set: a sample is a dict"):
        Task(net, [(X, Y)], [sample] * 4)


@pytest.mark.parametrize(("mode", "channels"), [("L", 1), ("RGB", 3), ("P", 3)])
@pytest.mark.parametrize("as_dict", [True, False])
def test_pictures_become_tensors_between_0_and_1(mode: str, channels: int, as_dict: bool) -> None:
    pil = pytest.importorskip("PIL.Image")
    picture = pil.new("RGB", (5, 4), (255, 255, 255)).convert(mode)
    sample: Any = {"image": picture, "label": 1} if as_dict else (picture, 1)
    (x,), y = source([sample] * 3).fetch(torch.arange(2))
    assert x.shape == (2, channels, 4, 5)
    assert x.dtype == torch.float32
    assert x.eq(1).all()
    assert y.tolist() == [1, 1]


class HubRows:
    """Looks like a data set of the `datasets` package: rows are dicts, and it is no torch Dataset."""

    features = ("img", "label")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, row: int) -> dict[str, object]:
        return {"img": X[0], "label": row % 2}


def test_hugging_face_data_sets_are_clients() -> None:
    task = Task(net, [HubRows(), HubRows()])
    assert [c.n for c in task.clients] == [5, 5]
    assert task.evaluation[0].fetch(torch.arange(1))[0][0].shape == (1, 2)


@pytest.mark.parametrize(
    ("clients", "what"),
    [
        (TensorDataset(X, Y), r"`clients` is a TensorDataset.*random_split"),
        (Arrays((X,), Y), r"`clients` is a Arrays.*for a single client, \[\(x, y\)\]"),
        (3, "`clients` is a int"),
        (net(), "`clients` is a Linear"),
        (HubRows(), r"clients\[0\]: cannot read samples from a dict.*`clients` is a list with one of these for each"),
        ([(X[0], 1), (X[1], 0)], r"clients\[0\]: cannot read samples from a tuple"),
        ([("picture", 1), ("picture", 0)], r"clients\[0\]: cannot read a sample of \(str\)"),
        ([(X[0], Y[0]), (X[1], Y[1])], r"clients\[0\]: inputs and targets must have the same length"),
        (
            (X, Y),
            r"clients\[0\]: cannot read samples from a tensor of shape \(4, 2\): give a torch Dataset, or a tuple",
        ),
        ((X.numpy(), Y.numpy()), r"clients\[0\]: cannot read samples from a ndarray"),
        (X, r"clients\[0\]: cannot read samples from a tensor of shape \(2,\)"),
        ({"a": (X, Y)}, "`clients` is a dict. Give a list"),
        (torch.nn.Sequential(net()), r"clients\[0\]: cannot read samples from a Linear"),
        ([], "the task has no clients"),
        ([(X, Y), 3], r"clients\[1\]: cannot read samples from a int"),
        (
            [(X, Y), (X, Y[:2])],
            r"clients\[1\]: inputs and targets must have the same length; their shapes are \(4, 2\), \(2,\)",
        ),
        ([(X, np.array(list("abcd")))], r"clients\[0\]: cannot read samples: .*numpy\.str_.*Give .* arrays of numbers"),
        ([(X, Y), (X[:0], Y[:0])], r"clients\[1\] has no samples"),
    ],
)
def test_mistakes_in_clients_get_one_clear_sentence(clients: Any, what: str) -> None:
    with pytest.raises(DataError, match=what):
        Task(net, clients)


def test_clients_may_come_from_a_generator_or_the_values_of_a_dict() -> None:
    assert len(Task(net, ((X, Y) for _ in range(3))).clients) == 3  # type: ignore[arg-type]
    assert len(Task(net, {"a": (X, Y), "b": (X, Y)}.values()).clients) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("data", [[(X, Y)], TensorDataset(X, Y), HubRows(), (X, Y)])
def test_swapped_arguments_are_an_error(data: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"the model is a \w+: expected a torch module.* Write Task\(model, clients, test\)"
    ):
        Task(data, net())  # type: ignore[arg-type]


def test_prunable_none_is_an_error_that_names_the_choices() -> None:
    with pytest.raises(ConfigError, match="prunable = None: leave it out, or write prunable='none'"):
        Task(net, [(X, Y)], prunable=None)  # type: ignore[arg-type]


def test_test_set_without_targets_or_samples_is_an_error() -> None:
    with pytest.raises(
        DataError,
        match=r"the test set: cannot read samples from a tensor of shape \(4, 2\): .*targets\)",
    ):
        Task(net, [(X, Y)], X)
    with pytest.raises(DataError, match="the test set has no samples"):
        Task(net, [(X, Y)], (X[:0], Y[:0]))


def test_error_in_users_data_set_waits_for_training() -> None:
    class Broken(HubRows):
        def __getitem__(self, row: int) -> dict[str, object]:
            raise OSError("the disk is gone")

    assert len(Task(net, [Broken(), HubRows()]).clients) == 2


def test_client_with_one_sample_trains_and_holds_nothing_back() -> None:
    task = Task(net, [(X[:1], Y[:1])], holdout=0.5)
    assert (len(task.train[0]), task.evaluation) == (1, [])
    assert Task(net, [(X[:1], Y[:1]), (X, Y)], holdout=0.5).evaluators == [1]


def test_evaluation_is_the_test_set_or_what_clients_hold_back() -> None:
    task = Task(net, [(X, Y)] * 2, (X, Y))
    assert (task.evaluation, task.evaluators) == ([task.test], [])
    task = Task(net, [(X, Y)] * 2, holdout=0.5)
    assert ([len(s) for s in task.evaluation], task.evaluators) == ([2, 2], [0, 1])
    assert Task(net, [(X, Y)] * 2, holdout=0).evaluation == []


def test_metric_name_and_direction() -> None:
    def error_rate(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return 1 - accuracy(output, target)

    task = Task(net, [(X, Y)])
    assert (task.metric_name, task.higher_is_better) == ("accuracy", True)
    task = Task(net, [(X, Y)], metric=error_rate, higher_is_better=False)
    assert (task.metric_name, task.higher_is_better) == ("error_rate", False)
    assert Task(net, [(X, Y)], metric=lambda output, target: 0.0).metric_name == "metric"
    assert Task(net, [(X, Y)], metric=torch.nn.L1Loss(), higher_is_better=False).metric_name == "metric"
    assert Task(net, [(X, Y)], metric=error_rate, metric_name="share", higher_is_better=False).metric_name == "share"


def test_repr_names_clients_samples_and_parameters() -> None:
    task = Task(net, [(X, Y)] * 3, (X, Y), prunable="weight", name="small")
    assert repr(task) == "Task('small', 3 clients, 12 training samples, 6 parameters, 67% prunable)"


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
