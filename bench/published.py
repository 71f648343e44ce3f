"""Why are our MNIST results above the paper's? Runs with the habits of the paper's published code.

    FLASHFL_DATA=FOLDER python bench/published.py [--method spdst|pdst] [--density 0.05] [--alpha 1] [--masked]

Two habits concern all methods: softmax is applied before the cross-entropy, which applies it again, and the learning
rate decays as over 1,000 rounds. The third concerns frozen masks: the model that clients train and the server evaluates
keeps its initial weights outside the mask. They are not trained. --masked leaves this habit out.

A run has 400 rounds and takes 10 to 20 minutes of one core. It prints the accuracy of the whole model, and that of the
masked weights alone.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from torch.nn.functional import cross_entropy

import flashfl as fl
from flashfl.core.client import Clients, Part, Rows
from flashfl.core.method import Method
from flashfl.core.record import RoundRecord
from flashfl.core.rng import fold
from flashfl.data.tasks import build_task
from flashfl.engine.train import Trainer
from flashfl.run.config import load_toml, make_config

CONFIG = Path(__file__).parent.parent / "configs/paper/mnist.toml"
DRAW = {"spdst": 2, "pdst": 1}  # which draw of initial weights their training phase begins with


@dataclass(frozen=True)
class Unmasked(Part):
    """The forward pass also sees the initial weights outside the mask."""

    key: int = 0  # with which these weights were drawn

    def begin(self, c: Clients) -> None:
        trained = c.layout.trained_size
        c.state["outside"] = outside(c.initial(self.key)[:trained], c.masks)

    def view(self, r: Rows, weights: Tensor) -> Tensor:
        return weights + r.state["outside"]


def outside(initial: Tensor, masks: Tensor) -> Tensor:
    """The initial weights outside the masks [clients, K], and 0 elsewhere, [clients, trained]."""
    out, k = initial.repeat(len(masks), 1), masks.shape[1]
    out[:, :k].masked_fill_(masks, 0.0)
    out[:, k:] = 0.0
    return out


def unmasked(method: Method) -> Method:
    """A method with a frozen mask whose clients compute with the initial weights outside the mask."""

    class Habit(type(method)):  # type: ignore[misc]
        def work(self, s: fl.State, client: fl.Client) -> fl.Local:
            work = super().work(s, client)
            if work.report == "counts":  # the first phase
                return work
            return replace(work, parts=(Unmasked(fold(s.plan.key, "weights", DRAW[self.name])),))

    return Habit(**vars(method))


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("--method", default="spdst", choices=sorted(DRAW))
    asked.add_argument("--density", default="0.05")
    asked.add_argument("--alpha", default="1")
    asked.add_argument("--seed", default="0")
    asked.add_argument("--rounds", type=int, default=400)
    asked.add_argument("--masked", action="store_true", help="only the first two habits")
    given = asked.parse_args()
    options = {name: getattr(given, name) for name in ("method", "density", "alpha", "seed")}
    config = make_config(load_toml(CONFIG), options)
    train = replace(config.train, workers=1, rounds=given.rounds, lr_end=0.1 * 0.01 ** (given.rounds / 1000))
    task = build_task(config.task, fold(int(given.seed), "task"))
    task.loss = lambda output, target: cross_entropy(output.softmax(1), target)
    trainer, test = Trainer(task), task.test
    assert test is not None

    def accuracy(s: fl.State, whole: bool) -> float:
        vector, trained = s.weights.vector.clone(), s.layout.trained_size
        if whole:
            vector[:trained] += outside(s.plan.initial(DRAW[given.method])[:trained], s.mask.bits[None])[0]
        return 100 * trainer.evaluate_all(fl.Weights.dense(s.layout, vector), test)[1] / len(test)

    def watch(s: fl.State, record: RoundRecord) -> None:
        if s.counted and s.counted % 20 == 0:
            whole = "" if given.masked else f"whole model {accuracy(s, True):.2f} %, "
            print(f"round {s.counted}: {whole}masked weights {accuracy(s, False):.2f} %", flush=True)

    method = config.method if given.masked else unmasked(config.method)
    fl.simulate(method, task, train=train, watch=watch, progress=False)


if __name__ == "__main__":
    main()
