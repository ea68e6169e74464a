"""Central DP against an oracle, its epsilon, and which method goes with Flower's wrappers and mods."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)
from torch import nn

import flwr_regs as fr
from flwr_regs import CentralDP, InProcessGrid, RoundFailed, client_app, wrap
from flwr_regs.server.aggregation import Reply
from flwr_regs.server.privacy import private_mean
from flwr_regs.term import ServerContext, Term
from flwr_regs.wire.arrays import NDArrays
from flwr_regs.wire.records import from_record
from tests.conftest import ROOT, close, make_clients, make_model, run, to_numpy
from tests.oracles.central_dp import central_dp
from tests.sampling import sampled

ORDERS = (2.0, 3.0, 4.0, 8.0, 16.0, 32.0)
AMPLIFIED = (SamplingMethod.WITHOUT_REPLACEMENT, NeighboringRelation.REPLACE_ONE)
PLAIN = (SamplingMethod.NO_AMPLIFICATION, NeighboringRelation.ADD_OR_REMOVE_ONE)


def accountant(
    population: int, model: Any = AMPLIFIED, limit: float | None = None
) -> RdpAccountant:
    sampling, relation = model
    return RdpAccountant(PrivacyConfig(1e-5, population, relation, sampling, limit), ORDERS)


class Watching(InProcessGrid):
    """Keeps the train messages' arrays; `lose` may drop a reply."""

    def __init__(self, *args: Any, lose: Callable[[int, int], bool] | None = None) -> None:
        super().__init__(*args)
        self.sent: list[dict[str, NDArrays]] = []
        self._lose = lose

    def send_and_receive(self, messages: Iterable[Message], **kwargs: Any) -> Iterable[Message]:
        messages = list(messages)
        trained = [m for m in messages if m.metadata.message_type == "train"]
        self.sent += [
            {k: from_record(r) for k, r in m.content.array_records.items()} for m in trained
        ]
        rounds = [int(m.content["config"]["server-round"]) for m in trained]  # type: ignore[call-overload,arg-type]
        replies = list(super().send_and_receive(messages, **kwargs))
        if self._lose is not None and rounds:
            lost = self._lose
            replies = [r for r in replies if not lost(rounds[0], r.metadata.src_node_id - 1000)]
        return replies


def app_of(
    client: Any,
    model: Callable[[], nn.Module] = make_model,
    mods: Any = (),
    clients: Any = None,
    change: Callable[[int, Any], Any] = lambda pid, c: c,
) -> Any:
    data = clients or make_clients()

    def client_fn(context: Any) -> Any:
        pid = int(context.node_config["partition-id"])
        return change(pid, client(model(), data[pid], data[pid], device="cpu"))

    return client_app(client_fn, mods=mods)


def start(
    strategy: Any, grid: Any, rounds: int = 3, model: Callable[[], nn.Module] = make_model
) -> Any:
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model().state_dict()),
        num_rounds=rounds,
        train_config=ConfigRecord({"lr": 0.2, "local-epochs": 2}),
    )
    return {name: a.numpy() for name, a in result.arrays.items()}


# Central DP: clip and mean

METHODS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {
    "fedavg": (partial(fr.FedAvg, weighting="uniform"), fr.FedAvgClient, {}, {}),
    "fedfor": (
        partial(fr.FedFOR, weighting="uniform"),
        fr.FedFORClient,
        {"alpha": 0.6},
        {"alpha": 0.6},
    ),
    "slowmo": (
        fr.SlowMo,
        fr.SlowMoClient,
        {"beta": 0.6, "alpha": 0.9},
        {"beta_global": 0.6, "alpha": 0.9},
    ),
    "fedadc": (
        fr.FedADC,
        fr.FedADCClient,
        {"beta_local": 0.5, "beta_global": 0.8, "alpha": 0.9},
        {"beta_local": 0.5, "beta_global": 0.8, "alpha": 0.9},
    ),
}


def failing(pid: int, client: Any) -> Any:
    if pid == 2:
        client.train_data = []
    return client


@pytest.mark.parametrize("failed", [frozenset(), frozenset({2})])
@pytest.mark.parametrize("method", METHODS)
def test_without_noise_it_is_clip_and_mean(method: str, failed: frozenset[int]) -> None:
    strategy_class, client, ours, oracle_settings = METHODS[method]
    clip = 0.6
    strategy = strategy_class(**ours, seed=3, fraction_evaluate=0.0, privacy=CentralDP(clip, 0.0))
    app = app_of(client, change=failing if failed else lambda pid, c: c)
    got = start(strategy, InProcessGrid(app, 4))
    first = {n: p.numpy() for n, p in make_model().state_dict().items()}
    want, clipped = central_dp(
        first, to_numpy(make_clients()), 3, 0.2, 2, method, clip, failed, **oracle_settings
    )
    close(got, want[-1], 1e-10)
    replies = 4 - len(failed)
    assert 0 < clipped < 3 * replies  # some are clipped and some are not
    told = sum(entry["clipped"] * replies for entry in strategy.history)
    assert told == pytest.approx(clipped)
    assert [list(e["failures"]) for e in strategy.history] == [sorted(failed)] * 3


