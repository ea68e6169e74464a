"""FedNova beyond the laws: weights, where it settles, what is refused, what clients may claim."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.abilities import Weighs
from flwr_regs.term import Term
from flwr_regs.testing.problem import start_weights, train
from tests.conftest import budgeted, close, make_clients, make_model, to_numpy
from tests.methods.watching import (
    SHORT,
    SOME,
    composed,
    untouched,
    watched,
)
from tests.oracles.server_step.fednova import fednova
from tests.sampling import sampled

KINDS: list[dict[str, float]] = [{}, {"momentum": 0.6}, {"mu": 0.8}]
CELLS = list(product(KINDS, ["model", "delta"], ["average", "drop"]))


@sampled("settings,downlink,incomplete", CELLS, 5)
def test_some_clients_of_which_some_stop_early(
    settings: dict[str, float], downlink: str, incomplete: str
) -> None:
    """3 of 5 unequal clients a round, of which some take fewer steps."""
    strategy = fr.FedNova(**settings, downlink=downlink, incomplete=incomplete, **SOME)
    found = watched(strategy, budgeted(fr.FedNovaClient, SHORT), "fednova")
    models = fednova(
        start_weights(), to_numpy(make_clients(5)), 8, lambda t: 0.2, 2, **settings,
        **found.plan, steps_done=[SHORT[t % 4] for t in range(8)],
    )  # fmt: skip
    for a, b in zip(found.models, models, strict=True):
        close(a, b, 1e-10)


# where it settles: one client takes 1 of 5 steps


def half_step(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.5)


def test_a_servers_optimiser_gets_the_weighted_sum() -> None:
    """τ_eff and all: with lr = 0.5 the model moves by half of FedNova's step."""
    terms = [fr.NormalizedAveraging(), fr.TorchServerOptimizer(half_step)]
    client = composed(terms[0])
    half = train(fr.RegStrategy(terms, seed=3), client, rounds=1)[0]
    whole = train(fr.FedNova(seed=3), fr.FedNovaClient, rounds=1)[0]
    start = start_weights()
    close(half, {n: (start[n] + whole[n]) / 2 for n in start}, 1e-12)


def test_buffers_keep_their_weights() -> None:
    """BatchNorm's statistics are FedAvg's after a round, its weights are not."""
    model = partial(make_model, batch_norm=True)
    found = train(fr.FedNova(seed=3), fr.FedNovaClient, rounds=1, model=model)[0]
    plain = train(fr.FedAvg(seed=3), fr.FedAvgClient, rounds=1, model=model)[0]
    np.testing.assert_allclose(found["1.running_var"], plain["1.running_var"], rtol=0, atol=1e-12)
    assert abs(found["1.weight"] - plain["1.weight"]).max() > 1e-5


# what is refused


@dataclass(frozen=True)
class Equal(Term, Weighs):
    """It weighs all clients alike."""

    name: ClassVar[str] = "equal"

    def weigh(self, weights: Any, uploads: Any, ctx: Any) -> Any:
        return {k: 1 / len(weights) for k in weights}


def test_wrong_settings() -> None:
    with pytest.raises(ValueError, match=r"momentum or mu, but got momentum=0.5 and mu=0.1: leave"):
        fr.FedNova(momentum=0.5, mu=0.1)
    with pytest.raises(ValueError, match="momentum must be a number from 0 to below 1, not 1"):
        fr.FedNova(momentum=1)
    with pytest.raises(ValueError, match=r"incomplete='scale' weighs .* and so does 'fednova'"):
        fr.FedNova(incomplete="scale")
    with pytest.raises(ValueError, match="only one term can weigh"):
        fr.RegStrategy([fr.NormalizedAveraging(), Equal()])
    with pytest.raises(ValueError, match=r"privacy=.* 'fednova' weighs clients unequally"):
        fr.FedNova(privacy=fr.CentralDP(1.0, 1.0), weighting="uniform")
    assert fr.FedNova().weighting == "num-examples"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (fr.Proximal(0.1), r"'proximal': .*give FedNova mu="),
        (fr.EmbeddedMomentum(0.5, 0.5), "'fedadc': .*would multiply FedADC's momentum"),
    ],
)
def test_what_does_not_go_with_it(other: Any, why: str) -> None:
    for terms in ([other, fr.NormalizedAveraging()], [fr.NormalizedAveraging(), other]):
        with pytest.raises(ValueError, match=f"'fednova' excludes {why}"):
            fr.RegStrategy(terms)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("momentum", 0.9, "SGD with momentum weighs"), ("optimizer", "Adam", "Adam weighs")],
)
def test_a_config_is_refused_before_any_client_is_contacted(key: str, value: Any, why: str) -> None:
    config = {"local-epochs": 1, key: value}
    with untouched(fr.FedNovaClient) as grid, pytest.raises(ValueError, match=f"{why} their"):
        train(fr.FedNova(momentum=0.5, seed=1), fr.FedNovaClient, grid=grid, length=config)


