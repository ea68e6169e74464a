"""rFedAvg's own promises: features, the second exchange, bytes, privacy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Error, Message, RecordDict
from torch import nn

from flwr_regs import (
    FeatureTable,
    FedAvg,
    FedAvgClient,
    InProcessGrid,
    LeaveOneOutMean,
    RegClient,
    RFedAvg,
    RFedAvgClient,
    RFedAvgPlus,
    RFedAvgPlusClient,
    client_app,
)
from flwr_regs.client.measure.features import FeatureTap
from flwr_regs.term import ClientContext
from flwr_regs.wire import keys
from tests.conftest import close, make_clients, make_model, run
from tests.flower.test_strategy import app_of, start
from tests.oracles.client_loss.rfedavg import delta

QUIET: dict[str, Any] = {"seed": 3, "fraction_evaluate": 0.0}


# Features


def test_features_are_what_enters_the_output_layer() -> None:
    model, data = make_model(batch_norm=True), make_clients()[2]
    before = {n: v.clone() for n, v in model.state_dict().items()}
    tap = FeatureTap(model)
    got = tap.mean(data, torch.device("cpu"))
    want = model[:3].eval()(torch.cat([x for x, _ in data])).mean(0)
    torch.testing.assert_close(got, want)
    other = {"0.bias": before["0.bias"] + 1}
    shifted = tap.mean(data, torch.device("cpu"), other)
    assert abs(shifted - got).max() > 1e-2  # at these parameters, not at the model's own
    first = tap.mean(data, torch.device("cpu"), batches=1)
    torch.testing.assert_close(first, model[:3].eval()(data[0][0]).mean(0))
    tap.close()
    model(data[0][0])
    with pytest.raises(ValueError, match="does not use its output layer"):
        _ = tap.value  # the hook is gone
    assert all(torch.equal(before[n], v) for n, v in model.state_dict().items())


@pytest.mark.parametrize("client", [RFedAvgClient, RFedAvgPlusClient])
def test_a_model_without_a_linear_layer_is_refused_with_a_way_out(client: Any) -> None:
    conv = nn.Sequential(nn.Conv2d(1, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(ValueError, match=r"no nn.Linear.*name one with classifier=\.\.\., out of"):
        client(conv, [])
    client(conv, [], classifier="0")
    with pytest.raises(ValueError, match=r"no nn.Linear"):
        RegClient(conv, [], terms=client.terms)


def test_the_losses_are_the_papers() -> None:
    """Gradients alone cannot tell the mean of squared distances from the distance to the mean."""
    features, table = (
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([[0.0, 0], [1, 1], [5, 5]]),
    )
    ctx = ClientContext(start={}, lr=0.1, num_steps=1, features=features, client_id=2)
    ids = torch.tensor([0, 1, 2])
    table_ctx = ClientContext(**{**vars(ctx), "broadcast": {"ids": ids, "table": table}})
    # φ̄ = (2, 3): to (0, 0) 13, to (1, 1) 5; its own row is left out
    assert FeatureTable(0.5).loss(1.0, {}, table_ctx) == pytest.approx(1 + 0.5 * (13 + 5) / 2)
    mean_ctx = ClientContext(**{**vars(ctx), "broadcast": {"mean": torch.tensor([0.5, 0.5])}})
    assert LeaveOneOutMean(0.5).loss(1.0, {}, mean_ctx) == pytest.approx(
        1 + 0.5 * (1.5**2 + 2.5**2)
    )


# The second exchange


class Watching(InProcessGrid):
    """Notes every message: (type, partition, bytes of model arrays)."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.log: list[tuple[str, int, int]] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for m in messages:
            record = m.content.array_records.get("arrays", {})
            size = sum(len(a.data) for a in record.values())
            self.log.append((m.metadata.message_type, m.metadata.dst_node_id - 1000, size))
        return super().push_messages(messages)