def reply_of(arrays: dict[str, Any], **delta: Any) -> Reply:
    return Reply({n: np.asarray(a) for n, a in arrays.items()}, {}, {}, 1.0, delta)


def test_an_update_is_clipped_as_one_vector() -> None:
    base = {"a": np.zeros(2), "b": np.zeros((1, 2))}
    update = {"a": [3.0, 0.0], "b": [[0.0, 4.0]]}
    mean, share = private_mean(base, {7: reply_of(update)}, ["a", "b"], CentralDP(1.0, 0.0), 2)
    close(mean, {"a": np.array([0.3, 0.0]), "b": np.array([[0.0, 0.4]])}, 1e-15)
    assert share == 1.0


def test_sensitivity_of_the_mean() -> None:
    """One client replaced moves it by at most 2 C / m, and one that is missing by C / m."""
    rng = np.random.default_rng(0)
    base = {"a": rng.normal(size=(30, 4)), "b": rng.normal(size=7)}
    honest = {
        k: reply_of({n: w + rng.normal(size=w.shape) for n, w in base.items()}) for k in range(5)
    }
    against = {n: 2 * w - honest[3].arrays[n] for n, w in base.items()}  # w - Δ
    worst = {n: w + 1e150 * (against[n] - w) for n, w in base.items()}
    huge = {n: np.full_like(w, 1e300) for n, w in base.items()}  # its norm overflows

    def mean(replies: Any, m: int = 5) -> np.ndarray:
        out, _ = private_mean(base, replies, list(base), CentralDP(0.5, 0.0), m)
        return np.concatenate([out[n].ravel() for n in sorted(base)])

    moved = [
        float(np.linalg.norm(mean({**honest, 3: reply_of(bad)}) - mean(honest)))
        for bad in (against, worst, huge)
    ]
    assert moved[:2] == pytest.approx([2 * 0.5 / 5] * 2)
    assert moved[2] <= 2 * 0.5 / 5 + 1e-12
    without = {k: r for k, r in honest.items() if k != 3}
    assert np.linalg.norm(mean(without) - mean(honest)) == pytest.approx(0.5 / 5)


def test_an_adversarial_client_moves_a_round_by_no_more() -> None:
    def model_after(bad: bool) -> dict[str, np.ndarray]:
        data = make_clients()
        if bad:
            data[1] = [(1e3 * x, 2 - y) for x, y in data[1]]
        privacy = CentralDP(0.3, 0.0)
        strategy = fr.FedAvg("uniform", seed=1, fraction_evaluate=0.0, privacy=privacy)
        return run(strategy, fr.FedAvgClient, clients=data, rounds=1)

    a, b = model_after(False), model_after(True)
    moved = math.sqrt(sum(float(((a[n] - b[n]) ** 2).sum()) for n in a))
    assert 0.05 < moved <= 2 * 0.3 / 4 + 1e-9


# Central DP: the noise


def wide() -> nn.Module:
    """12,003 parameters, so that a standard deviation is known to 0.7 %."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 1500), nn.Tanh(), nn.Linear(1500, 3)).to(torch.float64)


def flat(model: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([a.ravel() for a in model.values()])


def noise_of(strategy_class: Any, client: Any, rounds: int, **settings: Any) -> list[np.ndarray]:
    """What noise of multiplier 2 changed, in two runs of the same seed."""
    runs = [
        run(
            strategy_class(
                **settings,
                seed=5,
                fraction_evaluate=0.0,
                privacy=CentralDP(0.1, z),
            ),
            client,
            rounds=rounds,
            model=wide,
            train={"local-steps": 1},
        )
        for z in (0.0, 2.0, 2.0)
    ]
    return [flat(r) - flat(runs[0]) for r in runs[1:]]


@pytest.mark.parametrize(
    ("strategy", "client", "settings", "factor"),
    [
        (fr.FedAvg, fr.FedAvgClient, {"weighting": "uniform"}, 1.0),
        (fr.SlowMo, fr.SlowMoClient, {"beta": 0.6, "alpha": 0.5}, 0.5),
        (fr.FedAvgM, fr.FedAvgMClient, {"weighting": "uniform", "server_lr": 3.0}, 3.0),
    ],
)
def test_the_noise_on_the_mean_has_its_size_and_is_new_each_time(
    strategy: Any, client: Any, settings: Any, factor: float
) -> None:
    std = factor * 2.0 * 0.1 / 4  # z C / m, and then the server's step
    a, b = noise_of(strategy, client, 1, **settings)
    for noise in (a, b):
        assert abs(noise.std() / std - 1) < 5 / math.sqrt(2 * noise.size)
        assert abs(noise.mean()) < 5 * std / math.sqrt(noise.size)
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 5 / math.sqrt(a.size)


def test_momentum_carries_the_noise_on() -> None:
    """SlowMo's second step contains β times the first noise: it was in the mean, not on the model."""
    strategy = fr.SlowMo(
        beta=0.6, seed=1, fraction_evaluate=0.0, privacy=CentralDP(1e-9, 1e9)
    )  # a mean that is nothing but noise, of standard deviation 1/4
    grid = Watching(app_of(fr.SlowMoClient, wide), 4)
    final = flat(start(strategy, grid, 2, wide))
    w = [flat(grid.sent[i]["arrays"]) for i in (0, 4)] + [final]
    first, second = w[1] - w[0], w[2] - w[1]
    assert abs(float(first.std()) * 4 - 1) < 0.05
    slope = float(first @ second / (first @ first))
    assert abs(slope - 0.6) < 0.06


