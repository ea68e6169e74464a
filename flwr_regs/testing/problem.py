"""The problem that the laws are checked on: a small model, unequal clients, and a run in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.func import functional_call

from flwr_regs.client.train.batches import seeded
from flwr_regs.client.train.task import LossFn
from flwr_regs.flower.app import client_app
from flwr_regs.flower.compat import recorddict_from_proto, recorddict_to_proto
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.wire import keys

Batch = tuple[torch.Tensor, torch.Tensor]
NDArrays = dict[str, np.ndarray]


def drawn(seed: int = 0) -> AbstractContextManager[None]:
    """Draw on the CPU as after ``torch.manual_seed(seed)``; afterwards, draws go on as before."""
    return seeded(seed, torch.device("cpu"))


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Return the perceptron of the laws: 4 inputs, 6 tanh units, 3 classes; always the same weights.

    Its ``state_dict`` has ``0.weight`` (6, 4), ``0.bias`` (6,), ``2.weight`` (3, 6) and ``2.bias`` (3,).
    """
    with drawn():
        layers = (nn.Linear(4, 6, device="cpu"), nn.Tanh(), nn.Linear(6, 3, device="cpu"))
        return nn.Sequential(*layers).to(dtype)


def start_weights() -> NDArrays:
    """Return the weights of :func:`make_model`, for an oracle."""
    return {n: v.numpy().copy() for n, v in make_model().state_dict().items()}


def make_clients(n: int = 4, dtype: torch.dtype = torch.float64) -> list[list[Batch]]:
    """Return `n` clients of unequal size (2 + i batches of 5 examples) and skewed labels."""
    clients = []
    for i in range(n):
        g = torch.Generator().manual_seed(100 + i)
        batches = []
        for _ in range(2 + i):
            x = torch.randn(5, 4, generator=g, dtype=torch.float64, device="cpu") + 0.3 * i
            y = torch.randint(0, 2, (5,), generator=g, device="cpu") + i % 2
            batches.append((x.to(dtype), y))
        clients.append(batches)
    return clients


def gradient(
    weights: NDArrays, x: np.ndarray, y: np.ndarray, loss_fn: LossFn = nn.functional.cross_entropy
) -> NDArrays:
    """Return the gradient of a loss of :func:`make_model` on a batch.

    `weights` are float64 by the names of its ``state_dict``, `x` is (batch, 4), `y` (batch,) integers.
    `loss_fn` gets tensors, the outputs (batch, 3) and y; by default it is the mean cross-entropy. An oracle
    may ask for this function.
    """
    leaves = {n: torch.from_numpy(w).requires_grad_() for n, w in weights.items()}
    output = functional_call(make_model(), leaves, (torch.from_numpy(x),))
    loss = loss_fn(output, torch.from_numpy(y))
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {n: g.numpy() for n, g in zip(leaves, gradients, strict=True)}


def to_numpy(clients: Sequence[Sequence[Batch]]) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """Return the same batches for an oracle."""
    return [[(x.numpy(), y.numpy()) for x, y in c] for c in clients]


class Point(nn.Module):
    """One scalar v from 0; with targets √a·c and the loss below, ``f(v) = a/2 (v − c)²``."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(1, dtype=torch.float64, device="cpu"))

    def forward(self, root_a: torch.Tensor) -> torch.Tensor:
        """Return √a·v."""
        return root_a * self.v


def half_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return half the mean squared error."""
    return 0.5 * ((output - target) ** 2).mean()


def quadratic_clients(curvatures: Sequence[float], centres: Sequence[float]) -> list[list[Batch]]:
    """Return the data of :class:`Point`: client k has k + 1 equal examples, of curvature a and centre c."""
    kind: Any = {"dtype": torch.float64, "device": "cpu"}
    roots = [torch.full((k + 1, 1), a**0.5, **kind) for k, a in enumerate(curvatures)]
    return [[(root, root * c)] for root, c in zip(roots, centres, strict=True)]


def sgd_pull(curvature: float, lr: float, steps: int) -> float:
    """Return ``v_K − w`` for ``c − w = 1``, after K steps of gradient descent down ``a/2 (v − c)²``.

    ``D_{i+1} = (1 − ηa) D_i + ηa`` gives ``D_K = 1 − (1 − ηa)^K``.
    """
    return 1 - (1 - lr * curvature) ** steps


