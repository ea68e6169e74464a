"""FedExP: its server step size, the mean of the last two models, and hostile updates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.term import ServerContext
from flwr_regs.testing.problem import (
    app_of,
    start_weights,
)
from flwr_regs.wire.records import from_record
from tests.conftest import close, make_clients, make_model, to_numpy
from tests.oracles.server_step.fedexp import fedexp

CLIENTS = make_clients(4)
OFF = {"seed": 3, "fraction_evaluate": 0.0}


def test_the_history_has_the_metrics_of_the_mean_of_the_last_two_models() -> None:
    calls: list[tuple[int, dict[str, np.ndarray]]] = []

    def test(number: int, arrays: ArrayRecord) -> MetricRecord:
        calls.append((number, from_record(arrays)))
        return MetricRecord({"sum": float(sum(a.sum() for a in calls[-1][1].values()))})

    def trained(strategy: Any, client: Any) -> Any:
        calls.clear()
        return strategy.start(
            fr.InProcessGrid(app_of(client, CLIENTS), 4),
            ArrayRecord(make_model().state_dict()), 4,
            train_config=ConfigRecord({"lr": 0.2, "local-epochs": 2}), evaluate_fn=test,
        )  # fmt: skip

    strategy = fr.FedExP(1e-3, **OFF)
    result = trained(strategy, fr.FedExPClient)
    means: list[Any] = []
    steps: list[float] = []
    models = fedexp(
        start_weights(), to_numpy(CLIENTS), 4, lambda t: 0.2, 2, eps=1e-3, averages=means,
        server_steps=steps,
    )  # fmt: skip
    assert [n for n, _ in calls] == [0, 1, 1, 2, 2, 3, 3, 4, 4]
    for t in range(4):
        close(calls[2 * t + 1][1], models[t], 1e-10)
        close(calls[2 * t + 2][1], means[t], 1e-10)
        entry = strategy.history[t]
        assert entry["averaged_metrics"]["sum"] == pytest.approx(
            sum(a.sum() for a in means[t].values())
        )
        assert entry["server_metrics"]["sum"] == result.evaluate_metrics_serverapp[t + 1]["sum"]
    assert max(steps) > 1.01
    assert strategy.training.model.server["fedexp"]["server-lr"] == pytest.approx(steps[-1])

    trained(plain := fr.FedAvg(**OFF), fr.FedAvgClient)
    assert [n for n, _ in calls] == [0, 1, 2, 3, 4]
    assert not any("averaged_metrics" in e for e in plain.history)


def test_the_mean_of_two_models_keeps_dtypes_and_whole_numbers() -> None:
    first = {"w": np.array([1.0, 3.0], np.float32), "n": np.array(4), "mask": np.array([np.inf])}
    model = GlobalModel(chain([fr.Extrapolation()]), first)
    assert model.averaged is None
    model.step = {"w": np.array([0.5, -1.0], np.float32), "n": np.array(3), "mask": np.zeros(1)}
    mean = model.averaged
    assert mean is not None
    np.testing.assert_array_equal(mean["w"], np.array([0.75, 3.5], np.float32))
    assert mean["w"].dtype == np.float32
    assert mean["n"] == 4
    assert mean["mask"] == np.inf


def test_one_large_update_does_not_make_the_step_size_large() -> None:
    """With a robust aggregator, which has the squares too."""
    rng = np.random.default_rng(0)
    updates = {k: {"w": rng.normal(size=6) + 1} for k in range(5)}
    weights = dict.fromkeys(updates, 0.2)
    ctx = ServerContext(2, 0.1, {"w": np.zeros(6)}, weights=weights)
    term = fr.Extrapolation(1e-3)

    def step_size(robust: bool, liar: float) -> float:
        sent = {k: {"w": d["w"] * (liar if k == 4 else 1)} for k, d in updates.items()}
        vectors = np.array([d["w"] for d in sent.values()])
        own = ServerContext(2, 0.1, {"w": np.zeros(6)}, weights=weights, robust=robust)
        each = [term.fold({}, k, d, {}, weights[k], own)["square"] for k, d in sent.items()]
        total = 5 * np.median(each) if robust else sum(each)
        mean = np.median(vectors, axis=0) if robust else vectors.mean(axis=0)
        server, _ = term.update({}, {"w": mean}, {"square": total}, ctx)
        return float(server["server-lr"])

    honest = [np.sum(d["w"] ** 2) for d in updates.values()]
    mean = np.mean([d["w"] for d in updates.values()], axis=0)
    exact = np.mean(honest) / (2 * (np.sum(mean**2) + 1e-3))
    assert step_size(False, 1.0) == pytest.approx(max(1.0, float(exact)))
    assert step_size(True, 1e6) < 3 * step_size(True, 1.0)
