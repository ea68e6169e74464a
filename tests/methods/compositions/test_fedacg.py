"""FedACG beyond the laws: Nesterov's SGD on the server, and the model that its paper reports."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

import flwr_regs as fr
from flwr_regs.testing.problem import app_of, start_weights, train
from flwr_regs.wire.records import from_record
from tests.conftest import close, make_clients, make_model, to_numpy
from tests.oracles.server_step.fedacg import fedacg

SOME: dict[str, Any] = {"seed": 8, "fraction_train": 0.6, "min_train_nodes": 1}


def test_what_is_sent_follows_nesterovs_sgd_of_learning_rate_1() -> None:
    ours = train(fr.FedACG(0.7, 0.3, **SOME), fr.FedACGClient)
    nesterov = fr.FedOpt("SGD", lr=1.0, momentum=0.7, nesterov=True).term.terms
    strategy = fr.RegStrategy([fr.Proximal(0.3), *nesterov], weighting="uniform", **SOME)
    theirs = train(strategy, partial(fr.RegClient, terms=[fr.Proximal]))
    for z, same in zip(ours, theirs, strict=True):
        close(z, same, 1e-12)


def test_the_history_has_the_metrics_of_the_mean_of_the_clients_models() -> None:
    """``w = z − λ m``, beside those of z."""
    tested: list[Any] = []

    def test(number: int, arrays: ArrayRecord) -> MetricRecord:
        tested.append(from_record(arrays))
        return MetricRecord({"sum": float(sum(a.sum() for a in tested[-1].values()))})

    data, strategy = make_clients(5), fr.FedACG(0.7, 0.3, fraction_evaluate=0.0, **SOME)
    strategy.start(
        grid=fr.InProcessGrid(app_of(fr.FedACGClient, data), 5),
        initial_arrays=ArrayRecord(make_model().state_dict()),
        num_rounds=4,
        train_config=ConfigRecord({"lr": 0.2, "local-epochs": 2}),
        evaluate_fn=test,
    )
    iterates: list[Any] = []
    cohorts = [entry["cohort"] for entry in strategy.history]
    sent = fedacg(
        start_weights(), to_numpy(data), 4, lambda t: 0.2, 2,
        lam=0.7, mu=0.3, cohorts=cohorts, iterates=iterates,
    )  # fmt: skip
    for t, entry in enumerate(strategy.history):
        close(tested[2 * t + 1], sent[t], 1e-10)
        close(tested[2 * t + 2], iterates[t], 1e-10)
        of_w = sum(a.sum() for a in iterates[t].values())
        assert entry["averaged_metrics"]["sum"] == pytest.approx(of_w)
    assert strategy.averaged_arrays is not None
    close(from_record(strategy.averaged_arrays), iterates[-1], 1e-10)
