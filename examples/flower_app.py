"""The server and client apps for Flower, run here in one process. docs/deploy.md takes them to real machines."""

import torch
from flwr.serverapp import ServerApp
from torch import nn

from flashfl import SPDST, Task, TrainConfig
from flashfl.flower import FlashStrategy, client_app, server_task


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 3))


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=draw)
    return torch.randn(count, 16, generator=draw) + 4 * nn.functional.one_hot(labels, 16), labels


server = ServerApp()


@server.main()
def run_server(grid, context) -> None:
    train = TrainConfig(rounds=8, per_round=3, epochs=3, batch=8)
    strategy = FlashStrategy(SPDST(density=0.1, warmup_clients=3), server_task(net, samples(300, 99)), train)
    strategy.start(grid)
    print(strategy.run)


def private_task(context) -> Task:
    """What a client trains on: its node's settings say which part of the data is its own."""
    return Task(net, [samples(80, int(context.node_config["partition-id"]))], holdout=0)


client = client_app(private_task)


def main() -> None:
    from flashfl.flower.testing import InProcessGrid  # real nodes take its place in a deployment

    grid = InProcessGrid({node: (client, {"partition-id": node}) for node in (1, 2, 3, 4)})
    run_server(grid, None)


if __name__ == "__main__":
    main()
