"""What a sparse-FL method is: a few pure functions over plain data.

A method is a frozen dataclass whose fields are its hyper-parameters. It never touches data sets, devices, sockets,
clocks or bytes. Whatever it is handed already lies on the right device. Engines never know its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .client import reports_changes
from .errors import ConfigError, unknown
from .exchange import Client, Extra, Local, Order, Sums
from .mask import Weights
from .state import TRAINING, Phase, Plan, State


@dataclass(frozen=True)
class Method:
    """The base of all methods. By default: a random cohort, one model for all clients, one phase."""

    name: ClassVar[str] = ""
    phases: ClassVar[tuple[Phase, ...]] = (TRAINING,)
    counts_flops: ClassVar[bool] = False  # whether it reads `plan.flops`
    personal: ClassVar[bool] = False  # whether clients end with models of their own, which are then evaluated too
    recipe: ClassVar[Mapping[str, object]] = {}  # settings of the run it is meant for; the user's own win
    exact: ClassVar[bool] = True  # the server's model has exactly its `density`; False: it may be denser

    @property
    def common(self) -> bool:
        """Whether in every round all clients get one model and keep its mask. Secure aggregation needs this.

        A method with its own `work` or `models` must say so itself.
        """
        return type(self).work is Method.work and type(self).models is Method.models

    def init(self, plan: Plan) -> State:
        """The server's state before the first round. `plan.initial()` draws the weights."""
        raise NotImplementedError

    def admit(self, clients: Sequence[Client], key: int) -> tuple[Client, ...]:
        """The clients with their densities. By default they are returned as they are."""
        return tuple(clients)

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        """The clients that take part in this round."""
        return s.sample(clients)

    def work(self, s: State, client: Client) -> Local:
        """The work of one client in this round."""
        return self.local(s)

    def models(self, s: State, clients: Sequence[Client]) -> Iterator[tuple[Client, Weights]]:
        """The model that each of these clients gets. Clients that share a model get the same object."""
        return ((client, s.weights) for client in clients)

    def orders(self, s: State, cohort: Sequence[Client]) -> Iterator[tuple[Client, Order]]:
        """The orders of a round, one by one."""
        extra = self.download(s)
        for client, weights in self.models(s, cohort):
            yield client, s.order(client, self.work(s, client), weights, extra)

    def download(self, s: State) -> Mapping[str, Extra]:
        """What clients are sent beside the weights, by name. Their parts find it in `Clients.given`."""
        return {}

    def aggregate(self, s: State, sums: Sums) -> State:
        """The next state, from the sums of this round's updates."""
        raise NotImplementedError

    def done(self, s: State) -> bool:
        """Whether the run is over."""
        return s.counted >= s.plan.rounds

    def views(self, s: State) -> Mapping[str, Weights]:
        """The models to evaluate, by name. The first is reported. By default {"after": s.weights}.

        "before" is left out if s.before is None. It is the average before the server cut it to its mask.
        """
        return {"after": s.weights} if s.before is None else {"after": s.weights, "before": s.before}

    def reported(self, s: State) -> Mapping[str, Weights]:
        """All views. If the run has a running average of the server's model, it comes first."""
        return self.views(s) if s.average is None else {"average": s.average, **self.views(s)}

    def view(self, s: State, name: str = "") -> Weights:
        """The view of this name; by default the reported one."""
        views = self.reported(s)
        if name and name not in views:
            raise unknown("view", name, views)
        return views[name or next(iter(views))]

    def with_statistics(self, s: State, sums: Sums) -> State:
        """The state with BatchNorm statistics that were gathered from the clients."""
        if sums.weights is None:
            return s
        return replace(s, weights=s.weights.with_statistics(sums.weights[s.layout.trained_size :] / sums.n))

    def local(self, s: State, **changes: Any) -> Local:
        """The run's training settings, with this round's learning rate and with `changes`.

        The run's own parts come after the given ones.
        """
        run = s.plan.local.parts
        parts = (*changes.pop("parts", ()), *run)
        if run and reports_changes(parts):
            raise ConfigError(
                f"feedback = true: not possible with {self.name}, whose clients send changes. Set feedback = false."
            )
        return replace(s.plan.local, **{"lr": s.plan.lr(s.counted), "parts": parts, **changes})
