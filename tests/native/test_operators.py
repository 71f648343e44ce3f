"""Each native operator agrees with torch's dense one, and so do its gradients."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from flashfl.native import Planes, SparseWeight

pytestmark = pytest.mark.usefixtures("native")
many = settings(
    max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)  # fmt: skip


def close(ours: Tensor, theirs: Tensor, scale: Tensor | None = None) -> None:
    """Equal to 1e-4 of the norm of `scale`, by default of `theirs`."""
    ours, theirs = ours.detach(), theirs.detach()
    assert ours.shape == theirs.shape
    assert float((ours - theirs).norm()) <= 1e-4 * float((theirs if scale is None else scale).norm()) + 1e-6


def sparse(weight: Tensor, bits: Tensor) -> SparseWeight:
    values = weight.flatten()[bits.flatten()].detach().clone().requires_grad_()
    return SparseWeight(weight.shape, bits.flatten().nonzero().flatten(), values)


def plain(x: object) -> Tensor:
    assert isinstance(x, Planes | Tensor)
    return x.dense() if isinstance(x, Planes) else x


def both(x: Tensor, pad: int, ours: Callable[..., object], theirs: Callable[..., Tensor]) -> None:
    """Compare results and input gradients of two functions of a batch."""
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = plain(ours(Planes.of(a, pad))), theirs(b)
    close(out, expected)
    gradient = torch.randn(expected.shape)
    out.backward(gradient)
    expected.backward(gradient)
    assert a.grad is not None
    assert b.grad is not None
    close(a.grad, b.grad)


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, object]:
    groups = draw(st.sampled_from([1, 1, 1, 2, 3]))
    kernel = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    padding = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    least = [max(1, d * (k - 1) + 1 - 2 * p) for k, d, p in zip(kernel, dilation, padding, strict=True)]
    return {
        "n": draw(st.integers(1, 37)), "groups": groups, "kernel": kernel, "dilation": dilation, "padding": padding,
        "inside": groups * draw(st.integers(1, 5)), "outside": groups * draw(st.integers(1, 7)),
        "stride": draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        "size": [low + draw(st.integers(0, 20)) for low in least],
        "density": draw(st.sampled_from([0.0, 0.05, 0.2, 0.4, 0.7, 1.0])),
        "pad": draw(st.integers(0, 2)), "bias": draw(st.booleans()), "seed": draw(st.integers(0, 2**31)),
        "threads": draw(st.sampled_from([1, 1, 2, 3])),
    }  # fmt: skip


@many
@given(convolutions())
def test_convolution_and_all_gradients_agree_with_dense_masked_autograd(case) -> None:
    torch.manual_seed(case["seed"])
    shape = (case["outside"], case["inside"] // case["groups"], *case["kernel"])
    bits = torch.rand(shape) < case["density"]
    weight = (torch.randn(shape) * bits).requires_grad_()
    x, ours = torch.randn(case["n"], case["inside"], *case["size"]), sparse(weight, bits)
    biases = [torch.randn(case["outside"]).requires_grad_() if case["bias"] else None for _ in range(2)]
    if biases[0] is not None:
        biases[1] = biases[0].detach().clone().requires_grad_()
    how = (case["stride"], case["padding"], case["dilation"], case["groups"])
    before = torch.get_num_threads()
    torch.set_num_threads(case["threads"])
    try:
        both(
            x,
            case["pad"],
            lambda x: F.conv2d(x, ours, biases[0], *how),
            lambda x: F.conv2d(x, weight, biases[1], *how),
        )
    finally:
        torch.set_num_threads(before)
    # The gradient of a single active weight is a long sum, which may cancel to almost nothing.
    close(ours.values.grad, weight.grad[bits], scale=weight.grad)
    if biases[0] is not None:
        close(biases[0].grad, biases[1].grad)


@many
@given(st.integers(1, 50), st.integers(1, 40), st.integers(1, 40), st.floats(0, 1), st.integers(0, 2**31))
def test_linear_and_all_gradients_agree_with_dense_masked_autograd(n, inside, outside, density, seed) -> None:
    torch.manual_seed(seed)
    bits = torch.rand(outside, inside) < density
    weight = (torch.randn(outside, inside) * bits).requires_grad_()
    ours = sparse(weight, bits)
    both(torch.randn(n, inside), 0, lambda x: F.linear(x, ours), lambda x: F.linear(x, weight))
    close(ours.values.grad, weight.grad[bits])


@many
@given(
    st.integers(1, 35), st.integers(1, 5), st.integers(1, 9), st.integers(2, 9), st.integers(0, 2), st.booleans(),
    st.booleans(), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_batchnorm_with_addition_and_relu_agrees_with_torch(n, planes, h, w, pad, add, relu, training, seed) -> None:
    torch.manual_seed(seed)
    norms = [nn.BatchNorm2d(planes).train(training) for _ in range(2)]
    with torch.no_grad():
        for name, value in norms[0].state_dict().items():
            if value.is_floating_point():
                value.copy_(torch.rand(planes) + 0.5)
                norms[1].state_dict()[name].copy_(value)
    others = [torch.randn(n, planes, h, w)]
    others = [others[0].clone().requires_grad_(), others[0].clone().requires_grad_()]

    def run(x, norm, other):
        y = norm(x)
        y = y + other if add else y
        return y.relu() if relu else y

    x = 3 * torch.randn(n, planes, h, w) + 5
    both(x, pad, lambda x: run(x, norms[0], Planes.of(others[0], pad)), lambda x: run(x, norms[1], others[1]))
    for name in ("weight", "bias"):
        close(getattr(norms[0], name).grad, getattr(norms[1], name).grad)
    for name in ("running_mean", "running_var"):
        close(getattr(norms[0], name), getattr(norms[1], name))
    if add:
        close(others[0].grad, others[1].grad)


@many
@given(
    st.integers(1, 35), st.integers(1, 3), st.integers(4, 12), st.integers(4, 12), st.integers(1, 4), st.integers(1, 3),
    st.booleans(), st.integers(0, 2), st.integers(0, 2**31),
)  # fmt: skip
def test_max_pool_agrees_with_torch_also_where_maxima_are_equal(n, planes, h, w, k, step, padded, pad, seed) -> None:
    torch.manual_seed(seed)
    x = torch.randn(n, planes, h, w).round()  # many equal values
    padding = k // 2 if padded else 0
    both(x, pad, lambda x: F.max_pool2d(x, k, step, padding), lambda x: F.max_pool2d(x, k, step, padding))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten(1), lambda x: torch.flatten(x, 1), lambda x: x.view(x.size(0), -1),
        lambda x: x.mean((2, 3)), lambda x: x.mean([-1, -2], keepdim=True), lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: F.adaptive_avg_pool2d(x, (3, 2)), lambda x: F.avg_pool2d(x, 2), lambda x: F.max_pool2d(x, 3, 2, 1),
        lambda x: F.max_pool2d(x, 3, ceil_mode=True), lambda x: x * 2 - 1, lambda x: 1 - x, lambda x: x + 1,
        lambda x: x + x, lambda x: torch.add(x, x, alpha=3), lambda x: torch.cat([x, x], 1), lambda x: x[:, 1:],
        lambda x: torch.sigmoid(x), lambda x: x.tanh(), lambda x: F.gelu(x), lambda x: F.relu(x, inplace=True),
        lambda x: F.pad(x, (1, 2)), lambda x: x.mean(), lambda x: x.sum((2, 3)), lambda x: x.reshape(-1, 4),
        lambda x: F.dropout(x, 0.0), lambda x: x.transpose(2, 3), lambda x: x.relu() + x, lambda x: x / 3,
    ],
)  # fmt: skip
def test_any_function_of_planes_gives_what_it_gives_for_a_tensor(function) -> None:
    torch.manual_seed(0)
    x = torch.randn(19, 3, 6, 8)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    ours, theirs = plain(function(Planes.of(a * 1, 1))), function(b * 1)
    close(ours, theirs)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    close(a.grad, b.grad)


def test_a_norm_that_is_used_twice_updates_its_statistics_once() -> None:
    norms, x = [nn.BatchNorm2d(3), nn.BatchNorm2d(3)], torch.randn(8, 3, 4, 4) + 2
    for norm, batch in zip(norms, (Planes.of(x, 1), x), strict=True):
        y = norm(batch)
        plain(y.relu()), plain(y + y)
    close(norms[0].running_mean, norms[1].running_mean)
    close(norms[0].running_var, norms[1].running_var)


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    torch.manual_seed(0)
    x, bits = torch.randn(40, 12, 9, 9), torch.rand(14, 12, 3, 3) < 0.3
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        weight = sparse(torch.arange(bits.numel()).view(bits.shape).sin(), bits)
        out = plain(F.conv2d(Planes.of(x, 1), weight, None, 1, 1))
        out.square().sum().backward()
        found.append((out.detach(), weight.values.grad))
    torch.set_num_threads(1)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def test_forked_processes_and_several_callers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    torch.manual_seed(0)
    weight = torch.randn(16, 8, 3, 3)
    ours, x = sparse(weight, torch.rand(weight.shape) < 0.2), torch.randn(32, 8, 12, 12)

    def run(_: object = None) -> Tensor:
        with torch.no_grad():
            return plain(F.conv2d(Planes.of(x, 1), ours, padding=1))  # type: ignore[arg-type]

    expected = run()
    with ThreadPoolExecutor(4) as callers:
        assert all(torch.equal(out, expected) for out in callers.map(run, range(40)))
    child = os.fork()
    if child == 0:  # the parent's threads are not there: it works on its own
        os._exit(0 if torch.equal(run(), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_weight_without_a_kernel_acts_as_the_whole_tensor() -> None:
    bits = torch.rand(4, 3) < 0.5
    weight = torch.randn(4, 3) * bits
    ours = sparse(weight, bits)
    close(torch.matmul(ours, torch.ones(3)), weight.sum(1))
    close(ours.abs(), weight.abs())
    with pytest.raises(RuntimeError, match="shape"):
        F.linear(torch.zeros(2, 5), ours)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_inputs_of_another_type_are_refused_as_by_torch(kind: torch.dtype) -> None:
    ours = sparse(torch.randn(4, 3, 3, 3), torch.rand(4, 3, 3, 3) < 0.5)
    with pytest.raises(RuntimeError):
        F.conv2d(torch.zeros(2, 3, 8, 8, dtype=kind), ours)  # type: ignore[arg-type]
    ours = sparse(torch.randn(4, 3), torch.rand(4, 3) < 0.5)
    with pytest.raises(RuntimeError):
        F.linear(torch.zeros(2, 3, dtype=kind), ours)  # type: ignore[arg-type]
