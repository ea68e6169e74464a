"""Refuses unknown arguments of a strategy or a loop; suggests the name that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Set

from flwr_regs.wire.config import nearest

MOVED = {
    "fraction_fit": "fraction_train",
    "min_fit_clients": "min_train_nodes",
    "min_evaluate_clients": "min_evaluate_nodes",
    "min_available_clients": "min_available_nodes",
    "fit_metrics_aggregation_fn": "train_metrics_aggr_fn",
    "evaluate_metrics_aggregation_fn": "evaluate_metrics_aggr_fn",
    "on_fit_config_fn": "start(train_config=...)",
    "on_evaluate_config_fn": "start(evaluate_config=...)",
    "evaluate_fn": "start(evaluate_fn=...)",
    "initial_parameters": "start(initial_arrays=...)",
}
"""Names in Flower's older strategies -> their names now."""


def check_arguments(owner: str, given: Iterable[str], known: Set[str], own: Set[str]) -> None:
    """Raise TypeError naming an argument of a strategy or a loop that is none of the `known`.

    The name that was probably meant is one of these, or of the owner's `own` parameters.
    """
    for name in set(given) - known:
        hint = nearest(name, known | own)
        if name in MOVED:
            hint = f", an older name: now it is {MOVED[name]}"
        raise TypeError(f"{owner} takes no argument '{name}'{hint}")