def test_no_seed_has_a_part_in_the_noise() -> None:
    """Neither the run's, nor numpy's or torch's global one."""
    base = {"w": np.zeros(10)}
    reply = {0: Reply(base, {}, {}, 1.0)}

    def once() -> np.ndarray:
        np.random.seed(0)  # noqa: NPY002
        torch.manual_seed(0)
        mean, _ = private_mean(base, reply, ["w"], CentralDP(1.0, 1.0), 1)
        return mean["w"]

    assert not np.isin(once(), once()).any()


def test_frozen_parameters_and_dtypes_stay() -> None:
    def frozen() -> nn.Module:
        model = make_model(torch.float32)
        model[0].weight.requires_grad_(False)
        return model

    strategy = fr.FedAvg("uniform", seed=1, fraction_evaluate=0.0, privacy=CentralDP(1.0, 1.0))
    got = run(strategy, fr.FedAvgClient, clients=make_clients(dtype=torch.float32), model=frozen)
    np.testing.assert_array_equal(got["0.weight"], frozen().state_dict()["0.weight"].numpy())
    assert np.abs(got["2.weight"] - frozen().state_dict()["2.weight"].numpy()).min() > 0
    assert {a.dtype for a in got.values()} == {np.dtype(np.float32)}


# Central DP: epsilon


def by_hand(rdp: Callable[[float], float], delta: float = 1e-5) -> float:
    """From Rényi to (ε, δ): Canonne, Kamath, Steinke 2020, Prop. 12."""
    return min(rdp(a) + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a in ORDERS)


def private_run(population: int, model: Any, fraction: float, z: float, **settings: Any) -> Any:
    privacy = CentralDP(0.5, z, accountant(population, model, settings.pop("limit", None)))
    strategy = fr.FedAvg(
        "uniform",
        seed=1,
        fraction_evaluate=0.0,
        fraction_train=fraction,
        min_train_nodes=1,
        privacy=privacy,
        **settings,
    )
    grid = Watching(app_of(fr.FedAvgClient, clients=make_clients(population)), population)
    return strategy, grid


def test_epsilon_is_that_of_dp_accounting_for_fixed_cohorts() -> None:
    strategy, grid = private_run(8, AMPLIFIED, 0.5, 3.0)
    start(strategy, grid)
    theirs = dp_accounting.rdp.RdpAccountant(ORDERS, dp_accounting.NeighboringRelation.REPLACE_ONE)
    std, sensitivity = 3.0 * 0.5 / 4, 2 * 0.5 / 4  # of the mean over 4
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        8, 4, dp_accounting.GaussianDpEvent(std / sensitivity)
    )
    for entry in strategy.history:
        theirs.compose(event)
        assert entry["epsilon"] == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-12)
        assert entry["delta"] == 1e-5
    assert strategy.privacy.accountant.num_releases == 3


@pytest.mark.parametrize(
    ("model", "factor"),
    [(PLAIN, 1), (AMPLIFIED, 4)],  # (sensitivity / C)²: a client less, or another one
)
def test_epsilon_without_amplification_is_the_closed_form(model: Any, factor: int) -> None:
    strategy, grid = private_run(4, model, 1.0, 3.0)
    start(strategy, grid)
    for t, entry in enumerate(strategy.history, start=1):
        expected = by_hand(partial(lambda t, a: t * a * factor / (2 * 3.0**2), t))
        assert entry["epsilon"] == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("model", [PLAIN, AMPLIFIED])
def test_the_budget_ends_training_before_a_client_hears_of_it(model: Any) -> None:
    free, grid = private_run(4, model, 1.0, 3.0)
    start(free, grid, 3)
    limit = (free.history[1]["epsilon"] + free.history[2]["epsilon"]) / 2
    strategy, grid = private_run(4, model, 1.0, 3.0, limit=limit)
    with pytest.raises(PrivacyBudgetExhausted, match=r"round 3 would pass max_epsilon=.*2 rounds"):
        start(strategy, grid, 5)
    assert len(grid.sent) == 2 * 4
    assert len(strategy.history) == 2
    assert strategy.privacy.accountant.num_releases == 2
    with pytest.raises(PrivacyBudgetExhausted, match="round 1 would"):  # it is spent for good
        start(strategy, grid, 5)
    assert len(grid.sent) == 2 * 4


