"""The tables of docs/performance.md and docs/speed.md, and the picture, from the kept results."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from benchmarks.common import BLUE, GREEN, RED, picture, table
from benchmarks.speed.targets import TARGETS, Found, rows_of
from benchmarks.speed.timing import ROOT, Row

OUT = ROOT / "docs" / "studies" / "speed.json.gz"
PAGE = ROOT / "docs" / "performance.md"
"""For users; it has the table `summary`."""
DETAILS = ROOT / "docs" / "speed.md"
"""For developers; it has all the others."""
PICTURE = ROOT / "docs" / "img" / "performance.webp"
MISSING = "not measured"


def kept(path: Path) -> dict[str, Any]:
    """Return the results of a file, none if there is no file; a ``.gz`` is compressed."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return found


def keep(path: Path, found: Mapping[str, Any]) -> None:
    """Write results to a file."""
    data = (json.dumps(found, indent=1, ensure_ascii=False) + "\n").encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def tables(found: Found) -> dict[str, str]:
    """Return the page's tables by name."""
    return {
        "summary": _summary(found),
        "targets": _targets(found),
        "step": _rows(found, "step", ("what", "model", "batch", "threads", "side"), RATIO),
        "clients": _rows(found, "clients", ("side", "grid", "threads"), PER_SECOND),
        "aggregation": _rows(
            found, "aggregation", ("clients", "parameters", "threads", "side"), MEMORY
        ),
        "codec": _codec(found),
        "growth": _rows(found, "growth", ("what", "grid", "size", "clients"), SECONDS),
        "ray": _rows(found, "ray", ("side", "clients", "rounds"), SIMULATED),
        "peers": _rows(found, "peers", ("side",), PEERS),
        "profile": _profile(found),
        "gpu": _rows(found, "gpu", ("model", "side", "grid"), PER_SECOND[:2]),
        "machine": _machine(found),
    }


def _number(value: float) -> str:
    """Return a number with three digits that count, or all of a large one."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _range(value: Mapping[str, float], factor: float = 1.0) -> str:
    """Return a median with its quartiles."""
    median, low, high = (_number(factor * value[k]) for k in ("median", "low", "high"))
    return f"{median} ({low} to {high})"


def _mebibytes(row: Row) -> str:
    return f"{row['memory-first'] / 2**20:,.0f} → {row['memory-last'] / 2**20:,.0f}"


Columns = Sequence[tuple[str, Callable[[Row], str]]]
RATIO: Columns = (
    ("ms", lambda r: _range(r["seconds"], 1000)),
    ("x bare", lambda r: _range(r["ratio"])),
)
PER_SECOND: Columns = (
    ("clients/s", lambda r: _range(r["per-second"])),
    ("x bare loop", lambda r: _range(r["ratio"])),
    ("ms a client beyond it", lambda r: _range(r["overhead-ms"])),
    ("over bare vmap", lambda r: _range(r["over-vmap"]) if "over-vmap" in r else "–"),
    ("over FedJAX's FedAvg", lambda r: _range(r["over-fedjax"]) if "over-fedjax" in r else "–"),
)
MEMORY: Columns = (
    ("seconds", lambda r: _range(r["seconds"])),
    ("x Flower", lambda r: _range(r["ratio"])),
    ("models of memory", lambda r: _number(r["models"])),
)
SECONDS: Columns = (
    ("first round, s", lambda r: _number(r["first"])),
    ("later rounds, s", lambda r: _range(r["seconds"])),
)
SIMULATED: Columns = (
    ("clients/s", lambda r: _range(r["per-second"])),
    ("MiB, early → end", _mebibytes),
)
PEERS: Columns = (("clients/s", lambda r: _range(r["per-second"])),)
TITLES = {"what": "", "side": "side", "size": "size", "grid": "grid", "model": "model"}


def _rows(found: Found, part: str, keys: Sequence[str], columns: Columns) -> str:
    """Return a table with a line for each row."""
    if not (rows := rows_of(found, part)):
        return f"*{MISSING}*"
    lines = []
    for row in rows:
        cells = [row.get(key, "") for key in keys]
        shown = [f"{v:,}" if isinstance(v, int) else str(v) for v in cells]
        lines.append(shown + [_cell(row, show) for _, show in columns])
    return table([TITLES.get(k, k) for k in keys] + [name for name, _ in columns], lines)


def _cell(row: Row, show: Callable[[Row], str]) -> str:
    return f"skipped: {row['skipped']}" if "skipped" in row else show(row)


def _codec(found: Found) -> str:
    columns: Columns = (
        ("bits a parameter", lambda r: _number(r["bits"])),
        ("code, ms", lambda r: _range(r["code-seconds"], 1000)),
        ("decode, ms", lambda r: _range(r["decode-seconds"], 1000)),
    )
    return _rows(found, "codec", ("side", "parameters"), columns)


def _profile(found: Found) -> str:
    """Return the profile: the files that take most, of each round."""
    rows = rows_of(found, "profile")
    lines = [[r["what"], f"`{r['file']}`", f"{r['calls']:,}", _number(r["share"])] for r in rows]
    return table(["round", "file", "calls", "time, %"], lines) if lines else f"*{MISSING}*"


def _summary(found: Found) -> str:
    """Return the clients a second on one thread."""
    lines = [
        [r["side"], r["grid"] or "–", _range(r["per-second"]), _number(r["ratio"]["median"])]
        for r in rows_of(found, "clients")
        if r["threads"] == 1
    ]
    head = ["what trains", "grid", "clients/s", "time over the bare loop's"]
    return table(head, lines) if lines else f"*{MISSING}*"


def _targets(found: Found) -> str:
    """Return each target with what was measured, and whether it is met."""
    lines = []
    for target in TARGETS:
        value = target.value(found)
        shown = MISSING if value is None else _number(value)
        verdict = "" if value is None else "met" if target.met(value) else "missed"
        lines.append([target.says, target.limit_text, shown, verdict])
    return table(["what", "target", "measured", ""], lines)


def _machine(found: Found) -> str:
    """Return what was measured where, on which commit."""
    lines = []
    for part, taken in found.items():
        m = taken["machine"]
        where = f"{m['processor']}, {m['cores']} cores, {m['memory-GiB']} GiB, {m['system']}"
        with_ = f"Python {m['python']}, torch {m['torch']}, flwr {m['flwr']}, NumPy {m['numpy']}"
        ray = f", Ray {m['ray']}" if part == "ray" else ""
        lines.append(
            [
                part,
                f"`{m['commit']}`",
                where,
                with_ + ray,
                str(m["load"]),
                f"{taken['seconds']:.0f}",
            ]
        )
    return table(["part", "commit", "machine", "versions", "load after", "took, s"], lines)


LOOKS: Mapping[str, Mapping[str, Any]] = {
    "InProcessGrid": {"color": BLUE, "marker": "o", "mfc": "none"},
    "StackedGrid": {"color": BLUE, "marker": "o"},
    "StackedGrid, compile=True": {"color": BLUE, "marker": "D"},
    "plain torch": {"color": GREEN, "marker": "s"},
    "another library": {"color": RED, "marker": "^"},
}
"""What trains -> its dot; a grid is the package's."""


