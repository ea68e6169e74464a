"""Refuses unknown arguments of a strategy, and suggests the name that was probably meant."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

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


def check_arguments(strategy: type, settings: set[str], given: Iterable[str]) -> None:
    """Raise TypeError naming an argument that is neither one of `settings` nor a class's own."""
    makers = [vars(c)["__init__"] for c in strategy.__mro__[:-1] if "__init__" in vars(c)]
    known = settings | {name for make in makers for name in inspect.signature(make).parameters}
    for name in set(given) - settings:
        hint = nearest(name, known)
        if name in MOVED:
            hint = f", an older name: now it is {MOVED[name]}"
        raise TypeError(f"{strategy.__name__} takes no argument '{name}'{hint}")
