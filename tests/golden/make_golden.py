"""Golden records: what every method did on the digits, round by round, before the internals were rewritten.

    python tests/golden/make_golden.py                  # run every case and write digits.json
    python tests/golden/make_golden.py --only jmwst     # replace the records of cases whose name contains "jmwst"
    python tests/golden/make_golden.py --check-exact    # write nothing; say which cases are bit-identical

`tests/test_golden.py` runs every case and compares it with the file, within tolerances. Exact digests depend on the
machine's instruction set and on the torch version, so only `--check-exact` looks at them. With other instructions a
value next to a rounding threshold may round the other way under fp16 or int8; such a case can then fail the test too.

Cases use the public API: `flashfl.simulate`, `flashfl.tasks`, methods and settings. What may move when internals do is
in three functions at the top: `simulate_lanes`, `round_facts` and `state_facts`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import flashfl as fl

FILE = Path(__file__).with_name("digits.json")
COUNTED = 4  # rounds, not counting a first stage
SAMPLED = 32  # weights recorded after each round
LANES = 2  # one fewer than clients a round, so that the last client is alone

Facts = dict[str, Any]  # of one round, as it stands in the file
Watch = Callable[[Any, Any], None]


# -- adapters: the only code here that knows internals --------------------------------------------------------------


def simulate_lanes(method: fl.Method, task: fl.Task, train: fl.TrainConfig, batched: bool, watch: Watch) -> None:
    """Run on the GPU engine, on the CPU: a replica for each client, or all clients batched into one computation."""
    from flashfl.core.engine import FixedPopulation
    from flashfl.engine.gpu import GPUEngine
    from flashfl.run.simulate import drive

    crew = "batched" if batched else "lanes"
    engine = GPUEngine(task, replace(train, lanes=LANES, crew=crew), "cpu")
    try:
        drive(method, task, train, engine, FixedPopulation(task.clients), watch=watch)
    finally:
        engine.close()


def round_facts(record: fl.RoundRecord) -> Facts:
    """What a round's record says. "stage" is the number of its phase: 1 for one that does not count."""
    return {
        "stage": 2 if record.counts else 1,
        "round": record.round,
        "attempt": record.attempt,
        "cohort": list(record.cohort),
        "failures": {str(client): why for client, why in record.failures.items()},
        "missed": {str(client): why for client, why in record.missed.items()},
        "bytes": asdict(record.bytes),
        "loss": record.loss,
        "metrics": {view: {"loss": score.loss, "metric": score.metric} for view, score in record.metrics.items()},
    }


def state_facts(state: Any) -> Facts:
    """The server's mask and weights after a round."""
    vector = state.weights.vector.cpu()
    nonzero = vector.nonzero().flatten()
    at = nonzero[torch.linspace(0, len(nonzero) - 1, SAMPLED).long()]
    return {
        "mask": state.mask.hash,
        "active": list(state.mask.counts),
        "digest": hashlib.blake2b(vector.numpy().tobytes(), digest_size=8).hexdigest(),
        "norm": float(vector.double().norm()),
        "at": at.tolist(),
        "values": [to_hex(value) for value in vector[at].tolist()],
    }


def values_at(state: Any, places: list[int]) -> list[float]:
    """The weights at these places."""
    found: list[float] = state.weights.vector.cpu()[torch.tensor(places)].tolist()
    return found


# -- cases ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One run: a method by name and its settings, settings of the training and of the task, and the engine."""

    method: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "cpu"  # or lanes, batched


GRADIENT, MOMENTUM = fl.PruneRegrow(growth="gradient"), fl.PruneRegrow(growth="momentum")
SGD = {"momentum": 0.9, "weight_decay": 5e-4, "prox": 0.01, "lr": 0.02}
REPEATED = {"dropout": 0.5, "min_replies": 2, "retries": 20}  # what clients remember is rolled back
# Chosen so that a difference in the last bit stays small. Clients differ in size, so averages are weighted and last
# batches are short. No last batch has fewer than eight samples: BatchNorm over fewer magnifies differences. The first
# layer is dense: a sparse one has channels without any weight, where BatchNorm divides by almost nothing.
TASK = {"clients": 8, "partition": "dirichlet", "limit": 240, "partition_seed": 43, "prunable": "inner"}
PLAIN = {"model": "leafcnn"}  # has no BatchNorm, which cannot be batched over clients
FAST = {"lr": 0.5}  # without BatchNorm training is slower

