"""``flwr-regs methods``: the registry as a table, and what one method costs and refuses."""

from __future__ import annotations

import textwrap
import tomllib

from flwr_regs.experiments import signatures
from flwr_regs.experiments.calls import catalogue
from flwr_regs.experiments.report.terminal import columns
from flwr_regs.methods.registry import COMPOSITIONS, METHODS, TERMS, Method
from flwr_regs.wire.config import nearest

LEGEND = """\
for       device: a client may take part only once; silo: the same clients again
          and again; both
down, up  what a client receives and sends in a round, in models; (1): with
          downlink="delta"; +: and something small
trips     exchanges with a client in a round
state     a client keeps something between rounds
SecAgg    the server needs only sums over the clients
DP        goes with central differential privacy
robust    a robust aggregator covers all that the clients send
streams   the server never holds a whole cohort's uploads
stacks    a cohort can run as one, under torch.func.vmap

Each row is for the call below."""
HEAD = (
    *("method", "for", "down", "up", "trips", "state", "SecAgg", "DP", "robust", "streams", "stacks"),
)  # fmt: skip


def text() -> str:
    """Return the registry as plain text, at most 80 columns wide."""
    cells = [HEAD, *map(_short, METHODS.values())]
    return "\n".join([*columns(cells), "", LEGEND, calls()])


def calls() -> str:
    """Return how methods are written in ``methods=``, and the terms that compose with them."""
    names = [t for row in METHODS.values() for t in row.terms] + [*TERMS]
    lines = ["methods, as calls with their own arguments:"]
    lines += [f"  {row.example}" for row in METHODS.values()]
    lines += ["terms, which compose with + (FedADC+SparseTernary(density_up=0.01));"]
    lines += ["`flwr-regs methods SparseTernary` shows the arguments of one:"]
    terms = textwrap.wrap(", ".join(dict.fromkeys(names)), 76)
    return "\n".join([*lines, *(f"  {line}" for line in terms)])


def one(name: str) -> str:
    """Return what a method costs and goes with, or a term's arguments; ValueError for another name."""
    if name in METHODS:
        return f"{costs(METHODS[name])}\n\n{composes(METHODS[name])}"
    if name not in catalogue():
        raise ValueError(f"there is no method '{name}'{nearest(name, catalogue())}")
    return f"{name}{signatures.signature(name)}\n\n{signatures.document(name)}"


def costs(row: Method) -> str:
    """Return the table of a method's page on what it costs and goes with."""
    down = f"{_models(row.down)} to each client"
    if row.down_delta is not None:
        down += f'; {_models(row.down_delta)} with `downlink="delta"`, if it is in sync'
    goes = {
        "secure aggregation": row.secure_aggregation,
        "central differential privacy": row.central_dp,
        "robust aggregators": row.robust,
    }
    lines = {
        f"`{row.example}`": "cost",
        "---": "---",
        "down in a round": down,
        "up in a round": f"{_models(row.up)} from each client",
        "beside these, and small": row.beside or "nothing",
        "exchanges with a client in a round": str(row.exchanges),
        "a client keeps between rounds": row.state or "nothing",
        "a client computes beside one gradient a step": row.gradients or "nothing",
        "made for": f"cross-{row.setting}" if row.setting != "both" else "cross-device, cross-silo",
        "goes with": ", ".join(what for what, yes in goes.items() if yes) or "–",
        "does not go with": ", ".join(what for what, yes in goes.items() if not yes) or "–",
    }
    return "\n".join(f"| {left} | {right} |" for left, right in lines.items())


def composes(row: Method) -> str:
    """Return what of the package a method does not go with, and the reason that the package gives."""
    refused = tomllib.loads(COMPOSITIONS.read_text(encoding="utf-8"))[row.name]
    text = textwrap.fill(
        f"Joined by `+`, {row.name} goes with every other method and term of the package, and it takes the "
        "settings `privacy=CentralDP(...)`, `wire_dtype` and `overlap=True`"
        + (", but for these:" if refused else "."),
        118,
    )
    if not refused:
        return text
    lines = ["| refused | the package's reason |", "| --- | --- |"]
    lines += [f"| `{what}` | {why} |" for what, why in refused.items()]
    return "\n".join([text, "", *lines])


def _short(row: Method) -> tuple[str, ...]:
    small = "+" if row.beside else ""
    flags = (
        *(bool(row.state), row.secure_aggregation, row.central_dp),
        *(row.robust, row.streams, row.stacks),
    )
    up = f"{row.up:g}{small}"
    return (row.name, row.setting, down(row) + small, up, str(row.exchanges), *map(_mark, flags))


def _models(size: float) -> str:
    return f"{size:g} model" + "s" * (size != 1)


def down(row: Method) -> str:
    """Return what a client receives in a round, in models; in brackets: with ``downlink="delta"``."""
    delta = "" if row.down_delta is None else f" ({row.down_delta:g})"
    return f"{row.down:g}{delta}"


def _mark(yes: bool) -> str:
    return "yes" if yes else "–"
