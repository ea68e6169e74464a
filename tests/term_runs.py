"""A user's own terms in whole trainings: unequal clients, apps, and grids, to test what hooks read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from torch import nn

from flwr_regs import (
    InProcessGrid,
    RegClient,
    RegStrategy,
    Term,
    client_app,
)
from tests.conftest import Batch, close, make_model

Arrays = dict[str, Any]
Slot = dict[str, Any]
Models = list[dict[str, np.ndarray]]
Budget = Callable[[int, int], int | None]  # (client, how many turns it had) -> its step budget


SIZES = [[5], [4, 3], [5, 2, 4], [3, 3, 3, 1], [6, 5]]
LR = 0.2


def make_data() -> list[list[Batch]]:
    """Five clients with unequal numbers of batches of unequal size, and skewed labels."""
    clients = []
    for k, sizes in enumerate(SIZES):
        g = torch.Generator().manual_seed(200 + k)
        clients.append(
            [
                (
                    torch.randn(b, 4, generator=g, dtype=torch.float64) + 0.3 * k,
                    torch.randint(0, 2, (b,), generator=g) + k % 2,
                )
                for b in sizes
            ]
        )
    return clients


class SerialisingGrid(InProcessGrid):
    """Sends messages and client state through Flower's own serialisation, as a real node does."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for m in messages:
            m.content = recorddict_from_proto(recorddict_to_proto(m.content))
        ids = super().push_messages(messages)
        for i in ids:
            if not (reply := self._replies[i]).has_error():
                reply.content = recorddict_from_proto(recorddict_to_proto(reply.content))
        for context in self._contexts.values():
            context.state = recorddict_from_proto(recorddict_to_proto(context.state))
        return ids


both_grids = pytest.mark.parametrize("kind", [InProcessGrid, SerialisingGrid])


def no_budget(_k: int, _turn: int) -> None:
    return None


def numpy_app(
    terms: Sequence[type[Term]],
    data: Sequence[Any],
    model: Callable[[], nn.Module] = make_model,
    budget: Budget = no_budget,
    **kwargs: Any,
) -> Any:
    """An app of NumPyClients."""
    turns: Counter[int] = Counter()

    def client_fn(context: Context) -> Any:
        k = int(context.node_config["partition-id"])
        turns[k] += 1
        steps = budget(k, turns[k] - 1)
        return RegClient(
            model(), data[k], data[k], device="cpu", terms=terms, step_budget=steps, **kwargs
        )

    return client_app(client_fn)


def train(
    strategy: RegStrategy,
    app: Any,
    *,
    kind: type[InProcessGrid] = InProcessGrid,
    rounds: int = 8,
    clients: int = 5,
    model: Callable[[], nn.Module] = make_model,
    **config: Any,
) -> Models:
    """Return the global model after each round."""
    models: Models = []
    strategy.start(
        grid=kind(app, clients),
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": LR, **(config or {"local-epochs": 2})}),
        evaluate_fn=lambda t, arrays: models.append(
            {n: a.numpy().copy() for n, a in arrays.items()}
        ),
    )
    return models[1:]


def start_weights() -> dict[str, np.ndarray]:
    return {n: a.numpy().copy() for n, a in make_model().state_dict().items()}


def check_models(got: Models, want: Models, tol: float = 1e-5) -> None:
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs, tol)
