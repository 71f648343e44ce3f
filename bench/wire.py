"""The wire format against the entropy bound and other formats: sizes, times and savings for a ResNet18.

    OMP_NUM_THREADS=1 python bench/wire.py

Prints each figure with its target and pass or FAIL. The exit status is the number of failures. Needs scipy, for the
comparison only. Takes about a minute on one core.
"""

from __future__ import annotations

import argparse
import heapq
import io
import math
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import scipy
import scipy.sparse
import torch

import flashfl as fl
from flashfl.core.exchange import Local, Traffic
from flashfl.core.layout import Layout
from flashfl.core.mask import Mask, Recipe, Weights
from flashfl.core.precision import FORMS, Precision
from flashfl.core.rng import choose, fold
from flashfl.sparsity import recipe_mask
from flashfl.wire import Message, decode, encode, mask_to_bytes, size_with
from flashfl.wire.coded import plan_levels
from flashfl.wire.levels import TOPS, to_levels

SHAPES = (
    [(64, 3, 3, 3)]
    + [(64, 64, 3, 3)] * 4
    + [(128, 64, 3, 3), (128, 128, 3, 3), (128, 64, 1, 1)]
    + [(128, 128, 3, 3)] * 2
    + [(256, 128, 3, 3), (256, 256, 3, 3), (256, 128, 1, 1)]
    + [(256, 256, 3, 3)] * 2
    + [(512, 256, 3, 3), (512, 512, 3, 3), (512, 256, 1, 1)]
    + [(512, 512, 3, 3)] * 2
)
CLIENTS, COHORT, ROUNDS, EVERY = 100, 10, 600, 5
failures = 0


def resnet18() -> Layout:
    """Every convolution prunable; BatchNorm and the classifier dense; 9,600 running statistics."""
    return Layout.build(
        {
            "prunable": [(f"conv{i}.weight", shape) for i, shape in enumerate(SHAPES)],
            "dense": [(f"norm{i}.{p}", (s[0],)) for i, s in enumerate(SHAPES) for p in ("weight", "bias")]
            + [("fc.weight", (10, 512)), ("fc.bias", (10,))],
            "statistic": [(f"norm{i}.running_{p}", (s[0],)) for i, s in enumerate(SHAPES) for p in ("mean", "var")],
        }
    )


LAYOUT = resnet18()
K, DENSE, STATISTICS = (
    LAYOUT.prunable_size,
    LAYOUT.trained_size - LAYOUT.prunable_size,
    LAYOUT.size - LAYOUT.trained_size,
)


def verdict(what: str, found: float, limit: float, at_least: bool = False, form: str = ".3f") -> None:
    """One line: the figure, its target, pass or FAIL."""
    global failures
    good = found >= limit if at_least else found <= limit
    failures += not good
    sign = ">=" if at_least else "<="
    print(f"  {'pass' if good else 'FAIL'}  {what:<62} {found:>10{form}}  {sign} {limit:{form}}")


def budgets(density: float, skewed: bool) -> list[int]:
    """Uniform, or shaped as a warm-up leaves them: the smallest layers full, the largest at half the mean density."""
    if not skewed:
        return [round(size * density) for size in LAYOUT.sizes]
    sizes = np.array(LAYOUT.sizes, float)
    low, high = 0.0, 8.0
    for _ in range(60):  # the steeper the profile, the emptier the largest layers
        slope = (low + high) / 2
        shape = (sizes / sizes.max()) ** -slope
        a, b = 0.0, 1.0
        for _ in range(60):
            scale = (a + b) / 2
            a, b = (scale, b) if np.minimum(1, scale * shape) @ sizes < density * K else (a, scale)
        low, high = (slope, high) if scale > density / 2 else (low, slope)
    return [round(n) for n in np.minimum(1, scale * shape) * sizes]


def random_mask(budgets: Sequence[int], key: int) -> Mask:
    return recipe_mask(LAYOUT, Recipe(key, tuple(budgets)))


def plain(mask: Mask) -> Mask:
    """The mask without its recipe: as if it had been found by training."""
    return Mask(LAYOUT, mask.bits, mask.counts)


def changed(mask: Mask, share: float, key: int) -> Mask:
    """`share` of each layer's active weights dropped at random and as many grown."""
    rng = np.random.default_rng(key)
    bits = mask.bits.numpy().copy()
    for layer in LAYOUT.prunable:
        part = bits[layer.start : layer.stop]
        on, off = np.flatnonzero(part), np.flatnonzero(~part)
        count = min(math.ceil(len(on) * share), len(off))
        part[rng.choice(on, count, replace=False)] = False
        part[rng.choice(off, count, replace=False)] = True
    return Mask(LAYOUT, torch.from_numpy(bits), mask.counts)


