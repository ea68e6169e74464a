"""The weights of replies: what a weigher sees."""

from typing import Any

import numpy as np
import pytest

from flwr_regs.server.aggregate.weights import bounded_shares, cut_weights, restricted
from flwr_regs.term import ServerContext


def test_a_part_of_a_round_has_the_weights_and_replies_of_its_clients_alone() -> None:
    replies: Any = dict.fromkeys(range(3))
    ctx = ServerContext(1, 0.1, weights={0: 0.2, 1: 0.3, 2: 0.5}, replies=replies)
    part = restricted(ctx, [0, 1])
    assert part.weights == {0: 0.4, 1: 0.6}
    assert part.replies.keys() == {0, 1}


def test_weights_within_their_bound_stay_as_they_are_to_the_bit() -> None:
    """Those of p_k that are cut already are not cut a second time, by rounding."""
    for seed in range(50):
        counts = np.random.default_rng(seed).integers(20, 60, 6) / 7
        counts[0] *= 10**4
        most = 0.3
        weights = cut_weights({k: n / sum(counts) for k, n in enumerate(counts)}, most)
        assert bounded_shares(weights, most) == weights
        bounded = bounded_shares({**weights, 3: 10.0}, most)
        assert {**bounded, 3: 10.0} == {**weights, 3: 10.0}
        assert bounded[3] == pytest.approx(most * sum(bounded.values()), rel=1e-9)