def test_the_model_travels_down_once_a_round() -> None:
    grid = Watching(app_of(RFedAvgPlusClient), 3)
    strategy = RFedAvgPlus(lam=0.5, **QUIET)
    start(strategy, grid, 2)
    model = [s for t, p, s in grid.log if t == keys.PROBE and p == 0]
    train = [s for t, p, s in grid.log if t == "train" and p == 0]
    assert len(model) == len(train) == 2
    assert min(model) > 0
    assert max(train) == 0
    entry = strategy.history[-1]
    assert entry["bytes_down"][0] > entry["bytes_probe_down"][0] > model[0]
    assert 0 < entry["bytes_probe_up"][0] < entry["bytes_up"][0]


class Failing(InProcessGrid):
    """Partition 1 fails in the exchange `where`."""

    where = ""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        out = []
        for reply in super().pull_messages(message_ids):
            kind, node = reply.metadata.message_type, reply.metadata.src_node_id
            if kind == self.where and node == 1001:
                reply = Message(Error(2, "gone"), reply_to=reply)
                reply.metadata.__dict__["_src_node_id"] = node
            out.append(reply)
        return out


@pytest.mark.parametrize("where", [keys.PROBE, "train"])
def test_a_client_that_fails_one_exchange_costs_only_itself(where: str) -> None:
    class Grid(Failing):
        pass

    Grid.where = where
    strategy = RFedAvgPlus(lam=0.5, **QUIET)
    got = start(strategy, Grid(app_of(RFedAvgPlusClient), 4), 3)
    for entry in strategy.history:
        assert entry["replies"] == [0, 2, 3]
        assert "gone" in entry["failures"][1]
    if where == keys.PROBE:  # as if it were not there
        data = make_clients(6)
        want = run(
            RFedAvgPlus(lam=0.5, **QUIET),
            RFedAvgPlusClient,
            rounds=3,
            clients=[data[i] for i in (0, 2, 3)],
            train={"local-epochs": 1},
        )
        close({n: a.numpy() for n, a in got.arrays.items()}, want, 1e-12)


