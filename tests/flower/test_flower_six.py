"""Six real SuperNodes with default settings, one of them asleep and one killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from deployment import deployment, wait_for

from flashfl.run.results import Results

ROUNDS = 8


@pytest.mark.slow
def test_sleeping_and_killed_supernode_among_six_with_default_settings(tmp_path: Path) -> None:
    """The worker of node 4 is stopped, as if asleep: its SuperNode still sends heartbeats. Node 5 is killed."""
    folder = tmp_path / "run"

    def rounds() -> int:
        return len(Results.read(folder).rounds) if (folder / "results.jsonl").exists() else 0

    with deployment(tmp_path / "flower") as made:
        for number in range(6):
            made.supernode(number, 6)
        run = made.run(
            settings="method=pdst", train__rounds=ROUNDS, train__per_round=6, flower__clients=6, folder=str(folder)
        )
        wait_for(rounds, 300, "the first round")
        for process in made.descendants("node4", "flashfl.flower.worker"):
            os.kill(process, signal.SIGSTOP)
        made.kill("node5")
        began = rounds()
        assert made.wait(run, 500) == "finished:completed"
    history = Results.read(folder).rounds
    usual = max(record.seconds["train"] for record in history[:began])
    seconds = [record.seconds["train"] for record in history]
    print("rounds before the faults:", began, "seconds a round:", [round(s, 1) for s in seconds])
    assert {4, 5} <= set().union(*(record.failures for record in history))
    assert history[-1].failures.keys() <= {4, 5}
    assert max(seconds[began + 2 :]) < 20 + usual, seconds
