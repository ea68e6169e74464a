"""Which settings of a strategy are refused: tables of their ranges, and of pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from os import fspath
from typing import Any, TypeVar

from flwr_regs.abilities import CountsOnMean
from flwr_regs.server.aggregate.aggregators import Aggregator, Mean
from flwr_regs.server.privacy import CentralDP
from flwr_regs.term import COUNT, FRACTION, NOT_NEGATIVE, POSITIVE, SHARE, SWITCH, WHOLE, Range
from flwr_regs.wire import keys
from flwr_regs.wire.precision import DTYPES

T = TypeVar("T")


def check(options: Any) -> None:
    """Raise ValueError if :class:`flwr_regs.server.options.Options` break a row of a table below."""
    check_ranges(vars(options))
    for sentence, excluded in pairs(options).items():
        if excluded:
            names = excluded if isinstance(excluded, list) else ()
            behind = [t for t in options.term.terms if t is excluded or t.name in names]
            who = " and ".join(type(term).__name__ for term in behind)
            raise Refused(sentence, {**vars(options), "who": who})


class Refused(ValueError):
    """Settings that exclude each other; the text names the terms behind that, or their method."""

    def __init__(self, sentence: str, values: Mapping[str, Any]) -> None:
        super().__init__(sentence, values)

    def __str__(self) -> str:
        sentence, values = self.args
        return str(sentence.format(**values))

    def of(self, owner: str) -> Refused:
        """Return the same error of the method that the user has written."""
        sentence, values = self.args
        return Refused(sentence, {**values, "who": owner})


def check_ranges(given: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting of those `given` that is out of its range."""
    for name, good, sentence in RANGES:
        if name in given and not _fits(good, given[name]):
            raise ValueError(f"{name} must {sentence}, not {given[name]!r}")


def _fits(good: Callable[[Any], bool], value: Any) -> bool:
    with suppress(TypeError, ValueError, OverflowError):  # a value of a wrong type
        return good(value)
    return False


def as_many(given: T | Sequence[T] | None) -> Sequence[T]:
    """Return one callable, several, or none as a sequence."""
    given = () if given is None else given
    return given if isinstance(given, list | tuple) else (given,)


def _callables(value: Any) -> bool:
    return all(callable(f) and not isinstance(f, type) for f in as_many(value))


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


def _is_aggregator(value: Any) -> bool:
    return isinstance(value, Aggregator) and not isinstance(value, type)


def _is_metric(value: Any) -> bool:
    return value is None or callable(value) or (isinstance(value, str) and value != "")


def _is_period(value: Any) -> bool:
    return value > timedelta(0) if isinstance(value, timedelta) else COUNT.fits(value)


def _is_wait(value: Any) -> bool:
    return NOT_NEGATIVE.fits(value) or (isinstance(value, float) and value == math.inf)


def _or_none(good: Range) -> Callable[[Any], bool]:
    return lambda value: value is None or good.fits(value)


def _one_of(name: str, *values: Any) -> Row:
    *others, last = map(repr, values)
    return name, lambda value: value in values, f"be {', '.join(others)} or {last}"


COUNTS = ("seed", "retries", "min_train_nodes", "min_evaluate_nodes", "min_available_nodes")
Row = tuple[str, Callable[[Any], bool], str]
RANGES: list[Row] = [
    # a setting, what it must satisfy, and the sentence if it does not
    _one_of("weighting", "num-examples", "uniform"),
    _one_of("downlink", "model", "delta"),
    _one_of("wire_dtype", *DTYPES, None),
    _one_of("cohorts", "uniform", "class-covering"),
    _one_of("incomplete", "average", "scale", "drop"),
    _one_of("on_divergence", "exclude", "warn", "stop"),
    _one_of("retry_cohort", "new", "same"),
    *((name, WHOLE.fits, f"be {WHOLE.expected}") for name in COUNTS),
    ("min_replies", COUNT.fits, f"be {COUNT.expected}"),
    *((name, SWITCH.fits, f"be {SWITCH.expected}") for name in ("overlap", "restart_lr")),
    ("population", _or_none(COUNT), f"be {COUNT.expected} or None"),
    ("fraction_train", SHARE.fits, "lie in [0, 1]"),
    ("fraction_evaluate", SHARE.fits, "lie in [0, 1]"),
    ("max_weight", _or_none(FRACTION), "lie above 0 and up to 1, or be None"),
    ("max_scale", Range("", lambda v: v >= 1).fits, "be a number of at least 1"),
    ("retry_pause", NOT_NEGATIVE.fits, "be a number of seconds from 0"),
    ("wait_timeout", _is_wait, "be a number of seconds from 0"),
    ("deadline", _or_none(POSITIVE), "be positive or None"),
    ("drop_inactive", _or_none(POSITIVE), "be positive or None"),
    ("lr_schedule", callable, "be a function of the round"),
    ("privacy", lambda v: v is None or isinstance(v, CentralDP), "be a CentralDP"),
    ("aggregator", _is_aggregator, "be an aggregator, such as Mean() or Krum(byzantine=1)"),
    ("keep_best", _is_metric, "be a metric's name, or a function of a round's entry"),
    ("weighted_by_key", lambda v: isinstance(v, str) and v != "", "be the name of a metric"),
    ("train_metrics_aggr_fn", _is_function, "be a function of records and a key, or None"),
    ("evaluate_metrics_aggr_fn", _is_function, "be a function of records and a key, or None"),
    ("stop_when", _callables, "be a function of the history, or a list of them"),
    ("on_round", _callables, "be a function of a round's entry, or a list of them"),
    ("checkpoint_dir", lambda v: v is None or bool(fspath(v)), "be the path of a folder or None"),
    ("checkpoint_every", _is_period, "be at least 1 round, or a positive timedelta"),
]


