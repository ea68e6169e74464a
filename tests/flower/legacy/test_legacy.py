"""Older projects: every strategy under Flower's older server is the same strategy, to the bit."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import Parameters, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import (
    History,
    LegacyContext,
    Server,
    ServerApp,
    ServerAppComponents,
    ServerConfig,
    SimpleClientManager,
)
from flwr.server.compat import start_grid
from flwr.server.strategy import DifferentialPrivacyServerSideFixedClipping
from flwr.server.workflow import DefaultWorkflow
from safetensors.numpy import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flwr_regs as fr
from flwr_regs import InProcessGrid, LegacyStrategy, RoundFailed, client_app
from flwr_regs.flower.network import GridNetwork
from flwr_regs.server.population import PopulationError
from flwr_regs.testing import Method
from tests.conftest import ROOT, make_clients, make_model
from tests.laws import CASES

CONFIG = {"lr": 0.2, "local-epochs": 1}
SOME = {"seed": 11, "fraction_train": 0.6, "min_train_nodes": 1}
Sabotage = Callable[[int, Any], Any]


def app_of(
    client_class: Callable[..., Any] = fr.FedAvgClient,
    model: Callable[[], nn.Module] = make_model,
    sabotage: Sabotage | None = None,
    **client_kwargs: Any,
) -> ClientApp:
    """An app of five unequal clients; `sabotage(partition_id, client)` may replace or change one."""
    data = make_clients(5, next(model().parameters()).dtype)

    def client_fn(context: Context) -> Any:
        pid = context.node_config["partition-id"]
        client = client_class(model(), data[pid], data[pid], device="cpu", **client_kwargs)
        return sabotage(pid, client) if sabotage else client

    return client_app(client_fn)


def start(strategy: Any, grid: Any, rounds: int = 3, model: Any = make_model, **kwargs: Any) -> Any:
    """Train under the Message API."""
    arrays = ArrayRecord(model().state_dict())
    kwargs = {"train_config": CONFIG, **kwargs}
    configs = {k: ConfigRecord(v) if isinstance(v, dict) else v for k, v in kwargs.items()}
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, **configs)


def adapt(
    strategy: Any,
    rounds: int = 3,
    model: Any = make_model,
    kind: type[LegacyStrategy] = LegacyStrategy,
    **kwargs: Any,
) -> Any:
    """Make the strategy one of Flower's older kind."""
    kwargs = {"train_config": CONFIG, **kwargs}
    return kind(strategy, model().state_dict(), num_rounds=rounds, **kwargs)


def serve(adapter: Any, grid: Any, rounds: int = 3, **config: Any) -> History:
    """Train under Flower's older server, which is what a ServerApp with a server_fn runs."""
    return start_grid(grid=grid, config=ServerConfig(num_rounds=rounds, **config), strategy=adapter)


def legacy(strategy: Any, grid: Any, rounds: int = 3, **kwargs: Any) -> History:
    """Train a strategy under the older server."""
    return serve(adapt(strategy, rounds, **kwargs), grid, rounds)