Dots = Sequence[tuple[str, Mapping[str, Row]]]
"""The lines of the picture, the slowest first: a name, and its rows by look."""


def dots(found: Found) -> tuple[Dots, Dots]:
    """Return the package's methods by grid, and what stands beside them: plain loops, another library."""
    methods: dict[str, dict[str, Row]] = {}
    beside: dict[str, dict[str, Row]] = {}
    for row in rows_of(found, "clients"):
        if row["threads"] != 1:
            continue
        if row["grid"] in LOOKS:
            methods.setdefault(row["side"], {})[row["grid"]] = row
        elif not row["grid"]:
            kind = "plain torch" if row["side"].startswith("bare ") else "another library"
            beside[row["side"]] = {kind: row}

    def fastest(line: tuple[str, dict[str, Row]]) -> float:
        return max(float(row["per-second"]["median"]) for row in line[1].values())

    return sorted(methods.items(), key=fastest), sorted(beside.items(), key=fastest)


def draw(found: Found, path: Path) -> None:
    """Draw clients a second on the small job: the package, plain loops and another library, of one run."""
    groups = dots(found)
    if not groups[0]:
        return
    lines = [*groups[0], ("", {}), *groups[1]]
    with picture(path, 7.2, 1.2 + 0.2 * len(lines)) as made:
        axes = made.subplots()
        for at, (_, rows) in enumerate(lines):
            for kind, row in rows.items():
                low, median, high = (row["per-second"][k] for k in ("low", "median", "high"))
                axes.plot((low, high), (at, at), color=LOOKS[kind]["color"], ls="-", lw=1)
                axes.plot(median, at, ls="", ms=5, zorder=3, **LOOKS[kind])
        axes.set_yticks(range(len(lines)), [name for name, _ in lines])
        axes.tick_params(axis="y", length=0)
        axes.axhline(len(groups[0]), color="0.6", lw=0.6)
        axes.set_xscale("log")
        ticks = [10**power * step for power in range(5) for step in (1, 2, 5)]
        low, high = axes.get_xlim()
        shown = [tick for tick in ticks if low <= tick <= high]
        axes.set_xticks(shown, [f"{tick:,}" for tick in shown])
        axes.minorticks_off()
        axes.set_xlabel("clients a second on one thread, median and quartiles (logarithmic scale)")
        key = [
            Line2D([], [], ls="", ms=5, label=kind, **look)
            for kind, look in LOOKS.items()
            if any(kind in rows for _, rows in lines)
        ]
        made.legend(handles=key, loc="outside upper center", ncols=3, frameon=False)
