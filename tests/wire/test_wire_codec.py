"""Whole messages: nothing is lost, sizes are exact, and writing again gives the same bytes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_support import layouts, mask_of, masks, order, samples, small_layout, update
from wire_surgery import again

from flashfl.core.exchange import Extra, Local
from flashfl.core.mask import Recipe, Weights
from flashfl.core.parts import part
from flashfl.core.precision import Precision
from flashfl.sparsity import PruneRegrow
from flashfl.wire import Limits, Message, decode, encode, mask_sizes, size_with
from flashfl.wire.errors import BadCount, BadField, BadSection, NonFinite, TooLarge
from flashfl.wire.tensors import notes_from_bytes, notes_to_bytes
from flashfl.wire.values import FORMS, Form

LAYOUT = small_layout()
SAMPLES = samples(LAYOUT)


@part
@dataclasses.dataclass(frozen=True)
class WireTestRule(PruneRegrow):
    """A custom rule with a field of its own."""

    names: tuple[str, ...] = ()


def check_same(a: Message, b: Message) -> None:
    """Every field but values, which a lossy form may round, and their precision."""
    for name in ("kind", "tag", "client", "n", "key", "start", "own", "local", "carries", "metrics", "lacks"):
        assert getattr(a, name) == getattr(b, name), name
    assert (a.mask is None) == (b.mask is None)
    assert a.mask is None or b.mask is None or torch.equal(a.mask.bits, b.mask.bits)
    assert (a.values is None) == (b.values is None)
    assert b.counts == (a.mask.counts if a.mask is not None else a.counts)
    assert set(a.extra) == set(b.extra)
    for name, extra in a.extra.items():
        assert extra.form == b.extra[name].form
        assert torch.equal(extra.value, b.extra[name].value)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index", range(8))
def test_message_round_trips(index: int, form: Form) -> None:
    message, bases = SAMPLES[index]
    known = {mask.hash: mask for mask in bases}
    sent = encode(message, bases, Precision(form))
    assert sent.traffic.total == len(sent.data)
    found = decode(sent.data, LAYOUT, known)
    check_same(message, found)
    if form == "fp32" and message.values is not None:
        assert torch.equal(found.values, message.values)
    assert again(found, sent.data, known) == sent.data


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_random_message_round_trips(data: st.DataObject) -> None:
    layout = data.draw(layouts())
    mask, base = data.draw(masks(layout)), data.draw(masks(layout))
    metrics = data.draw(st.dictionaries(st.text("abc. -_", min_size=1), st.floats(-1e9, 1e9), max_size=3))
    message = dataclasses.replace(
        update(mask, data.draw(st.sampled_from(["all", "weights"])), metrics=metrics),
        tag=(data.draw(st.integers(0, 255)), data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(0, 65535))),
        client=data.draw(st.integers(0, 2**64 - 1)),
    )
    form = data.draw(st.sampled_from(FORMS))
    sent = encode(message, (base,), Precision(form))
    found = decode(sent.data, layout, {base.hash: base})
    check_same(message, found)
    assert sent.traffic.total == len(sent.data)
    assert again(found, sent.data, {base.hash: base}) == sent.data


@pytest.mark.parametrize("form", FORMS)
def test_size_counted_on_a_device_is_the_encoded_size(form: Form) -> None:
    """What a device counts is what an encoder writes."""
    for message, bases in SAMPLES[:3]:
        assert message.mask is not None
        found = mask_sizes(LAYOUT, message.mask.bits[None], [base.bits for base in bases])
        bare = dataclasses.replace(message, mask=None, values=None)
        parts = size_with(bare, message.mask.active, int(found), Precision(form))
        assert parts == encode(message, bases, Precision(form)).traffic


def test_weights_of_a_message() -> None:
    mask = mask_of(LAYOUT, [0.5, 0.1, 0.0, 1.0], 1)
    weights = Weights.masked(mask, torch.randn(LAYOUT.size))
    sent = encode(Message("update", LAYOUT, (2, 0, 0), 1, 10, mask=mask, values=weights.packed()))
    assert torch.equal(decode(sent.data, LAYOUT).weights().vector, weights.vector)
    bare = weights.packed()[: mask.active + 17]
    sent = encode(Message("update", LAYOUT, (2, 0, 0), 1, 10, mask=mask, values=bare, carries="weights"))
    found = decode(sent.data, LAYOUT).weights()
    assert torch.equal(found.vector[: LAYOUT.trained_size], weights.vector[: LAYOUT.trained_size])
    assert not found.statistics.any()
    with pytest.raises(ValueError, match="carries no weights"):
        Message("update", LAYOUT, (2, 0, 0), 1).weights()


def test_settings_round_trip() -> None:
    mask = mask_of(LAYOUT, [0.5, 0.1, 0.0, 1.0], 1)
    local = Local(epochs=3, lr=1, adapt=WireTestRule(0.5, names=("a", "b")), keep=("mask",))
    found = decode(encode(order(mask, local)).data, LAYOUT).local
    assert found == local
    assert isinstance(found.adapt, WireTestRule)


def test_overhead_is_small() -> None:
    """A message under a known mask is within 200 bytes of its values; settings take at most 300 more."""
    layout = small_layout([50_000] * 20)
    mask = mask_of(layout, [0.1] * 20, 1)
    sent = encode(update(mask, metrics={"loss": 1.0}), (mask,))
    assert len(sent.data) - 4 * update(mask).values.numel() <= 200
    down = encode(order(mask, start=(2, 1, 0), own=mask.hash), (mask,))
    assert len(down.data) - 4 * update(mask).values.numel() <= 500


def test_limits_are_checked() -> None:
    mask = mask_of(LAYOUT, [0.5, 0.1, 0.0, 1.0], 1)
    extra = {"x": Extra("dense", torch.zeros(40))}
    data = encode(update(mask, extra=extra, metrics={"a": 1.0, "b": 2.0})).data
    for limits in (Limits(message=100), Limits(metrics=1), Limits(extras=0), Limits(elements=39)):
        with pytest.raises(TooLarge):
            decode(data, LAYOUT, limits=limits)
    for limits in (Limits(json=10), Limits(depth=0)):
        with pytest.raises(TooLarge):
            decode(encode(order(mask)).data, LAYOUT, limits=limits)


def bad_messages() -> list[tuple[Message, type[Exception]]]:
    mask = mask_of(LAYOUT, [0.5, 0.1, 0.0, 1.0], 1)
    plain = update(mask)
    return [
        (dataclasses.replace(plain, tag=(300, 0, 0)), BadField),
        (dataclasses.replace(plain, metrics={"loss": float("nan")}), NonFinite),
        (dataclasses.replace(plain, metrics={"": 1.0}), BadField),
        (dataclasses.replace(plain, metrics={f"{i:03}": 1.0 for i in range(300)}), BadField),
        (dataclasses.replace(plain, extra={f"{i:03}": Extra("scalar", torch.zeros(())) for i in range(300)}), BadField),
        (dataclasses.replace(plain, local=Local()), BadSection),
        (dataclasses.replace(plain, start=(1, 0, 0)), BadSection),
        (dataclasses.replace(order(mask), local=None), BadSection),
        (dataclasses.replace(order(mask), start=(1, -1, 0)), BadField),
        (dataclasses.replace(order(mask), local=Local(start=Recipe(-1, mask.counts))), BadField),
        (dataclasses.replace(order(mask), local=Local(start=Recipe(1, (1,)))), BadCount),
        (dataclasses.replace(plain, extra={"x": Extra("masked", torch.zeros(3))}), BadCount),
        (dataclasses.replace(plain, extra={"x": Extra("scalar", torch.zeros(3))}), BadCount),
        (dataclasses.replace(plain, extra={"x": Extra("dense", torch.zeros(3, dtype=torch.float16))}), BadField),
        (dataclasses.replace(plain, extra={"x": Extra("dense", torch.tensor([float("inf")]))}), NonFinite),
    ]


@pytest.mark.parametrize(("message", "error"), bad_messages())
def test_invalid_message_is_not_sent(message: Message, error: type[Exception]) -> None:
    with pytest.raises(error):
        encode(message)


def test_a_client_may_remember_more_tensors_than_a_message_may_hold() -> None:
    notes = {f"layer {i}": Extra("scalar", torch.tensor(float(i))) for i in range(200)}
    assert len(notes) > Limits().extras
    assert {name: float(one.value) for name, one in notes_from_bytes(notes_to_bytes(notes)).items()} == {
        name: float(one.value) for name, one in notes.items()
    }
