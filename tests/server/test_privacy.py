"""Central DP against an oracle, its epsilon, and Flower's mods beside it."""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import dp_accounting
import numpy as np
import pytest
import torch
from flwr.client import mod as older
from flwr.clientapp.mod import LocalDpMod, fixedclipping_mod
from flwr.serverapp import NeighboringRelation, PrivacyConfig, RdpAccountant, SamplingMethod
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.flower.client import client_class
from flwr_regs.server.aggregate.updates import Updates
from flwr_regs.server.checkpoint.fingerprint import differences, plain
from flwr_regs.server.exchange.replies import Reader
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.server.options import Options
from flwr_regs.server.privacy import private_mean
from flwr_regs.server.round import Reply, Round
from flwr_regs.testing.problem import app_of, start_weights
from tests.conftest import Watching, close, make_clients, norm_model, run, to_numpy, wide
from tests.experiments.runs import strategy_of
from tests.oracles.central_dp import central_dp

ORDERS = (2.0, 3.0, 4.0, 8.0, 16.0, 32.0)
AMPLIFIED = (SamplingMethod.WITHOUT_REPLACEMENT, NeighboringRelation.REPLACE_ONE)
UNIFORM: dict[str, Any] = {"weighting": "uniform", "fraction_evaluate": 0.0}
CLIENTS = make_clients()
PLAIN = (SamplingMethod.NO_AMPLIFICATION, NeighboringRelation.ADD_OR_REMOVE_ONE)


def accountant(
    population: int, model: Any = AMPLIFIED, limit: float | None = None
) -> RdpAccountant:
    sampling, relation = model
    return RdpAccountant(PrivacyConfig(1e-5, population, relation, sampling, limit), ORDERS)


start = partial(run, client_class=fr.FedAvgClient, rounds=3)


# Central DP: clip and mean


@pytest.mark.parametrize(
    ("strategy", "client", "settings", "failed"),
    [
        (fr.FedAvg, fr.FedAvgClient, {}, [2]),
        (fr.FedADC, fr.FedADCClient, {"beta_local": 0.5, "beta_global": 0.8, "alpha": 0.9}, []),
    ],
)
def test_without_noise_it_is_clip_and_mean(
    strategy: Any, client: Any, settings: dict[str, float], failed: list[int]
) -> None:
    clip, method = 0.6, strategy.__name__.lower()
    strategy = strategy(**settings, **UNIFORM, seed=3, privacy=fr.CentralDP(clip, 0.0))
    clients = [[] if k in failed else batches for k, batches in enumerate(CLIENTS)]
    got = start(strategy, grid=fr.InProcessGrid(app_of(client, clients), 4))
    plan = (start_weights(), to_numpy(CLIENTS), 3, 0.2, 2)
    want, clipped = central_dp(*plan, method, clip, frozenset(failed), **settings)
    close(got, want[-1], 1e-10)
    replies = 4 - len(failed)
    assert 0 < clipped < 3 * replies  # some are clipped and some are not
    told = sum(entry["clipped"] * replies for entry in strategy.history)
    assert told == pytest.approx(clipped)
    assert [list(e["failures"]) for e in strategy.history] == [failed] * 3


def reply_of(arrays: dict[str, Any], **delta: Any) -> Reply:
    return Reply({n: np.asarray(a) for n, a in arrays.items()}, {}, {}, 1.0, delta)


def test_sensitivity_of_the_mean() -> None:
    """One client replaced moves it by at most 2 C / m, and one that is missing by C / m."""
    rng = np.random.default_rng(0)
    base = {"a": rng.normal(size=(30, 4)), "b": rng.normal(size=7)}
    sent = [{n: w + rng.normal(size=w.shape) for n, w in base.items()} for _ in range(5)]
    honest = dict(enumerate(map(reply_of, sent)))
    against = {n: 2 * w - honest[3].arrays[n] for n, w in base.items()}  # w - Δ
    huge = {n: np.full_like(w, 1e300) for n, w in base.items()}  # its norm overflows

    def mean(replies: Any, m: int = 5) -> np.ndarray:
        out, _ = private_mean(Updates(base, replies, {}, {}, []), fr.CentralDP(0.5, 0.0), m)
        return np.concatenate([out[n].ravel() for n in sorted(base)])

    opposite, overflown = (
        float(np.linalg.norm(mean({**honest, 3: reply_of(bad)}) - mean(honest)))
        for bad in (against, huge)
    )
    assert opposite == pytest.approx(2 * 0.5 / 5)
    assert overflown <= 2 * 0.5 / 5 + 1e-12
    without = {k: r for k, r in honest.items() if k != 3}
    assert np.linalg.norm(mean(without) - mean(honest)) == pytest.approx(0.5 / 5)