def test_two_strategies_with_one_accountant_stay_within_its_budget() -> None:
    """What the second one spent counts for the first, whose last round failed."""
    alone, grid = private_run(4, PLAIN, 1.0, 1.0)
    start(alone, grid, 1)
    shared = accountant(4, PLAIN, limit=alone.history[0]["epsilon"] * 1.001)
    first, second = (
        fr.FedAvg("uniform", fraction_evaluate=0.0, privacy=CentralDP(0.5, z, shared))
        for z in (50.0, 1.0)
    )
    with pytest.raises(RoundFailed):
        start(first, Watching(app_of(fr.FedAvgClient), 4, lose=lambda _, pid: True), 1)
    start(second, grid, 1)
    with pytest.raises(PrivacyBudgetExhausted):
        start(first, grid, 40)
    assert shared.get_epsilon(1e-5) <= alone.history[0]["epsilon"] * 1.001


def test_the_population_must_be_what_the_accountant_was_told() -> None:
    strategy, _ = private_run(5, PLAIN, 1.0, 1.0)
    grid = Watching(app_of(fr.FedAvgClient), 4)
    with pytest.raises(ValueError, match=r"population of 5 clients, but 4.*population_size=4"):
        start(strategy, grid)
    assert grid.sent == []


class Leaving(Watching):
    """From round 2 on, partition 0 is gone."""

    def get_node_ids(self) -> Iterable[int]:
        return [n for n in super().get_node_ids() if n != 1000 or len(self.sent) < 4]


def test_a_client_that_left_is_still_drawn_and_counts_as_zero() -> None:
    strategy, grid = private_run(4, AMPLIFIED, 1.0, 1.0)
    grid.__class__ = Leaving
    start(strategy, grid)
    assert [e["cohort"] for e in strategy.history] == [[0, 1, 2, 3]] * 3
    assert [e["failures"] for e in strategy.history] == [{}, {0: "it has left"}, {0: "it has left"}]
    assert strategy.history[2]["replies"] == [1, 2, 3]
    free, grid = private_run(4, PLAIN, 1.0, 1.0)
    grid.__class__ = Leaving
    start(free, grid)
    assert [len(e["cohort"]) for e in free.history] == [4, 3, 3]


def test_cohorts_that_count_for_privacy_do_not_follow_from_the_seed() -> None:
    def cohorts(model: Any) -> list[list[int]]:
        strategy, grid = private_run(8, model, 0.5, 1.0)
        start(strategy, grid, 4)
        return [e["cohort"] for e in strategy.history]

    assert cohorts(PLAIN) == cohorts(PLAIN)
    assert cohorts(AMPLIFIED) != cohorts(AMPLIFIED)  # alike once in 70⁴ times


def test_a_second_training_of_one_accountant_draws_cohorts_of_its_own() -> None:
    """Epsilon adds up over rounds whose draws are independent, not over one draw used twice."""
    strategy, grid = private_run(8, AMPLIFIED, 0.5, 1.0)
    cohorts = []
    for rounds in (4, 8):
        start(strategy, grid, 4)
        assert strategy.privacy.accountant.num_releases == rounds
        cohorts.append([e["cohort"] for e in strategy.history])
    assert cohorts[0] != cohorts[1]  # alike once in 70⁴ times


# Central DP: what is refused


@dataclass(frozen=True)
class Sneaky(Term):
    """A user's term that uploads without saying so."""

    name = "sneaky"

    def finish(self, delta: Any, ctx: Any) -> Any:
        return delta, {"secret": torch.ones(3)}, {}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: fr.FedAvg(privacy=p), r"CentralDP.*num-examples.*use weighting='uniform'"),
        (lambda p: fr.FedCurv(0.5, weighting="uniform", privacy=p), r"\['elastic'\] send more"),
        (lambda p: fr.RFedAvg(0.5, weighting="uniform", privacy=p), r"\['rfedavg'\] send more"),
        (lambda p: fr.RFedAvgPlus(0.5, weighting="uniform", privacy=p), r"\['rfedavg-plus'\]"),
        (
            lambda p: fr.FedADC(cohorts="class-covering", privacy=p),
            r"label counts without noise.*use cohorts='uniform'",
        ),
        (lambda p: fr.FedADC(incomplete="scale", privacy=p), "incomplete='scale' weighs"),
        (lambda p: fr.EFL(0.0, weighting="uniform", privacy=p), "incomplete='scale' weighs"),
        (lambda p: fr.FedADC(drop_inactive=1.0, privacy=p), "drop_inactive draws .* who failed"),
    ],
)
def test_what_noise_does_not_cover_is_refused_when_built(make: Any, message: str) -> None:
    for counted in (accountant(4), accountant(4, PLAIN), None):
        with pytest.raises(ValueError, match=message):
            make(CentralDP(1.0, 1.0, counted))


