"""Which settings of a strategy are refused: a table of their ranges, and a table of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from os import fspath
from typing import Any, TypeVar

from flwr_regs.server.aggregate.aggregators import Aggregator, Mean
from flwr_regs.server.privacy import CentralDP
from flwr_regs.wire import keys
from flwr_regs.wire.precision import DTYPES

T = TypeVar("T")


def check(options: Any) -> None:
    """Raise ValueError if :class:`flwr_regs.server.options.Options` break a row of a table below."""
    check_ranges(vars(options))
    for sentence, broken in PAIRS.items():
        if broken(options):
            raise ValueError(sentence.format(**vars(options)))


def check_ranges(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting of those `given` that is out of its range."""
    for name, good, sentence in RANGES:
        if name in given and not _fits(good, value := given[name]):
            raise ValueError(f"{name} must {sentence}, not {value!r}")


def _fits(good: Callable[[Any], bool], value: Any) -> bool:
    try:
        return good(value)
    except (TypeError, ValueError, OverflowError):  # a value of a wrong type
        return False


def as_many(given: T | Sequence[T] | None) -> Sequence[T]:
    """Return one callable, several, or none as a sequence."""
    if given is None:
        return ()
    return given if isinstance(given, list | tuple) else (given,)


def _callables(value: Any) -> bool:
    return all(map(callable, as_many(value)))


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _whole(value: Any) -> bool:
    return bool(int(value) == value)


def _count(value: Any) -> bool:
    return _whole(value) and value >= 0


RANGES: list[tuple[str, Callable[[Any], bool], str]] = [
    # setting, what it must satisfy, and the sentence if it does not
    ("weighting", _one_of("num-examples", "uniform"), "be 'num-examples' or 'uniform'"),
    ("seed", _count, "be a whole number of at least 0"),
    ("downlink", _one_of("model", "delta"), "be 'model' or 'delta'"),
    ("wire_dtype", _one_of(None, *DTYPES), f"be one of {DTYPES} or None"),
    ("lr_schedule", callable, "be a function of the round"),
    ("cohorts", _one_of("uniform", "class-covering"), "be 'uniform' or 'class-covering'"),
    ("incomplete", _one_of("average", "scale", "drop"), "be 'average', 'scale' or 'drop'"),
    ("drop_inactive", lambda v: v is None or v > 0, "be positive or None"),
    ("privacy", lambda v: v is None or isinstance(v, CentralDP), "be a CentralDP"),
    (
        "aggregator",
        lambda v: isinstance(v, Aggregator) and not isinstance(v, type),
        "be an aggregator, such as Mean() or Krum(byzantine=1)",
    ),
    ("max_weight", lambda v: v is None or 0 < v <= 1, "lie above 0 and up to 1, or be None"),
    ("max_scale", lambda v: 1 <= v < math.inf, "be a number of at least 1"),
    (
        "on_divergence",
        _one_of("exclude", "warn", "stop"),
        "be 'exclude', 'warn' or 'stop'",
    ),
    ("min_replies", lambda v: _whole(v) and v >= 1, "be at least 1"),
    ("retries", _count, "be a whole number of at least 0"),
    ("retry_cohort", _one_of("new", "same"), "be 'new' or 'same'"),
    ("retry_pause", lambda v: 0 <= v < math.inf, "be a number of seconds from 0"),
    ("deadline", lambda v: v is None or 0 < v < math.inf, "be positive or None"),
    (
        "keep_best",
        lambda v: v is None or callable(v) or (isinstance(v, str) and v != ""),
        "be a metric's name, or a function of a round's entry",
    ),
    ("stop_when", _callables, "be a function of the history, or a list of them"),
    ("on_round", _callables, "be a function of a round's entry, or a list of them"),
    ("population", lambda v: v is None or (_whole(v) and v >= 1), "be at least 1"),
    ("checkpoint_dir", lambda v: v is None or bool(fspath(v)), "be the path of a folder or None"),
    (
        "checkpoint_every",
        lambda v: v > timedelta(0) if isinstance(v, timedelta) else _whole(v) and v >= 1,
        "be at least 1 round, or a positive timedelta",
    ),
    ("wait_timeout", lambda v: v >= 0, "be a number of seconds from 0"),
    *(
        (name, lambda v: 0.0 <= v <= 1.0, "lie in [0, 1]")
        for name in ("fraction_train", "fraction_evaluate")
    ),
    *(
        (name, _count, "be a whole number of at least 0")
        for name in ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
    ),
]

_UNCOVERED: dict[str, Callable[[Any], Any]] = {
    # what does not go with privacy, as in PAIRS
    "the clients of {term.uploading} send more than their update, without noise; leave it out (an "
    "Elastic or Curvature with lam=0 sends nothing)": lambda o: o.term.uploading,
    "its noise is for the mean, not for aggregator={aggregator}; leave one of the two "
    "out": lambda o: not isinstance(o.aggregator, Mean),
    "all clients weigh alike; leave max_weight={max_weight} out": lambda o: (
        o.max_weight is not None
    ),
    "for class-covering cohorts the clients tell their label counts without noise, and such cohorts "
    "are no uniform sample; use cohorts='uniform'": lambda o: o.cohorts == "class-covering",
    "weighting='{weighting}' weighs clients unequally; the noise is for equal weights; use "
    "weighting='uniform'": lambda o: o.weighting != "uniform",
    "'{term.weigher.name}' weighs clients unequally; the noise is for equal weights; leave it "
    "out": lambda o: o.term.weigher,
    "incomplete='scale' weighs clients unequally; use incomplete='average' or 'drop'": lambda o: (
        o.incomplete == "scale"
    ),
    "drop_inactive draws the cohorts, and changes their size, by who failed or took no step, which "
    "gets no noise; leave it out": lambda o: o.drop_inactive is not None,
}


def _under_privacy(broken: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda o: o.privacy and broken(o)


PAIRS: dict[str, Callable[[Any], Any]] = {
    # a sentence, which can name the settings' values, and whether they exclude each other
    "the record keys are part of the protocol: leave them 'arrays', 'config'": lambda o: (
        (o.arrayrecord_key, o.configrecord_key) != (keys.ARRAYS, keys.CONFIG)
    ),
    "wire_dtype='{wire_dtype}' does not go with compression, whose updates have a code of their own; "
    "leave one of the two out": lambda o: (
        o.wire_dtype and (o.term.coder("finish") or o.term.coder("release"))
    ),
    "wire_dtype='{wire_dtype}' needs downlink='model': a client's rounded model does not follow from "
    "the rounded step": lambda o: o.wire_dtype and o.downlink == "delta",
    "overlap=True needs downlink='delta'": lambda o: o.overlap and o.downlink != "delta",
    "overlap=True sends whole models ahead, which a compressed downlink is there to "
    "avoid": lambda o: o.overlap and o.term.coder("release"),
    "aggregator={aggregator} does not reach what the clients of {term.unaggregated} upload beside "
    "their updates, so one client could still move all; use aggregator=Mean() (LeaveOneOutMean: or "
    "sum_only=False; a term of your own: or `adds`, or ctx.aggregated and "
    "robust=True)": lambda o: not isinstance(o.aggregator, Mean) and o.term.unaggregated,
    "incomplete='scale' weighs the clients' updates, and so does '{term.weigher.name}': leave one of "
    "the two out": lambda o: o.term.weigher and o.incomplete == "scale",
    **{
        f"privacy=CentralDP(...): {sentence}": _under_privacy(broken)
        for sentence, broken in _UNCOVERED.items()
    },
}