def test_a_pull_beyond_its_limit_is_refused_before_any_client_is_contacted() -> None:
    """η μ < 1. Weight decay and clipping change the gradients, not their weights: they are allowed."""
    with untouched(fr.FedNovaClient) as grid, pytest.raises(ValueError, match=r"lr · mu < 1.*1\.2"):
        train(fr.FedNova(mu=6.0, seed=1), fr.FedNovaClient, grid=grid)
    strategy = fr.FedNova(mu=2.0, seed=1, lr_schedule=lambda t: 3.0 if t == 2 else 1.0)
    with pytest.raises(ValueError, match=r"lr=0\.6 and mu=2 make 1\.2: use a smaller mu"):
        train(strategy, fr.FedNovaClient)
    assert len(strategy.history) == 1
    config = {"local-steps": 1, "weight-decay": 0.1, "clip-norm": 1.0}
    train(fr.FedNova(mu=2.0, seed=1), fr.FedNovaClient, rounds=1, length=config)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam,
        partial(torch.optim.SGD, momentum=0.5),
        partial(torch.optim.SGD, dampening=0.5),
    ],
)
def test_a_clients_own_optimiser_is_refused(optimizer: Any) -> None:
    with pytest.raises(fr.RoundFailed, match="weighs their gradients in another way"):
        train(fr.FedNova(seed=1), fr.FedNovaClient, rounds=1, optimizer=optimizer)


# what a client may claim


@pytest.mark.parametrize("aggregator", [fr.CoordinateMedian(), fr.NormBound(), fr.Mean()], ids=repr)
def test_one_clients_claims_do_not_lengthen_the_others_steps(aggregator: Any) -> None:
    """With local epochs a client that claims a million examples may claim as many steps."""

    class Liar(fr.FedNovaClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            sent, n, metrics = super().fit(parameters, config)
            if config["regs.partition"] == 4:
                n = 10**6
                metrics |= {"local-steps": n, "planned-steps": n}
            return sent, n, metrics

    strategy = fr.FedNova(seed=1, fraction_evaluate=0.0, aggregator=aggregator, weighting="uniform")
    try:
        found = train(strategy, Liar, rounds=1, clients=make_clients(5))[0]
    except fr.RoundFailed:  # it diverged
        found = {n: np.array(np.inf) for n in start_weights()}
    moved = max(abs(a - start_weights()[n]).max() for n, a in found.items())
    assert moved > 100 if aggregator == fr.Mean() else moved < 2


@pytest.mark.parametrize("claim", [10**9, 0.5, -1])
def test_a_claim_beyond_the_rounds_plan_costs_its_client(claim: Any) -> None:
    class Liar(fr.FedNovaClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            sent, n, metrics = super().fit(parameters, config)
            if config["regs.partition"] == 2:
                metrics |= {"local-steps": claim}
            return sent, n, metrics

    strategy = fr.FedNova(seed=1, fraction_evaluate=0.0)
    train(strategy, Liar, rounds=1, length={"local-steps": 3})
    assert strategy.history[0]["replies"] == [0, 1, 3]
    assert "where the round asked for 3" in strategy.history[0]["failures"][2]