def choices(universe: Sequence[int], counts: Sequence[int]) -> float:
    """Bytes of the entropy bound: log2 of the number of ways to choose, layer by layer."""
    pairs = zip(universe, counts, strict=True)
    nats = sum(math.lgamma(u + 1) - math.lgamma(c + 1) - math.lgamma(u - c + 1) for u, c in pairs)
    return nats / math.log(2) / 8


def change_bound(mask: Mask, base: Mask) -> float:
    moved = mask.bits & ~base.bits
    grown = [int(np.count_nonzero(moved[x.start : x.stop])) for x in LAYOUT.prunable]
    free = [k - c for k, c in zip(LAYOUT.sizes, base.counts, strict=True)]
    return choices(base.counts, grown) + choices(free, grown)


def rivals(mask: Mask, values: np.ndarray) -> dict[str, int]:
    """Bytes of the same weights in other formats, each with the dense layers as plain fp32."""
    bits, rest = mask.bits.numpy(), 4 * (DENSE + STATISTICS)
    weights = np.zeros(K, np.float32)
    weights[bits] = values[: mask.active]
    rows = sum(shape[0] + 1 for shape in SHAPES)
    npz = saved = 0
    for layer in LAYOUT.prunable:
        table = scipy.sparse.csr_matrix(weights[layer.start : layer.stop].reshape(layer.shape[0], -1))
        buffer = io.BytesIO()
        scipy.sparse.save_npz(buffer, table)
        npz += buffer.tell()
        buffer = io.BytesIO()
        torch.save([torch.from_numpy(x) for x in (table.indptr, table.indices, table.data)], buffer)
        saved += buffer.tell()
    packed = zlib.compress(np.packbits(bits).tobytes(), 6)
    return {
        "int32 CSR": 8 * mask.active + 4 * rows + rest,
        "bitmap + zlib": len(packed) + 4 * mask.active + rest,
        "scipy npz": npz + rest,
        "torch.save": saved + rest,
    }


def message(mask: Mask, kind: str = "update", statistics: bool = True, local: Local | None = None) -> Message:
    values = torch.from_numpy(np.random.default_rng(1).standard_normal(mask.active + DENSE + STATISTICS * statistics))
    carries = "all" if statistics else "weights"
    if kind == "order":
        return Message("order", LAYOUT, (2, 9, 0), 7, key=fold(1, "key"), start=(2, 3, 0), local=local or Local(),
                       mask=mask, values=values.float(), carries=carries)  # fmt: skip
    return Message("update", LAYOUT, (2, 9, 0), 7, 500, mask=mask, values=values.float(), carries=carries,
                   metrics={"loss": 0.5})  # fmt: skip


def size(sent: Message, bases: Sequence[Mask] = ()) -> Traffic:
    return encode(sent, bases).traffic


def sizes() -> None:
    print("\nSizes in kB, whole update; mask bytes against the entropy bound")
    print(f"  {'mask':<22}{'ours':>8}{'mask':>8}{'bound':>8}  " + "".join(f"{n:>15}" for n in
          ("int32 CSR", "bitmap + zlib", "scipy npz", "torch.save")))  # fmt: skip
    found: list[tuple[str, float, float]] = []
    for skewed in (False, True):
        for density in (0.1, 0.05, 0.01):
            mask = plain(random_mask(budgets(density, skewed), 7))
            sent = message(mask)
            parts = size(sent)
            assert sent.values is not None
            bound = choices(LAYOUT.sizes, mask.counts)
            others = rivals(mask, sent.values.numpy())
            name = f"{'warm-up' if skewed else 'uniform'} d = {density}"
            row = "".join(f"{n / 1e3:>15.0f}" for n in others.values())
            print(f"  {name:<22}{parts.total / 1e3:>8.0f}{parts.mask / 1e3:>8.1f}{bound / 1e3:>8.1f}  {row}")
            near = changed(mask, 0.125, 3)
            found.append((name, parts.mask / bound, size(message(near), (mask,)).mask / change_bound(near, mask)))
            if skewed:
                densities = [c / k for c, k in zip(mask.counts, LAYOUT.sizes, strict=True)]
                print(f"  {'':<22}layer densities {max(densities):.3f} down to {min(densities):.4f}")
    for name, full, change in found:
        verdict(f"{name}: full mask / bound", full, 1.02, form=".4f")
        verdict(f"{name}: 12.5 % changed / bound", change, 1.03, form=".4f")


