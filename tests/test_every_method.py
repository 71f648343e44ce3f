"""The promises every registered method keeps, whoever wrote it: a new method is covered by being registered."""

from __future__ import annotations

import ast
import itertools
import os
import re
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashfl as fl
from flashfl.core.mask import Mask
from flashfl.core.method import Method
from flashfl.core.state import State
from flashfl.data.task import Task
from flashfl.sparsity import weight_budget
from tests.run.run_support import After, Killed, killed

ROUNDS = 4
SETTINGS: dict[str, Any] = {"per_round": 4, "batch": 4, "eval_every": 2, "workers": 1, "checkpoint_every": 1}


def small(name: str, **changes: Any) -> Method:
    """A method at a density that small nets can bear, with a short first stage."""
    cls = fl.METHODS[name]
    known = {f.name for f in fields(cls)}
    wanted = {"density": 0.3, "warmup_clients": 3, "warmup_epochs": 3, "densities": (0.2, 0.3, 0.4), **changes}
    if "densities" in known:
        wanted.pop("density")
    return cls(**{k: v for k, v in wanted.items() if k in known})


VARIANTS = [
    *((name, {}) for name in fl.METHODS),
    ("pdst", {"allocation": "erk"}),
    ("pdst", {"allocation": "erk+"}),
    ("spdst", {"nm": 4}),
    ("spdst", {"mask_init": "magnitude"}),
    ("jmwst", {"nm": 4}),
    ("hetero-jmwst", {"nm": 4}),
    ("jmwst", {"r_int": 2}),
    ("jmwst", {"freeze_after": 2}),
    ("jmwst", {"aggregator": "wfa", "adapt": fl.PruneRegrow(growth="gradient")}),
    ("nst", {"adapt": fl.PruneRegrow(growth="momentum")}),
    ("flashplus", {"r_int": 2, "look_ahead": 0.5}),
    ("flashplus", {"multiply": 1.0, "shrink": 0.001, "init_scale": 0.5}),
    ("fedspa", {"moving": True}),
    ("fedspa", {"masks": "common"}),
    ("prunefl", {"interval": 2}),
    ("lotteryfl", {"threshold": 0.0}),
    ("zerofl", {"upload": "largest changes"}),
    ("zerofl", {"upload": "changes of the largest weights"}),
]
variants = pytest.mark.parametrize(
    ("name", "changes"), VARIANTS, ids=["-".join([n, *map(str, c)]) for n, c in VARIANTS]
)
methods = pytest.mark.parametrize("name", list(fl.METHODS))
# Systems whose clients, by definition, report masks of no fixed size: drawn bits, slices of several widths, masks that
# shrink, or that stop below their cap.
ANY_SIZE = ("fedpm", "heterofl", "fjord", "lotteryfl", "prunefl")


def run(method: Method, task: Task, **settings: Any) -> tuple[fl.Run, list[State]]:
    states: list[State] = []
    done = fl.simulate(method, task, ROUNDS, watch=lambda s, line: states.append(s), **{**SETTINGS, **settings})
    return done, states


def assert_equal(a: fl.Run, b: fl.Run) -> None:
    assert torch.equal(a.weights.mask.bits, b.weights.mask.bits)
    assert torch.equal(a.weights.vector, b.weights.vector)
    assert a.checksum == b.checksum


@variants
def test_density_is_exact_in_every_round(name: str, changes: dict[str, Any], small_task: Task) -> None:
    method = small(name, **changes)
    _, states = run(method, small_task)
    check_density(method, states, changes.get("nm", 0))


def check_density(method: Method, states: list[State], pattern: int = 0) -> None:
    """Masks state their true counts and have exactly the method's density, or are not sparse yet."""
    budgets = {weight_budget(s.layout, getattr(method, "density", 1.0)) for s in states}
    for state in states:
        fresh = Mask(state.layout, state.mask.bits)
        assert fresh.counts == state.mask.counts, "a mask must state its true counts"
        assert not state.weights.vector[: state.layout.prunable_size][~state.mask.bits].any()
        if method.name == "prunefl":
            assert not state.phase.counts or fresh.active <= max(budgets)
        elif not method.exact:
            assert fresh.active >= max(budgets)
        elif state.phase.counts and not pattern:
            assert fresh.active in budgets | {state.layout.prunable_size}
    if method.exact and not pattern:
        assert states[-1].mask.active in budgets
    if pattern:
        assert len({state.mask.counts for state in states if state.phase.counts}) == 1


