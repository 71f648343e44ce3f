"""Train your own model on your own data with 5 % of its weights, then save and load it."""

import tempfile

import torch
from safetensors.torch import load_file
from torch import nn

import flashfl as fl


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU())
        self.head = nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def samples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four clouds of points: a stand-in for what a client holds."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=draw)
    centres = 2 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    return centres[labels] + torch.randn(count, 32, generator=draw), labels


def main() -> None:
    clients = [samples(60, seed) for seed in range(1, 11)]
    task = fl.Task(Net, clients, test=samples(400, 99), prunable="body.*.weight", name="clouds")
    run = fl.simulate(fl.SPDST(density=0.05, warmup_clients=4), task, rounds=15, per_round=4, epochs=2, batch=8)
    print(run)
    with tempfile.TemporaryDirectory() as folder:
        path = run.save(folder)  # model.safetensors, its masks, and the results
        model = Net()
        model.load_state_dict(load_file(path))
    inputs, labels = samples(400, 99)
    print(f"loaded model: {(model(inputs).argmax(1) == labels).float().mean():.3f} of the test samples are right")


if __name__ == "__main__":
    main()
