"""Every Triton kernel against its plain twin: on a GPU, or with TRITON_INTERPRET=1 wherever Triton is installed."""

from __future__ import annotations

import copy
import math
import os

import pytest
import torch
from torch import Tensor

from flashfl.core import rng
from flashfl.core.layout import Layout
from flashfl.engine import counting, replica
from flashfl.sparsity import select
from flashfl.sparsity.select import lowest_by_layer, magnitude
from flashfl.wire import sizes
from tests.wire.wire_lists import plain_gap_sums

pytest.importorskip("triton", reason="needs Triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    DEVICE = torch.device("cpu")
elif torch.cuda.is_available():
    DEVICE = torch.device("cuda", 0)
else:
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from flashfl.kernels.collect import add, finite
from flashfl.kernels.hash import hash_rows
from flashfl.kernels.largest import largest
from flashfl.kernels.norm import batch_norm
from flashfl.kernels.rice import gap_sums
from flashfl.kernels.select import keep_largest, radix_lowest
from flashfl.kernels.step import masked_step

LAYOUT = Layout.build(
    {"prunable": [("a", (9000,)), ("b", (1,)), ("c", (64, 64)), ("d", (4097,))], "dense": [("x", (3,))]}
)
K = LAYOUT.prunable_size


def on(device: torch.device, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


def flags(key: int, rows: int, share: float) -> Tensor:
    return torch.stack([rng.uniform(rng.fold(key, row), K) < share for row in range(rows)])


def test_hash() -> None:
    keys = [rng.fold(1, i) for i in range(3)]
    words = [[rng._signed(key & 0xFFFFFFFF), rng._signed(key >> 32)] for key in keys]
    for start, stop in ((0, 1), (5, 7000), (1 << 30, (1 << 30) + 2048)):
        assert torch.equal(hash_rows(words, start, stop, DEVICE).cpu(), rng.hash_rows(keys, start, stop))


@pytest.mark.parametrize("share", [None, 0.0, 0.05, 0.9])
@pytest.mark.parametrize("spread", [1, 40, 1 << 31])
def test_selection(spread: int, share: float | None) -> None:
    """With many ties, few and none; with all, none, few and most positions as candidates."""
    keys = torch.stack([rng.hashes(row, 0, K).long() % (2 * spread) - spread for row in range(2)]).to(torch.int32)
    among = None if share is None else flags(3, 2, share)
    counts = []
    for row in range(2):
        most = [x.size if among is None else int(among[row, x.start : x.stop].sum()) for x in LAYOUT.prunable]
        counts.append([n if i == 1 else int(n * (0.3, 0.8)[row]) for i, n in enumerate(most)])
    expected = lowest_by_layer(LAYOUT, keys, counts, among)
    theirs, candidates = on(DEVICE, keys, among)
    assert torch.equal(radix_lowest(LAYOUT.spans, theirs, counts, candidates, False).cpu(), expected)


def test_selection_of_distinct_keys_and_of_magnitudes() -> None:
    counts = [[900, 1, 4096, 0], [1, 0, 5, 4097]]
    hashes = rng.hash_rows([1, 2], 0, K)
    weights = torch.stack([rng.uniform(row, K) - 0.5 for row in range(2)])
    weights[:, ::3] = 0
    for keys, distinct in ((hashes, True), (magnitude(weights), False), (-magnitude(weights), False)):
        expected = lowest_by_layer(LAYOUT, keys, counts)
        assert torch.equal(radix_lowest(LAYOUT.spans, keys.to(DEVICE), counts, None, distinct).cpu(), expected)


def test_selection_in_the_whole_model() -> None:
    keys = magnitude(torch.stack([rng.uniform(row, K) - 0.5 for row in range(2)]))
    expected = select.lowest(keys, 777)
    assert torch.equal(radix_lowest(((0, K),), keys.to(DEVICE), [[777]] * 2, None, False).cpu(), expected)


def test_keep_the_largest_of_each_span() -> None:
    """With ties, with a span that keeps everything, and with columns outside the spans."""
    values = torch.stack([rng.uniform(row, K + 5) - 0.5 for row in range(2)])
    values[:, ::3] = -0.25
    spans, counts = [slice(*span) for span in LAYOUT.spans], [800, 1, 4096, 1]
    drop = tuple(size - count for size, count in zip(LAYOUT.sizes, counts, strict=True))
    found = keep_largest(values.to(DEVICE), LAYOUT.spans, drop)
    assert torch.equal(found.cpu(), select.keep_largest(values, spans, counts))


@pytest.mark.parametrize("share", [0.0, 0.05, 0.7, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(50,), (7, 30), (3, 5, 11), (4, 6, 8, 8), (2, 3, 4, 5, 6), (9, 4, 32, 32)])
def test_largest_inputs(shape: tuple[int, ...], dtype: torch.dtype, share: float) -> None:
    x = (rng.uniform(3, math.prod(shape)) - 0.5).view(shape).to(dtype)
    spacing = -(-x.numel() // 32768) | 1  # as `replica.largest` has it
    expected = replica.largest(x, torch.tensor(share))
    last = [torch.channels_last] if len(shape) == 4 else []
    for form in (torch.contiguous_format, *last):
        found = largest(x.to(DEVICE, memory_format=form), torch.tensor(share, device=DEVICE), spacing)
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("density", [0.0, 0.05, 0.6, 1.0])
@pytest.mark.parametrize("moved", [0.0, 0.01, 0.7])
def test_sizes_of_lists(density: float, moved: float) -> None:
    """Sparse lists, lists that are coded as complements, empty and full ones."""
    bits = flags(1, 2, density)
    base = bits ^ flags(2, 2, moved)
    for mine, bases in ((bits, []), (bits, [base[:1]]), (bits[:1], [base]), (bits, [base[:1], base])):
        for i, other in enumerate(bases or [None]):
            expected = sizes._streams(plain_gap_sums(LAYOUT, mine, other, i == 0))
            found = sizes._streams(gap_sums(LAYOUT, *on(DEVICE, mine, other), i == 0))
            for plain, kernel in zip(expected, found, strict=True):
                assert torch.equal(plain, kernel.cpu())


@pytest.mark.parametrize("first", [0, 3000])
@pytest.mark.parametrize("shared", [True, False])
def test_updates_are_judged_and_added(shared: bool, first: int) -> None:
    rows, size, k = 4, 5000, 2500
    values = torch.stack([rng.uniform(row, size) - 0.5 for row in range(rows)])
    bits = torch.stack([rng.uniform(20 + row, k) < 0.3 for row in range(1 if shared else rows)])
    values[1, 4999], values[2, 0] = float("nan"), -float("inf")
    theirs = [t.to(DEVICE) for t in (values, bits)]
    assert finite(theirs[0]).tolist() == values.isfinite().all(1).tolist() == [True, False, False, True]

    share = torch.tensor([3, 0, 0, 2**40])
    sums = [torch.ones(size, dtype=torch.float64), torch.ones(k, dtype=torch.int64)]
    mine = [t.clone().to(DEVICE) for t in sums]
    add(*theirs, share.to(DEVICE), *mine, first)
    counting._add(values, bits, share, *sums, first)
    torch.testing.assert_close(mine[0].cpu(), sums[0], rtol=1e-12, atol=0)
    assert torch.equal(mine[1].cpu(), sums[1])


@pytest.mark.parametrize(("adds", "cuts"), [(True, True), (False, True), (False, False), (True, False)])
@pytest.mark.parametrize("shape", [(5, 70, 7, 9), (2, 64, 1, 1), (3, 3, 60, 50)])
def test_normalising_adding_and_cutting_off(shape: tuple[int, int, int, int], adds: bool, cuts: bool) -> None:
    torch.manual_seed(0)
    c = shape[1]
    x, more, dy = (torch.randn(shape).contiguous(memory_format=torch.channels_last) for _ in range(3))
    x += 30  # where a plain sum of squares would lose digits
    plain = torch.nn.BatchNorm2d(c)
    with torch.no_grad():
        plain.weight.copy_(torch.rand(c) + 0.5)
        plain.bias.copy_(torch.randn(c))
    ours = copy.deepcopy(plain).to(DEVICE)
    a, b = ([t.clone().to(d).requires_grad_() for t in (x, more)] for d in ("cpu", DEVICE))
    y = plain(a[0])
    y = y + a[1] if adds else y
    expected = y.relu() if cuts else y
    dy *= y.detach().abs() > 1e-4  # nearer to zero than rounding, either may let a gradient through
    settings = (ours.weight, ours.bias, ours.running_mean, ours.running_var, 0.1, plain.eps)
    got = batch_norm(b[0], b[1] if adds else None, *settings, cuts)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)
    expected.backward(dy)
    got.backward(dy.to(DEVICE))
    pairs = [(plain.weight.grad, ours.weight.grad), (plain.bias.grad, ours.bias.grad), (a[0].grad, b[0].grad)]
    pairs += [(plain.running_mean, ours.running_mean), (plain.running_var, ours.running_var)]
    for one, other in [*pairs, *([(a[1].grad, b[1].grad)] if adds else [])]:
        torch.testing.assert_close(other.cpu(), one, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("half", [True, False])
def test_step(half: bool, decay: float) -> None:
    weights, grad, mask = rng.uniform(1, 5000), rng.uniform(2, 5000), rng.uniform(3, 5000) < 0.3
    weights *= mask
    w, g, m, lr = (t.clone().to(DEVICE) for t in (weights, grad, mask, torch.tensor(0.1)))
    copy = w.to(torch.bfloat16) if half else None
    masked_step(w, copy, g.to(torch.bfloat16) if half else g, m, lr, decay)
    followed = (grad.to(torch.bfloat16).float() if half else grad) + decay * weights
    expected = weights - 0.1 * followed * mask
    torch.testing.assert_close(w.cpu(), expected)
    if copy is not None:
        torch.testing.assert_close(copy.float(), w, rtol=2**-7, atol=0)  # Triton's interpreter cuts where a GPU rounds