# Central DP: the noise


@pytest.mark.parametrize(
    ("strategy", "client", "factor"),
    [
        (partial(fr.FedAvg, "uniform"), fr.FedAvgClient, 1.0),
        (partial(fr.SlowMo, beta=0.6, alpha=0.5), fr.SlowMoClient, 0.5),
    ],
)
def test_the_noise_on_the_mean_has_its_size_and_is_new_each_time(
    strategy: Any, client: Any, factor: float
) -> None:
    """In two runs of one seed, over a run without noise; a client that fails counts."""
    model = partial(wide, 1500, torch.float64)  # a standard deviation is known to 0.7 %
    app = app_of(client, [*CLIENTS[:3], []], model)
    plain, *noisy = (
        run(
            strategy(seed=5, fraction_evaluate=0.0, privacy=fr.CentralDP(0.1, z)),
            client,
            rounds=1,
            model=model,
            grid=fr.InProcessGrid(app, 4),
            train={"local-steps": 1},
        )
        for z in (0.0, 2.0, 2.0)
    )
    std = factor * 2.0 * 0.1 / 4  # z C / m, and then the server's step
    a, b = (np.concatenate([(w[n] - plain[n]).ravel() for n in plain]) for w in noisy)
    for noise in (a, b):
        assert abs(noise.std() / std - 1) < 5 / math.sqrt(2 * noise.size)
        assert abs(noise.mean()) < 5 * std / math.sqrt(noise.size)
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 5 / math.sqrt(a.size)


# Central DP: epsilon


def private_run(population: int, model: Any, fraction: float, z: float, **settings: Any) -> Any:
    privacy = fr.CentralDP(0.5, z, accountant(population, model, settings.pop("limit", None)))
    strategy = fr.FedAvg(
        seed=1, fraction_train=fraction, min_train_nodes=1, privacy=privacy, **UNIFORM, **settings
    )
    grid = Watching(app_of(fr.FedAvgClient, make_clients(population)), population)
    return strategy, grid


def theirs(population: int, model: Any, cohort: int, z: float, rounds: int = 3) -> list[float]:
    """Epsilon after each round by dp-accounting, of the mean's noise over its sensitivity."""
    sampling, relation = model
    replaced = relation == NeighboringRelation.REPLACE_ONE
    names = dp_accounting.NeighboringRelation
    kind = names.REPLACE_ONE if replaced else names.ADD_OR_REMOVE_ONE
    counting = dp_accounting.rdp.RdpAccountant(ORDERS, kind)
    std, sensitivity = z * 0.5 / cohort, (2 if replaced else 1) * 0.5 / cohort
    event: Any = dp_accounting.GaussianDpEvent(std / sensitivity)
    if sampling == SamplingMethod.WITHOUT_REPLACEMENT:
        event = dp_accounting.SampledWithoutReplacementDpEvent(population, cohort, event)
    return [counting.compose(event).get_epsilon(1e-5) for _ in range(rounds)]


@pytest.mark.parametrize("model", [PLAIN, AMPLIFIED])
def test_epsilon_is_of_the_cohorts_and_ends_training_before_a_client_hears_of_it(
    model: Any,
) -> None:
    free, grid = private_run(8, model, 0.5, 3.0)
    start(free, grid=grid)
    spent = [e["epsilon"] for e in free.history]
    assert spent == pytest.approx(theirs(8, model, 4, 3.0), rel=1e-12)
    assert {e["delta"] for e in free.history} == {1e-5}
    assert free.privacy.accountant.num_releases == 3
    strategy, grid = private_run(8, model, 0.5, 3.0, limit=sum(spent[1:]) / 2)
    with pytest.raises(PrivacyBudgetExhausted, match=r"round 3 would pass max_epsilon=.*2 rounds"):
        start(strategy, grid=grid, rounds=5)
    assert strategy.privacy.accountant.num_releases == 2
    with pytest.raises(PrivacyBudgetExhausted, match="round 1 would"):  # it is spent for good
        start(strategy, grid=grid, rounds=5)
    assert len(grid.sent) == 2 * 4


def test_a_run_that_is_resumed_with_another_budget_is_told_what_differs() -> None:
    one, other = (
        {"setting": {"privacy": plain(fr.CentralDP(0.5, 1.0, accountant(4, limit=limit)))}}
        for limit in (None, 8.0)
    )
    (said,) = differences(one, other)
    assert said.endswith("accountant.RdpAccountant.max_epsilon was None, now it is 8.0")


def test_the_population_must_be_what_the_accountant_was_told() -> None:
    strategy, _ = private_run(5, PLAIN, 1.0, 1.0)
    grid = Watching(app_of(fr.FedAvgClient, CLIENTS), 4)
    with pytest.raises(ValueError, match=r"population of 5 clients, but 4.*population_size=4"):
        start(strategy, grid=grid)
    assert grid.sent == []