def settled(
    curvatures: Sequence[float],
    centres: Sequence[float],
    weights: Sequence[float],
    lr: float,
    steps: int,
    pull: Callable[[float, float, int], float] = sgd_pull,
) -> float:
    """Return FedAvg's fixed point for the clients of :func:`quadratic_clients`.

    There ``Σ p_k D_k = 0``, with ``D_k = pull(a_k, η, K) (c_k − w)`` what K local steps move. It is also
    the fixed point of a method that follows the last global step, which is gone there.
    """
    each = zip(curvatures, centres, weights, strict=True)
    parts = [(p * pull(a, lr, steps), c) for a, c, p in each]
    return sum(part * c for part, c in parts) / sum(part for part, _ in parts)


def app_of(
    client: Callable[..., Any],
    clients: Sequence[Any],
    model: Callable[[], nn.Module] = make_model,
    **settings: Any,
) -> ClientApp:
    """Return an app of ``client(model, train_data, eval_data, device="cpu", **settings)``."""

    def client_fn(context: Any) -> Any:
        batches = clients[context.node_config["partition-id"]]
        return client(model(), batches, batches, device="cpu", **settings)

    return client_app(client_fn)


def train(
    strategy: Any,
    client: Callable[..., Any],
    *,
    rounds: int = 4,
    clients: Sequence[Any] | None = None,
    model: Callable[[], nn.Module] = make_model,
    lr: float = 0.2,
    length: Mapping[str, Any] | None = None,
    grid: InProcessGrid | None = None,
    on_round: Callable[[int], None] = lambda t: None,
    **client_settings: Any,
) -> list[NDArrays]:
    """Train in one process and return the model after each round, by name.

    Parameters
    ----------
    strategy, client, client_settings
        The strategy, and the client as for :func:`app_of`.
    length : mapping
        How long a client trains: ``{"local-epochs": 2}`` by default, or ``{"local-steps": n}``.
    grid : InProcessGrid, optional
        With an app of its own; `client` is not used then.
    on_round : callable
        Called with each round's number when it has ended, and with 0 before the first.
    """
    data = make_clients() if clients is None else clients
    models: list[NDArrays] = []

    def keep(number: int, arrays: ArrayRecord) -> None:
        if number:
            models.append({name: array.numpy() for name, array in arrays.items()})
        on_round(number)

    grid = grid or InProcessGrid(app_of(client, data, model, **client_settings), len(data))
    start = ArrayRecord(model().state_dict())
    config = ConfigRecord({"lr": lr, **(length or {"local-epochs": 2})})
    strategy.start(grid, start, rounds, train_config=config, evaluate_fn=keep)
    return models


class SerialisingGrid(InProcessGrid):
    """Sends messages and client state through Flower's own serialisation, as a real node does."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients on what the messages' bytes hold."""
        messages = list(messages)
        for m in messages:
            m.content = _through_bytes(m.content)
        ids = super().push_messages(messages)
        for i in ids:
            if not (reply := self._replies[i]).has_error():
                reply.content = _through_bytes(reply.content)
        for context in self._contexts.values():
            context.state = _through_bytes(context.state)
        return ids


class ReversingGrid(InProcessGrid):
    """Returns replies last first."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages."""
        return list(super().pull_messages(message_ids))[::-1]


class RepeatingGrid(SerialisingGrid):
    """Lets clients train each round twice, as a server does that is resumed or tries again."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun: dict[int, list[Message]] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Run the clients on each round's messages, the probe too, and return the last replies."""
        messages = list(messages)
        for m in messages:
            kind, node = m.metadata.message_type, m.metadata.dst_node_id
            if kind == keys.PROBE:
                self._begun[node] = [copied(m)]
            if kind != "train":
                continue
            begun = self._begun.pop(node, [])
            for one in [m, *begun]:
                list(self.pull_messages(super().push_messages([copied(one)])))
        return super().push_messages(messages)


def copied(message: Message) -> Message:
    """Return a message to the same client that shares nothing with `message`."""
    sent = message.metadata
    content = _through_bytes(message.content)
    return Message(content, sent.dst_node_id, sent.message_type, group_id=sent.group_id)


def _through_bytes(record: RecordDict) -> RecordDict:
    proto = recorddict_to_proto(record)
    return recorddict_from_proto(type(proto).FromString(proto.SerializeToString()))
