"""A round that fails, however late, binds nobody: the training goes on as if it had not been."""

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord

import flwr_regs as fr
from flwr_regs.testing.problem import app_of
from tests.conftest import make_clients, make_model

CONFIG = ConfigRecord({"lr": 0.1, "local-steps": 2})


def fails_in(number: int) -> Callable[..., Any]:
    rounds = list[int]()

    def mean(contents: Any, key: str) -> Any:
        rounds.append(len(rounds) + 1)
        if len(rounds) == number:
            raise KeyboardInterrupt("of the user's own")
        return MetricRecord({"mean": 1.0})

    return mean


def rounds_of(strategy: Any, grid: Any, numbers: Collection[int]) -> ArrayRecord:
    """A loop of one's own, which goes on after a round whose metrics fail."""
    arrays = ArrayRecord(make_model().state_dict()) if 1 in numbers else strategy.arrays
    for number in numbers:
        messages = list(strategy.configure_train(number, arrays, CONFIG, grid))
        try:
            arrays, _ = strategy.aggregate_train(number, grid.send_and_receive(messages))
        except KeyboardInterrupt:
            assert strategy.history[-1]["failed"] == "of the user's own"
    return arrays


def test_what_a_training_keeps_is_after_a_round_that_failed_late_as_before_it() -> None:
    terms = [fr.ControlVariates(), fr.SparseTernary(density_down=0.5)]
    more: dict[str, Any] = {"downlink": "delta", "incomplete": "drop", "drop_inactive": 0.5}
    strategy = fr.RegStrategy(terms, seed=1, train_metrics_aggr_fn=fails_in(3), **more)
    strategy.prepare(5, None, CONFIG, ConfigRecord({}))
    grid = fr.InProcessGrid(app_of(fr.RegClient, make_clients(3), terms=[*map(type, terms)]), 3)
    rounds_of(strategy, grid, [1, 2])
    before = strategy.training.snapshot()
    assert before["model"]["coded_steps"]
    assert before["model"]["changed"]
    assert before["participation"]["turns"]
    rounds_of(strategy, grid, [3])
    after = strategy.training.snapshot()
    for part in ("model", "participation", "guard", "remembered"):
        np.testing.assert_equal(after[part], before[part], part)
