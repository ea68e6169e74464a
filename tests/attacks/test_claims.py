"""What a client says of itself multiplies its influence by a bound at most."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import flwr_regs as fr
from flwr_regs.abilities import Weighs
from flwr_regs.methods.registry import METHODS
from flwr_regs.server.aggregate import weights as weighing
from flwr_regs.server.aggregate.weights import StepScaling
from flwr_regs.server.round import Reply
from flwr_regs.term import ServerContext
from tests.experiments.runs import strategy_of

LIAR, STEPS = 3, 9
BASE = {"w": np.zeros(4)}


def weighers() -> dict[str, Any]:
    """The terms that weigh: those of the registry's examples, others of their settings, and scaling."""
    examples = [strategy_of(row.example) for row in METHODS.values()]
    found = {s.method_name: t for s in examples for t in s.term.terms if isinstance(t, Weighs)}
    assert set(found) == {"FedNova", "QFedAvg"}
    more = (fr.NormalizedAveraging(momentum=0.9), fr.NormalizedAveraging(mu=2.0))
    fair = (fr.FairWeights(0.3), fr.FairWeights(2.0))
    return found | {repr(t): t for t in (*more, *fair, StepScaling())}


def weights(
    term: Any, lie: Mapping[str, Any] | None, clients: int, scale: float, robust: bool
) -> dict[int, float]:
    """The ω_k of equal clients; one of them lies."""
    replies = {}
    for k in range(clients):
        said = {"taken": STEPS, "planned": STEPS, "loss": 1.0, **(lie or {} if k == LIAR else {})}
        steps = min(said["taken"], said["planned"]), said["planned"]
        uploads = {term.name: {"loss": np.asarray(said["loss"])}}
        replies[k] = Reply({"w": np.full(4, 0.1)}, uploads, {}, 20.0, steps=steps)
    measured = {k: weighing.Stats(k, r, BASE, ()) for k, r in replies.items()}
    p = weighing.aggregation_weights(replies, "num-examples")
    ctx = ServerContext(2, 0.1, weights=p, replies=measured, max_scale=scale, robust=robust)
    return dict(weighing.update_weights(term, replies, ctx))


CLAIMS = st.fixed_dictionaries(
    {
        "taken": st.integers(1, 12) | st.integers(1, 10**12),
        "planned": st.integers(1, 12) | st.integers(1, 10**12),
        "loss": st.floats(-15, 15).map(lambda e: 10.0**e) | st.just(0.0),
    }
)


WEIGHERS = weighers()


@pytest.mark.parametrize("term", WEIGHERS.values(), ids=WEIGHERS)
@pytest.mark.parametrize("scale", [10.0, 3.0])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(CLAIMS, st.integers(6, 12), st.booleans())
def test_claims_multiply_influence_by_the_bound_at_most(
    term: Any, scale: float, lie: Mapping[str, Any], clients: int, robust: bool
) -> None:
    honest, told = (weights(term, x, clients, scale, robust) for x in (None, lie))
    bound = 100.0**term.q if isinstance(term, fr.FairWeights) else scale
    others = 1 + bound / clients  # FedNova's τ_eff is a mean
    assert told[LIAR] <= bound * honest[LIAR] * others * (1 + 1e-9)
    assert all(told[k] <= others * honest[k] * (1 + 1e-9) for k in told if k != LIAR)
    least = 0.05 if isinstance(term, fr.FairWeights) and term.q < 1 else 0.0
    assert all(told[k] >= least * honest[k] for k in told)
    share = weighing.bounded_shares(told, 0.2)
    assert share[LIAR] <= 0.2 * sum(share.values()) * (1 + 1e-9)
    assert all(share[k] <= told[k] * (1 + 1e-9) for k in told)
    if max(told.values()) <= 0.2 * sum(told.values()):
        assert share == pytest.approx(told)
