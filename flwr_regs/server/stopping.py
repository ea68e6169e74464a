"""Conditions that end a training early: values of `stop_when`. Each depends on the history alone."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from flwr_regs.term import COUNT, NOT_NEGATIVE, Range, plain_numbers
from flwr_regs.wire.config import Spelled

LOG = logging.getLogger("flwr")
SOURCES = ("server_metrics", "evaluate_metrics", "train_metrics")
"""Where a metric is looked up in a round's entry, best first: on the server, on clients, in training."""
History = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Target(Spelled):
    """Stop once a metric reaches a value.

    Parameters
    ----------
    value : float
    metric : str
        Its name in the history's ``"server_metrics"`` (of `evaluate_fn`), else ``"evaluate_metrics"`` (the
        clients' mean), else ``"train_metrics"``: the first of these that ever has it.
    mode : {"max", "min"}, optional
        Whether more or less is better. Default: ``"min"`` for a name with "loss", "error" or
        "perplexity", in any case.

    Raises
    ------
    ValueError
        Another `mode`, or a `value` that is no finite number.
    TypeError
        A `metric` that is no name.
    """

    value: float
    metric: str = "accuracy"
    mode: str | None = None

    def __post_init__(self) -> None:
        plain_numbers(self)
        sign(self.metric, self.mode)
        Range("a number").check("Target", "value", self.value)

    def __call__(self, history: History) -> str:
        """Return why training ends; "" if it goes on."""
        reported = values(history, self.metric)
        if not reported or reported[-1][0] != history[-1]["round"]:
            return ""
        factor, last = sign(self.metric, self.mode), reported[-1][1]
        reached = f"{self.metric} {last:.6g} reaches the target {self.value:g}"
        return reached if factor * last >= factor * self.value else ""


@dataclass(frozen=True)
class Patience(Spelled):
    """Stop once a metric has not improved for some rounds.

    Parameters
    ----------
    rounds : int
        Rounds without an improvement, at least 1. Rounds that lack the metric do not count.
    metric, mode : str, str or None
        As for :class:`Target`.
    min_delta : float
        The smallest change that counts as an improvement, at least 0.

    Raises
    ------
    ValueError
        Another `mode`, `rounds` below 1, or a negative `min_delta`.
    """

    rounds: int
    metric: str = "loss"
    mode: str | None = None
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        plain_numbers(self)
        sign(self.metric, self.mode)
        COUNT.check("Patience", "rounds", self.rounds)
        NOT_NEGATIVE.check("Patience", "min_delta", self.min_delta)

    def __call__(self, history: History) -> str:
        """Return why training ends; "" if it goes on."""
        factor, best, at, since = sign(self.metric, self.mode), -math.inf, None, 0
        for number, value in values(history, self.metric):
            since += 1
            # NaN never improves
            if at is None or best < factor * value >= best + self.min_delta:
                at, best = number, (-math.inf if math.isnan(value) else factor * value)
                since = 0
        if since < self.rounds:
            return ""
        shown = factor * best if math.isfinite(best) else math.nan
        return f"{self.metric} has not improved on {shown:.6g} since round {at}"


def sign(metric: str, mode: str | None) -> int:
    """Return 1 if more of a metric is better, else -1.

    Raises ValueError for an unknown mode, TypeError for a metric that is no name.
    """
    if not isinstance(metric, str):
        raise TypeError(f"metric must be the name of a metric, not {metric!r:.80}")
    if mode not in (None, "max", "min"):
        raise ValueError(f"mode must be 'max', 'min' or None, not {mode!r}")
    less = any(word in metric.lower() for word in ("loss", "error", "perplexity"))
    return -1 if (mode or ("min" if less else "max")) == "min" else 1


def values(history: History, metric: str) -> list[tuple[int, float]]:
    """Return (round, value) of a metric, from the best source that has it; warn once if none has.

    The server has it too if it has tested the initial model alone by now. A list of numbers is no value.
    """
    tested = any(metric in entry.get("initial_metrics", ()) for entry in history)
    sources = SOURCES[:1] if tested else SOURCES
    for source in sources:
        said = [(e["round"], e[source][metric]) for e in history if metric in e.get(source, ())]
        # the type first: thousands of rounds would wait for isinstance
        if numbers := [(t, float(v)) for t, v in said if type(v) is float or isinstance(v, Real)]:
            return numbers
    if len(history) == 1:
        known = sorted({name for source in sources for name in history[0].get(source, {})})
        text = "round %d has no metric '%s' that is a number, only %s%s"
        but = "; the server tested the initial model, so its tests alone count" * tested
        level = logging.INFO if tested else logging.WARNING  # it may test some rounds alone
        LOG.log(level, text, history[0]["round"], metric, known, but)
    return []
