"""The targets for speed, each as a number of the results and its limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.speed.timing import Row

Value = Callable[[Sequence[Row]], float | None]
LARGE, CNN = "MLP 784-2048-2048-10", "CNN of McMahan et al."


@dataclass(frozen=True)
class Target:
    """A limit for a number; `least` says that it is a lower limit."""

    says: str
    part: str
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


def _found(rows: Sequence[Row], where: Mapping[str, Any], *path: str) -> float | None:
    """Return a number of the only row with these entries, or None without such a row."""
    chosen = [
        r for r in rows if "skipped" not in r and all(r.get(k) == v for k, v in where.items())
    ]
    if not chosen:
        return None
    value: Any = chosen[0]
    for key in path:
        value = value[key]
    return float(value)


def _value(where: Mapping[str, Any], *path: str) -> Value:
    return partial(_at, where, path)


def _at(where: Mapping[str, Any], path: tuple[str, ...], rows: Sequence[Row]) -> float | None:
    return _found(rows, where, *path)


def _client(side: str, grid: str = "InProcessGrid") -> dict[str, Any]:
    return {"side": side, "grid": grid, "threads": 1}


def _efl(rows: Sequence[Row]) -> float | None:
    """EFL's seconds over FedAvg's, one by one."""
    efl, plain = (_found(rows, _client(m), "seconds", "median") for m in ("EFL", "FedAvg"))
    return None if efl is None or plain is None else efl / plain


def _population(rows: Sequence[Row]) -> float | None:
    """Seconds of a round of 1,000 drawn from 100,000, over those from 1,000."""
    every = [r for r in rows if r.get("what") == "population"]
    grids = list(dict.fromkeys(r["grid"] for r in every))
    found = []
    for grid in grids:
        mine = {r["size"]: r["seconds"]["median"] for r in every if r["grid"] == grid}
        found.append(mine[max(mine)] / mine[min(mine)])
    return max(found, default=None)


def _step(model: str, method: str, limit: float) -> Target:
    where = {"model": model, "side": method, "what": "step", "threads": 1}
    says = f"local step of {method} on the {model.split(' of ')[0]}, over torch's"
    return Target(says, "step", limit, _value(where, "ratio", "median"))


def _aggregation(clients: int, side: str, limit: float, what: str) -> Target:
    where = {"clients": clients, "side": side}
    if what == "models":
        says = f"models of memory beyond the replies, {side}, {clients} clients"
        return Target(says, "aggregation", limit, _value(where, "models"))
    says = f"aggregation of {clients} replies, {side}, over Flower's"
    return Target(says, "aggregation", limit, _value(where, "ratio", "median"))


TARGETS = (
    Target(
        "clients a second, FedAvg, StackedGrid",
        "clients",
        1842,
        _value(_client("FedAvg", "StackedGrid"), "per-second", "median"),
        least=True,
    ),
    *(
        Target(
            f"clients a second, {method}, StackedGrid",
            "clients",
            1560,
            _value(_client(method, "StackedGrid"), "per-second", "median"),
            least=True,
        )
        for method in ("FedProx", "FedFOR", "FedADC", "SCAFFOLD")
    ),
    Target(
        "FedAvg one by one, over the bare loop with the same loader",
        "clients",
        1.5,
        _value(_client("FedAvg"), "ratio", "median"),
    ),
    Target(
        "overhead of a client call, ms",
        "clients",
        1.0,
        _value(_client("FedAvg"), "overhead-ms", "median"),
    ),
    Target("EFL one by one, over FedAvg", "clients", 3.0, _efl),
    _step(LARGE, "FedProx", 1.25),
    _step(LARGE, "FedFOR", 1.45),
    _step(LARGE, "FedADC", 1.35),
    *(_step(CNN, method, 1.05) for method in ("FedProx", "FedFOR", "FedADC")),
    Target(
        "two epochs of FedADC+ on the CNN, over torch's",
        "step",
        1.5,
        _value(
            {"model": CNN, "side": "FedADCPlus", "what": "two epochs", "threads": 1},
            "ratio",
            "median",
        ),
    ),
    _aggregation(10, "FedAvg", 1.0, "seconds"),
    _aggregation(20, "FedAvg", 1.0, "seconds"),
    _aggregation(10, "FedAvg", 1.1, "models"),
    _aggregation(20, "FedAvg", 1.1, "models"),
    _aggregation(10, "FedAvg, ternary code", 3.2, "models"),
    Target("a round of 1,000 of 100,000 clients, over 1,000 of 1,000", "growth", 1.2, _population),
)