def plain(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A history without what differs from run to run."""
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in history]


def assert_equal(a: Any, b: Any) -> None:
    """Two strategies that have run: the same bits, and the same history."""
    got, want = ({n: x.numpy() for n, x in s.arrays.items()} for s in (a, b))
    assert got.keys() == want.keys()
    for name in got:
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)
    assert plain(a.history) == plain(b.history)
    assert len(a.history) > 0


def both(
    make: Callable[[], Any], grid: Callable[[], InProcessGrid], **kwargs: Any
) -> tuple[Any, Any, History]:
    """Run both ways and compare; return the strategies (ours under the older server first)."""
    strategies = make(), make()
    history = legacy(strategies[0], grid(), **kwargs)
    start(strategies[1], grid(), **kwargs)
    assert_equal(*strategies)
    return *strategies, history


# The same bits


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_every_method_equals_itself_under_the_message_api(case: Method) -> None:
    ours, *_ = both(
        lambda: case.strategy(**case.settings, **SOME),
        lambda: InProcessGrid(app_of(case.client), 5),
        rounds=4,
    )
    assert all(len(entry["cohort"]) == 3 for entry in ours.history)
    assert not any(entry["failures"] for entry in ours.history)


def batch_norm() -> nn.Module:
    return make_model(torch.float32, batch_norm=True)


def private_and_compressed() -> Any:
    terms = [fr.Elastic(0.5), fr.LocalBatchNorm(), fr.SparseTernary(0.3, 0.4)]
    return fr.RegStrategy(terms, **SOME)


@pytest.mark.parametrize(
    ("make", "client", "kwargs"),
    [
        (lambda: fr.FedAvg(**SOME), fr.FedAvgClient, {}),
        (lambda: fr.FedBN(**SOME), fr.FedBNClient, {}),
        (lambda: fr.FedPer(patterns="3.*", **SOME), fr.FedPerClient, {}),
        (
            private_and_compressed,
            fr.RegClient,
            {"terms": [fr.Elastic, fr.LocalBatchNorm, fr.SparseTernary]},
        ),
    ],
    ids=["FedAvg", "FedBN", "FedPer", "EFL+FedBN"],
)
def test_buffers_private_entries_and_residuals(make: Any, client: Any, kwargs: Any) -> None:
    ours, _, history = both(
        make,
        lambda: InProcessGrid(app_of(client, batch_norm, **kwargs), 5),
        rounds=4,
        model=batch_norm,
    )
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in ours.history)
    assert [r for r, _ in history.losses_distributed] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "options",
    [
        {"downlink": "delta"},
        {"downlink": "delta", "overlap": True},
        {"cohorts": "class-covering"},
        {"incomplete": "scale", "drop_inactive": 0.05, "restart_lr": True},
        {"lr_schedule": lambda r: 0.5**r, "weighting": "uniform"},
        {"fraction_evaluate": 0.0},
    ],
    ids=lambda o: "-".join(o),
)
def test_what_every_strategy_can_do(options: dict[str, Any]) -> None:
    def sabotage(pid: int, client: Any) -> Any:
        client.step_budget = {1: 0, 2: 1}.get(pid) if "incomplete" in options else None
        return client

    app = app_of(fr.FedFORClient, sabotage=sabotage, share_label_counts=True)
    ours, *_ = both(
        lambda: fr.FedFOR(alpha=0.6, **SOME, **options),
        lambda: InProcessGrid(app, 5),
        rounds=6,
        timeout=60,
    )
    if "overlap" in options:
        assert any(entry.get("bytes_ahead") for entry in ours.history)
    if "drop_inactive" in options:
        assert any(entry.get("dropped_for_good") for entry in ours.history)


def test_personalisation_and_metrics_reach_flowers_history() -> None:
    configs: dict[str, Any] = {"evaluate_config": {"personalise": "plain", "personal-lr": 0.05}}
    make = lambda: fr.FedAvg(seed=4)  # noqa: E731
    grid = lambda: InProcessGrid(app_of(), 5)  # noqa: E731
    _, _, history = both(make, grid, **configs)
    result = start(make(), grid(), **configs)
    for server_round, fit in result.train_metrics_clientapp.items():
        assert set(fit) == {"train-loss", "local-steps", "planned-steps", "examples-processed"}
        for key, value in fit.items():
            assert dict(history.metrics_distributed_fit[key])[server_round] == value
    assert set(history.metrics_distributed) == {"accuracy", "personal-accuracy", "personal-loss"}
    for server_round, evaluation in result.evaluate_metrics_clientapp.items():
        mine = dict(evaluation)
        assert dict(history.losses_distributed)[server_round] == mine.pop("loss")
        assert {"accuracy", "personal-accuracy", "personal-loss"} == set(mine)
        for key, value in mine.items():
            assert dict(history.metrics_distributed[key])[server_round] == value


def test_a_server_app_with_a_server_fn_and_a_second_run_of_it() -> None:
    strategies = [fr.FedFOR(alpha=0.6, **SOME) for _ in range(3)]

    def server_fn(context: Context) -> ServerAppComponents:
        arrays = ArrayRecord(make_model().state_dict())
        ran.append(LegacyStrategy(strategies[len(ran)], arrays, num_rounds=3, train_config=CONFIG))
        return ServerAppComponents(strategy=ran[-1], config=ServerConfig(num_rounds=3))

    ran: list[LegacyStrategy] = []
    grid = InProcessGrid(app_of(fr.FedFORClient), 5)
    context = Context(1, 1, {}, RecordDict(), {})
    for _ in range(2):
        ServerApp(server_fn=server_fn)(grid, context)
    start(strategies[2], InProcessGrid(app_of(fr.FedFORClient), 5))
    assert_equal(strategies[0], strategies[2])
    assert_equal(strategies[1], strategies[2])
    serve(ran[0], grid)
    assert_equal(strategies[0], strategies[2])


# The model on the server


def test_evaluate_fn_is_the_older_one_and_sees_every_array_in_order() -> None:
    """Also those that stay with the clients, as they were given: names are matched by position."""
    seen = []

    def evaluate_fn(server_round: int, arrays: list[np.ndarray], config: Any) -> Any:
        assert config == {}
        seen.append(arrays)
        return (float(server_round), {"twice": 2.0 * server_round}) if server_round else None

    strategy = fr.FedBN(seed=3)
    grid = InProcessGrid(app_of(fr.FedBNClient, batch_norm), 5)
    history = legacy(strategy, grid, model=batch_norm, evaluate_fn=evaluate_fn)
    initial = {k: v.numpy() for k, v in batch_norm().state_dict().items()}
    assert history.losses_centralized == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert history.metrics_centralized == {"twice": [(1, 2.0), (2, 4.0), (3, 6.0)]}
    assert len(seen) == 4
    for arrays, now in ((seen[0], {}), (seen[-1], strategy.arrays)):
        assert len(arrays) == len(initial)
        want = {**initial, **{k: v.numpy() for k, v in now.items()}}
        for array, name in zip(arrays, initial, strict=True):
            np.testing.assert_array_equal(array, want[name], err_msg=name)
    assert set(strategy.arrays) < set(initial)


def test_evaluate_fn_of_the_other_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"must return \(loss, metrics\) or None, not dict"):
        legacy(
            fr.FedAvg(seed=1),
            InProcessGrid(app_of(), 5),
            evaluate_fn=lambda r, a, c: {"accuracy": 1.0},
        )


class Reading(LegacyStrategy):
    """What older projects' own subclasses do: look at results, keep the model."""

    saved: list[list[np.ndarray]]
    counts: list[list[int]]
    losses: list[list[float]]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        self.saved = [*getattr(self, "saved", []), parameters_to_ndarrays(parameters)]
        self.counts = [*getattr(self, "counts", []), sorted(r.num_examples for _, r in results)]
        assert all(len(parameters_to_ndarrays(r.parameters)) == 4 for _, r in results)
        assert all("train-loss" in r.metrics for _, r in results)
        return parameters, metrics

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        instructions = super().configure_fit(server_round, parameters, client_manager)
        assert all(ins.config["lr"] == 0.2 for _, ins in instructions)
        return instructions

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        self.losses = [*getattr(self, "losses", []), [r.loss for _, r in results]]
        assert all(0 <= r.metrics["accuracy"] <= 1 for _, r in results)
        return super().aggregate_evaluate(server_round, results, failures)


def test_a_subclass_reads_results_and_keeps_the_model() -> None:
    strategy = fr.FedAvg(seed=2)
    ran = adapt(strategy, kind=Reading)
    serve(ran, InProcessGrid(app_of(), 5))
    assert ran.counts == [[10, 15, 20, 25, 30]] * 3
    assert all(np.isfinite(losses).all() and len(losses) == 5 for losses in ran.losses)
    for saved, now in zip(ran.saved[-1], strategy.arrays.values(), strict=True):
        np.testing.assert_array_equal(saved, now.numpy())
    assert not np.array_equal(ran.saved[0][0], ran.saved[1][0])


def test_a_subclass_is_shown_the_cohort_and_nothing_sent_ahead() -> None:
    strategy = fr.FedFOR(alpha=0.6, downlink="delta", overlap=True, fraction_evaluate=0.0, **SOME)
    ran = adapt(strategy, kind=Reading)
    serve(ran, InProcessGrid(app_of(fr.FedFORClient), 5))
    assert [len(counts) for counts in ran.counts] == [3, 3, 3]
    assert strategy.history[0]["bytes_ahead"]


class Dropping(LegacyStrategy):
    """Leaves a client's result out."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        kept = [pair for pair in results if pair[0].node_id != 1003]
        return super().aggregate_fit(server_round, kept, failures)


def test_a_result_that_a_subclass_leaves_out_is_not_averaged() -> None:
    strategy = fr.FedAvg(seed=2)
    legacy(strategy, InProcessGrid(app_of(), 5), kind=Dropping)
    for entry in strategy.history:
        assert entry["replies"] == [0, 1, 2, 4]
        assert "left out of the results that aggregate_fit was given" in entry["failures"][3]


class Choosy(SimpleClientManager):
    """A client manager of somebody's own, which knows better than to take client 1."""

    def all(self) -> Any:
        return {cid: proxy for cid, proxy in super().all().items() if cid != "1001"}


def test_the_clients_are_those_of_the_client_manager() -> None:
    strategy = fr.FedAvg(seed=2, population=4)
    start_grid(
        grid=InProcessGrid(app_of(), 5),
        config=ServerConfig(num_rounds=3),
        strategy=adapt(strategy),
        client_manager=Choosy(),
    )
    assert [entry["replies"] for entry in strategy.history] == [[0, 2, 3, 4]] * 3


# What goes wrong


def raising(which: Iterable[int], what: str = "fit") -> Sabotage:
    """Clients that raise, in fit or evaluate."""

    def sabotage(pid: int, client: Any) -> Any:
        def fail(*_: Any) -> Any:
            raise OSError(f"disk {pid} is full")

        if pid in which:
            setattr(client, what, fail)
        return client

    return sabotage


def poisoned(pid: int, client: Any) -> Any:
    """Client 2 answers with NaN."""
    fit = client.fit

    def fit_nan(*args: Any) -> Any:
        arrays, count, metrics = fit(*args)
        arrays[0][:] = np.nan
        return arrays, count, metrics

    if pid == 2:
        client.fit = fit_nan
    return client


@pytest.mark.parametrize(
    ("sabotage", "reason"),
    [(raising([2]), "disk 2 is full"), (poisoned, "holds NaN or infinity")],
    ids=["raises", "nan"],
)
def test_a_bad_client_is_named_as_under_the_message_api(sabotage: Any, reason: str) -> None:
    ours, *_ = both(
        lambda: fr.FedFOR(alpha=0.6, seed=5),
        lambda: InProcessGrid(app_of(fr.FedFORClient, sabotage=sabotage), 5),
    )
    for entry in ours.history:
        assert list(entry["failures"]) == [2]
        assert reason in entry["failures"][2]
        assert entry["replies"] == [0, 1, 3, 4]


class SilentGrid(InProcessGrid):
    """Node 1003 never answers a train message; node 1004's failure is told by node 1, as Flower does."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            if reply.metadata.message_type == "train" and reply.metadata.src_node_id == 1004:
                reply.metadata.__dict__["_src_node_id"] = 1
            if reply.metadata.message_type != "train" or reply.metadata.src_node_id != 1003:
                yield reply


def test_silent_and_dead_nodes_are_named_too() -> None:
    ours, *_ = both(lambda: fr.FedAvg(seed=5), lambda: SilentGrid(app_of(sabotage=raising([4])), 5))
    for entry in ours.history:
        assert set(entry["failures"]) == {3, 4}
        assert "disk 4 is full" in entry["failures"][4]


class ForgetfulGrid(InProcessGrid):
    """From round 2 on, client 1 loses its state before each message."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if message.metadata.dst_node_id == 1001:
                self._contexts[1001].state.clear()
        return super().push_messages(messages)


@pytest.mark.parametrize("name", ["FedFOR-delta", "EFL", "RFedAvgPlus"])
def test_a_client_that_lost_its_state_is_served_in_the_round(name: str) -> None:
    (case,) = (c for c in CASES if c.name == name)
    ours, *_ = both(
        lambda: case.strategy(**case.settings, seed=11),
        lambda: ForgetfulGrid(app_of(case.client), 5),
    )
    for entry in ours.history:
        assert entry["replies"] == [0, 1, 2, 3, 4]
    if name == "FedFOR-delta":
        down = ours.history[-1]["bytes_down"]
        assert down[1] > 1.9 * down[0]


def test_no_usable_reply_ends_the_run_and_the_model_is_as_it_was() -> None:
    """Flower's own server goes on with the old model here."""
    grid = InProcessGrid(app_of(sabotage=raising(range(5))), 5)
    strategy = fr.FedAvg(seed=5)
    with pytest.raises(
        RoundFailed, match=r"(?s)0 usable replies from a cohort of 5.*disk 3 is full"
    ):
        legacy(strategy, grid)
    for name, want in make_model().state_dict().items():
        np.testing.assert_array_equal(strategy.arrays[name].numpy(), want.numpy())
    assert len(strategy.history) == 1


def test_no_answer_to_the_first_exchange_ends_the_run() -> None:
    """There is then nobody to train: Flower's server would skip the round without a word."""
    grid = InProcessGrid(app_of(fr.RFedAvgPlusClient, sabotage=raising(range(5))), 5)
    with pytest.raises(RoundFailed, match="0 usable replies from a cohort of 5"):
        legacy(fr.RFedAvgPlus(lam=0.5, seed=5), grid)


def test_models_sent_ahead_do_not_hide_that_nobody_trains() -> None:
    def mute(pid: int, client: Any) -> Any:
        """It is silent in the first exchange of round 2, whose next cohort is sent the model ahead."""
        fit = client.fit

        def second(parameters: Any, config: Any) -> Any:
            if config.get("regs.probe") and config["server-round"] == 2:
                raise RuntimeError("no answer")
            return fit(parameters, config)

        client.fit = second
        return client

    strategy = fr.RFedAvgPlus(
        0.1, downlink="delta", overlap=True, **{**SOME, "seed": 2, "fraction_train": 0.4}
    )
    with pytest.raises(RoundFailed, match=r"round 2 .* 0 usable replies from a cohort of 2"):
        legacy(strategy, InProcessGrid(app_of(fr.RFedAvgPlusClient, sabotage=mute), 5))
    assert strategy.history[1]["bytes_ahead"]


def test_an_evaluation_that_never_works_ends_the_run() -> None:
    grid = InProcessGrid(app_of(sabotage=raising(range(5), "evaluate")), 5)
    with pytest.raises(RoundFailed, match=r"(?s)no client of 5 could evaluate.*disk 0 is full"):
        legacy(fr.FedAvg(seed=5), grid)


def test_an_evaluation_of_nobody_ends_the_run() -> None:
    strategy = fr.FedAvg(seed=5, fraction_evaluate=0.1, min_evaluate_nodes=0)
    with pytest.raises(RoundFailed, match="no client of 0 could evaluate"):
        legacy(strategy, InProcessGrid(app_of(), 5))


def test_evaluation_alone() -> None:
    *_, history = both(
        lambda: fr.FedAvg(seed=5, fraction_train=0.0), lambda: InProcessGrid(app_of(), 5)
    )
    assert len(history.losses_distributed) == 3
    assert not history.metrics_distributed_fit


class BrokenGrid(InProcessGrid):
    """The connection breaks in training."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        if messages[0].metadata.message_type == "train":
            raise ConnectionError("the SuperLink is gone")
        return super().push_messages(messages)


def test_a_broken_connection_ends_the_run() -> None:
    with pytest.raises(ConnectionError, match="the SuperLink is gone"):
        legacy(fr.FedAvg(seed=5), BrokenGrid(app_of(), 5))


class AskingGrid(InProcessGrid):
    """A grid that does not say by itself which partitions its clients serve: they are asked."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return super().push_messages(messages)


@pytest.mark.parametrize(("round_timeout", "want"), [(None, 55.0), (77.0, 77.0)])
def test_timeouts(
    round_timeout: float | None, want: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: dict[str, set[float]] = {}
    sizes: dict[str, set[int]] = {}
    exchange = GridNetwork.exchange

    def timed(self: Any, messages: Any, timeout: float | None = None) -> Any:
        for kind in {m.metadata.message_type for m in messages}:
            waits.setdefault(kind, set()).add(self._timeout if timeout is None else timeout)
            sizes.setdefault(kind, set()).add(len(messages))
        return exchange(self, messages, timeout)

    monkeypatch.setattr(GridNetwork, "exchange", timed)
    strategy = fr.RFedAvgPlus(lam=0.5, seed=5, wait_timeout=33.0)
    grid = AskingGrid(app_of(fr.RFedAvgPlusClient), 5)
    serve(adapt(strategy, timeout=55.0), grid, round_timeout=round_timeout)
    assert waits.pop("query.flwr_regs") == {33.0}
    assert waits == {"train": {want}, "evaluate": {want}, "query.flwr_regs_probe": {55.0}}
    assert sizes["train"] == {5}


# Mistakes in an older project


class UsersClient(NumPyClient):
    """Somebody's own client."""

    def fit(self, parameters: Any, config: Any) -> Any:
        return parameters, 1, {}


def test_a_plain_client_app_is_told_what_to_change() -> None:
    grid = InProcessGrid(ClientApp(lambda context: UsersClient().to_client()), 5)
    with pytest.raises(PopulationError, match=r"build its ClientApp with flwr_regs\.client_app"):
        legacy(fr.FedAvg(seed=5), grid)


def test_the_wrong_client_class_names_both() -> None:
    grid = InProcessGrid(app_of(fr.FedProxClient), 5)
    with pytest.raises(RoundFailed, match=r"FedProxClient \(FedProx\).*runs 'FedFOR'"):
        legacy(fr.FedFOR(seed=5), grid)


def test_a_server_that_goes_on_for_longer_than_it_said_is_refused() -> None:
    strategy = fr.FedAvg(seed=5)
    with pytest.raises(ValueError, match=r"goes on to round 4, .* num_rounds=3"):
        serve(adapt(strategy), InProcessGrid(app_of(), 5), 4)
    assert len(strategy.history) == 3


class OwnServer(Server):
    """A server of somebody's own, which says nothing of its rounds."""

    def fit(self, num_rounds: int, timeout: float | None) -> Any:
        self.parameters = self._get_initial_parameters(0, timeout)
        for server_round in range(1, num_rounds + 1):
            fitted = self.fit_round(server_round, timeout)
            assert fitted is not None
            assert fitted[0] is not None
            self.parameters = fitted[0]
        return History(), 0.0


def test_a_server_of_ones_own_and_more_rounds_than_it_said() -> None:
    strategies = [fr.FedFOR(seed=5, fraction_evaluate=0.0) for _ in range(2)]
    server = OwnServer(client_manager=SimpleClientManager(), strategy=adapt(strategies[0]))
    grid = InProcessGrid(app_of(fr.FedFORClient), 5)
    with pytest.raises(ValueError, match=r"goes on to round 4, .* num_rounds=3"):
        start_grid(grid=grid, server=server, config=ServerConfig(num_rounds=4))
    start(strategies[1], InProcessGrid(app_of(fr.FedFORClient), 5))
    assert_equal(*strategies)


def test_another_workflow_is_refused() -> None:
    """It sends what the instructions look like, which clients cannot use."""
    adapter = adapt(fr.FedAvg(seed=5), 2)
    context = LegacyContext(
        Context(1, 1, {}, RecordDict(), {}),
        config=ServerConfig(num_rounds=2),
        strategy=adapter,
        client_manager=SimpleClientManager(),
    )
    with pytest.raises(RuntimeError, match=r"DefaultWorkflow does.*start\(grid=grid"):
        DefaultWorkflow()(InProcessGrid(app_of(), 5), context)


class ChangesModel(LegacyStrategy):
    """Adds noise to the global model behind the strategy's back."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        parameters, metrics = super().aggregate_fit(server_round, results, failures)
        noisy = [a + 1.0 for a in parameters_to_ndarrays(parameters)]
        return ndarrays_to_parameters(noisy), metrics


class ChangesConfig(LegacyStrategy):
    """Tells clients something that would not reach them."""

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        instructions = super().configure_fit(server_round, parameters, client_manager)
        instructions[-1][1].config["temperature"] = 2.0
        return instructions


class ChangesResults(LegacyStrategy):
    """Scales what a client sent."""

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        result = results[-1][1]
        result.parameters.tensors[0] = result.parameters.tensors[0][:-1] + b"0"
        return super().aggregate_fit(server_round, results, failures)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ChangesModel, "configure_evaluate in round 1: these are not the parameters"),
        (ChangesConfig, "an instruction was changed"),
        (ChangesResults, "the parameters of node .* were changed after it answered"),
    ],
)
def test_changes_that_would_pass_the_strategy_by_are_refused(kind: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        legacy(fr.FedAvg(seed=5), InProcessGrid(app_of(), 5), kind=kind)


def test_flowers_older_privacy_wrapper_is_refused() -> None:
    """Its clipping would not reach the strategy, and its accountant would not know."""
    adapter = adapt(fr.FedAvg(seed=5), 2)
    private = DifferentialPrivacyServerSideFixedClipping(adapter, 0.1, 1.0, 5)
    with pytest.raises(ValueError, match="were changed after it answered"):
        serve(private, InProcessGrid(app_of(), 5), 2)


def test_proxies_without_a_grid_are_refused() -> None:
    class Proxy:
        cid, node_id = "7", 7

    manager = SimpleClientManager()
    manager.register(Proxy())  # type: ignore[arg-type]
    adapter = adapt(fr.FedAvg(seed=5), 2)
    parameters = adapter.initialize_parameters(manager)
    with pytest.raises(TypeError, match=r"Flower's grid, not by Proxy .*ServerAppComponents"):
        adapter.configure_fit(1, parameters, manager)


def test_a_moment_without_clients_does_not_end_the_run() -> None:
    """Flower's client manager forgets nodes that are away, while their replies are awaited."""

    class Away(InProcessGrid):
        replies_at_once = False
        away = 0

        def get_node_ids(self) -> Iterable[int]:
            return [] if self.away > 0 else super().get_node_ids()

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            self.away = 3 if messages[0].metadata.message_type == "train" else 0
            return super().push_messages(messages)

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            self.away -= 1
            return [] if self.away > 0 else super().pull_messages(message_ids)

    strategy = fr.FedAvg(seed=5)
    legacy(strategy, Away(app_of(), 5))
    assert [e["failures"] for e in strategy.history] == [{}] * 3


def test_aggregation_without_configuration_is_refused() -> None:
    adapter = adapt(fr.FedAvg(seed=5), 2)
    with pytest.raises(RuntimeError, match="aggregate_fit of round 1 came without its configure"):
        adapter.aggregate_fit(1, [], [])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"strategy": object()}, TypeError, "needs a strategy of flwr_regs, not object"),
        ({"strategy": fr.FedBN()}, ValueError, "FedBN found no BatchNorm layer"),
        ({"initial_arrays": Parameters([], "")}, TypeError, "names.*state_dict.*not Parameters"),
        ({"num_rounds": 0}, ValueError, "num_rounds must be at least 1"),
        ({"strategy": fr.FedFOR(), "train_config": {"lr": 0.1}}, ValueError, "local-epochs"),
        ({"train_config": {"learning-rate": 0.1}}, ValueError, "unknown train_config key"),
        ({"evaluate_config": {"personalize": "plain"}}, ValueError, "did you mean 'personalise'"),
    ],
)
def test_wrong_arguments_are_refused_when_built(changed: Any, error: Any, message: str) -> None:
    arguments: dict[str, Any] = {
        "strategy": fr.FedAvg(seed=1),
        "initial_arrays": make_model().state_dict(),
        "num_rounds": 3,
        "train_config": CONFIG,
    }
    arguments |= changed
    with pytest.raises(error, match=message):
        LegacyStrategy(arguments.pop("strategy"), arguments.pop("initial_arrays"), **arguments)


