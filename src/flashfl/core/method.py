"""What a sparse-FL method is: a few pure functions over plain data.

A method is a frozen dataclass whose fields are its hyper-parameters. It never touches data sets, devices, sockets,
clocks or bytes; engines never know its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from .errors import unknown
from .rng import choose
from .state import Client, Local, Order, Plan, State, Sums, Weights


@dataclass(frozen=True)
class Method:
    """The defaults most methods share: a keyed uniform cohort, one order for all, one model to judge."""

    name: ClassVar[str] = ""
    exact: ClassVar[bool] = True  # once the server's model is sparse it has its `density`; False: it may have more

    def init(self, plan: Plan) -> State:
        """The server's state before the first round."""
        raise NotImplementedError

    def admit(self, clients: Sequence[Client], key: int) -> tuple[Client, ...]:
        """The clients as this method sees them; one that needs densities gives them to clients that have none."""
        return tuple(clients)

    def cohort(self, s: State, clients: Sequence[Client]) -> tuple[Client, ...]:
        """Who takes part in this round."""
        return sample(s, clients, s.plan.per_round)

    def order(self, s: State, client: Client) -> Order:
        """What one client is to do in this round."""
        return s.order(client, self.local(s), self.held(s, client))

    def held(self, s: State, client: Client) -> Weights:
        """The model this client is sent, and whose BatchNorm statistics it reports if they are gathered at the end."""
        return s.weights

    def aggregate(self, s: State, sums: Sums) -> State:
        """The next state, from what the updates of this round add up to."""
        raise NotImplementedError

    def views(self, s: State) -> Mapping[str, Weights]:
        """The models to judge; the first is the one reported."""
        return {"after": s.weights} if s.before is None else {"after": s.weights, "before": s.before}

    def view(self, s: State, name: str = "") -> Weights:
        """One of the models to judge, by its name: by default the one reported."""
        views = self.views(s)
        if name and name not in views:
            raise unknown("view", name, views)
        return views[name or next(iter(views))]

    def with_statistics(self, s: State, sums: Sums) -> State:
        """The state with BatchNorm statistics that were gathered from the clients."""
        if sums.weights is None:
            return s
        return replace(s, weights=s.weights.with_statistics(sums.weights[s.layout.trained_size :] / sums.n))

    def local(self, s: State, **changes: Any) -> Local:
        """The plan's training recipe at this round's learning rate, with changes."""
        return replace(s.plan.local, **{"lr": s.plan.lr(s.round), **changes})


def sample(s: State, clients: Sequence[Client], count: int, purpose: str = "cohort") -> tuple[Client, ...]:
    """`count` of the clients, keyed uniform, ascending by id; all of them if there are fewer."""
    chosen = set(choose(s.key(purpose), [c.id for c in clients], count))
    return tuple(sorted((c for c in clients if c.id in chosen), key=lambda c: c.id))
