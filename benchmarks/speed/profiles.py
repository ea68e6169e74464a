"""Where the time goes: the files that take most of a round of the small job.

A file's time is that of its own functions, and of the built-in ones (torch's, NumPy's) that they call.
"""

from __future__ import annotations

import cProfile
import pstats
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import flwr_regs as fr
from benchmarks.speed import aggregation, jobs
from benchmarks.speed.timing import ROOT, Effort, Row, say, threads

MOST = 10
"""Files that are shown of each profile."""
BUILT_IN = "~"


def measure(effort: Effort) -> list[Row]:
    """Return a row for each of the files that take most, of several rounds."""
    number = 4 if effort.quick else jobs.CLIENTS
    calls: dict[str, Callable[[], Any]] = {}
    for name, method in (
        ("InProcessGrid", "FedAvg"),
        ("InProcessGrid", "EFL"),
        ("StackedGrid", "FedAvg"),
        ("StackedGrid", "SCAFFOLD"),
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
    calls, seconds = Counter[str](), Counter[str]()
    for (file, _, _), (_, count, own, _, callers) in found.items():
        if file != BUILT_IN:
            calls[_short(file)] += count
            seconds[_short(file)] += own
            continue
        for (caller, _, _), (_, _, part, _) in callers.items():
            seconds["torch" if caller == BUILT_IN else _short(caller)] += part
    whole = sum(seconds.values())
    return [
        {
            "what": what,
            "file": file,
            "calls": calls[file],
            "share": float(f"{100 * own / whole:.3g}"),
        }
        for file, own in seconds.most_common(MOST)
    ]


def _short(file: str) -> str:
    """Return a file's name without the folders of this machine."""
    path = Path(file)
    ours = path.is_relative_to(ROOT) and "site-packages" not in path.parts
    return (path.relative_to(ROOT) if ours else Path(*path.parts[-3:])).as_posix()
