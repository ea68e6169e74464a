"""A round that fails, however late, binds nobody: the training goes on as if it had not been."""

from typing import Any

import numpy as np
import pytest
from flwr.app import MetricRecord

import flwr_regs as fr
from flwr_regs.testing.problem import app_of
from tests.conftest import make_clients, start


def test_what_a_training_keeps_is_after_a_round_that_failed_late_as_before_it() -> None:
    kept: list[dict[str, Any]] = []

    def mean(contents: Any, key: str) -> Any:
        if len(kept) == 2:
            raise KeyboardInterrupt("of the user's own")
        return MetricRecord({"mean": 1.0})

    def keep(entry: Any) -> None:
        kept.append(strategy.training.snapshot())

    terms = [fr.ControlVariates(), fr.SparseTernary(density_down=0.5)]
    more: dict[str, Any] = {"downlink": "delta", "incomplete": "drop", "drop_inactive": 0.5}
    more |= {"train_metrics_aggr_fn": mean, "on_round": keep, "fraction_evaluate": 0.0}
    strategy = fr.RegStrategy(terms, seed=1, **more)
    grid = fr.InProcessGrid(app_of(fr.RegClient, make_clients(3), terms=[*map(type, terms)]), 3)
    with pytest.raises(KeyboardInterrupt):
        start(strategy, grid, 5, config={"lr": 0.1, "local-steps": 2})
    assert strategy.history[-1]["failed"] == "of the user's own"
    before, after = kept[-1], strategy.training.snapshot()
    assert before["model"]["coded_steps"]
    assert before["model"]["changed"]
    assert before["participation"]["turns"]
    for part in ("model", "participation", "guard", "remembered"):
        np.testing.assert_equal(after[part], before[part], part)
