"""What the tests of methods with memory share: watched runs, clients that forget, small problems."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message, RecordDict

import flwr_regs as fr
from flwr_regs.term import Term
from flwr_regs.testing import problem, spies
from flwr_regs.testing.problem import SerialisingGrid, app_of, train
from tests.conftest import budgeted, make_clients

Arrays = dict[str, np.ndarray]
SOME = {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1, "fraction_evaluate": 0.0}
SHORT = [{}, {1: 2, 3: 1}, {0: 3}, {2: 4, 4: 1}]  # round -> client -> steps that it has time for


@dataclass
class Watched:
    """What a run shows of one term.

    The models and the term's server slot after each round, and by (round, client) what the client kept,
    also of another term.
    """

    models: list[Arrays]
    server: list[Arrays]
    kept: dict[tuple[int, int], Arrays]
    history: list[dict[str, Any]]
    beside: dict[tuple[int, int], Arrays]

    @property
    def plan(self) -> dict[str, Any]:
        """Who took part, for an oracle."""
        unused = [set(e["cohort"]) - set(e["replies"]) for e in self.history]
        return {"cohorts": [e["cohort"] for e in self.history], "unused": unused}


def watched(
    strategy: Any,
    client: Any,
    term: str,
    grid: Any = SerialisingGrid,
    clients: Any = None,
    model: Any = problem.make_model,
    rounds: int = 8,
    length: Mapping[str, int] | None = None,
    beside: str = "",
) -> Watched:
    """Train unequal clients in one process, 5 by default."""
    out, calls = Watched([], [], {}, [], {}), list[spies.LocalCall]()
    data = make_clients(5) if clients is None else clients

    def after(number: int) -> None:
        if number:
            slot = strategy.training.model.server[term]
            out.server.append({key: np.array(a) for key, a in slot.items()})

    with spies.recorded(calls):
        places = grid(app_of(client, data, model), len(data))
        out.models = train(
            strategy, client, rounds=rounds, grid=places, on_round=after, length=length, model=model
        )
    out.history = strategy.history
    for call in calls:
        at = call.settings["config"]["server-round"], call.client
        for name, into in ((term, out.kept), (beside, out.beside)):
            into[at] = {n: a.numpy() for n, a in call.result.client.get(name, {}).items()}
    return out


class Forgetful(fr.InProcessGrid):
    """Client 2 loses its state before round 5."""

    rounds = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.rounds += any(m.metadata.message_type == "train" for m in messages)
        if self.rounds == 5:
            self._contexts[1002].state = RecordDict()
        return super().push_messages(messages)


LOST = [set[int]()] * 4 + [{2}] + [set[int]()] * 3


@contextmanager
def untouched(client: Any, kind: str = "") -> Iterator[fr.InProcessGrid]:
    """A grid whose clients must not be contacted; with a `kind` of message, not by that."""
    contacted = list[str]()

    class Noting(fr.InProcessGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            contacted.extend(m.metadata.message_type for m in messages)
            return super().push_messages(messages)

    yield Noting(app_of(client, make_clients()), 4)
    assert kind not in contacted if kind else not contacted


def composed(*terms: Term) -> type[fr.RegClient]:
    """Return the class of the clients of several terms."""
    return type("Composed", (fr.RegClient,), {"terms": tuple(type(t) for t in terms)})


CURVATURES, CENTRES = (1.0, 4.0), (-1.0, 2.0)


def settles(
    strategy: Any,
    client: Any,
    steps: Mapping[int, int] | None = None,
    rounds: int = 120,
    lr: float = 0.1,
    most: int = 5,
) -> float:
    """Return where two quadratic clients settle, of which some take fewer `steps`."""
    found = train(
        strategy, budgeted(client, [dict(steps or {})]), rounds=rounds, lr=lr,
        clients=problem.quadratic_clients(CURVATURES, CENTRES), model=problem.Point,
        length={"local-steps": most}, loss_fn=problem.half_squared_error,
    )  # fmt: skip
    return float(found[-1]["v"][0])


def between(parts: Sequence[float]) -> float:
    """Return where ``Σ parts_k (c_k − w) = 0``."""
    return sum(p * c for p, c in zip(parts, CENTRES, strict=True)) / sum(parts)