# docs/migration.md


BLOCKS = dict(
    re.findall(
        r"```python\n# (\w+\.py, [\w ]+)\n(.*?)```",
        (ROOT / "docs/migration.md").read_text(),
        re.DOTALL,
    )
)


class Task(ModuleType):
    """The `task.py` of the page: random data; `evaluated` are the models that were tested."""

    def __init__(self, seen: list[dict[str, np.ndarray]]) -> None:
        super().__init__("task")
        self.Net = batch_norm
        self._clients = [
            DataLoader(TensorDataset(torch.cat([x for x, _ in c]), torch.cat([y for _, y in c])), 5)
            for c in make_clients(5, torch.float32)
        ]
        self._seen = seen

    def load_data(self, partition: int) -> Any:
        return self._clients[partition], self._clients[partition]

    def test_data(self) -> Any:
        return self._clients[4]

    def get_weights(self, net: nn.Module) -> list[np.ndarray]:
        return [v.numpy().copy() for v in net.state_dict().values()]

    def set_weights(self, net: nn.Module, arrays: list[np.ndarray]) -> None:
        names = net.state_dict().keys()
        given = {n: torch.tensor(a) for n, a in zip(names, arrays, strict=True)}
        net.load_state_dict(given, strict=True)

    def train(self, net: nn.Module, data: Any, epochs: int, lr: float) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr)
        for _ in range(epochs):
            for x, y in data:
                optimizer.zero_grad()
                nn.functional.cross_entropy(net(x), y).backward()
                optimizer.step()

    def test(self, net: nn.Module, data: Any) -> tuple[float, float]:
        self._seen.append({n: v.numpy().copy() for n, v in net.state_dict().items()})
        x, y = data.dataset.tensors
        with torch.no_grad():
            output = net.eval()(x)
        loss = float(nn.functional.cross_entropy(output, y))
        return loss, float((output.argmax(1) == y).float().mean())