CASES: dict[str, Case] = {
    "dense": Case("dense"),
    "nst": Case("nst"),
    "pdst-uniform": Case("pdst"),
    "pdst-erk-plus": Case("pdst", {"allocation": "erk+"}),
    "spdst": Case("spdst"),
    "spdst-prunable-conv": Case("spdst", task={"prunable": "conv"}),
    "jmwst-every-round": Case("jmwst"),
    "jmwst-every-second-round": Case("jmwst", {"r_int": 2}),
    "hetero-spdst": Case("hetero-spdst"),
    "hetero-jmwst": Case("hetero-jmwst"),
    "sparse": Case("sparse"),
    "disagree": Case("disagree"),
    "jmwst-nm": Case("jmwst", {"nm": 8, "density": 0.25}),
    "jmwst-wfa": Case("jmwst", {"aggregator": "wfa"}),
    "jmwst-growth-gradient": Case("jmwst", {"adapt": GRADIENT}),
    "jmwst-growth-momentum": Case("jmwst", {"adapt": MOMENTUM}),
    "jmwst-int8": Case("jmwst", train={"values": "int8"}),
    "spdst-fp16": Case("spdst", train={"values": "fp16"}),
    "jmwst-static-bn": Case("jmwst", train={"static_bn": True}),
    "jmwst-sgd": Case("jmwst", train=SGD),
    "jmwst-dropout": Case("jmwst", train={"dropout": 0.3}),
    "nst-dropout": Case("nst", train={"dropout": 0.3}),
    "nst-repeated-rounds": Case("nst", train=REPEATED),
    "spdst-mask-init-magnitude": Case("spdst", {"mask_init": "magnitude"}),
    "jmwst-freeze-after": Case("jmwst", {"freeze_after": 2}),
    "lanes-dense": Case("dense", engine="lanes"),
    "lanes-nst": Case("nst", engine="lanes"),
    "lanes-nst-repeated-rounds": Case("nst", train=REPEATED, engine="lanes"),
    "lanes-spdst": Case("spdst", engine="lanes"),
    "lanes-jmwst": Case("jmwst", engine="lanes"),
    "lanes-jmwst-growth-momentum": Case("jmwst", {"adapt": MOMENTUM}, engine="lanes"),
    "lanes-jmwst-int8": Case("jmwst", train={"values": "int8"}, engine="lanes"),
    "lanes-jmwst-sgd": Case("jmwst", train=SGD, engine="lanes"),
    "lanes-jmwst-static-bn": Case("jmwst", train={"static_bn": True}, engine="lanes"),
    "lanes-hetero-jmwst-dropout": Case("hetero-jmwst", train={"dropout": 0.3}, engine="lanes"),
    "batched-spdst": Case("spdst", train=FAST, task=PLAIN, engine="batched"),
    "batched-jmwst-growth-momentum": Case("jmwst", {"adapt": MOMENTUM}, train=FAST, task=PLAIN, engine="batched"),
    "batched-jmwst-sgd": Case("jmwst", train={**SGD, "lr": 0.1}, task=PLAIN, engine="batched"),
}


def method_of(case: Case) -> fl.Method:
    """The method, with a short first stage where it has one."""
    cls = fl.METHODS[case.method]
    usual = {"warmup_clients": 3, "warmup_epochs": 2} if "warmup_epochs" in cls.__dataclass_fields__ else {}
    if case.method == "sparse":  # has the settings of a first stage, and none by default
        usual = {}
    return cls(**{**usual, **case.settings})


def run_case(case: Case, watch: Watch) -> None:
    """Run a case on one thread; `watch` is called after every round."""
    task = fl.tasks.digits(**{**TASK, **case.task})
    settings = {"rounds": COUNTED, "per_round": 3, "batch": 16, "seed": 0, "eval_every": 1, "device": "cpu"}
    train = fl.TrainConfig(**{**settings, "workers": 1, **case.train})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if case.engine == "cpu":
            fl.simulate(method_of(case), task, train=train, watch=watch)
        else:
            simulate_lanes(method_of(case), task, train, case.engine == "batched", watch)
    finally:
        torch.set_num_threads(before)


def record(case: Case) -> list[Facts]:
    """The facts of every round of a case."""
    rounds: list[Facts] = []
    run_case(case, lambda state, line: rounds.append({**round_facts(line), **state_facts(state)}))
    return rounds


# -- the file -------------------------------------------------------------------------------------------------------


def to_hex(value: float) -> str:
    """A hex float without zeros at the end: 0x1.8p-3."""
    mantissa, exponent = value.hex().split("p")
    return f"{mantissa.rstrip('0').rstrip('.')}p{exponent}"


def machine() -> dict[str, str]:
    """What the exact bits depend on."""
    return {
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "processor": platform.machine(),
    }


def load(path: Path = FILE) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def save(cases: Mapping[str, list[Facts]], path: Path = FILE) -> None:
    """Readable JSON: sorted keys, one line a round."""
    parts = [f' "made_on": {json.dumps(machine(), sort_keys=True)}']
    for name in sorted(cases):
        rounds = ",\n".join("   " + json.dumps(facts, sort_keys=True, separators=(",", ":")) for facts in cases[name])
        parts.append(f"  {json.dumps(name)}: [\n{rounds}\n  ]")
    path.write_text("{\n" + parts[0] + ',\n "cases": {\n' + ",\n".join(parts[1:]) + "\n }\n}\n")


def check_exact(only: str) -> int:
    """Print for every case whether its weights are, bit for bit, those of the file; the number that are not."""
    golden = load()
    print(f"recorded on {golden['made_on']}\nrunning on  {machine()}")
    different = 0
    for name, case in CASES.items():
        if only in name:
            then, now = ([(f["mask"], f["digest"]) for f in x] for x in (golden["cases"][name], record(case)))
            first = next((i for i, pair in enumerate(zip(then, now, strict=False)) if pair[0] != pair[1]), None)
            same = then == now
            different += not same
            where = "" if same else f" from round {first} of {len(then)}" if first is not None else " in length"
            print(f"{'bit-identical' if same else 'DIFFERENT' + where:<32} {name}", flush=True)
    print(f"{different} different")
    return different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--check-exact", action="store_true", help="compare bit for bit and write nothing")
    args = parser.parse_args()
    if args.check_exact:
        return 1 if check_exact(args.only) else 0
    cases = load()["cases"] if args.only else {}
    for name, case in CASES.items():
        if args.only in name:
            began = time.perf_counter()
            cases[name] = record(case)
            print(f"{time.perf_counter() - began:5.1f} s  {name}", flush=True)
    save(cases)
    print(f"{FILE}: {FILE.stat().st_size / 1e3:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
