"""A regression task: its own loss, and a metric where lower is better."""

import torch
from torch import Tensor, nn

import flashfl as fl


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 8, generator=draw)
    return x, (x[:, :1] * x[:, 1:2] + x[:, 2:3].sin())


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))


def main() -> None:
    task = fl.Task(
        net,
        [samples(80, seed) for seed in range(8)],
        test=samples(300, 99),
        loss=nn.functional.mse_loss,
        metric=nn.functional.mse_loss,  # a mean over samples, so batches and clients can be averaged
        metric_name="mse",
        higher_is_better=False,
        name="surface",
    )
    run = fl.simulate(fl.SPDST(density=0.2, warmup_clients=4), task, rounds=20, per_round=4, batch=16)
    print(run)
    print(f"last mse {run.metric:.4f} (rmse {run.metric**0.5:.4f}), best mse {run.best:.4f}")


if __name__ == "__main__":
    main()
