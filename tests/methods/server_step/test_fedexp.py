"""FedExP: the mean of the last two models."""

from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord

import flwr_regs as fr
from flwr_regs.chain import chain
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.testing.problem import app_of, start_weights
from flwr_regs.wire.records import from_record
from tests.conftest import close, make_clients, start, to_numpy
from tests.oracles.server_step.fedacg import fedacg
from tests.oracles.server_step.fedexp import fedexp

CLIENTS = make_clients(5)


@pytest.mark.parametrize(
    ("name", "settings", "oracle", "filled"),
    [
        ("FedExP", {"eps": 1e-3}, fedexp, "averages"),
        ("FedACG", {"lam": 0.7, "mu": 0.3}, fedacg, "iterates"),
    ],
)
def test_the_history_has_the_metrics_of_the_model_that_a_paper_reports(
    name: str, settings: dict[str, Any], oracle: Any, filled: str
) -> None:
    """Beside those of the model that the next round begins with: the mean of the last two."""
    tested: list[dict[str, np.ndarray]] = []

    def test(number: int, arrays: ArrayRecord) -> MetricRecord:
        tested.append(from_record(arrays))
        return MetricRecord({"sum": float(sum(a.sum() for a in tested[-1].values()))})

    some = {"seed": 3, "fraction_train": 0.6, "min_train_nodes": 1, "fraction_evaluate": 0.0}
    strategy = getattr(fr, name)(**settings, **some)
    grid = fr.InProcessGrid(app_of(getattr(fr, f"{name}Client"), CLIENTS), 5)
    start(strategy, grid, 4, config={"lr": 0.2, "local-epochs": 2}, evaluate_fn=test)
    reported: list[Any] = []
    cohorts = [entry["cohort"] for entry in strategy.history]
    plan = (start_weights(), to_numpy(CLIENTS), 4, lambda t: 0.2, 2)
    models = oracle(*plan, cohorts=cohorts, **settings, **{filled: reported})
    for t, model in enumerate(reported):
        close(tested[2 * t + 1], models[t], 1e-10)
        close(tested[2 * t + 2], model, 1e-10)
        told = strategy.history[t]["averaged_metrics"]["sum"]
        assert told == pytest.approx(sum(a.sum() for a in model.values()))


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
