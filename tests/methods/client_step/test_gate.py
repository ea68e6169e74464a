"""VRL-SGD and FedGATE beyond the laws: d_k, SCAFFOLD, what the server keeps, what is refused."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.experiments.strategies import build
from flwr_regs.experiments.calls import parse_methods
from flwr_regs.term import ServerContext
from flwr_regs.testing.problem import start_weights, train
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.methods.watching import (
    LOST,
    SHORT,
    SOME,
    Arrays,
    Forgetful,
    Watched,
    composed,
    untouched,
    watched,
)
from tests.oracles.client_step.gate import fedgate
from tests.oracles.model import Params
from tests.sampling import sampled

SINGLE = {"clients": make_clients(4, torch.float32), "model": partial(make_model, torch.float32)}
STEPS = {"local-steps": 6}


def complete(found: Watched, pid: int, number: int) -> Arrays:
    """One client's d_k after a round: what it kept in its last used one, and that round's mean."""
    used = [t for t in range(1, number + 1) if pid in found.history[t - 1]["replies"]]
    if not used:
        return {}
    kept, server = found.kept[used[-1], pid], found.server[number - 1]
    return {n: kept[f"d.{n}"] + kept["rate"] * server[f"{used[-1]}.{n}"] for n in start_weights()}


def expected(found: Watched, controls: list[list[Params]], **more: Any) -> list[Params]:
    """The oracle's models for the cohorts and replies of a run; `controls` takes d_k."""
    return fedgate(
        start_weights(), to_numpy(make_clients(5)), 8, lambda t: 0.2, 2, server_lr=0.7,
        controls=controls, **found.plan, **more,
    )  # fmt: skip


CELLS = list(product(["model", "delta"], ["average", "drop"], ["uniform", "num-examples"]))


@sampled("downlink,incomplete,weighting", CELLS, 5)
def test_some_clients_of_which_some_stop_early(
    downlink: str, incomplete: str, weighting: str
) -> None:
    """3 of 5 clients a round, so that w̄ comes late. Models and each d_k are the oracle's."""
    strategy = fr.FedGATE(
        0.7, downlink=downlink, incomplete=incomplete, weighting=weighting, **SOME
    )
    found = watched(strategy, budgeted(fr.FedGATEClient, SHORT), "gradient-tracking")
    assert any(found.plan["unused"]) == (incomplete == "drop")
    controls: list[list[Params]] = []
    short = [SHORT[t % 4] for t in range(8)]
    models = expected(found, controls, steps_done=short, weighting=weighting)
    seen = 0
    for t, own in enumerate(controls):
        close(found.models[t], models[t], 1e-10)
        for k in range(5):
            if mine := complete(found, k, t + 1):
                close(mine, own[k], 1e-10)
                seen += 1
    assert seen > 20


def test_a_client_that_lost_its_correction_is_named() -> None:
    """It begins at 0, although the server sends what it has for it."""
    strategy = fr.FedGATE(0.7, seed=3, fraction_evaluate=0.0)
    found = watched(strategy, fr.FedGATEClient, "gradient-tracking", Forgetful)
    assert [set(e["lost_state"]) for e in found.history] == LOST
    controls: list[list[Params]] = []
    close(found.models[-1], expected(found, controls, lost=LOST)[-1], 1e-10)
    for k in range(5):
        close(complete(found, k, 8), controls[-1][k], 1e-10)


def test_the_server_keeps_the_means_that_clients_still_need() -> None:
    """One model if all take part; else one for each round that was some client's last."""
    found = watched(fr.VRLSGD(**SOME), fr.VRLSGDClient, "gradient-tracking")
    for number, server in enumerate(found.server, start=1):
        last: dict[int, int] = {}
        for t, entry in enumerate(found.history[:number], start=1):
            last |= dict.fromkeys(entry["replies"], t)
        assert {int(key[5:]): int(a) for key, a in server.items() if key[:5] == "last."} == last
        means = {key for key in server if key[:5] != "last."}
        assert means == {f"{t}.{n}" for t in last.values() for n in start_weights()}
    every = watched(fr.VRLSGD(seed=3), fr.VRLSGDClient, "gradient-tracking", rounds=3)
    assert {key.partition(".")[0] for key in every.server[-1]} == {"last", "3"}


