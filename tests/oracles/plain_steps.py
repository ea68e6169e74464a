"""Plain loops for tests/test_hook_contexts.py, in float64: steps of one client, and means over its data."""

from tests.oracles.client_loss.rfedavg import delta as mean_features
from tests.oracles.model import Client, Params, features, gradient, loss
from tests.oracles.rounds import examples, mean_gradient, minus, plus, square

__all__ = ["features", "gradient", "loss", "mean_features", "mean_gradient", "square"]


def moved(w: Params, client: Client, steps: int, lr: float) -> Params:
    """The update v_k - w of plain local steps."""
    v = w
    for i in range(steps):
        v = plus(v, -lr, gradient(v, *client[i % len(client)]))
    return minus(v, w)


def mean_loss(w: Params, client: Client) -> float:
    """The mean over the client's examples, whatever the sizes of its batches."""
    return sum(len(y) * loss(w, x, y) for x, y in client) / examples(client)