class Leaving(Watching):
    """From round 2 on, partition 0 is gone."""

    def get_node_ids(self) -> Iterable[int]:
        return [n for n in super().get_node_ids() if n != 1000 or len(self.sent) < 4]


def test_a_client_that_left_is_still_drawn_and_counts_as_zero() -> None:
    strategy, grid = private_run(4, AMPLIFIED, 1.0, 1.0)
    grid.__class__ = Leaving
    start(strategy, grid=grid)
    assert [e["cohort"] for e in strategy.history] == [[0, 1, 2, 3]] * 3
    assert [e["failures"] for e in strategy.history] == [{}, {0: "it has left"}, {0: "it has left"}]
    assert strategy.history[2]["replies"] == [1, 2, 3]
    free, grid = private_run(4, PLAIN, 1.0, 1.0)
    grid.__class__ = Leaving
    start(free, grid=grid)
    assert [len(e["cohort"]) for e in free.history] == [4, 3, 3]


def test_cohorts_that_count_for_privacy_do_not_follow_from_the_seed() -> None:
    def cohorts(model: Any) -> list[list[int]]:
        strategy, grid = private_run(8, model, 0.5, 1.0)
        start(strategy, grid=grid, rounds=4)
        return [e["cohort"] for e in strategy.history]

    assert cohorts(PLAIN) == cohorts(PLAIN)
    assert cohorts(AMPLIFIED) != cohorts(AMPLIFIED)  # alike once in 70⁴ times


# Central DP: what is refused


def test_numbers_out_of_range_are_refused() -> None:
    poisson = PrivacyConfig(1e-5, 4, NeighboringRelation.ADD_OR_REMOVE_ONE, SamplingMethod.POISSON)
    for arguments, message in [
        ((0.0, 1.0), "clip_norm must be a positive number, not 0"),
        ((math.nan, 1.0), "clip_norm must be"),
        ((1.0, -0.1), "noise_multiplier must be a number of at least 0, not -0.1"),
        ((1.0, 1.0, RdpAccountant), "accountant must be an accountant, such as .*, not <class"),
        ((1.0, 0.0, accountant(4)), "epsilon is infinite"),
        ((1.0, 1.0, RdpAccountant(poisson)), "Poisson sampling does not describe"),
    ]:
        with pytest.raises(ValueError, match=message):
            fr.CentralDP(*arguments)


def test_batch_norm_is_refused_before_training_unless_private() -> None:
    privacy = fr.CentralDP(1.0, 0.1)
    grid = Watching(app_of(fr.FedAvgClient, CLIENTS, norm_model), 4)
    with pytest.raises(ValueError, match=r"1\.running_mean.*use GroupNorm, or.*LocalBatchNorm"):
        start(fr.FedAvg("uniform", privacy=privacy), grid=grid, model=norm_model)
    assert grid.sent == []
    strategy = fr.FedBN(weighting="uniform", seed=1, privacy=privacy)
    grid = Watching(app_of(fr.FedBNClient, CLIENTS, norm_model), 4)
    got = start(strategy, grid=grid, rounds=2, model=norm_model)
    assert sorted(got) == ["0.bias", "0.weight", "3.bias", "3.weight"]


def test_what_would_get_no_noise_is_left_out() -> None:
    """A buffer that changed, and an upload that no term declared."""
    model = {"w": np.zeros(2), "seen": np.zeros(())}
    replies = {
        0: reply_of({"w": [1.0, 1.0], "seen": 0.0}),
        1: reply_of({"w": [1.0, 1.0], "seen": 4.0}),
        2: replace(reply_of({"w": [1.0, 1.0]}), uploads={"sneaky": {"secret": np.ones(3)}}),
        3: replace(reply_of({"w": [1.0, 1.0]}), uploads={"nothing": {}}),
    }
    replies = {p: replace(r, buffers=frozenset({"seen"})) for p, r in replies.items()}
    options = Options.of(chain([]), weighting="uniform", privacy=fr.CentralDP(1.0, 0.1))
    this_round, open_round = Round(1), Round(1)
    for one, of_round in ((options, this_round), (replace(options, privacy=None), open_round)):
        Reader("FedAvg", one, GlobalModel(one.term, model)).compare(of_round, dict(replies))
    assert this_round.failures == {
        1: "it changed ['seen'], which are not trained and would get no noise",
        2: "it sends uploads of ['sneaky'] beside its update, which get no noise",
    }
    assert (list(this_round.received), list(open_round.received)) == ([0, 3], [0, 1, 2, 3])


# Flower's mods, and its wrappers


