"""FedDyn beyond the laws: robust aggregators, clients that come later."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import flwr_regs as fr
from flwr_regs.term import ServerContext


@pytest.mark.parametrize("of", [fr.DynamicRegulariser(0.5), fr.ControlVariates()], ids=str)
def test_the_sum_over_all_clients_is_that_of_those_whose_state_counts(of: Any) -> None:
    """Krum gives n times the mean of those that it selected; a client that comes later brings 0."""
    one, four = np.ones(2), {"w": 4 * np.ones(2), "c.w": 4 * np.ones(2)}
    ctx = ServerContext(
        1, 0.1, {"w": np.zeros(2)}, population=8, weights=dict.fromkeys(range(4), 0.25), robust=True
    )
    rate = -0.5 if isinstance(of, fr.DynamicRegulariser) else 1.0
    own = {key: a for key, a in four.items() if (key == "w") == (rate < 0)}

    def total(server: Any, ctx: ServerContext, uploads: Any = own) -> Any:
        new, step = of.update(server, {"w": one}, uploads, ctx)
        (value,) = (a for key, a in new.items() if key.endswith(".w"))
        assert rate > 0 or np.array_equal(step["w"], one - 2 * value)
        return value, new

    every, server = total({}, ctx)
    np.testing.assert_allclose(every, rate / 8 * 4 * one)
    selected, _ = total({}, replace(ctx, selected=[2]))
    np.testing.assert_allclose(selected, rate / 8 * one)
    grown, _ = total(server, replace(ctx, population=16, selected=[]))
    np.testing.assert_allclose(grown, every / 2)