def test_numbers_out_of_range_are_refused() -> None:
    poisson = PrivacyConfig(1e-5, 4, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.POISSON)
    for arguments, message in [
        ((0.0, 1.0), "clip_norm must be a positive number, not 0"),
        ((math.inf, 1.0), "clip_norm must be"),
        ((math.nan, 1.0), "clip_norm must be"),
        ((1.0, -0.1), "noise_multiplier must be a number of at least 0, not -0.1"),
        ((1.0, math.inf), "noise_multiplier must be"),
        ((1.0, 0.0, accountant(4)), "epsilon is infinite"),
        ((1.0, 1.0, RdpAccountant(poisson)), "fixed size, so Poisson sampling does not"),
    ]:
        with pytest.raises(ValueError, match=message):
            CentralDP(*arguments)
    with pytest.raises(ValueError, match="no accountant"):
        _ = CentralDP(1.0, 1.0).accounted_multiplier


def test_batch_norm_is_refused_before_training_unless_private() -> None:
    normed = partial(make_model, batch_norm=True)
    privacy = CentralDP(1.0, 0.1)
    grid = Watching(app_of(fr.FedAvgClient, normed), 4)
    with pytest.raises(ValueError, match=r"1\.running_mean.*use GroupNorm, or.*LocalBatchNorm"):
        start(fr.FedAvg("uniform", privacy=privacy), grid, 1, normed)
    assert grid.sent == []
    strategy = fr.FedBN(weighting="uniform", seed=1, privacy=privacy)
    got = start(strategy, InProcessGrid(app_of(fr.FedBNClient, normed), 4), 2, normed)
    assert sorted(got) == ["0.bias", "0.weight", "3.bias", "3.weight"]


class Counting(nn.Module):
    """A linear model with a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3).to(torch.float64)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        out: torch.Tensor = self.linear(x)
        return out


def test_a_reply_that_changes_a_buffer_is_left_out() -> None:
    strategy = fr.FedAvg("uniform", seed=1, fraction_evaluate=0.0, privacy=CentralDP(1.0, 0.0))
    with pytest.raises(RoundFailed, match=r"changed \['seen'\], which are not trained"):
        start(strategy, InProcessGrid(app_of(fr.FedAvgClient, Counting), 4), 1, Counting)


def test_an_upload_that_no_term_declared_is_left_out() -> None:
    strategy = fr.RegStrategy(
        [Sneaky()], weighting="uniform", fraction_evaluate=0.0, privacy=CentralDP(1.0, 1.0)
    )
    client = partial(fr.RegClient, terms=[Sneaky])
    with pytest.raises(RoundFailed, match=r"sends uploads of \['sneaky'\] beside its update"):
        start(strategy, InProcessGrid(app_of(client), 4), 1)


def test_the_package_works_without_dp_accounting() -> None:
    code = (
        "import sys; sys.modules['dp_accounting'] = None; import flwr_regs as fr\n"
        "fr.FedAvg('uniform', privacy=fr.CentralDP(1.0, 1.0)); fr.wrap, fr.client_app"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


# Flower's wrappers and mods


@dataclass(frozen=True)
class Way:
    """A column of the table in docs/privacy.md: how noise is added."""

    wrapper: Any = None
    mod: Any = None
    adaptive: bool = False

    def build(self, inner: Any, z: float, clip: float, builder: Any) -> Any:
        if self.wrapper is None:
            return inner
        settings = {
            "noise_multiplier": z,
            "num_sampled_clients": 3,
            ("initial_clipping_norm" if self.adaptive else "clipping_norm"): clip,
        }
        if self.adaptive:
            settings["clipped_count_stddev"] = 1.0 if z else 0.0
        return builder(self.wrapper, inner, **settings)

    def mods(self, z: float, clip: float) -> list[Any]:
        if self.mod is LocalDpMod:
            return [LocalDpMod(clip, 0.01 * z, 1.0, 1e-5)]
        return [self.mod] if self.mod else []


WAYS = {
    "CentralDP": Way(),
    "server, fixed": Way(DifferentialPrivacyServerSideFixedClipping),
    "server, adaptive": Way(DifferentialPrivacyServerSideAdaptiveClipping, None, True),
    "client, fixed": Way(DifferentialPrivacyClientSideFixedClipping, fixedclipping_mod),
    "client, adaptive": Way(
        DifferentialPrivacyClientSideAdaptiveClipping, adaptiveclipping_mod, True
    ),
    "LocalDpMod": Way(None, LocalDpMod),
}
UNIFORM: dict[str, Any] = {"weighting": "uniform"}
ROWS: dict[str, tuple[Any, Any]] = {
    "FedAvg": (fr.FedAvg, fr.FedAvgClient),
    "FedProx": (partial(fr.FedProx, mu=0.5), fr.FedProxClient),
    "FedFOR": (fr.FedFOR, fr.FedFORClient),
    "FedADC": (fr.FedADC, fr.FedADCClient),
    "FedADC, beta_local ≠ beta_global": (
        partial(fr.FedADC, beta_local=0.5, beta_global=0.8),
        fr.FedADCClient,
    ),
    "FedADCPlus": (fr.FedADCPlus, fr.FedADCPlusClient),
    "SlowMo": (partial(fr.SlowMo, beta=0.5), fr.SlowMoClient),
    "FedOpt": (
        partial(fr.FedOpt, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5)),
        fr.FedOptClient,
    ),
    "FedAvgM": (fr.FedAvgM, fr.FedAvgMClient),
    "FedAdagrad": (fr.FedAdagrad, fr.FedAdagradClient),
    "FedAdam": (fr.FedAdam, fr.FedAdamClient),
    "FedYogi": (fr.FedYogi, fr.FedYogiClient),
    "RFedAvg": (partial(fr.RFedAvg, lam=0.1), fr.RFedAvgClient),
    "RFedAvgPlus": (partial(fr.RFedAvgPlus, lam=0.1), fr.RFedAvgPlusClient),
    "EFL": (partial(fr.EFL, lam=0.1, incomplete="average"), fr.EFLClient),
    "EFL, lam = 0, compressed": (
        partial(fr.EFL, lam=0.0, density_up=0.5, density_down=0.5, incomplete="average"),
        fr.EFLClient,
    ),
    "FedCurv": (partial(fr.FedCurv, lam=0.1), fr.FedCurvClient),
    "FedBN": (fr.FedBN, fr.FedBNClient),
    "FedPer": (partial(fr.FedPer, "2.*"), fr.FedPerClient),
}
WHY = {
    "a": r"\['[a-z-]+'\] send more than their update|does not go with '[a-z, -]+', whose clients send more",
    "b": r"move the model by more than the plain mean, from means without noise.*CentralDP",
    "c": r"coded updates would be read as dense ones.*CentralDP",
    "d": r"does not go with a method that asks clients a question before they train",
}


def table() -> dict[tuple[str, str], str]:
    """Read docs/privacy.md's table: (strategy, column) -> "yes" or a letter."""
    text = (ROOT / "docs" / "privacy.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.split("## Flower's wrappers and mods")[1].splitlines()
        if line.startswith("|") and "---" not in line
    ]
    head, *rest = rows
    return {
        (row[0], column): v for row in rest for column, v in zip(head[1:], row[1:], strict=True)
    }