@methods
def test_clients_of_every_round_have_their_exact_budget(name: str, small_task: Task, monkeypatch: Any) -> None:
    from flashfl import aggregate
    from flashfl.engine import encoding

    seen: list[tuple[int, ...]] = []

    def spy(sums: Any, update: Any) -> Any:
        seen.append(update.counts)
        return aggregate.add(sums, update)

    monkeypatch.setattr(encoding, "add", spy)
    run(small(name), small_task)
    allowed = {weight_budget(small_task.layout, d) for d in (0.2, 0.3, 0.4, 1.0)}
    assert seen
    assert name in ANY_SIZE or {sum(counts) for counts in seen} <= allowed


@methods
def test_first_phase_moves_layer_densities(name: str, small_task: Task) -> None:
    method = small(name)
    if not hasattr(method, "warmup_clients"):
        pytest.skip("this method has no first phase")
    _, states = run(method, small_task)
    first = next(s for s in states if s.phase.counts)
    densities = first.mask.layer_densities
    assert max(densities) - min(densities) > 0.01, "uniform densities mean that the first phase did nothing"


@pytest.mark.parametrize("name", ["dense", "pdst", "spdst", "hetero-spdst"])
def test_frozen_masks_never_move(name: str, small_task: Task) -> None:
    _, states = run(small(name), small_task)
    masks = [s.mask for s in states if s.phase.counts]
    assert all(fl.mismatch(a, b) == 0 for a, b in itertools.pairwise(masks))


@pytest.mark.parametrize("name", ["nst", "jmwst", "hetero-jmwst"])
def test_moving_masks_move(name: str, small_task: Task) -> None:
    _, states = run(small(name), small_task)
    masks = [s.mask for s in states if s.phase.counts]
    assert any(fl.mismatch(a, b) > 0 for a, b in itertools.pairwise(masks))


@methods
def test_nested_masks_nest(name: str, small_task: Task) -> None:
    method = small(name)
    if not hasattr(method, "densities"):
        pytest.skip("this method has one density")
    _, states = run(method, small_task)
    for state in (s for s in states if s.phase.counts):
        masks = [state.extra[f"mask {d}"] for d in sorted(method.densities)]
        for small_mask, large in itertools.pairwise(masks):
            assert isinstance(small_mask, Mask)
            assert isinstance(large, Mask)
            assert not (small_mask.bits & ~large.bits).any()
        counts = [Mask(state.layout, m.bits).active for m in masks if isinstance(m, Mask)]
        assert counts == [weight_budget(state.layout, d) for d in sorted(method.densities)]


@methods
def test_order_of_replies_does_not_change_results(name: str, small_task: Task, monkeypatch: Any) -> None:
    """The engine's pool hands results back in reverse order, as slow first clients would."""
    from flashfl.engine import pool

    whole, _ = run(small(name), small_task)
    each, turned = pool.InProcess.each, []

    def reversed_each(self: Any, jobs: Any) -> Any:
        results = list(each(self, jobs))
        turned.append(len(results) > 1)
        return reversed(results)

    monkeypatch.setattr(pool.InProcess, "each", reversed_each)
    other, _ = run(small(name), small_task)
    assert any(turned)
    assert_equal(whole, other)
    assert whole.traffic == other.traffic


@methods
def test_number_of_workers_does_not_change_results(name: str, small_task: Task) -> None:
    one, _ = run(small(name), small_task)
    three, _ = run(small(name), small_task, workers=3)
    assert_equal(one, three)
    assert one.traffic == three.traffic


