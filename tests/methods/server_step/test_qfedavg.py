"""q-FedAvg: what a hostile loss does to its weights."""

from types import SimpleNamespace

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.term import ServerContext


def weights(q: float, losses: list[float], norms: list[float], robust: bool = False) -> np.ndarray:
    """The term's ω_k for equal p_k; with a robust aggregator too."""
    share = dict.fromkeys(range(len(losses)), 1 / len(losses))
    replies = {k: SimpleNamespace(norm=n) for k, n in enumerate(norms)}
    ctx = ServerContext(2, 0.1, weights=share, replies=replies, robust=robust)
    uploads = {k: {"loss": np.asarray(f)} for k, f in enumerate(losses)}
    by_client = fr.FairWeights(q).weigh(share, uploads, ctx)
    return np.array([by_client[k] for k in share])


@pytest.mark.parametrize("q", [0.3, 1.0, 2.0, 40.0])
@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("claim", [0.0, 1e-300, 1e15])
@pytest.mark.parametrize("norm", [0.0, 1e15])
def test_no_claim_makes_a_weight_large(q: float, robust: bool, claim: float, norm: float) -> None:
    """Together at most 1, or with a robust aggregator each; and none is NaN."""
    omega = weights(q, [claim, 0.5, 2.0, 1.0, 0.8], [norm, 0.1, 0.5, 0.2, 0.1], robust)
    assert (omega >= 0).all()
    assert (omega <= 1).all()
    assert robust or omega.sum() <= 1 + 1e-12
    if claim == 1e15 and not norm and not robust:  # 100 times the median loss, of client 4
        assert omega[0] == pytest.approx(125**q * omega[1] / 0.625**q, rel=1e-6)
    if robust:  # one claim changes the others' weights by what one client changes a median
        honest = weights(q, [0.7, 0.5, 2.0, 1.0, 0.8], [0.1, 0.1, 0.5, 0.2, 0.1], True)
        bounds = [weights(q, [f, 0.5, 2.0, 1.0, 0.8], [n, 0.1, 0.5, 0.2, 0.1], True)
                  for f in (0.5, 2.0) for n in (0.1, 0.5)]  # fmt: skip
        low, high = np.min([honest, *bounds], axis=0), np.max([honest, *bounds], axis=0)
        assert (omega[1:] > 0.2 * low[1:]).all()
        assert (omega[1:] < 5 * high[1:] + 1e-12).all()