def model_of(row: str) -> Callable[[], nn.Module]:
    return partial(make_model, batch_norm=row == "FedBN")


def strategy_of(row: str, **settings: Any) -> Any:
    return ROWS[row][0](**UNIFORM, seed=2, **settings)


@cache
def without(row: str) -> dict[str, np.ndarray]:
    model = model_of(row)
    return start(strategy_of(row), InProcessGrid(app_of(ROWS[row][1], model), 3), 2, model)  # type: ignore[no-any-return]


def direct(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
    return wrapper(*args, **kwargs)


def trained_with(row: str, column: str, z: float, clip: float, grids: list[Watching]) -> Any:
    way, model = WAYS[column], model_of(row)
    settings = {"privacy": CentralDP(clip, z)} if column == "CentralDP" else {}
    strategy = way.build(strategy_of(row, **settings), z, clip, wrap)
    app = app_of(ROWS[row][1], model, way.mods(z, clip))
    grids.append(Watching(app, 3))
    return start(strategy, grids[-1], 2, model)


def test_the_table_names_every_strategy_and_way() -> None:
    assert set(table()) == {(row, column) for row in ROWS for column in WAYS}
    named = {
        name
        for name in fr.__all__
        if isinstance(getattr(fr, name), type) and issubclass(getattr(fr, name), fr.RegStrategy)
    } - {"RegStrategy"}
    assert {row.split(",")[0] for row in ROWS} == named


CELLS = list(product(ROWS, WAYS))


@sampled("row,column", [c for c in CELLS if table().get(c) == "yes"], 1)
def test_what_the_table_of_docs_privacy_allows(row: str, column: str) -> None:
    """Without clipping and noise it is the method itself, and noise reaches every entry."""
    plain = without(row)
    close(trained_with(row, column, 0.0, 1e6, []), plain, 1e-6)
    clipped, noisy = (trained_with(row, column, z, 0.5, []) for z in (0.0, 0.5))
    assert noisy.keys() == plain.keys()
    for name, a in noisy.items():
        assert np.isfinite(a).all()
        assert np.all(a != clipped[name]) or "compressed" in row
        assert np.any(a != clipped[name])


@sampled("row,column", [c for c in CELLS if table().get(c) != "yes"], 1)
def test_what_the_table_of_docs_privacy_refuses(row: str, column: str) -> None:
    says = table()[row, column]
    grids: list[Watching] = []
    with pytest.raises((ValueError, RoundFailed), match=WHY[says]):
        trained_with(row, column, 0.5, 0.5, grids)
    way = WAYS[column]
    if way.wrapper is None:
        assert all(len(g.sent) <= 3 for g in grids)  # asked once, and refused before training
        return
    assert grids == []
    strategy = way.build(strategy_of(row), 0.5, 0.5, direct)
    grid = Watching(app_of(ROWS[row][1], mods=way.mods(0.5, 0.5)), 3)
    with pytest.raises(ValueError, match=WHY[says] + "|needs the strategy's own start"):
        start(strategy, grid, 2)
    assert grid.sent == []


SERVER = DifferentialPrivacyServerSideFixedClipping
CLIENT = DifferentialPrivacyClientSideFixedClipping


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weighting": "num-examples"}, "wrappers: weighting='num-examples' weighs"),
        ({"incomplete": "scale"}, "incomplete='scale' weighs clients unequally"),
        ({"incomplete": "drop"}, "use incomplete='average'"),
        ({"cohorts": "class-covering"}, "label counts without noise"),
        ({"drop_inactive": 1.0}, "drop_inactive needs the strategy's own start"),
        ({"wire_dtype": "bfloat16"}, "arrays are clipped and averaged as they travel"),
        ({"downlink": "delta"}, "downlink='delta' needs the strategy's own start"),
        ({"privacy": CentralDP(1.0, 1.0)}, "noise is needed once; use one of them"),
        ({"alpha": 2.0}, r"\['fedadc'\] move the model by more than the plain mean"),
    ],
)
def test_unsafe_settings_under_a_wrapper(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wrap(SERVER, fr.FedADC(**settings), 1.0, 1.0, 3)
    grid = Watching(app_of(fr.FedADCClient), 3)
    with pytest.raises(ValueError, match=message + "|needs? the strategy's own start"):
        start(SERVER(fr.FedADC(**settings), 1.0, 1.0, 3), grid)
    assert grid.sent == []


def test_what_wrap_takes() -> None:
    with pytest.raises(TypeError, match="one of Flower's DifferentialPrivacyServerSide"):
        wrap(fr.FedAvg, fr.FedADC())
    with pytest.raises(TypeError, match="for strategies of flwr_regs, not Differential"):
        wrap(SERVER, SERVER(fr.FedADC(), 1.0, 1.0, 3), 1.0, 1.0, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="count epsilon for Flower's own FedAvg only"):
        wrap(SERVER, fr.FedADC(), 1.0, 1.0, 3, accountant=accountant(3, PLAIN))


def test_a_wrapper_for_another_cohort_is_refused() -> None:
    grid = Watching(app_of(fr.FedADCClient), 4)
    with pytest.raises(ValueError, match=r"num_sampled_clients=3, but the cohort of round 1 has 4"):
        start(wrap(SERVER, fr.FedADC(), 1.0, 1.0, 3), grid)
    assert grid.sent == []


@pytest.mark.parametrize("way", [w for w in WAYS if w != "CentralDP"])
def test_batch_norm_under_wrappers_and_mods(way: str) -> None:
    normed = partial(make_model, batch_norm=True)
    strategy = WAYS[way].build(strategy_of("FedAvg"), 0.1, 1.0, wrap)
    grid = Watching(app_of(fr.FedAvgClient, normed, WAYS[way].mods(0.1, 1.0)), 3)
    with pytest.raises((ValueError, RoundFailed), match=r"BatchNorm's statistics.*use GroupNorm"):
        start(strategy, grid, 1, normed)


@pytest.mark.parametrize("row", ["FedFOR", "FedADC", "FedADCPlus"])
def test_what_clients_are_told_of_the_last_step_is_the_released_one(row: str) -> None:
    """The direction or momentum sent beside the model follows from the noisy models alone."""
    strategy = wrap(SERVER, strategy_of(row), 1.0, 0.3, 3)
    grid = Watching(app_of(ROWS[row][1]), 3)
    start(strategy, grid, 3)
    w1, w2, w3 = (grid.sent[3 * t]["arrays"] for t in range(3))
    for t, (before, after) in enumerate([(w1, w2), (w2, w3)], start=1):
        (told,) = (v for k, v in grid.sent[3 * t].items() if k.endswith(".broadcast"))
        close(told, {n: (before[n] - after[n]) / 0.2 for n in before}, 1e-12)


PACKAGE_TERMS: list[Term] = [
    fr.Proximal(0.5),
    fr.FirstOrder(1.0),
    fr.EmbeddedMomentum(0.9, 0.9),
    fr.EmbeddedMomentum(0.5, 0.8),
    fr.EmbeddedMomentum(0.9, 0.9, alpha=0.5),
    fr.SelfDistillation(),
    fr.SlowMomentum(0.0),
    fr.SlowMomentum(0.5),
    fr.SlowMomentum(0.0, alpha=2.0),
    fr.TorchServerOptimizer(lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.5)),
    fr.AdaptiveServer("adam", 0.1, 0.9, 0.99, 1e-3),
    fr.LocalBatchNorm(),
    fr.Private("2.*"),
]