def example(row: str, **settings: Any) -> Any:
    usual = {**UNIFORM, "incomplete": "average", "seed": 2}
    return strategy_of(fr.METHODS[row].example, **{**usual, **settings})


def grid_of(row: str, mods: Any = (), **of_clients: Any) -> Watching:
    app: Any = app_of(client_class(example(row)), CLIENTS, **of_clients)
    return Watching(fr.client_app(app.client_fn, mods), 3)


@pytest.mark.parametrize(
    ("row", "mod"), [("SlowMo", fixedclipping_mod), ("FedADC", LocalDpMod), ("FedFOR", None)]
)
def test_without_clipping_and_noise_it_is_the_method_and_noise_reaches_every_entry(
    row: str, mod: Any
) -> None:
    """CentralDP alone, and with a clipping mod of Flower's; and Flower's local DP in place of it."""

    def trained(z: float, clip: float) -> Any:
        if mod is LocalDpMod:
            settings, mods = {}, [LocalDpMod(clip, 0.01 * z, 1.0, 1e-5)]
        else:
            settings, mods = {"privacy": fr.CentralDP(clip, z)}, [mod] if mod else []
        train = {"local-epochs": 2, **({"clipping_norm": clip} if mods and settings else {})}
        return start(example(row, **settings), grid=grid_of(row, mods), rounds=2, train=train)

    plain = start(example(row), grid=grid_of(row), rounds=2)
    close(trained(0.0, 1e6), plain, 1e-6)
    clipped, noisy = trained(0.0, 0.5), trained(0.5, 0.5)
    for name, a in noisy.items():
        assert np.isfinite(a).all()
        assert np.all(a != clipped[name])


def test_a_mod_is_refused_before_a_client_trains_that_sends_more_than_its_update() -> None:
    grid = grid_of("SCAFFOLD", [LocalDpMod(1, 0.1, 1, 1e-5)])
    with pytest.raises(fr.RoundFailed, match=r"LocalDpMod does not go with .* needs more of a"):
        start(example("SCAFFOLD"), grid=grid, rounds=1)


@pytest.mark.parametrize("mod", [LocalDpMod(1, 0.1, 1, 1e-5), fixedclipping_mod])
def test_a_client_that_took_no_step_is_inactive_with_a_mod_too(mod: Any) -> None:
    strategy = example(
        "FedAvg", privacy=fr.CentralDP(0.5, 0.0) if mod is fixedclipping_mod else None
    )
    grid = grid_of("FedAvg", [mod], step_budget=0)
    train = {"local-epochs": 1, **({"clipping_norm": 0.5} if strategy.privacy else {})}
    with pytest.raises(fr.RoundFailed, match=r"needed 1: inactive: \[0, 1, 2\]$"):
        start(strategy, grid=grid, train=train)
    if strategy.privacy:
        with pytest.raises(fr.RoundFailed, match="a train_config without 'clipping_norm'"):
            start(strategy, grid=grid)


def test_a_mod_of_flowers_older_layout_is_refused_where_the_app_is_built() -> None:
    for mod, remedy in ((older.fixedclipping_mod, "use the"), (older.secaggplus_mod, "none in")):
        with pytest.raises(TypeError, match=f"older message layout; .*{remedy}"):
            grid_of("FedAvg", [mod])


def test_flowers_wrappers_are_refused_before_a_client_hears_of_it() -> None:
    grid = grid_of("FedAvg")
    inner = example("FedAvg")
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, 3)
    with pytest.raises(ValueError, match=r"another strategy is wrapped.*privacy=CentralDP"):
        start(strategy, grid=grid, rounds=1)
    with pytest.raises(ValueError, match=r"'clipping_norm' is for .* nobody would add the noise"):
        start(inner, grid=grid, train={"local-epochs": 2, "clipping_norm": 1.0})
    assert grid.kinds == []
    start(inner, grid=grid, rounds=1)  # its own start is not spoilt by that
    assert len(inner.history) == 1


@pytest.mark.parametrize("row", ["FedFOR", "FedADC"])
def test_what_clients_are_told_of_the_last_step_is_the_released_one(row: str) -> None:
    """The direction or momentum sent beside the model follows from the noisy models alone."""
    strategy = example(row, privacy=fr.CentralDP(0.3, 1.0))
    grid = grid_of(row)
    start(strategy, grid=grid)
    w1, w2, w3 = (grid.sent[3 * t]["arrays"] for t in range(3))
    for t, (before, after) in enumerate([(w1, w2), (w2, w3)], start=1):
        (told,) = (v for k, v in grid.sent[3 * t].items() if k.endswith(".broadcast"))
        close(told, {n: (before[n] - after[n]) / 0.2 for n in before}, 1e-12)
