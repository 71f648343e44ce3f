"""Fuzzing: for any bytes the decoder gives a message that keeps every promise, or raises a named error.

More than half of the mutations are made field by field and sealed with a valid checksum, so that they reach the
checks behind it. A million of them is a slow test; the fast suite makes twenty thousand.
"""

from __future__ import annotations

import os
import resource
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from wire_support import changed, count_values, mask_of, resnet_layout, samples, small_layout, update
from wire_surgery import again, mutate_bytes, mutate_field
from wire_surgery import replace as put

from flashfl.core.layout import Layout
from flashfl.core.mask import Mask
from flashfl.core.precision import Precision
from flashfl.wire import Limits, Message, WireError, decode, encode
from flashfl.wire.values import FORMS

HERE = Path(__file__).parent
Seed = tuple[bytes, dict[str, Mask]]


def seeds(layout: Layout) -> list[Seed]:
    """Valid messages of every kind, mask form and value form."""
    out: list[Seed] = []
    for message, bases in samples(layout):
        known = {mask.hash: mask for mask in bases}
        for form in FORMS if message.values is not None else FORMS[:1]:
            out.append((encode(message, bases, Precision(form)).data, known))
        if message.kind == "update" and message.mask is not None:
            out += coded(message, bases)
        if message.mask is not None:
            forms = ["rice", "bitmap", *(["difference"] if bases else [])]
            out += [(encode(message, bases, form=form).data, known) for form in forms]
    return out


def coded(message: Message, bases: tuple[Mask, ...]) -> list[Seed]:
    """An update with changes, most of them small, so that their levels are coded."""
    assert message.values is not None
    peaked = replace(message, values=message.values**5)
    how = [Precision(form, changes=True) for form in ("int8", "int4")]
    return [(encode(peaked, bases, one).data, {mask.hash: mask for mask in bases}) for one in how]


def check(message: Message, data: bytes, known: dict[str, Mask]) -> None:
    """Every promise a decoded message makes, and that it is written again to the very same bytes."""
    layout, mask = message.layout, message.mask
    if mask is not None:
        assert mask.bits.dtype == torch.bool
        assert mask.bits.shape == (layout.prunable_size,)
        assert message.counts == Mask(layout, mask.bits).counts
    if message.counts is not None:
        assert all(0 <= c <= k for c, k in zip(message.counts, layout.sizes, strict=True))
    if message.values is not None:
        assert message.values.dtype == torch.float32
        assert message.values.shape == (count_values(layout, mask.active if mask else 0, message.carries),)
        assert bool(torch.isfinite(message.values).all())
    assert again(message, data, known) == data


def fuzz(layout: Layout, pool: list[Seed], count: int, seed: int, seconds: float = 1e9) -> Counter[str]:
    """How `count` mutations ended, by the name of the error; two thirds are made field by field and sealed."""
    rng = np.random.default_rng(seed)
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds
    limits = Limits(message=1 << 26, elements=1 << 22)
    for step in range(count):
        data, known = pool[int(rng.integers(len(pool)))]
        bad = mutate_field(data, rng) if step % 3 else mutate_bytes(data, rng)
        try:
            found = decode(bad, layout, known, limits)
        except WireError as error:
            ends[type(error).__name__] += 1
        else:
            check(found, bad, known)
            ends["decoded"] += 1
        if step % 64 == 0 and time.monotonic() > until:
            break
    return ends


def test_fuzz_5_000_mutations() -> None:
    layout = small_layout()
    ends = fuzz(layout, seeds(layout), 5_000, 1)
    assert ends.total() == 5_000
    assert len(ends) > 12, ends
    assert ends["decoded"] > 250, ends


@pytest.mark.slow
def test_fuzz_1_000_000_mutations() -> None:
    """Time-boxed: over layouts of up to 2,000 weights, a new one every ten thousand."""
    until = time.monotonic() + float(os.environ.get("FLASHFL_FUZZ_SECONDS", "1500"))
    ends: Counter[str] = Counter()
    rng = np.random.default_rng(3)
    while ends.total() < 1_000_000 and time.monotonic() < until:
        layout = small_layout(tuple(int(x) for x in rng.integers(0, 500, 4)))
        ends += fuzz(layout, seeds(layout), 10_000, ends.total(), until - time.monotonic())
    print(ends.total(), dict(ends))
    assert ends["decoded"] > 1000


def large(count: int, room: int = 768 << 20) -> None:
    """Mutations at ResNet18's size with `room` bytes of memory beyond what is in use before the first."""
    layout = resnet_layout()
    base = mask_of(layout, [0.05] * 20, 1)
    near = changed(base, 0.125, 2)
    known = {base.hash: base}
    pool: list[Seed] = [
        (encode(update(base), (base,)).data, known),
        (encode(update(near), (base,), Precision("int8")).data, known),
        (encode(update(near), form="rice").data, known),
        (encode(update(near), form="bitmap", values=Precision("fp16")).data, known),
        *coded(update(near), (base,)),
    ]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, used + room))
    began = time.monotonic()
    ends = fuzz(layout, pool, count, 4)
    print(ends.total(), f"{time.monotonic() - began:.0f} s", dict(ends))
    assert ends.total() == count


def held() -> int:
    """Bytes of memory in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
def test_a_few_bytes_that_stand_for_many_zeros_take_no_memory() -> None:
    layout, most = small_layout(), Limits().elements
    empty = b"\4" + struct.pack("<IIBI", most, 0, 0, 0)
    data = encode(update(mask_of(layout, [0.2, 0.1, 0.0, 1.0], 1)), form="rice").data
    before = held()
    found = decode(put(data, "extra", b"\2\1a" + empty + b"\1b" + empty), layout)
    assert held() - before < most // 4
    assert [extra.value.shape for extra in found.extra.values()] == [(most,)] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_fuzz_resnet18_under_a_memory_limit(count: int) -> None:
    path = os.pathsep.join([str(HERE), *sys.path])
    code = f"import torch; torch.set_num_threads(1); import test_wire_fuzz as t; t.large({count})"
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    print(run.stdout)
    assert run.returncode == 0, run.stderr