def test_the_pages_blocks_are_all_there() -> None:
    assert sorted(BLOCKS) == [
        "client_app.py, before",
        "client_app.py, first stage",
        "server_app.py, before",
        "server_app.py, first stage",
        "server_app.py, second stage",
    ]
    page = (ROOT / "docs/migration.md").read_text()
    assert page.count("```python") == len(BLOCKS)


def of_the_page(
    server: str, client: str, monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, np.ndarray]]:
    """Run two blocks of the page; return the models that were tested, in order."""
    seen: list[dict[str, np.ndarray]] = []
    monkeypatch.setitem(sys.modules, "task", Task(seen))
    apps = []
    for name in (f"server_app.py, {server}", f"client_app.py, {client}"):
        scope: dict[str, Any] = {"__name__": name}
        exec(compile(BLOCKS[name], name, "exec"), scope)
        apps.append(scope["app"])
    apps[0](InProcessGrid(apps[1], 5), Context(1, 1, {}, RecordDict(), {}))
    return seen


def test_the_pages_stages_train_and_are_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = of_the_page("before", "before", monkeypatch)
    assert len(before) > 4  # its clients test, too
    first = of_the_page("first stage", "first stage", monkeypatch)
    second = of_the_page("second stage", "first stage", monkeypatch)
    assert len(first) == len(second) == 4  # the initial model and three rounds
    for ours, theirs in zip(first, second, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    for earlier, later in pairwise(first):
        assert not np.array_equal(earlier["0.weight"], later["0.weight"])


def test_half_a_move_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server has moved and the clients have not."""
    with pytest.raises(PopulationError, match=r"build its ClientApp with flwr_regs\.client_app"):
        of_the_page("first stage", "before", monkeypatch)


# Flower's own runtime

PROJECT = {
    "task.py": """
from flwr_regs import Elastic, LocalBatchNorm, RegStrategy, SparseTernary
from tests.flower.legacy.test_legacy import batch_norm, make_clients, torch

KINDS = (Elastic, LocalBatchNorm, SparseTernary)


def strategy():
    terms = [Elastic(0.5), LocalBatchNorm(), SparseTernary(0.3, 0.4)]
    return RegStrategy(terms, seed=11, fraction_train=0.6, min_train_nodes=1)


def load_data(pid):
    return make_clients(5, torch.float32)[pid]
""",
    "server_app.py": """
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr_regs import LegacyStrategy
from task import batch_norm, strategy

ran = []


def server_fn(context):
    ran.append(strategy())
    adapted = LegacyStrategy(
        ran[-1], batch_norm().state_dict(), num_rounds=3, train_config={"lr": 0.2, "local-epochs": 1}
    )
    return ServerAppComponents(strategy=adapted, config=ServerConfig(num_rounds=3))


app = ServerApp(server_fn=server_fn)
""",
    "older_client_app.py": """
from flwr_regs import RegClient, client_app
from task import KINDS, batch_norm, load_data


def client_fn(context):
    data = load_data(context.node_config["partition-id"])
    return RegClient(batch_norm(), data, data, device="cpu", terms=KINDS).to_client()


app = client_app(client_fn)
""",
    "go.py": """
import json
import server_app
from flwr.simulation import run_simulation
from older_client_app import app
from safetensors.numpy import save_file

backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
run_simulation(server_app.app, app, num_supernodes=5, backend_config=backend)
(strategy,) = server_app.ran
save_file({k: a.numpy() for k, a in strategy.arrays.items()}, "model.safetensors")
with open("history.json", "w") as sink:
    json.dump(strategy.history, sink)
""",
}


@pytest.mark.flower
def test_an_older_project_in_ray(tmp_path: Path) -> None:
    """EFL with FedBN, so with client state and coded steps; the weights are those of one process."""
    for name, text in PROJECT.items():
        (tmp_path / name).write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    env |= {"FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    run = subprocess.run(
        [sys.executable, "go.py"],
        cwd=tmp_path,
        env=env,
        text=True,
        capture_output=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    history = json.loads((tmp_path / "history.json").read_text())
    assert [len(entry["replies"]) for entry in history] == [3, 3, 3]
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in history)
    assert all(len(entry["evaluate"]["clients"]) == 5 for entry in history)

    strategy = private_and_compressed()
    kinds = [fr.Elastic, fr.LocalBatchNorm, fr.SparseTernary]
    grid = InProcessGrid(app_of(fr.RegClient, batch_norm, terms=kinds), 5)
    start(strategy, grid, model=batch_norm)
    got = load_file(tmp_path / "model.safetensors")
    assert got.keys() == strategy.arrays.keys()
    for name, array in strategy.arrays.items():
        np.testing.assert_allclose(got[name], array.numpy(), rtol=0, atol=1e-6, err_msg=name)
    for mine, theirs in zip(history, strategy.history, strict=True):
        assert mine["cohort"] == theirs["cohort"]
        assert mine["bytes_down"] == {str(k): v for k, v in theirs["bytes_down"].items()}