def pairs(o: Any) -> dict[str, Any]:
    """Return sentences, and whether what each refuses is there: then, if it has some, the terms behind it.

    A sentence can name the settings' values, and ``{who}``: these terms.
    """
    robust = not isinstance(o.aggregator, Mean)
    uncovered = {
        "the server of {who} reads more of its clients than their mean update, without noise; leave "
        "privacy out, or take FedAvg or another method that `flwr-regs list methods` marks under DP (or "
        "an Elastic or Curvature with lam=0)": o.term.uploading,
        "its noise is for the mean, not for aggregator={aggregator}; leave one of the two out": robust,
        "all clients weigh alike; leave max_weight={max_weight} out": o.max_weight is not None,
        "for class-covering cohorts the clients tell their label counts without noise, and such cohorts "
        "are no uniform sample; use cohorts='uniform'": o.cohorts == "class-covering",
        "weighting='{weighting}' weighs clients unequally; the noise is for equal weights; use "
        "weighting='uniform'": o.weighting != "uniform",
        "{who} weighs clients unequally; the noise is for equal weights; leave one of the two "
        "out": o.term.weigher,
        "incomplete='scale' weighs clients unequally; use incomplete='average' or "
        "'drop'": o.incomplete == "scale",
        "drop_inactive draws the cohorts, and changes their size, by who failed or took no step, which "
        "gets no noise; leave it out": o.drop_inactive is not None,
    }
    own_keys = (o.arrayrecord_key, o.configrecord_key) != (keys.ARRAYS, keys.CONFIG)
    coded_down = o.term.coder("release")
    return {
        "the record keys are part of the protocol: leave them 'arrays', 'config'": own_keys,
        "wire_dtype='{wire_dtype}' does not go with compression, whose updates have a code of their own; "
        "leave one of the two out": o.wire_dtype and (o.term.coder("finish") or coded_down),
        "wire_dtype='{wire_dtype}' needs downlink='model': a client's rounded model does not follow from "
        "the rounded step": o.wire_dtype and o.downlink == "delta",
        "overlap=True sends clients the model ahead of their round, and then only the last step, as "
        "downlink='delta' does; with downlink='{downlink}' each round sends the model: write "
        "downlink='delta' too, or leave overlap out": o.overlap and o.downlink != "delta",
        "overlap=True sends whole models ahead, which a compressed downlink is there to "
        "avoid": o.overlap and coded_down,
        "aggregator={aggregator} does not reach what the clients of {who} upload beside "
        "their updates, so one client could still move all; use aggregator=Mean() (LeaveOneOutMean: or "
        "sum_only=False; a term of your own: or `adds`, or ctx.aggregated and "
        "robust=True)": robust and o.term.unaggregated,
        "incomplete='scale' weighs the clients' updates, and so does {who}: leave one of the two "
        "out": o.incomplete == "scale" and o.term.weigher,
        "incomplete='scale' weighs the updates anew, but {who} counts on their mean; use "
        "incomplete='average' or 'drop'": o.incomplete == "scale"
        and [t.name for t in o.term.able(CountsOnMean)],
        **{f"privacy=CentralDP(...): {why}": o.privacy and bad for why, bad in uncovered.items()},
    }