@pytest.mark.parametrize("term", PACKAGE_TERMS, ids=lambda t: type(t).__name__)
def test_averages_means_that_the_step_is_the_mean(term: Term) -> None:
    """Whatever the server kept: two rounds, the second with the first one's slot."""
    rng = np.random.default_rng(0)
    params = {"a": rng.normal(size=(3, 2))}
    ctx = ServerContext(1, 0.3, params)
    server = term.init(params)
    steps, deltas = [], []
    for _ in range(2):
        deltas.append({"a": rng.normal(size=(3, 2))})
        server, step = term.update(server, deltas[-1], {}, ctx)
        server, step = term.release(server, step, ctx)
        steps.append(step)
    same = all(np.allclose(s["a"], d["a"], atol=1e-12) for s, d in zip(steps, deltas, strict=True))
    assert same == term.averages


def test_a_client_that_forgot_its_mod_is_found_out() -> None:
    strategy = wrap(CLIENT, strategy_of("FedAvg"), 1.0, 0.01, 3)
    with pytest.raises(RoundFailed, match=r"larger than clipping_norm=0\.01: build its app"):
        start(strategy, InProcessGrid(app_of(fr.FedAvgClient), 3))
    single = make_clients(3, torch.float32)
    app = app_of(
        fr.FedAvgClient, partial(make_model, torch.float32), [fixedclipping_mod], single
    )  # a clipped float32 update is not taken for a larger one
    strategy = wrap(CLIENT, strategy_of("FedAvg"), 0.0, 1e-5, 3)
    start(strategy, InProcessGrid(app, 3), 2, partial(make_model, torch.float32))
    assert [e["failures"] for e in strategy.strategy.history] == [{}, {}]


