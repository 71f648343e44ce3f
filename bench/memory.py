"""Memory of a round does not grow with its clients: a model of 10M weights, one batch a client, 10 against 1,000.

    python bench/memory.py                  # all of it: about half an hour on two idle cores, 40 GB of temporary files
    python bench/memory.py --methods nst    # one method
    python bench/memory.py --most 100       # 10 against 100 clients a round, in some minutes

Every setting runs in a process of its own. What is compared is the peak memory of that process and its workers (PSS, so
that pages they share count once) above its level before the first round. The promise is a ratio of at most 1.3.

One round is looked at. In a second one NST would send everybody the union of all clients' masks, a model that is denser
the more clients there were: 40 % of the weights after ten, all of them after a thousand.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FEW, MOST, BOUND = 10, 1000, 1.3
METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "nst": {"density": 0.05},
    "jmwst": {"density": 0.05, "warmup_clients": 2, "warmup_epochs": 1},
}


def child(method: str, per_round: int, rounds: int, workers: int, folder: Path) -> None:
    """One setting: says when it is ready, waits for the word to begin, says when it is done."""
    import torch
    from torch import nn

    import flashfl as fl
    from flashfl.core.engine import FixedPopulation
    from flashfl.engine.cpu import CPUEngine
    from flashfl.run.config import TrainConfig
    from flashfl.run.simulate import drive

    def model() -> nn.Module:
        widths = (16, 1000, 3000, 2000, 500)
        parts: list[nn.Module] = []
        for inside, outside in itertools.pairwise(widths):
            parts += [nn.Linear(inside, outside), nn.ReLU()]
        return nn.Sequential(*parts, nn.Linear(widths[-1], 2))

    x = torch.rand(2 * MOST, 16)
    y = torch.arange(2 * MOST) % 2  # one of each for every client: so that all learn alike
    # Always as many clients, so that only the size of the cohort differs.
    task = fl.Task(model, [(x[2 * i : 2 * i + 2], y[2 * i : 2 * i + 2]) for i in range(MOST)], (x[:8], y[:8]))
    train = TrainConfig(
        rounds=rounds, per_round=per_round, batch=2, lr=0.01, workers=workers, device="cpu", eval_every=100
    )
    engine = CPUEngine(task, train, folder / "masks")
    print(f"ready {task.layout.prunable_size}", flush=True)
    sys.stdin.readline()
    run = drive(fl.METHODS[method](**METHODS[method]), task, train, engine, FixedPopulation(task.clients), folder)
    why = [reason for record in run.history for reason in record.failures.values()]
    engine.close()
    print("\n".join([f"done {len(why)}", *why[:3]]), flush=True)


def tree(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            continue  # it has just ended
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def pss(processes: list[int]) -> int:
    """Bytes these processes hold, pages they share counted by share."""
    total = 0
    for pid in processes:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)
    return total


def settled(root: int) -> int:
    """The level once workers have built their models: when it has not moved for a second."""
    level, since = 0, time.monotonic()
    while time.monotonic() - since < 1:
        now = pss(tree(root))
        if abs(now - level) > 1 << 20:
            level, since = now, time.monotonic()
        time.sleep(0.1)
    return level


def measure(method: str, per_round: int, rounds: int, workers: int) -> dict[str, Any]:
    """Level before the first round, peak above it, seconds."""
    with tempfile.TemporaryDirectory(prefix="flashfl-memory-") as folder:
        command = [sys.executable, __file__, "--child", method, str(per_round), str(rounds), str(workers), folder]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            weights = int(process.stdout.readline().split()[1])
            level, peak, began = settled(process.pid), 0, time.monotonic()
            process.stdin.write("go\n")
            process.stdin.flush()
            while process.poll() is None:
                processes = tree(process.pid)  # looking for new ones takes longer than looking at those there are
                for _ in range(20):
                    peak = max(peak, pss(processes))
                    time.sleep(0.1)
            said, *why = process.stdout.read().splitlines() or [""]
        if process.returncode or not said:
            raise SystemExit(f"{method} with {per_round} clients a round failed")
        for reason in why:
            print(f"dropped: {reason}", file=sys.stderr)
    return {
        "method": method, "per_round": per_round, "weights": weights, "level": level, "above": peak - level,
        "seconds": time.monotonic() - began, "dropped": int(said.split()[1]),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS), help="comma-separated")
    parser.add_argument("--most", type=int, default=MOST, help="clients a round of the larger setting")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, help="also write the figures there")
    parser.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        method, per_round, rounds, workers, folder = args.child
        child(method, int(per_round), int(rounds), int(workers), Path(folder))
        return 0
    print(f"{'method':<8}{'clients':>8}{'weights':>12}{'level MB':>10}{'above MB':>10}{'seconds':>9}{'ratio':>8}")
    rows, passed = [], True
    for method in args.methods.split(","):
        base = 0
        for per_round in (FEW, args.most):
            row = measure(method, per_round, args.rounds, args.workers)
            base = base or row["above"]
            ratio = row["above"] / base
            passed = passed and ratio <= BOUND and row["dropped"] == 0
            rows.append({**row, "ratio": ratio})
            print(
                f"{method:<8}{per_round:>8}{row['weights']:>12,}{row['level'] / 1e6:>10.0f}{row['above'] / 1e6:>10.0f}"
                f"{row['seconds']:>9.0f}{ratio:>8.2f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(f"{'pass' if passed else 'FAIL'}: at most {BOUND} times the memory of {FEW} clients a round")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
