"""A method of your own in a few lines, compared with a built-in one."""

from dataclasses import dataclass
from typing import ClassVar

import flashfl as fl


@dataclass(frozen=True)
class ServerMomentum(fl.PDST):
    """PDST whose server keeps a momentum: v = decay * v + (mean - w), then w + v."""

    name: ClassVar[str] = "server-momentum"
    decay: float = 0.5

    def aggregate(self, s: fl.State, sums: fl.Sums) -> fl.State:
        vector, trained = fl.fedavg(sums), s.layout.trained_size  # after the trained weights come BatchNorm's statistics
        velocity = (vector - s.weights.vector)[:trained]
        if "velocity" in s.extra:
            velocity = velocity + self.decay * s.extra["velocity"]
        vector[:trained] = s.weights.vector[:trained] + velocity
        return s.next(fl.Weights.masked(s.mask, vector), velocity=velocity)


fl.METHODS["server-momentum"] = ServerMomentum  # for the command line: flashfl run --load own_method.py ...


def main() -> None:
    task = fl.tasks.digits(clients=10)
    for method in (fl.PDST(density=0.05), ServerMomentum(density=0.05)):
        run = fl.simulate(method, task, rounds=10, per_round=4)
        print(f"{method.name:16s} accuracy {run.accuracy:.3f}, sent up {run.bytes_up / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
