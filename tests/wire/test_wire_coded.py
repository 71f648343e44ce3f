"""Coded levels of changes: smaller than plain ones, counted without writing, and in one way only."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from wire_support import mask_of, small_layout, update
from wire_surgery import payload, replace

from flashfl.core.precision import Form, Precision
from flashfl.wire import Message, WireError, decode, encode, size_with
from flashfl.wire.coded import BITS, plain_size, plan_levels, read_coded, read_plain, write_levels
from flashfl.wire.errors import BadCount, BadField, BadLength, OutOfRange, TrailingBytes
from flashfl.wire.levels import TOPS, scale_count
from flashfl.wire.reader import Reader

LAYOUT = small_layout((400, 800))
MASK = mask_of(LAYOUT, [0.5, 0.5], 1)
COUNT = MASK.active + 12  # coarse values
CODINGS: tuple[Form, Form] = ("int8", "int4")
forms = pytest.mark.parametrize("form", CODINGS)


def message(power: int = 5) -> Message:
    """An update. The higher the power, the more of its values are close to zero."""
    plain = update(MASK)
    assert plain.values is not None
    return dataclasses.replace(
        plain, values=plain.values**power * torch.tensor([1.0, -1.0]).repeat(400)[: len(plain.values)]
    )


def sent(form: Form, power: int = 5) -> bytes:
    return encode(message(power), (MASK,), Precision(form, changes=True)).data


def head(form: Form) -> int:
    """Where the levels of a values section begin."""
    return 2 + (4 * 3 if form == "int8" else 2 * scale_count([COUNT], form))


def edited(form: Form, edit: Callable[[bytearray], object]) -> bytes:
    """A coded message whose block was edited: the parameter, the unary stream's length, the streams, the rest."""
    data = sent(form)
    body = payload(data, "values")
    block = bytearray(body[head(form) :])
    edit(block)
    return replace(data, "values", body[: head(form)] + bytes(block))


def refused(error: type[WireError], data: bytes, match: str | None = None) -> None:
    with pytest.raises(error, match=match):
        decode(data, LAYOUT, {MASK.hash: MASK})


@st.composite
def some_levels(draw: st.DrawFn) -> tuple[Form, Tensor]:
    form: Form = draw(st.sampled_from(CODINGS))
    rng, top = np.random.default_rng(draw(st.integers(0, 2**20))), TOPS[form]
    spread = draw(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0, 200.0]))
    found = (rng.standard_normal(draw(st.integers(0, 300))) * spread).round().clip(-top, top)
    return form, torch.from_numpy(found).to(torch.int8)


@settings(deadline=None)
@given(some_levels())
def test_levels_round_trip_in_the_smallest_size(drawn: tuple[Form, Tensor]) -> None:
    """The parameter has the fewest bits of all, and the size that is counted is the size that is written."""
    form, levels = drawn
    coded, data = write_levels(levels, form, True)
    plain = plain_size(len(levels), form)
    numbers = [2 * x if x >= 0 else -2 * x - 1 for x in levels.tolist()]
    bits = [sum(1 + k + (x >> k) for x in numbers) for k in range(BITS[form])]
    k, saved = map(int, plan_levels(levels, form))
    assert k == bits.index(min(bits))
    assert len(data) == plain - saved <= plain
    assert coded == (saved > 0)
    assert not coded or data[0] == k <= BITS[form] - 2
    reader = Reader(memoryview(data), "values")
    found = read_coded(reader, len(levels), form) if coded else read_plain(reader, len(levels), form, True)
    reader.end()
    assert torch.equal(found, levels)


@forms
def test_messages_counted_together_are_counted_as_one_by_one(form: Form) -> None:
    rows = torch.randn(4, 500, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.0], [1], [3], [90]])
    levels = rows.round().clamp(-TOPS[form], TOPS[form]).to(torch.int8)
    for *found, row in zip(*plan_levels(levels, form), levels, strict=True):
        assert found == list(plan_levels(row, form))


@forms
@pytest.mark.parametrize("power", [1, 5])
def test_coded_message_is_never_larger_and_is_written_again_to_the_same_bytes(form: Form, power: int) -> None:
    how, data = Precision(form, changes=True), sent(form, power)
    found = decode(data, LAYOUT, {MASK.hash: MASK})
    assert found.precision == how
    assert encode(found, (MASK,), how).data == data
    plain = encode(message(power), (MASK,), Precision(form))
    weights = decode(plain.data, LAYOUT, {MASK.hash: MASK}).values
    assert weights is not None
    assert found.values is not None
    assert torch.equal(found.values, weights)
    assert plain.traffic == size_with(message(power), MASK.active, plain.traffic.mask, how)
    coded = bool(payload(data, "values")[1] & 64)
    assert len(data) < len(plain.data) if coded else len(data) == len(plain.data)
    assert coded or power == 1
    assert not payload(plain.data, "values")[1] & 64  # weights are never coded


