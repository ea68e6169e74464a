"""Which of the clients' metrics are averaged, and who is named because theirs are not."""

import math

from flwr_regs.server import client_metrics
from flwr_regs.server.client_metrics import MOST_ENTRIES, common_metrics, read_metrics
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.text import MOST_NAMES


def test_metrics_of_most_clients_are_averaged_and_the_others_named() -> None:
    usual = {"num-examples": 2, "loss": 1.0}
    odd = {
        3: {**usual, "loss": [1.0, 2.0]},
        4: {**usual, "loss": math.nan},
        5: {**usual, "loss": 1e300},
        6: {**usual, "mine": 1.0},
        7: {"num-examples": 2},
        8: {**usual, **{f"mine-{i:02}": 1.0 for i in range(2 * MOST_NAMES)}},
    }
    averaged, left_out = common_metrics({**dict.fromkeys(range(9), usual), **odd})
    assert averaged == [usual] * 5  # of client 6 all but its own name
    assert left_out.pop(8) == [f"mine-{i:02}" for i in range(MOST_NAMES)]
    assert left_out == {3: ["loss"], 4: ["loss"], 5: ["loss"], 6: ["mine"], 7: ["loss"]}


def test_a_metric_that_nobody_can_use_stays_as_it_is() -> None:
    """A loss of NaN is news."""
    lost = {"num-examples": 2, "loss": math.nan}
    averaged, left_out = common_metrics({0: lost, 1: lost})
    assert [math.isnan(m["loss"]) for m in averaged] == [True, True]
    assert left_out == {}


def test_lists_without_end_are_left_out() -> None:
    """Also many short ones."""
    lists = {"long": [0.0] * (MOST_ENTRIES + 1), "short": [0.0] * MOST_ENTRIES, "more": [0.0]}
    kept, _ = read_metrics(0, Parcel(metrics={"num-examples": 2, **lists}), "num-examples")
    assert sorted(kept) == ["num-examples", "short"]


def test_a_metrics_mean_is_weighed_by_examples() -> None:
    each = [{"n": 1, "loss": 2.0, "lr": 0.1}, {"n": 3, "loss": 4.0, "lr": 0.1}]
    assert client_metrics.weighted_mean(each, "n") == {"loss": 3.5, "lr": 0.1}
    equal = [{"n": n, "steps": 10} for n in (12, 38, 31)]
    assert client_metrics.weighted_mean(equal, "n") == {"steps": 10}
