"""The targets for speed, each as a number of the results and its limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.speed.timing import Row

Where = Mapping[str, Any]
Found = Mapping[str, Mapping[str, Any]]
"""The results: part -> its rows, and what they were measured on."""
Value = Callable[[Found], float | None]
LARGE, CNN = "MLP 784-2048-2048-10", "CNN of McMahan et al."


@dataclass(frozen=True)
class Target:
    """A limit for a number of the results; `least` says that it is a lower limit."""

    says: str
    limit: float
    value: Value
    least: bool = False

    @property
    def limit_text(self) -> str:
        """The limit as text."""
        return f"{'≥' if self.least else '≤'} {self.limit:,g}"

    def met(self, value: float) -> bool:
        """Whether a value keeps the limit."""
        return value >= self.limit if self.least else value <= self.limit


def rows_of(found: Found, part: str) -> list[Row]:
    """Return a part's rows; none if it was not measured."""
    return list(found.get(part, {}).get("rows", []))


def _found(found: Found, part: str, where: Where, *path: str) -> float | None:
    """Return a number of the only row with these entries, or None without such a row."""
    chosen = [
        r
        for r in rows_of(found, part)
        if path[0] in r and "skipped" not in r and all(r.get(k) == v for k, v in where.items())
    ]
    if not chosen:
        return None
    value: Any = chosen[0]
    for key in path:
        value = value[key]
    return float(value)


def _value(part: str, where: Where, *path: str) -> Value:
    return lambda found: _found(found, part, where, *path)


def _quotient(above: Value, below: Value) -> Value:
    def value(found: Found) -> float | None:
        a, b = above(found), below(found)
        return None if a is None or b is None else a / b

    return value


def _client(side: str, grid: str = "InProcessGrid") -> dict[str, Any]:
    return {"side": side, "grid": grid, "threads": 1}


def _per_second(method: str, grid: str = "InProcessGrid") -> Value:
    return _value("clients", _client(method, grid), "per-second", "median")


def _peer(side: str) -> Value:
    return _value("peers", {"side": side}, "per-second", "median")


def _population(found: Found) -> float | None:
    """Seconds of a round of 1,000 drawn from 100,000, over those from 1,000."""
    every = [r for r in rows_of(found, "growth") if r.get("what") == "population"]
    grids = list(dict.fromkeys(r["grid"] for r in every))
    each = []
    for grid in grids:
        mine = {r["size"]: r["seconds"]["median"] for r in every if r["grid"] == grid}
        each.append(mine[max(mine)] / mine[min(mine)])
    return max(each, default=None)


def _step(model: str, method: str, limit: float) -> Target:
    where = {"model": model, "side": method, "what": "step", "threads": 1}
    says = f"local step of {method} on the {model.split(' of ')[0]}, over torch's"
    return Target(says, limit, _value("step", where, "ratio", "median"))


def _aggregation(clients: int, threads: int, limit: float) -> Target:
    where = {"clients": clients, "side": "FedAvg", "threads": threads}
    number = ("one thread", "two threads")[threads - 1]
    says = f"aggregation of {clients} replies, FedAvg, {number}, over Flower's"
    return Target(says, limit, _value("aggregation", where, "ratio", "median"))


def _models(clients: int, side: str, limit: float) -> Target:
    where = {"clients": clients, "side": side, "threads": 1}
    says = f"models of memory beyond the replies, {side}, {clients} clients"
    return Target(says, limit, _value("aggregation", where, "models"))


OVER_FEDJAX = (
    ("FedAvg", "StackedGrid", 1.0),
    ("FedAvg", "StackedGrid, compile=True", 2.0),
    *((method, "StackedGrid", 0.9) for method in ("FedProx", "FedFOR", "FedADC")),
    ("SCAFFOLD", "StackedGrid", 0.8),
    *((method, "StackedGrid", 0.4) for method in ("RFedAvgPlus", "EFL, ternary")),
)
STACKED = ("FedAvg", "FedProx", "FedFOR", "FedADC", "SCAFFOLD")
TARGETS = (
    Target(
        "FedAvg, StackedGrid: clients a second over FedJAX's, same run",
        1.0,
        _quotient(_peer("FedAvg, StackedGrid"), _peer("FedJAX 0.0.17")),
        least=True,
    ),
    *(
        Target(
            f"{method}, {grid}: clients a second over FedJAX's FedAvg, same run",
            limit,
            _value("clients", _client(method, grid), "over-fedjax", "median"),
            least=True,
        )
        for method, grid, limit in OVER_FEDJAX
    ),
    *(
        Target(
            f"{method}, StackedGrid: clients a second over the bare vmap's",
            0.9,
            _value("clients", _client(method, "StackedGrid"), "over-vmap", "median"),
            least=True,
        )
        for method in STACKED
    ),
    *(
        Target(
            f"FedAvg, {way}: clients a second over one stack's of all",
            limit,
            _quotient(_per_second("FedAvg", way), _per_second("FedAvg", "StackedGrid")),
            least=True,
        )
        for way, limit in (
            ("StackedGrid, workers=2", 1.7),
            ("StackedGrid, a tenth of the clients", 1.0),
        )
    ),
    Target(
        "FedAvg one by one, over the bare loop with the same loader",
        1.5,
        _value("clients", _client("FedAvg"), "ratio", "median"),
    ),
    Target(
        "overhead of a client call, ms",
        1.0,
        _value("clients", _client("FedAvg"), "overhead-ms", "median"),
    ),
    Target(
        "EFL one by one, over FedAvg", 3.0, _quotient(_per_second("FedAvg"), _per_second("EFL"))
    ),
    _step(LARGE, "FedProx", 1.25),
    _step(LARGE, "FedFOR", 1.45),
    _step(LARGE, "FedADC", 1.35),
    *(_step(CNN, method, 1.05) for method in ("FedProx", "FedFOR", "FedADC")),
    Target(
        "two epochs of FedADC+ on the CNN, over torch's",
        1.5,
        _value(
            "step",
            {"model": CNN, "side": "FedADCPlus", "what": "two epochs", "threads": 1},
            *("ratio", "median"),
        ),
    ),
    *(_aggregation(10, threads, 1.0) for threads in (1, 2)),
    *(_aggregation(20, threads, 1.25) for threads in (1, 2)),
    _models(20, "FedAvg", 2.2),
    *(_models(10, side, 2.2) for side in ("FedAvg", "CoordinateMedian", "Krum")),
    _models(10, "FedAvg, ternary code", 3.2),
    Target("a round of 1,000 of 100,000 clients, over 1,000 of 1,000", 1.2, _population),
)