@variants
def test_resume_after_kill_is_bit_identical(
    name: str, changes: dict[str, Any], small_task: Task, tmp_path: Path
) -> None:
    """Checkpoints come every second round, and the kill comes before the next one: it loses one round or two."""
    method = small(name, **changes)
    whole, states = run(method, small_task)
    settings = {**SETTINGS, "checkpoint_every": 2}
    for at in range(3, len(states) + 1):
        folder = tmp_path / str(at)
        with killed():
            fl.simulate(method, small_task, ROUNDS, folder=folder, watch=After(at, Killed), **settings)
        resumed = fl.simulate(method, small_task, ROUNDS, folder=folder, resume=True, **settings)
        assert_equal(whole, resumed)
        assert resumed.traffic == whole.traffic, "bytes after a resume are those of the undisturbed run"
        assert len(resumed.history) == len(whole.history)


@methods
def test_clients_that_fail_do_not_stop_a_run(name: str, small_task: Task) -> None:
    done, states = run(small(name), small_task, dropout=0.4, retries=9)
    assert small(name).done(states[-1])
    assert any(line.failures for line in done.history)


@methods
def test_methods_are_plain_data(name: str) -> None:
    method = small(name)
    assert method == replace(method)
    assert isinstance(hash(method), int)
    assert fl.METHODS[name]() is not None, "every field has a default"
    assert code_lines(Path(sys.modules[type(method).__module__].__file__ or "")) <= 90


SYSTEMS = (
    "feddst", "fedspa", "zerofl", "prunefl", "lotteryfl", "heterofl", "fjord", "fedpm", "ssfl", "sparsyfed", "fedrts",
    "topk", "scaffold",
)  # fmt: skip


@pytest.mark.parametrize("name", SYSTEMS)
def test_docstring_of_a_system_states_paper_choices_and_bytes(name: str) -> None:
    said = " ".join((fl.METHODS[name].__doc__ or "").split())
    assert re.match(r".{5,90}et al., ([A-Za-z]+ )?20\d\d", said), "the paper and its year"
    assert re.search(r"Silent (in the paper|in the papers|or open in the paper|or changed|or left out): ", said)
    (cost,) = re.findall(r"Bytes: (.+) When: ", said)
    assert re.search(r"both directions|\b[Uu]p\b.*\b[Dd]own\b", cost), cost
    assert "Not to be confused with " in said


def test_most_systems_take_fewer_than_60_lines() -> None:
    lengths = [code_lines(Path(sys.modules[fl.METHODS[name].__module__].__file__ or "")) for name in SYSTEMS]
    assert statistics.median(lengths) < 60


def code_lines(path: Path) -> int:
    """Lines of a file without blank lines and docstrings."""
    tree = ast.parse(path.read_text())
    docs = [n.body[0] for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    said = {
        line
        for doc in docs
        if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
        for line in range(doc.lineno, (doc.end_lineno or 0) + 1)
    }
    return sum(bool(text.strip()) and i not in said for i, text in enumerate(path.read_text().splitlines(), 1))


@pytest.mark.slow
@methods
def test_resume_after_kill_9_is_bit_identical(name: str, tmp_path: Path) -> None:
    """A real process on the real digits task, killed without warning, and another that goes on."""
    has_density = "density" in {f.name for f in fields(fl.METHODS[name]) if not f.metadata}
    density = ["--density", "0.05"] if has_density else []
    common = [sys.executable, "-m", "flashfl.cli", "run", "--method", name, *density, "--rounds", "6"]
    common += ["--checkpoint-every", "1", "--quiet"]
    whole = subprocess.run([*common, "--out", str(tmp_path / "whole")], capture_output=True, text=True, check=True)
    process = subprocess.Popen([*common, "--out", str(tmp_path / "cut")], stdout=subprocess.DEVNULL)
    results = tmp_path / "cut" / "results.jsonl"
    while process.poll() is None and (not results.exists() or results.read_text().count('"type": "round"') < 3):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    resumed = subprocess.run(
        [*common, "--out", str(tmp_path / "cut"), "--resume"], capture_output=True, text=True, check=True
    )
    assert resumed.stdout.split("checksum ")[1].split()[0] == whole.stdout.split("checksum ")[1].split()[0]


def test_worked_example_of_the_guide_runs(tmp_path: Path) -> None:
    page = Path(__file__).parent.parent / "docs" / "adding-a-method.md"
    blocks = [b.split("```")[0] for b in page.read_text().split("```python\n")[1:]]
    script = tmp_path / "example.py"
    script.write_text("\n\n".join(textwrap.dedent(b) for b in blocks))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "accuracy" in done.stdout
