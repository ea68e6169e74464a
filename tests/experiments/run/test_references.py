"""Clients that train alone, and one model on all their data, against plain loops with whole batches."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.clients import RunClients
from tests.conftest import descend
from tests.experiments.runs import runs_of, trained

SMALL = {
    "model": "logistic",
    "examples": 300,
    "num_clients": 4,
    "rounds": 3,
    "local_steps": 2,
    "batch_size": 1000,
    "lr": 0.5,
    "fraction_train": 0.5,
    "lr_decay": 0.5,
}


def scored(model: Any, data: Any) -> tuple[float, float]:
    with torch.no_grad():
        output, y = model(torch.from_numpy(data.test_x)), torch.from_numpy(data.test_y)
    return float(F.cross_entropy(output, y)), float((output.argmax(1) == y).float().mean())


def trained_and_parts(label: str) -> tuple[RunRecord, Any, Any, list[Any]]:
    """A run's record, its initial model, its data, and each client's examples."""
    (run,) = runs_of(methods=label, **SMALL)
    clients = client_data_of(run.settings)
    data = clients.data
    x, y = torch.from_numpy(data.train_x), torch.from_numpy(data.train_y)
    examples = [(x[rows], y[rows]) for rows in clients.parts]
    model = RunClients(run, clients).new_model()
    return trained(methods=label, **SMALL)[label], model, data, examples


def test_local_clients_train_as_often_as_they_are_in_a_cohort_on_average() -> None:
    record, start, data, examples = trained_and_parts("Local")
    models = [copy.deepcopy(start) for _ in examples]
    expected = [np.mean([scored(model, data) for model in models], axis=0)]
    for lr in (0.5, None, 0.125):  # a second turn in round 3: half of the clients train in a round
        for model, whole in zip(models, examples, strict=True):
            if lr:
                descend(model, torch.optim.SGD(model.parameters(), lr), [whole] * 2)
        expected.append(np.mean([scored(model, data) for model in models], axis=0))
    got = [(test["loss"], test["accuracy"]) for test in record.test]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    sizes = sum(len(y) for _, y in examples)
    assert [entry["examples_processed"] for entry in record.rounds] == [2 * sizes, 0, 2 * sizes]
    assert record.megabytes == [0, 0, 0]
    # the worst client, by its own model and its own labels
    right = []
    for model, (_, y) in zip(models, examples, strict=True):
        output = model(torch.from_numpy(data.test_x)).argmax(1).numpy()
        hits = [np.mean(output[data.test_y == c] == c) for c in range(data.num_classes)]
        right.append(np.bincount(y, minlength=data.num_classes) @ hits / len(y))
    assert record.per_client["clients"] == pytest.approx(right)
    assert record.per_client["worst"] == pytest.approx(min(right))


def test_the_pooled_model_takes_as_many_steps_as_a_cohort_together() -> None:
    record, model, data, examples = trained_and_parts("Pooled")
    x, y = (torch.cat(part) for part in zip(*examples, strict=True))
    expected = [scored(model, data)]
    for lr in (0.5, 0.25, 0.125):
        descend(model, torch.optim.SGD(model.parameters(), lr), [(x, y)] * 4)
        expected.append(scored(model, data))
    got = [(test["loss"], test["accuracy"]) for test in record.test]
    np.testing.assert_allclose(got, expected, rtol=1e-5)
    assert record.ended
    assert len(record.per_client["clients"]) == 4
    half = {**SMALL, "local_steps": 0, "local_epochs": 1, "batch_size": 20, "held_out_share": 0.5}
    record = trained(methods="Pooled", **half)["Pooled"]  # 2 batches of each client's 37 or 38
    assert record.rounds[0]["examples_processed"] == 4 * 20


def test_a_model_that_diverges_ends_the_run() -> None:
    for label in ("Local", "Pooled"):
        record = trained(methods=label, **{**SMALL, "lr": 1e38, "local_steps": 9})[label]
        assert record.status == "diverged"
        assert record.ended


def test_a_row_that_fails_otherwise_says_why_and_the_others_have_their_turn() -> None:
    given = {"dataset": "synthetic", "partition": "natural", "test_on_clients": True}
    records = trained(methods="Local, Pooled", **given, **SMALL)
    assert all("would get no test data" in record.error for record in records.values())
    assert len(records) == 2
