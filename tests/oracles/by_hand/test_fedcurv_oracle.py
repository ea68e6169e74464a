"""The FedCurv oracle checked by itself: FedAvg as a special case, and a step by the paper's penalty."""

import numpy as np

from tests.oracles.client_step.efl import fisher
from tests.oracles.client_step.fedcurv import fedcurv
from tests.oracles.model import Params, gradient
from tests.oracles.perceptron import CLIENTS, lr, model, vector
from tests.oracles.server_step.fedavg import fedavg


def first_models() -> list[Params]:
    """Each client's model at the end of round 1."""
    return [fedavg(model(), [batches], 1, lr)[0] for batches in CLIENTS]


def penalty_gradient(at: np.ndarray, others: list[int], lam: float) -> np.ndarray:
    """Central differences of lam sum_i (v - v_i)' diag(F_i) (v - v_i), one entry at a time."""
    ends = first_models()
    anchors = [(vector(fisher(ends[i], CLIENTS[i])), vector(ends[i])) for i in others]

    def penalty(v: np.ndarray) -> np.ndarray:  # every entry's own part: the penalty is their sum
        return lam * sum((u * (v - v_i) ** 2 for u, v_i in anchors), np.zeros_like(v))

    return (penalty(at + 1e-4) - penalty(at - 1e-4)) / 2e-4


def stepped(
    cohorts: list[list[int]], lost: list[set[int]] | None = None
) -> tuple[np.ndarray, Params]:
    """The one step of client 2, alone in the last round, over the learning rate; and where it began."""
    got = fedcurv(model(), CLIENTS, len(cohorts), lr, cohorts=cohorts, lam=0.7, lost=lost)
    return (vector(got[-2]) - vector(got[-1])) / lr(len(cohorts)), got[-2]


def test_a_step_follows_the_penalty_over_the_other_clients() -> None:
    step, at = stepped([[0, 1, 2], [2]])
    want = vector(gradient(at, *CLIENTS[2][0])) + penalty_gradient(vector(at), [0, 1], 0.7)
    assert np.allclose(step, want, rtol=0, atol=1e-8)


def test_a_client_that_lost_its_own_counts_as_another() -> None:
    step, at = stepped([[0, 1, 2], [2]], [set(), {2}])
    want = vector(gradient(at, *CLIENTS[2][0])) + penalty_gradient(vector(at), [0, 1, 2], 0.7)
    assert np.allclose(step, want, rtol=0, atol=1e-8)


def test_nothing_is_subtracted_by_a_client_that_is_not_in_the_sums() -> None:
    step, at = stepped([[0, 1], [2]])
    want = vector(gradient(at, *CLIENTS[2][0])) + penalty_gradient(vector(at), [0, 1], 0.7)
    assert np.allclose(step, want, rtol=0, atol=1e-8)
    # nor by one that was there in an earlier round: as if it had forgotten
    cohorts = [[0, 1, 2], [0, 1], [2]]
    assert np.array_equal(stepped(cohorts)[0], stepped(cohorts, [set(), set(), {2}])[0])
