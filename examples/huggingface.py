"""A Hugging Face data set, split over clients. `datasets.load_dataset(...)` works the same way."""

import datasets
import numpy as np
from torch import nn

import flashfl as fl


def make() -> datasets.Dataset:
    """A small data set with the columns of an image data set. Yours would come from the hub."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 600)
    images = draw.normal(2 * labels[:, None, None], 1.0, (600, 8, 8)).astype(np.float32)
    return datasets.Dataset.from_dict({"image": images.tolist(), "label": labels.tolist()}).with_format("torch")


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))


def main() -> None:
    data = make()
    train, test = data.select(range(500)), data.select(range(500, 600))
    clients = [train.shard(10, index) for index in range(10)]  # each client's own part
    task = fl.Task(net, clients, test=test, name="pictures")
    run = fl.simulate(fl.SPDST(density=0.1, warmup_clients=4), task, rounds=10, per_round=4, epochs=2, batch=8)
    print(run)


if __name__ == "__main__":
    main()
