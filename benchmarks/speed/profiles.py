"""Where the time goes: the functions that take most of a round of the small job, by their own time."""

from __future__ import annotations

import cProfile
import pstats
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flwr_regs as fr
from benchmarks.speed import aggregation, jobs
from benchmarks.speed.timing import ROOT, Effort, Row, say, threads

MOST = 8
"""Functions that are shown of each profile."""


def measure(effort: Effort) -> list[Row]:
    """Return a row for each of the functions that take most, of several rounds."""
    number = 4 if effort.quick else jobs.CLIENTS
    calls: dict[str, Callable[[], Any]] = {}
    for name, method in (
        ("InProcessGrid", "FedAvg"),
        ("InProcessGrid", "EFL"),
        ("StackedGrid", "FedAvg"),
    ):
        if (kind := getattr(fr, name, None)) is not None:
            calls[f"{method}, {name}"] = jobs.side(method, kind(jobs.app(method), number))
    clients, parameters = (4, 500) if effort.quick else aggregation.SIZES[0]
    build = partial(fr.FedAvg, seed=1, fraction_evaluate=0.0)
    replies = aggregation.Replies(build, jobs.wide(parameters), clients)
    rows = []
    with threads(1):
        for what, call in calls.items():
            say(f"profile: {what}")
            call()
            rows += _rows(what, call)
        came = replies.next()
        rows += _rows(f"aggregation of {clients} replies", partial(replies.end, came))
    return rows


def _rows(what: str, call: Callable[[], Any]) -> list[Row]:
    profile = cProfile.Profile()
    profile.runcall(call)
    found: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    whole = sum(own for _, _, own, _, _ in found.values())
    most = sorted(found.items(), key=lambda item: -item[1][2])[:MOST]
    return [
        {
            "what": what,
            "function": _name(*place),
            "calls": calls,
            "share": float(f"{100 * own / whole:.3g}"),
        }
        for place, (_, calls, own, _, _) in most
    ]


def _name(file: str, _: int, function: str) -> str:
    """Return a function's name with its file, without the folders of this machine."""
    if file == "~":  # built in
        return function.strip("<>")
    path = Path(file)
    ours = path.is_relative_to(ROOT)
    where = path.relative_to(ROOT) if ours else Path(*path.parts[-2:])
    return f"{where.as_posix()}: {function}"
