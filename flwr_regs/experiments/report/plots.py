"""Pictures fit for a paper: accuracy over rounds, bytes or seconds; clients; the labels of a partition.

The functions return matplotlib figures and never touch pyplot's state. Each raises ImportError without
matplotlib; the message names the extra to install.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flwr_regs.experiments.report.curves import (
    Curve,
    Method,
    group,
    mean_over_seeds,
    positions,
    seeds_in_words,
)
from flwr_regs.experiments.report.label_spread import labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Curve", "accuracy", "clients", "labels", "save"]

AXES = {"round": "round", "megabytes": "megabytes per client, down and up", "seconds": "seconds"}
LOG_ABOVE = 30  # times: from the smallest to the largest total, for a logarithmic axis


def accuracy(
    curves: Sequence[Curve],
    *,
    x: str = "round",
    target: float | None = None,
    title: str = "",
    ordered: bool = False,
    measured: str = "test accuracy",
) -> Figure:
    """Draw accuracy as a line for each label: the mean over seeds, in a band of one standard deviation.

    The band is the sample's (n - 1), and there is none for one seed. The mean is taken round by round,
    over the rounds that all seeds have: with ``x="megabytes"`` or ``"seconds"`` a point is the seeds' mean
    x after a round against their mean accuracy after it. Runs that stopped, or whose accuracy is not
    finite, are in neither mean nor band: each is a thin line to its last finite accuracy, with a cross
    there, and the label counts them.

    Parameters
    ----------
    curves : the runs, in the order of the lines' looks
    x : ``"round"``, ``"megabytes"`` (logarithmic if the labels' totals differ by more than 30 times) or
        ``"seconds"``
    target : an accuracy (a fraction) to mark
    title : one sentence above the axes
    ordered : whether the labels are an ordered parameter's values, given in order: so are the colours then
    measured : what the accuracy is, for the axis

    Returns
    -------
    the figure, 6.3 inches wide and at least 3.9 high; :func:`save` writes it

    Raises ValueError if there are no curves, `x` is another word, a label has a seed twice or seeds
    without a common round, or an x is not finite.
    """
    from flwr_regs.experiments.report import drawing

    if x not in AXES:
        raise ValueError(f"x is {x!r}: expected one of {', '.join(AXES)}")
    methods = group(curves)
    with drawing.style():
        figure, axes = drawing.canvas()
        log = x == "megabytes" and _logarithmic(methods)
        labels = []
        for index, method in enumerate(methods):
            look = drawing.look(index, len(methods), ordered)
            text = method.text.replace(method.count, method.count.replace(" ", "\u00a0"))
            labels.append(drawing.Label(text, *_draw(axes, method, x, log, look)))
        mark = None
        if target is not None:
            look = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 0.9, "zorder": 2.5}
            axes.axhline(100 * target, gid="target", **look)
        _limits(axes, x, log)
        if target is not None:
            mark = drawing.Label(
                f"target {100 * target:.4g} %", look, (axes.get_xlim()[1], 100 * target)
            )
        axes.set(xlabel=AXES[x], ylabel=f"{measured} (%)")
        if len(labels) > drawing.AT_THE_LINES and not ordered:  # a list in the order of the ends
            labels.sort(key=lambda label: -label.end[1] if label.end else np.inf)
        caption = f"{seeds}." if (seeds := seeds_in_words(methods)) else ""
        if any(len(m.whole) > 1 for m in methods):
            caption = f"Mean and standard deviation over {caption}"
        if any(m.broken for m in methods):
            caption += " Thin line with a cross: a run that stopped there"
            caption += "; it is in no mean." if seeds else "; none finished."
        right, height, write = drawing.margin(figure, axes, labels, mark)
        drawing.frame(
            figure, axes, title=title, caption=caption.strip(), right=right, at_least=height
        )
        write()
    return figure


def _logarithmic(methods: Sequence[Method]) -> bool:
    totals = [
        max(positions(c, "megabytes"), default=0) for m in methods for c in m.whole or m.broken
    ]
    positive = [t for t in totals if t > 0]
    return bool(positive) and max(positive) > LOG_ABOVE * min(positive)


def _draw(
    axes: Axes, method: Method, x: str, log: bool, look: dict[str, Any]
) -> tuple[dict[str, Any], tuple[float, float] | None]:
    """Draw a method's runs; return the look of its label's sample and the end of its line."""
    ends: list[tuple[float, float]] = []
    thin = {**look, "linestyle": "-", "linewidth": 0.6, "label": "_stopped"}
    cross: dict[str, Any] = {
        "marker": "x",
        "markersize": 4.5,
        "markeredgewidth": 1,
        "clip_on": False,
    }
    for curve in method.broken:
        finite = np.isfinite(curve.accuracy)
        length = len(finite) if finite.all() else int(finite.argmin())
        across = np.asarray(positions(curve, x)[:length], float)
        up = 100 * np.asarray(curve.accuracy[:length], float)
        shown = across > 0 if log else slice(None)
        across, up = across[shown], up[shown]
        axes.plot(across, up, gid=f"stopped {method.label}", **thin)
        axes.plot(across[-1:], up[-1:], gid=f"cross {method.label}", **thin, **cross)
        ends += [(float(a), float(u)) for a, u in zip(across[-1:], up[-1:], strict=True)]
    if not method.whole:
        return thin, max(ends, default=None)
    across, mean, deviation = mean_over_seeds(method, x)
    if log:
        shown = across > 0
        across, mean, deviation = across[shown], mean[shown], deviation[shown]
    if len(method.whole) > 1:
        fill: dict[str, Any] = {"color": look["color"], "alpha": 0.16, "linewidth": 0, "zorder": 2}
        gid = f"band {method.label}"
        axes.fill_between(across, mean - deviation, mean + deviation, gid=gid, **fill)
    dot: dict[str, Any] = {"marker": "o", "markersize": 4} if len(mean) == 1 else {}
    axes.plot(across, mean, gid=f"mean {method.label}", label=method.text, **look, **dot)
    return look, (float(across[-1]), float(mean[-1])) if len(mean) else None


def _limits(axes: Axes, x: str, log: bool) -> None:
    """Set limits with a margin around what is drawn, and ticks: whole rounds, plain numbers."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

    drawn = [line.get_xydata() for line in axes.lines if line.get_gid() != "target"]
    points = np.concatenate([np.asarray(d, float).reshape(-1, 2) for d in drawn])
    high = [np.asarray(path.vertices)[:, 1] for c in axes.collections for path in c.get_paths()]
    flat = [
        np.asarray(line.get_ydata(), float) for line in axes.lines if line.get_gid() == "target"
    ]
    up = np.clip(np.concatenate([points[:, 1], *high, *flat]), 0, 100)
    low, top = (up.min(), up.max()) if len(up) else (0.0, 100.0)
    room = max(0.04 * (top - low), (0.5 - top + low) / 2)
    axes.set_ylim(low - room, top + room)
    axes.yaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    left, right = (points[:, 0].min(), points[:, 0].max()) if len(points) else (1.0, 2.0)
    if log:
        axes.set_xscale("log")
        axes.set_xlim(left / 1.08, right * 1.08)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        return
    room = 0.015 * (right - left) or 0.5
    axes.set_xlim(left - room, right + room)
    if x == "round":
        axes.xaxis.set_major_locator(
            MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
        )


def clients(curves: Sequence[Curve], *, title: str = "", measured: str = "test accuracy") -> Figure:
    """Draw the spread over clients: a row for each label, a point for each client of each seed.

    Points at nearly the same accuracy are stacked, which moves a point by at most 1 / 150 of the spread.
    Below them stand the median and the quartiles over all clients of all seeds. Runs that stopped have no
    final model; the label counts them. A NaN is a client that was not measured, and left out.

    Raises ValueError if there are no curves, a label has a seed twice, or no run holds clients' accuracies.
    """
    from flwr_regs.experiments.report import drawing

    methods = group(curves)
    pooled = [100 * np.array([a for c in m.whole for a in c.clients], float) for m in methods]
    values = [np.sort(v[np.isfinite(v)]) for v in pooled]
    every = np.concatenate(values)
    if not len(every):
        raise ValueError(
            "no whole run holds the clients' accuracies: expected them in Curve.clients"
        )
    low, top = every.min(), every.max()
    column = max((top - low) / 75, 1e-9)  # about a point's width
    columns = [np.round((v - low) / column).astype(int) for v in values]
    levels = [np.arange(len(c)) - np.searchsorted(c, c) for c in columns]
    step = min(0.09, 0.6 / (1 + max(level.max() for level in levels if len(level))))
    with drawing.style():
        figure, axes = drawing.canvas(2.0)
        for row, method in enumerate(methods):
            colour = drawing.look(row, len(methods), False)["color"]
            dot: dict[str, Any] = {
                "linestyle": "",
                "marker": "o",
                "markersize": 3,
                "markeredgewidth": 0,
                "alpha": 0.55,
            }
            x = low + column * columns[row]
            axes.plot(
                x, row - step * levels[row], color=colour, gid=f"points {method.label}", **dot
            )
            if len(x):
                first, median, third = np.quantile(values[row], [0.25, 0.5, 0.75])
                bar: dict[str, Any] = {"color": colour, "gid": f"quartiles {method.label}"}
                axes.plot([first, third], [row + 0.16] * 2, linewidth=3.5, alpha=0.45, **bar)
                bar["gid"] = f"median {method.label}"
                axes.plot([median] * 2, [row + 0.09, row + 0.23], linewidth=1.8, **bar)
        names = [drawing.wrap(figure, m.text, 1.6, 8) for m in methods]
        axes.set_yticks(range(len(methods)), names, fontsize=8, parse_math=False)
        room = max(0.03 * (top - low), 0.25)
        axes.set(xlim=(low - room, top + room), ylim=(len(methods) - 0.62, -0.75))
        axes.set_xlabel(f"{measured} of a client with the final model (%)")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        sizes = sorted({len(c.clients) for m in methods for c in m.whole if len(c.clients)})
        number = "to".join(f" {n} " for n in dict.fromkeys((sizes[0], sizes[-1])))
        seeds = seeds_in_words([m for m, v in zip(methods, values, strict=True) if len(v)])
        caption = (
            f"Points:{number}clients of each seed. Bars: median and quartiles over them, {seeds}."
        )
        lines = 1 + max(name.count("\n") for name in names)
        row_height = max(0.5 if len(methods) <= 8 else 0.34, 0.05 + 0.14 * lines)
        tall = row_height * len(methods)
        drawing.frame(figure, axes, title=title, caption=caption, at_least=tall)
    return figure


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write `path` as PNG (200 dots per inch) and PDF, and return the two paths.

    `path` may end in ``.png`` or ``.pdf``, or in neither. A file is replaced as a whole or not at all.
    Nothing in it depends on the date, so equal figures give equal bytes.
    """
    from flwr_regs.experiments.report import drawing

    base = Path(path)
    base = base.with_suffix("") if base.suffix in (".png", ".pdf") else base
    base.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, undated in (("png", "Software"), ("pdf", "CreationDate")):
        final = base.with_name(f"{base.name}.{kind}")
        part = base.with_name(f".{base.name}.{os.getpid()}.{kind}")
        try:
            with drawing.style():
                figure.savefig(part, format=kind, dpi=200, metadata={undated: None})
            part.replace(final)
        finally:
            part.unlink(missing_ok=True)
        written.append(final)
    return written
