"""One sleeping and one killed client among six, as processes, with default settings and a real clock."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'flashfl[flower]'")

from process_grid import ProcessGrid

import flashfl as fl
from flashfl.flower import FlashStrategy, FlowerOptions
from flashfl.run.config import TrainConfig
from tests.conftest import make_task

ROUNDS = 7


def run(faults: dict[int, str], clients: int) -> fl.Run:
    task = make_task("norm", clients=clients)
    config = TrainConfig(rounds=ROUNDS, per_round=clients, batch=4, min_replies=2)
    with contextlib.closing(ProcessGrid(task, faults)) as grid:
        strategy = FlashStrategy(fl.PDST(density=0.3), task, config, FlowerOptions(clients=clients), quiet=True)
        strategy.start(grid)
    assert strategy.run is not None
    return strategy.run


@pytest.mark.slow
def test_sleeping_and_killed_client_among_six_with_default_settings(tmp_path: Path) -> None:
    """After two rounds a round loses less than 20 s, and the run ends as the four honest clients alone would."""
    honest = run({}, 4)
    found = run({4: "sleeps", 5: "killed"}, 6)
    usual = max(record.seconds["train"] for record in honest.history)
    seconds = [record.seconds["train"] for record in found.history]
    print("seconds a round:", [round(s, 1) for s in seconds], "honest:", round(usual, 1))
    assert sorted(found.history[0].failures) == [4, 5]
    assert 55 < seconds[0] < 70 + usual, "the grace period, once"
    assert max(seconds[2:]) < 20 + usual, seconds
    assert found.checksum == honest.checksum
    assert [r.loss for r in found.history] == [r.loss for r in honest.history]