@forms
def test_other_parameter_is_refused(form: Form) -> None:
    levels = sample_levels(form)
    best = int(plan_levels(levels, form).k)
    tried = 0
    for k in range(BITS[form] - 1):
        block = written_with(levels, k)
        if len(block) < plain_size(len(levels), form):
            tried += 1
            if k == best:
                assert torch.equal(read_coded(Reader(memoryview(block), "values"), len(levels), form), levels)
            else:
                with pytest.raises(BadField, match="not the best one"):
                    read_coded(Reader(memoryview(block), "values"), len(levels), form)
    assert tried > 1
    for k in (BITS[form] - 1, 31, 255):
        refused(BadField, edited(form, lambda block, k=k: block.__setitem__(0, k)), "Rice parameter")


def sample_levels(form: Form) -> Tensor:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(2)) * TOPS[form] / 4
    return values.round().clamp(-TOPS[form], TOPS[form]).to(torch.int8)


def written_with(levels: Tensor, k: int) -> bytes:
    """A block with any parameter, bit by bit."""
    numbers = [2 * x if x >= 0 else -2 * x - 1 for x in levels.tolist()]
    low = [x >> plane & 1 for plane in range(k) for x in numbers]
    unary = [bit for x in numbers for bit in [0] * (x >> k) + [1]]
    streams = [np.packbits(np.array(bits, np.uint8), bitorder="little").tobytes() for bits in (low, unary)]
    return bytes([k]) + struct.pack("<I", len(streams[1])) + b"".join(streams)


@forms
def test_larger_form_is_refused(form: Form) -> None:
    """Plain levels that would be smaller coded, and coded ones that would be smaller plain."""
    data, plain = sent(form), encode(message(), (MASK,), Precision(form)).data
    body = bytearray(payload(plain, "values"))
    body[1] |= 32
    refused(BadField, replace(data, "values", bytes(body)), "Send them coded")
    wide = torch.randint(-TOPS[form], TOPS[form] + 1, (COUNT,), generator=torch.Generator().manual_seed(3))
    block = written_with(wide, BITS[form] - 2)
    assert len(block) > plain_size(COUNT, form)
    refused(BadLength, edited(form, lambda old: old.__setitem__(slice(None), block)), "Send plain ones")


@forms
def test_truncated_and_extended_messages_are_refused(form: Form) -> None:
    data = sent(form)
    body = payload(data, "values")
    for cut in range(head(form), len(body)):
        refused(WireError, replace(data, "values", body[:cut]))
    refused(TrailingBytes, replace(data, "values", body + b"\0"))


def put(at: int, what: bytes) -> Callable[[bytearray], None]:
    return lambda block: block.__setitem__(slice(at, at + len(what)), what)


@forms
def test_hostile_streams_are_refused(form: Form) -> None:
    k, length = struct.unpack("<BI", payload(sent(form), "values")[head(form) :][:5])
    unary = 5 + -(-COUNT * k // 8)
    for claimed in (0, length - 5, length - 1, length + 1, plain_size(COUNT, form), 2**32 - 1):
        refused(WireError, edited(form, put(1, struct.pack("<I", claimed))))
    refused(BadCount, edited(form, put(unary, b"\0" * length)), "has 0 gaps")  # one endless run
    refused(BadCount, edited(form, put(unary, b"\xff" * length)), "gaps")


def test_padding_of_the_low_stream_must_be_zero() -> None:
    levels = sample_levels("int4")[:1001]
    block = bytearray(written_with(levels, int(plan_levels(levels, "int4").k)))
    unary = struct.unpack("<I", block[1:5])[0]
    read_coded(Reader(memoryview(block), "values"), 1001, "int4")
    block[len(block) - unary - 1] |= 128
    with pytest.raises(BadField, match="padding"):
        read_coded(Reader(memoryview(block), "values"), 1001, "int4")


@forms
def test_levels_out_of_range_are_refused(form: Form) -> None:
    """Just above the range, which low bits alone may reach, and far above it. The largest level is in range."""
    top = TOPS[form]
    for level in (-top - 1, top + 1, 3000, top):
        levels = torch.tensor([level] + [0] * 10_000)
        error, match = (BadField, "not the best") if level == top else (OutOfRange, "outside")
        for k in range(level == top, BITS[form] - 2):
            block = written_with(levels, k)
            assert len(block) < plain_size(len(levels), form)
            with pytest.raises(error, match=match):
                read_coded(Reader(memoryview(block), "values"), len(levels), form)


def test_coded_flag_belongs_to_levels_of_changes() -> None:
    for how, flags in (("int4", 64), ("int8", 64), ("fp16", 64), ("fp16", 96), ("fp32", 64), ("fp32", 96)):
        data = encode(message(), (MASK,), Precision(how)).data
        body = bytearray(payload(data, "values"))
        body[1] |= flags
        refused(BadField, replace(data, "values", bytes(body)), "only int8 and int4 levels of changes can be coded")
    bare = small_layout(())
    data = encode(update(mask_of(bare, [], 1)), (), Precision("int4", changes=True), form="bitmap").data
    body = bytearray(payload(data, "values"))
    assert not body[1] & 64  # twelve levels are too few
    body[1] |= 64
    with pytest.raises(WireError):
        decode(replace(data, "values", bytes(body)), bare)