def overhead() -> None:
    print("\nA message under a mask both sides know, beyond 4 bytes a value")
    mask = random_mask(budgets(0.05, True), 7)
    up = size(message(mask), (mask,))
    verdict("update", up.total - 4 * (mask.active + DENSE + STATISTICS), 200, form=".0f")
    keep = Local(lr=0.0123456789, keep=("mask",), start=mask.recipe)
    for name, local in (("order, Local()", Local()), ("order, Local with a recipe", keep)):
        sent = size(message(mask, "order", local=local), (mask,))
        verdict(f"{name}", sent.total - 4 * (mask.active + DENSE + STATISTICS), 500, form=".0f")


def clock(call: Callable[[], object], times: int) -> float:
    """Median seconds."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return median(found)


def timings() -> None:
    print(
        "\nMilliseconds to encode and decode an update at d = 0.05, beside zlib level 1 of the masked dense fp32 bytes"
    )
    mask = random_mask(budgets(0.05, True), 7)
    near = changed(plain(mask), 0.125, 3)
    sent = message(mask)
    assert sent.values is not None
    dense = np.zeros(LAYOUT.size, np.float32)
    dense[:K][mask.bits.numpy()] = sent.values[: mask.active].numpy()
    dense[K:] = sent.values[mask.active :].numpy()
    raw = dense.tobytes()
    reference = clock(lambda: zlib.compress(raw, 1), 5)
    print(f"  zlib level 1: {reference * 1e3:.0f} ms")
    known = {mask.hash: mask}
    for name, which, bases, limit in (
        ("known mask", mask, (mask,), 1 / 5),
        ("full mask", plain(mask), (), 1 / 3),
        ("changed mask", near, (mask,), 1 / 3),
    ):  # fmt: skip
        # A fresh mask object each time: nothing remembered from the time before but what both sides know.
        def once(which: Mask = which, bases: tuple[Mask, ...] = bases) -> bytes:
            fresh = which if bases and which is bases[0] else plain(which)
            return encode(Message("update", LAYOUT, (2, 9, 0), 7, 500, mask=fresh, values=sent.values), bases).data

        data = once()
        down, up = clock(once, 9), clock(lambda data=data: decode(data, LAYOUT, known), 9)
        print(f"  {name}: encode {down * 1e3:.1f} ms, decode {up * 1e3:.1f} ms")
        verdict(f"{name}: (encode + decode) / zlib", (down + up) / reference, limit)


def cohorts() -> list[list[int]]:
    return [choose(fold(5, "cohort", t), range(CLIENTS), COHORT) for t in range(ROUNDS)]


def dense_run(statistics: bool) -> int:
    """Both directions of dense FedAvg in the same format: the full mask costs next to nothing."""
    full = Mask.full(LAYOUT)
    first, later = (
        size(message(full, "order", statistics)).total,
        size(message(full, "order", statistics), (full,)).total,
    )
    up = size(message(full, "update", statistics), (full,)).total
    return CLIENTS * (first - later) + ROUNDS * COHORT * (later + up)


def warm_up(mask: Mask, statistics: bool) -> int:
    """Ten clients are sent a sparse model and report layer counts."""
    counts = Message("update", LAYOUT, (1, 0, 0), 7, 500, counts=mask.counts, metrics={"loss": 0.5})
    return 10 * (size(message(mask, "order", statistics)).total + size(counts).total)


def spdst(statistics: bool) -> float:
    mask = random_mask(budgets(0.05, True), 7)
    seen: set[int] = set()
    order = [size(message(mask, "order", statistics), held).total for held in ((), (mask,))]
    up = size(message(mask, "update", statistics), (mask,)).total
    total = warm_up(random_mask(budgets(0.05, False), 8), statistics)
    for cohort in cohorts():
        for client in cohort:
            total += order[client in seen] + up
            seen.add(client)
    return dense_run(statistics) / total


def jmwst(churn: float) -> float:
    """Simulated masks: on every fifth round each client changes 12.5 % of its mask and the server `churn` of its own.

    What an order costs depends on how many times the mask changed since the client's last round; one pair of masks
    is encoded for each such distance.
    """
    versions = [random_mask(budgets(0.05, True), 7)]
    apart: dict[int, int] = {0: 9}
    full = len(mask_to_bytes(plain(versions[0])))
    while len(versions) < 2 or apart[len(versions) - 1] < full:
        versions.append(changed(plain(versions[-1]), churn, len(versions)))
        apart[len(versions) - 1] = len(mask_to_bytes(versions[-1], (versions[0],)))
        if len(versions) > 40:
            break
    moved = len(mask_to_bytes(changed(plain(versions[0]), 0.125, 99), (versions[0],)))
    frame = {kind: size(message(versions[0], kind), (versions[0],)).total - 9 for kind in ("order", "update")}
    recipe = len(mask_to_bytes(versions[0]))
    total = warm_up(random_mask(budgets(0.05, False), 8), True)
    held: dict[int, int] = {}
    for t, cohort in enumerate(cohorts()):
        version = -(-t // EVERY)  # the mask changes after rounds 0, 5, 10, ...
        for client in cohort:
            lag = version - held[client] if client in held else None
            first = recipe if version == 0 else full
            total += frame["order"] + (first if lag is None else apart.get(lag, full))
            total += frame["update"] + (moved if t % EVERY == 0 else 9)
            held[client] = version
    steps = ", ".join(f"{lag}: {n / 1e3:.0f}" for lag, n in apart.items() if lag < 6)
    print(f"  churn {churn:.3f}: kB of an order's mask by changes since the last round {steps}; full {full / 1e3:.0f}")
    return dense_run(True) / total


def savings() -> None:
    print(f"\nSavings over dense, both ways, {CLIENTS} clients, {COHORT} a round, {ROUNDS} rounds, warm-up included")
    verdict("SPDST d = 0.05, with BatchNorm statistics", spdst(True), 19.1, True)
    verdict("SPDST d = 0.05, static BatchNorm", spdst(False), 19.4, True)
    verdict("JMWST d = 0.05, r_int 5, server mask moves 12.5 %", jmwst(0.125), 18.0, True)
    verdict("JMWST d = 0.05, r_int 5, server mask moves 25 %", jmwst(0.25), 18.0, True)


def precisions() -> None:
    """Sizes in every form, as written and as the closed form says, and the density that the same bytes allow."""
    print("\nAn update under a known mask at d = 0.05: kB, bits for each active weight, and the density of equal bytes")
    mask = random_mask(budgets(0.05, True), 7)
    sent, plain_size = message(mask), size(message(mask), (mask,)).total
    for form in FORMS:
        for rest in ("fp32", "fp16") if form != "fp32" else ("fp32",):
            how = Precision(form, rest)
            written = encode(sent, (mask,), how).traffic
            assert written == size_with(sent, mask.active, written.mask, how)
            fixed = size_with(sent, 0, written.mask, how).total
            bits = 8 * (written.total - fixed) / mask.active
            density = 8 * (plain_size - fixed) / bits / K
            print(f"  {form}, rest {rest}: {written.total / 1e3:>8.0f} {bits:>8.2f} {density:>9.3f}")


def entropies() -> None:
    """How many bits the levels of a trained model hold: what an entropy code could save, and what ours saves."""
    print("\nBits of quantised values: entropy, a Huffman code, and our Rice code, which only changes use")
    print("  digits, SPDST d = 0.1, 15 rounds")
    before: list[Weights] = []
    run = fl.simulate(fl.SPDST(0.1), fl.data.tasks.digits(), 15, workers=1, progress=False,
                      watch=lambda state, record: before.append(state.weights))  # fmt: skip
    places, trained = run.weights.mask.places, run.weights.vector
    for what, values in (("weights", trained[places]), ("changes", (trained - before[-2].vector)[places])):
        for form in ("int8", "int4"):
            levels = to_levels(values, run.weights.mask.counts, form, "unbiased", [1]).levels
            counts = torch.bincount(levels.long() + TOPS[form]).double()
            shares = counts[counts > 0] / counts.sum()
            entropy, huffman = float(-(shares * shares.log2()).sum()), _huffman(shares.tolist())
            full = 8 if form == "int8" else 4
            rice = full - 8 * int(plan_levels(levels, form).saved) / len(levels)
            less = f"{1 - rice / full:.1%} less"
            print(
                f"  {what} as {form}: entropy {entropy:.2f}, Huffman {huffman:.2f}, Rice {rice:.2f} of {full}: {less}"
            )


def _huffman(shares: list[float]) -> float:
    """The mean length of the best prefix code: each merge adds a bit to everything below it."""
    heap, total = sorted(shares), 0.0
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        total += merged
        heapq.heappush(heap, merged)
    return total


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    print(f"ResNet18: {K:,} prunable, {DENSE:,} dense, {STATISTICS:,} statistics")
    print(f"torch {torch.__version__}, numpy {np.__version__}, scipy {scipy.__version__}")
    for part in (sizes, overhead, precisions, entropies, timings, savings):
        part()
    print(f"\n{failures} failed")
    sys.exit(failures)
