"""FedCurv beyond the laws: its penalty, its fixed point, and clients whose last reply does not count."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from flwr_regs import (
    Curvature,
    Elastic,
    EmbeddedMomentum,
    FedCurv,
    FedCurvClient,
    InProcessGrid,
    RegClient,
    RegStrategy,
    SparseTernary,
)
from flwr_regs.term import ClientContext, ServerContext, Term
from flwr_regs.testing.problem import (
    app_of,
    start_weights,
)
from tests.conftest import budgeted, close, make_clients, make_model, run, to_numpy
from tests.oracles.client_step.fedcurv import fedcurv

U = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.5, 0.0, 3.0])]
ENDS = [torch.tensor([1.0, 0.5, 2.0]), torch.tensor([2.0, -1.0, 0.0])]


def pulled(**client: Any) -> torch.Tensor:
    """What the term adds at v, for client 0 of two, both in the sums."""
    v = torch.tensor([1.5, -0.5, 2.0])
    broadcast = {"U.w": U[0] + U[1], "V.w": U[0] * ENDS[0] + U[1] * ENDS[1]}
    used = client.pop("used", True)
    ctx = ClientContext(
        start={"w": torch.zeros(3)},
        lr=0.1,
        num_steps=3,
        broadcast={**broadcast, "used": torch.tensor(used)},
        client=client,
    )
    return Curvature(0.7).correct({"w": torch.zeros(3)}, {"w": v}, ctx)["w"]  # type: ignore[no-any-return]


def by_autograd(clients: list[int]) -> torch.Tensor:
    v = torch.tensor([1.5, -0.5, 2.0], requires_grad=True)
    penalty = 0.7 * sum((U[i] * (v - ENDS[i]) ** 2).sum() for i in clients)
    torch.as_tensor(penalty).backward()
    assert v.grad is not None
    return v.grad


def test_the_term_is_the_derivative_of_the_penalty_over_the_others() -> None:
    own = {"U.w": U[0], "V.w": U[0] * ENDS[0]}
    torch.testing.assert_close(pulled(**own), by_autograd([1]))
    # not in the sums (an older one), or lost: nothing to subtract
    torch.testing.assert_close(pulled(**own, used=False), by_autograd([0, 1]))
    torch.testing.assert_close(pulled(), by_autograd([0, 1]))
    assert (by_autograd([1]) > 0).any()
    assert (by_autograd([0, 1]) < 0).any()


def test_rounding_makes_no_curvature_negative() -> None:
    """A large implicit step would else divide by zero."""
    u = torch.tensor([1.0])
    broadcast = {"U.w": u * (1 - 1e-6), "V.w": u, "used": torch.tensor(True)}
    client = {"U.w": u, "V.w": u}
    ctx = ClientContext({"w": u}, 0.1, 1, broadcast=broadcast, client=client)
    assert Curvature(1.0).sums("w", ctx)[0] == 0.0


def expected(cohorts: list[list[int]], n: int, **options: Any) -> dict[str, np.ndarray]:
    """The oracle's last model, for clients of unequal size and two epochs."""
    clients = to_numpy(make_clients(n))
    settings = {"epochs": 2, "cohorts": cohorts, "float32_fisher": True, "lam": 0.4, **options}
    return fedcurv(start_weights(), clients, len(cohorts), lambda t: 0.2, **settings)[-1]


def test_partial_participation_equals_the_oracle() -> None:
    """A client that sat out, or took part only earlier, subtracts nothing."""
    strategy = FedCurv(0.4, seed=5, fraction_train=0.5, min_train_nodes=1, fraction_evaluate=0.0)
    got = run(strategy, FedCurvClient, rounds=8, clients=make_clients(5))
    cohorts = [e["cohort"] for e in strategy.history]
    again = [set(a) & set(b) for a, b in itertools.pairwise(cohorts)]
    older = [set(c) - set(cohorts[t - 1]) for t, c in enumerate(cohorts) if t]
    assert any(again)
    assert any(o & set().union(*cohorts[:t]) for t, o in enumerate(older, start=1))
    close(got, expected(cohorts, 5), 1e-10)


def test_a_dropped_reply_is_not_subtracted() -> None:
    """Clients 1 and 3 are dropped in turn, and keep an older u_k, which is in no sum."""
    done = [{}, {1: 2}, {3: 1}, {1: 1}]
    strategy = FedCurv(0.4, seed=5, incomplete="drop", fraction_evaluate=0.0)
    got = run(strategy, budgeted(FedCurvClient, done), rounds=7)
    used = [e["replies"] for e in strategy.history]
    assert used[:4] == [[0, 1, 2, 3], [0, 2, 3], [0, 1, 2], [0, 2, 3]]
    close(got, expected(used, 4), 1e-10)


# What the server computes of v̂_k = u_k ⊙ v_k


def sent(terms: list[Term], **settings: Any) -> set[str]:
    """The kinds of arrays that a client uploads for its Fisher information."""
    found: set[str] = set()

    class Noting(InProcessGrid):
        def pull_messages(self, ids: Iterable[str]) -> Iterable[Message]:
            for reply in (replies := list(super().pull_messages(ids))):
                for key, record in reply.content.array_records.items():
                    if key in ("fedcurv.upload", "elastic.upload"):
                        found.update(k[0] for k in record)
            return replies

    strategy = RegStrategy(terms, seed=5, fraction_evaluate=0.0, **settings)
    kinds = [type(t) for t in terms]
    client = partial(RegClient, terms=kinds)
    grid = Noting(
        app_of(client, make_clients(2, torch.float32), model=partial(make_model, torch.float32)), 2
    )
    run(strategy, RegClient, rounds=2, grid=grid, model=partial(make_model, torch.float32))
    assert [e["replies"] for e in strategy.history] == [[0, 1]] * 2
    return found


@pytest.mark.parametrize("term", [Curvature(0.4), Elastic(0.4)], ids=lambda t: t.name)
def test_the_product_with_the_model_travels_only_where_the_server_lacks_the_model(
    term: Term,
) -> None:
    assert sent([term]) == {"U"}
    assert sent([EmbeddedMomentum(0.5, 0.5), term]) == {"U"}
    assert sent([term, SparseTernary(None, 0.5)]) == {"U"}
    assert sent([term, SparseTernary(0.5)]) == {"U", "V"}
    assert sent([term], wire_dtype="bfloat16") == {"U", "V"}


def test_a_product_beyond_all_bounds_costs_its_client() -> None:
    server = ServerContext(1, 0.1, {"w": np.full(2, 10.0, np.float32)})
    upload = {"U.w": np.full(2, 1e15, np.float32)}
    Curvature(0.4).check(upload, server.params, {})
    with pytest.raises(ValueError, match=r"its Fisher information times 'w' is beyond 1e\+15"):
        Curvature(0.4).fold({}, 0, {"w": np.zeros(2)}, upload, 1.0, server)
