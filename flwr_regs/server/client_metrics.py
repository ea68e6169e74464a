"""The clients' metrics: what of them can be used, what is kept, and which of them are averaged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from flwr_regs.wire.arrays import LARGEST, ProtocolError
from flwr_regs.wire.keys import METRICS
from flwr_regs.wire.parcel import Parcel
from flwr_regs.wire.text import LONGEST_NAME, MOST_NAMES, quoted, shown

MOST_ENTRIES = 1000
"""Metrics, and entries of a config, that a reply may have; numbers that all its lists may have."""

SMALLEST = 1e-15
"""The smallest number of examples: the weight of a smaller one could be rounded to 0."""


Metrics = Mapping[str, Any]


def is_number(value: Any) -> bool:
    """Whether a value that a client reports is a number, perhaps NaN; a boolean is none."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def usable(value: Any) -> bool:
    """Whether a value that a client reports is a number from −1e15 to 1e15."""
    return is_number(value) and abs(value) <= LARGEST


def read_metrics(pid: int, parcel: Parcel, weighted_by_key: str) -> tuple[Metrics, float]:
    """Return (a reply's metrics, the client's examples); raise ProtocolError without these.

    Names are made printable. A list is left out that would make more than `MOST_ENTRIES` numbers of all
    lists together: an evaluation's stay in the history.
    """
    what = f"the reply of client {pid}"
    if parcel.metrics is None:
        raise ProtocolError(f"{what} holds no MetricRecord '{METRICS}', only {parcel.names}")
    for kind, entries in (("metrics", parcel.metrics), ("config entries", parcel.config)):
        if len(entries) > MOST_ENTRIES:
            raise ProtocolError(f"{what} has {len(entries)} {kind}, more than {MOST_ENTRIES}")
    count = parcel.metrics.get(weighted_by_key)
    if not usable(count) or not float(count or 0) >= SMALLEST:
        good = f"a number from {SMALLEST:g} to {LARGEST:g}, not {quoted(count, 40)}"
        raise ProtocolError(f"{what}: metric '{weighted_by_key}' must be {good}")
    metrics, room = dict[str, Any](), MOST_ENTRIES
    for name, value in parcel.metrics.items():
        size = len(value) if isinstance(value, list) else 0
        if size <= room:
            metrics[shown(name, LONGEST_NAME)] = value
            room -= size
    return metrics, float(count or 0)


def long_lists(parcel: Parcel, kept: Metrics) -> list[str]:
    """Return the names of the lists of a reply that :func:`read_metrics` has left out."""
    sent = parcel.metrics or {}
    names = (shown(n, LONGEST_NAME) for n, v in sent.items() if isinstance(v, list))
    return [n for n in names if n not in kept] if len(kept) < len(sent) else []


def common_metrics(metrics: Mapping[int, Metrics]) -> tuple[list[Metrics], dict[int, list[str]]]:
    """Return (the clients' metrics that can be averaged, client -> the names that are left out of it).

    Flower's mean needs the same single numbers of every client. A name is kept if over half of the clients
    report a number under it. A client without a usable number under each of these has no share in the mean:
    it is named with what it lacks. One with other names has them left out. A name under which no client has
    a usable number is kept as it is: a loss of NaN is news.
    """
    single = {p: {k: v for k, v in m.items() if is_number(v)} for p, m in metrics.items()}
    good = {p: {k for k, v in m.items() if abs(v) <= LARGEST} for p, m in single.items()}
    numbers, usable_ones = (Counter(chain(*of.values())) for of in (single, good))
    kept = sorted(name for name, n in numbers.items() if 2 * n > len(single))
    strict = {name for name in kept if 2 * usable_ones[name] > len(single)}
    left_out: dict[int, list[str]] = {}
    averaged: list[Metrics] = []
    for pid, m in single.items():
        lacking = {*kept} - m.keys() | (strict - good[pid])
        if odd := sorted(lacking | (m.keys() - {*kept})):
            left_out[pid] = odd[:MOST_NAMES]
        if not lacking:
            averaged.append({name: m[name] for name in kept})
    return averaged, left_out


def weighted_mean(metrics: Sequence[Metrics], weight: str) -> dict[str, float]:
    """Return the clients' mean under each name but `weight`, which weighs them: as Flower's own mean.

    Where all agree, it is what they say, without rounding.
    """
    total = sum(m[weight] for m in metrics)
    means = {}
    for name in metrics[0]:
        if name != weight:
            mean = sum(m[name] * (m[weight] / total) for m in metrics)
            means[name] = metrics[0][name] if len({m[name] for m in metrics}) == 1 else mean
    return means