class Amnesiac(InProcessGrid):
    """Partition 1 loses its state before every message: also between the two exchanges."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        self._contexts[1001].state = RecordDict()
        return super().push_messages(messages)


def test_a_model_lost_between_the_exchanges_is_sent_again() -> None:
    want = RFedAvgPlus(lam=0.5, **QUIET)
    got = RFedAvgPlus(lam=0.5, **QUIET)
    a = start(want, InProcessGrid(app_of(RFedAvgPlusClient), 4), 3)
    b = start(got, Amnesiac(app_of(RFedAvgPlusClient), 4), 3)
    close(*({k: v.numpy() for k, v in r.arrays.items()} for r in (a, b)), 0.0)
    down = got.history[-1]["bytes_down"]
    assert down[1] > 1.5 * down[0]


def test_a_delta_lost_between_the_exchanges_costs_only_its_client() -> None:
    strategy = RFedAvgPlus(lam=0.5, sum_only=True, **QUIET)
    start(strategy, Amnesiac(app_of(RFedAvgPlusClient), 4), 2)
    assert all("lost its own δ" in e["failures"][1] for e in strategy.history)
    assert all(e["replies"] == [0, 2, 3] for e in strategy.history)


def test_a_client_alone_in_its_cohort_has_no_term() -> None:
    alone: dict[str, Any] = {"clients": make_clients(1)}
    few: dict[str, Any] = {"min_train_nodes": 1, "min_available_nodes": 1, "min_evaluate_nodes": 1}
    got = run(RFedAvgPlus(lam=5.0, **QUIET, **few), RFedAvgPlusClient, **alone)
    close(got, run(FedAvg(**QUIET, **few), FedAvgClient, **alone), 0.0)


# Bytes


# Privacy


def test_the_servers_sum_is_enough() -> None:
    each = run(RFedAvgPlus(lam=0.7, **QUIET), RFedAvgPlusClient)
    total = run(RFedAvgPlus(lam=0.7, sum_only=True, **QUIET), RFedAvgPlusClient)
    close(each, total, 1e-6)


def probe(term: LeaveOneOutMean, times: int = 1) -> np.ndarray:
    feature = torch.full((400,), 0.5, dtype=torch.float64)
    ctx = ClientContext(
        start={}, lr=0.1, num_steps=0, mean_features=lambda p, batches: feature, batch_size=5
    )
    return np.stack([term.probe(ctx)[0]["delta"].numpy() for _ in range(times)])


def test_delta_is_clipped_and_noised_as_in_the_paper() -> None:
    assert np.linalg.norm(probe(LeaveOneOutMean(0.1, clip_norm=2.0))[0]) == pytest.approx(2.0)
    assert np.linalg.norm(probe(LeaveOneOutMean(0.1, clip_norm=50.0))[0]) == pytest.approx(10.0)
    noisy = probe(LeaveOneOutMean(0.1, noise_std=3.0, clip_norm=2.0), times=50)
    clean = probe(LeaveOneOutMean(0.1, clip_norm=2.0))[0]
    assert (noisy - clean).std() == pytest.approx(3.0 * 2.0 / 5, rel=0.05)  # σ C / L
    assert abs((noisy - clean).mean()) < 0.05


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RFedAvg(lam=-1.0), "RFedAvg: lam must be a number of at least 0, not -1.0"),
        (
            lambda: RFedAvg(lam=1.0, delta_batches=0),
            "delta_batches must be a whole number of at least 1, or None, not 0",
        ),
        (lambda: RFedAvgPlus(lam=1.0, noise_std=1.0), "give both"),
        (
            lambda: RFedAvgPlus(lam=1.0, clip_norm=0.0),
            "clip_norm must be a positive number, or None, not 0.0",
        ),
    ],
)
def test_wrong_settings_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_delta_is_over_the_whole_local_data_and_of_the_local_model() -> None:
    """Read from the server's table after one round, against the oracle's mean."""
    clients = make_clients(3)
    strategy = RFedAvg(lam=0.5, **QUIET)
    local: dict[int, dict[str, np.ndarray]] = {}

    class Spy(RFedAvgClient):
        def fit(self, parameters: Any, config: Any) -> Any:
            answer = super().fit(parameters, config)
            names = list(self.model.state_dict())
            local[config[keys.CLIENT_KEY]] = dict(zip(names, answer[0], strict=True))
            return answer

    def client_fn(context: Any) -> Any:
        return Spy(make_model(), clients[context.node_config["partition-id"]], device="cpu")

    start(strategy, InProcessGrid(client_app(client_fn), 3), 1)
    for pid, model in local.items():
        want = delta(model, [(x.numpy(), y.numpy()) for x, y in clients[pid]])
        np.testing.assert_allclose(
            strategy.training.model.server["rfedavg"][str(pid)], want, atol=1e-12
        )


@pytest.mark.parametrize("size", [1, 5, 7], ids=lambda n: f"{n} entries")
@pytest.mark.parametrize("method", [RFedAvg, RFedAvgPlus])
def test_a_delta_of_another_length_costs_its_client_alone(method: Any, size: int) -> None:
    """Length 1 would be broadcast silently; the others' has 6. In round 1 the majority decides."""

    class Grid(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            replies = list(super().pull_messages(message_ids))
            for reply in replies:
                records = {} if reply.has_error() else reply.content.array_records
                for name, record in records.items():
                    if name.endswith(".upload") and reply.metadata.src_node_id == 1000:
                        record["delta"] = Array(np.ones(size))
            return replies

    client = {RFedAvg: RFedAvgClient, RFedAvgPlus: RFedAvgPlusClient}[method]
    strategy = method(lam=0.5, **QUIET)
    start(strategy, Grid(app_of(client), 4), 3)
    for entry in strategy.history:
        assert entry["replies"] == [1, 2, 3]
        assert f"'delta' has {size} entries, but most clients' 6" in entry["failures"][0] or (
            entry["round"] > 1
            and f"'delta' has {size} entries, but those seen so far 6" in entry["failures"][0]
        )