def test_compression_leaves_out_what_the_clients_have_yet_to_send() -> None:
    """Σ d_k = −Σ R_k / (K η), R_k the residual of client k."""
    terms = [fr.GradientTracking(), fr.SparseTernary(0.3)]
    strategy = fr.RegStrategy(terms, seed=3, weighting="uniform", fraction_evaluate=0.0)
    found = watched(
        strategy, composed(*terms), "gradient-tracking", rounds=4, length=STEPS,
        beside="ternary", **SINGLE,
    )  # fmt: skip
    own = [complete(found, k, 4) for k in range(4)]
    for n in start_weights():
        rest = sum(found.beside[4, k][n] for k in range(4)) / (6 * 0.2)
        np.testing.assert_allclose(sum(d[n] for d in own), -rest, rtol=0, atol=1e-5)
        assert abs(rest).max() > 1e-3


# where it settles


# beside a server's optimiser


def half_step(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.6)


def test_the_mean_is_that_before_a_servers_optimiser() -> None:
    """SGD with lr = γ on the server is FedGATE; the parts are put in the order that this needs."""
    (calls,) = parse_methods(
        "VRLSGD()+FedOpt(server_optimizer='SGD', lr=0.6)+SparseTernary(0.5)"
    ).values()
    names = [t.name for t in build(calls).term.terms]
    assert names == ["server-optimizer", "gradient-tracking", "ternary"]
    terms = [fr.TorchServerOptimizer(half_step), fr.GradientTracking()]
    strategy = fr.RegStrategy(terms, seed=3, weighting="uniform")
    a = train(strategy, composed(terms[1]), length=STEPS)
    b = train(fr.FedGATE(0.6, seed=3), fr.FedGATEClient, length=STEPS)
    for x, y in zip(a, b, strict=True):
        close(x, y, 1e-12)
    with pytest.raises(ValueError, match="put them behind 'server-optimizer'"):
        fr.RegStrategy(terms[::-1])


# what is refused


def test_scaled_clients_are_refused_before_any_client_is_contacted() -> None:
    """Then w̄ is not the clients' mean."""
    strategy = fr.VRLSGD(seed=1, incomplete="scale")
    with (
        untouched(fr.VRLSGDClient, "train") as grid,
        pytest.raises(ValueError, match="'scale' does"),
    ):
        train(strategy, fr.VRLSGDClient, grid=grid)


def test_a_clients_own_optimiser_is_refused() -> None:
    with pytest.raises(fr.RoundFailed, match=r"drift.*SGD with momentum takes other ones"):
        train(
            fr.VRLSGD(seed=1), fr.VRLSGDClient, rounds=1,
            optimizer=partial(torch.optim.SGD, momentum=0.5),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (fr.ControlVariates(), "'scaffold': .*same drift"),
        (fr.DynamicRegulariser(0.1), "'feddyn': .*same drift"),
        (fr.NormalizedAveraging(), "'fednova': its weights do not sum to 1"),
    ],
)
def test_what_does_not_go_with_it(other: Any, why: str) -> None:
    for terms in ([other, fr.GradientTracking()], [fr.GradientTracking(), other]):
        with pytest.raises(ValueError, match=f"'gradient-tracking' excludes {why}"):
            fr.RegStrategy(terms)


def test_the_step_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="server_lr must be a positive number, not 0"):
        fr.FedGATE(0)
    assert fr.FedGATE(0.5).weighting == fr.VRLSGD().weighting == "uniform"


def test_a_client_that_an_aggregator_left_out_still_needs_its_old_mean() -> None:
    """`uploads` has those whose state counts."""
    term, w = fr.GradientTracking(), {"w": np.zeros(2)}
    server: Any = {}
    for number, counted in ((1, [0, 1]), (2, [1]), (3, [1])):
        ctx = ServerContext(number, 0.1, w, population=2, weights={0: 0.5, 1: 0.5})
        delta = {"w": np.full(2, float(number))}
        server, _ = term.update(server, delta, {k: {} for k in counted}, ctx)
    assert set(server) == {"last.0", "last.1", "1.w", "3.w"}
    assert term.broadcast_to(0, server, ctx)["w"][0] == 1
    assert term.broadcast_to(1, server, ctx)["w"][0] == 3
    assert term.broadcast_to(7, server, ctx) == {}
