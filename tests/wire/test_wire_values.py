"""Values in all forms: rounding is unbiased, decoding is exact, and rounding again changes nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_support import count_values, mask_of, small_layout

from flashfl.core.precision import FORMS, Form, Precision
from flashfl.wire.errors import NonFinite
from flashfl.wire.reader import Reader
from flashfl.wire.values import (
    CARRIES,
    Carries,
    read_values,
    round_values,
    segments,
    values_chunks,
    values_size,
)

LAYOUT = small_layout()
MASK = mask_of(LAYOUT, [0.5, 0.1, 0.0, 1.0], 4)
numbers = st.floats(width=32, allow_nan=False, allow_infinity=False)


EVERY = [
    Precision(form, rest, rounding)
    for form, rest, rounding in itertools.product(FORMS, ("fp32", "fp16"), ("unbiased", "nearest"))
]
CHANGES = [Precision(form, rounding=rounding, changes=True) for form in FORMS for rounding in ("unbiased", "nearest")]


def there_and_back(values: torch.Tensor, carries: Carries, how: Precision, key: int) -> torch.Tensor:
    data = b"".join(values_chunks(values, LAYOUT, MASK.counts, carries, how, key))
    most = values_size(LAYOUT, MASK.active, carries, how)
    assert len(data) < most if data[1] & 64 else len(data) == most
    reader = Reader(memoryview(data), "values")
    found, *head = read_values(reader, LAYOUT, MASK.counts)
    assert head == [carries, replace(how, rounding="unbiased")]  # the receiver need not know how it was rounded
    reader.end()
    return found


@settings(deadline=None)
@given(st.data(), st.sampled_from(EVERY + CHANGES), st.sampled_from(list(CARRIES)), st.integers(0, 2**64 - 1))
def test_rounded_values_are_the_decoded_values(data: st.DataObject, how: Precision, carries: Carries, key: int) -> None:
    """`round_values` gives the receiver's values bit for bit, and rounding again under any key changes nothing."""
    how = replace(how, changes=how.changes and carries in ("all", "weights"))
    count = count_values(LAYOUT, MASK.active, carries)
    few = data.draw(st.lists(numbers, min_size=1, max_size=12))
    values = torch.tensor((few * count)[:count], dtype=torch.float32)
    parts = segments(LAYOUT, MASK.counts, carries, how.values)
    rounded = round_values(values, parts, how, key)
    found = there_and_back(values, carries, how, key)
    assert torch.equal(rounded.view(torch.int32), found.view(torch.int32))
    assert torch.equal(round_values(found, parts, how, key ^ 1), found)
    assert torch.equal(there_and_back(found, carries, how, key ^ 1).view(torch.int32), found.view(torch.int32))


@pytest.mark.parametrize("how", EVERY, ids=lambda how: f"{how.values}-{how.rest}-{how.rounding}")
@pytest.mark.parametrize("carries", CARRIES)
def test_messages_rounded_together_are_rounded_as_one_by_one(carries: Carries, how: Precision) -> None:
    """Bit for bit, each under its own key, also where a row has an infinity."""
    rows = torch.randn(3, count_values(LAYOUT, MASK.active, carries), generator=torch.Generator().manual_seed(1))
    rows[1, 0] = torch.inf
    parts, keys = segments(LAYOUT, MASK.counts, carries, how.values), (5, 2**64 - 1, 5)
    together = round_values(rows, parts, how, *keys)
    for row, key, found in zip(rows, keys, together, strict=True):
        assert torch.equal(round_values(row, parts, how, key).view(torch.int32), found.view(torch.int32))


@pytest.mark.parametrize("form", ["fp16", "bf16", "int8", "int4"])
@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_rounding_is_unbiased(form: Form, scale: float) -> None:
    """Over many keys the mean of a rounded value is the value, within five standard errors."""
    count = count_values(LAYOUT, MASK.active, "all")
    values = torch.from_numpy((np.random.default_rng(1).standard_normal(count) * scale).astype(np.float32))
    parts = segments(LAYOUT, MASK.counts, "all", form)
    runs = torch.stack([round_values(values, parts, Precision(form), key) for key in range(2000)]).double()
    error, spread = runs.mean(0) - values.double(), runs.std(0)
    assert bool((error.abs() <= 5 * spread / 2000**0.5 + values.abs() * 1e-4).all())
    coarse = torch.cat([torch.full((p.size,), p.coarse) for p in parts])
    assert torch.equal(runs[0][~coarse], values.double()[~coarse])
    assert bool((spread[coarse] > 0).any())


def test_statistics_and_vectors_are_not_rounded() -> None:
    assert [p.coarse for p in segments(LAYOUT, MASK.counts, "all", "int8")] == [True] * 4 + [False, True, False, False]
    assert [p.coarse for p in segments(LAYOUT, MASK.counts, "all", "fp16")] == [True] * 6 + [False] * 2


def test_values_beyond_the_range_are_clamped() -> None:
    """fp16 and bf16 stop at their largest number instead of overflowing."""
    count = count_values(LAYOUT, MASK.active, "weights")
    huge = torch.full((count,), torch.finfo(torch.float32).max)
    for form, largest in (("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)):
        assert float(there_and_back(-huge, "weights", Precision(form), 3).min()) == -largest


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("how", EVERY)
def test_non_finite_values_are_not_sent(bad: float, how: Precision) -> None:
    values = torch.zeros(count_values(LAYOUT, MASK.active, "all"))
    values[3] = bad
    with pytest.raises(NonFinite):
        values_chunks(values, LAYOUT, MASK.counts, "all", how, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("how", EVERY)
def test_cpu_and_gpu_round_alike(how: Precision) -> None:
    count = count_values(LAYOUT, MASK.active, "all")
    scales = torch.logspace(-44, 38, count, dtype=torch.float64)
    values = (torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * scales).float()
    parts = segments(LAYOUT, MASK.counts, "all", how.values)
    there = round_values(values.cuda(), parts, how, 7).cpu()
    assert torch.equal(round_values(values, parts, how, 7).view(torch.int32), there.view(torch.int32))
