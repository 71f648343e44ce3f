"""A run's numbers in pandas: from memory, and from the results file of any run."""

import tempfile
from pathlib import Path

import pandas as pd

import flashfl as fl


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        task = fl.tasks.digits(clients=8)
        run = fl.simulate(fl.JMWST(density=0.05, warmup_clients=3), task, rounds=6, per_round=3, folder=place, eval_every=2)

        rounds = pd.DataFrame(record.to_json() for record in run.history)
        print(rounds[["phase", "round", "loss", "density", "mismatch"]])

        lines = pd.read_json(place / "results.jsonl", lines=True)  # the same from the file
        counted = lines[(lines["type"] == "round") & (lines["counts"] == 1)]
        up = counted["bytes"].map(lambda parts: parts["up"])
        print(f"{up.sum() / 1e6:.2f} MB went up in {len(counted)} rounds")


if __name__ == "__main__":
    main()