def test_a_lost_reply_does_not_raise_the_others_weight() -> None:
    """Flower only warns; the noise would be for three, and the mean over two."""
    inner = strategy_of("FedAvg", fraction_evaluate=0.0)
    app = app_of(fr.FedAvgClient)
    grid = Watching(app, 3, lose=lambda t, pid: (t, pid) == (2, 1))
    start(wrap(SERVER, inner, 1.0, 0.3, 3), grid, 3)
    assert [e["replies"] for e in inner.history] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    w2, w3 = (grid.sent[3 * t]["arrays"] for t in (1, 2))
    close(w2, w3, 0.0)  # round 2 was skipped
    grid = Watching(app, 3, lose=lambda t, pid: pid == 1)
    with pytest.raises(RoundFailed, match=r"2 usable replies from a cohort of 3, needed 3"):
        start(wrap(SERVER, strategy_of("FedAvg"), 1.0, 0.3, 3), grid, 1)


def test_a_first_round_that_a_wrapper_skips_ends_the_run() -> None:
    strategy = wrap(SERVER, strategy_of("FedAvg"), 1.0, 0.3, 3)
    grid = InProcessGrid(app_of(fr.FedAvgClient, change=failing), 3)
    with pytest.raises(RoundFailed, match=r"round 1 was never aggregated.*a client failed"):
        start(strategy, grid, 1)


@pytest.mark.parametrize("mod", [LocalDpMod(1.0, 0.1, 1.0, 1e-5), fixedclipping_mod])
def test_a_mod_sends_on_no_upload_that_nobody_declared(mod: Any) -> None:
    strategy = fr.RegStrategy([Sneaky()], **UNIFORM, seed=1)
    if mod is fixedclipping_mod:
        strategy = wrap(CLIENT, strategy, 1.0, 0.3, 3)
    client = partial(fr.RegClient, terms=[Sneaky])
    with pytest.raises(RoundFailed, match=r"sneaky\.upload.*stays unprotected|never aggregated"):
        start(strategy, InProcessGrid(app_of(client, mods=[mod]), 3), 1)


@dataclass(frozen=True)
class Disguised(Term):
    """The same, in the layout of the model, which a server-side wrapper would clip as a model."""

    name = "disguised"

    def finish(self, delta: Any, ctx: Any) -> Any:
        return delta, {n: 2 * d for n, d in delta.items()}, {}


def test_a_wrapper_is_handed_no_upload_that_nobody_declared() -> None:
    def single() -> nn.Module:
        return nn.Linear(4, 3, bias=False).to(torch.float64)

    strategy = wrap(SERVER, fr.RegStrategy([Disguised()], **UNIFORM), 1.0, 0.3, 3)
    client = partial(fr.RegClient, terms=[Disguised])
    with pytest.raises(RoundFailed, match=r"sends uploads of \['disguised'\] beside its update"):
        start(strategy, InProcessGrid(app_of(client, single), 3), 1, single)


def test_mods_of_the_older_layout_are_refused_at_once() -> None:
    from flwr.client import mod as legacy

    for mod in (legacy.fixedclipping_mod, legacy.LocalDpMod(1.0, 1.0, 1.0, 1e-5)):
        with pytest.raises(TypeError, match=r"use the one of flwr\.clientapp\.mod"):
            app_of(fr.FedAvgClient, mods=[mod])


def test_local_noise_reaches_training_and_leaves_evaluation_alone() -> None:
    strategy = strategy_of("FedAvg")
    start(
        strategy, InProcessGrid(app_of(fr.FedAvgClient, mods=WAYS["LocalDpMod"].mods(1.0, 1.0)), 3)
    )
    assert all(len(e["evaluate"]["clients"]) == 3 for e in strategy.history)
