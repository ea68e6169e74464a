"""Pictures of runs, fit for a paper: accuracy or loss over rounds, bytes or seconds, and over clients.

The functions return matplotlib figures and never touch pyplot's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from scipy import stats

from flwr_regs.experiments.report import drawing
from flwr_regs.experiments.report.drawing import Look, Picture

X = {"round": "round", "megabytes": "megabytes per client, down and up", "seconds": "seconds"}
Y = {"accuracy": "test accuracy (%)", "loss": "test loss"}
LOG_ABOVE = 30  # times: from the smallest to the largest, for a logarithmic axis


@dataclass(frozen=True, eq=False)
class Curve:
    """One run: one method, one seed.

    Attributes
    ----------
    label : the method, or a sweep's value; the runs of one label are its seeds
    seed : the run's seed
    points : a row for each round with a test, increasing; round 0 is the untrained model. Columns
        ``round``, ``accuracy`` (in per cent), ``loss``; ``megabytes``, 10^6 bytes down and up until the end
        of the round, per client of the population; ``seconds`` of training until then
    clients : each client's accuracy (a fraction) with the final model; empty if not measured
    stopped : why the run diverged or failed after the last of `points`; empty if it did not
    """

    label: str
    seed: int
    points: pd.DataFrame
    clients: Sequence[float] = ()
    stopped: str = ""


@dataclass(frozen=True, eq=False)
class Method:
    """The runs of one label: whole ones, which are averaged, and broken ones.

    A run is broken if it stopped, measured nothing, or has a value that is not finite.
    """

    label: str
    whole: list[Curve] = field(default_factory=list)
    broken: list[Curve] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The label, with the number of stopped runs if there are any."""
        if not self.broken:
            return self.label
        runs = len(self.whole) + len(self.broken)
        return f"{self.label} ({len(self.broken)}\u00a0of\u00a0{runs}\u00a0stopped)"

    def mean(self, x: str, y: str, interval: bool) -> pd.DataFrame:
        """Return ``x``, ``y`` and ``spread`` by round, of the rounds that all whole runs have."""
        runs = {c.seed: c.points.set_index("round", drop=False) for c in self.whole}
        joined = pd.concat(runs, axis=1, join="inner").swaplevel(axis=1)
        if joined.empty:
            raise ValueError(f"the runs of {self.label!r} have no round in common")
        spread = joined[y].std(axis=1)
        if interval:
            spread *= stats.t.ppf(0.975, len(runs) - 1) / np.sqrt(len(runs))
        means = {"x": joined[x].mean(axis=1), "y": joined[y].mean(axis=1)}
        return pd.DataFrame({**means, "spread": spread})


def by_label(curves: Sequence[Curve], y: str = "accuracy") -> list[Method]:
    """Return the curves by label, in the order of the labels' first runs."""
    methods = {c.label: Method(c.label) for c in curves}
    for curve in curves:
        method, values = methods[curve.label], curve.points[y]
        broken = curve.stopped or values.empty or not np.isfinite(values).all()
        (method.broken if broken else method.whole).append(curve)
    return [*methods.values()]


def seeds_in_words(methods: Sequence[Method]) -> str:
    """Return the caption's words on n: the usual n, and the methods that have another."""
    numbers = {m.label: len(m.whole) for m in methods if m.whole}
    if not numbers:
        return ""
    usual = max(Counter(numbers.values()).items(), key=lambda item: (item[1], item[0]))[0]
    others = [f"{label}: n = {n}" for label, n in numbers.items() if n != usual]
    return f"n = {usual} seed{'s' * (usual > 1)}" + (f" ({'; '.join(others)})" if others else "")


def over_rounds(
    curves: Sequence[Curve],
    x: str = "round",
    y: str = "accuracy",
    *,
    target: float | None = None,
    title: str = "",
    ordered: bool = False,
    interval: bool = False,
    look: Look | None = None,
) -> Picture:
    """Draw accuracy or loss as a line for each label: the mean over seeds, in a band of their spread.

    The band is one standard deviation of the sample (n - 1), or with `interval` the mean's 95 % interval
    (Student's t), and there is none for one seed. The mean is taken round by round, over the rounds that
    all seeds have: with ``x="megabytes"`` or ``"seconds"`` a point is the seeds' mean x after a round
    against their mean y after it. Runs that stopped, or whose y is not finite, are in neither mean nor
    band: each is a thin line to its last finite y, with a cross there, and the label counts them.

    Parameters
    ----------
    curves : the runs, in the order of the lines' looks
    x : a key of `X`; megabytes are logarithmic if the labels' totals differ by more than 30 times
    y : a key of `Y`; the loss is logarithmic if it changes by more than 30 times
    target : an accuracy in per cent to mark
    title : one sentence above the axes, if the look has none
    ordered : whether the labels are an ordered parameter's values, given in order: so are the colours and
        the list of labels then; else the list is in the order of the lines' ends

    Returns
    -------
    the picture; :func:`flwr_regs.experiments.report.drawing.save` writes it

    Raises ValueError if `x` or `y` is another word, or a label's seeds have no common round.
    """
    for word, legal in ((x, X), (y, Y)):
        if word not in legal:
            raise ValueError(f"a picture of {word!r}: expected one of {', '.join(legal)}")
    methods, look = by_label(curves, y), look or Look()
    totals = [c.points[x].max() for m in methods for c in m.whole or m.broken]
    log = x == "megabytes" and _wide(np.array(totals))
    with drawing.style(look):
        picture = Picture(look)
        axes = picture.add_subplot()
        lines = []
        for index, method in enumerate(methods):
            line = drawing.line(index, len(methods), ordered)
            lines.append((_draw(axes, method, (x, y), log, interval, line), method.text, line))
        if target is not None:
            line = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 0.9, "zorder": 2.5}
            axes.axhline(target, gid="target", **line)
            lines.append((target, f"target {target:.4g} %", line))
        if not ordered:
            lines.sort(key=lambda line: -line[0])
        axes.margins(x=0.015, y=0.04)
        if y == "accuracy":
            low, top = axes.get_ylim()
            axes.set_ylim(max(low, -4), min(top, 104))
            axes.yaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
        elif _wide(pd.concat([c.points[y] for c in curves]).to_numpy()):
            axes.set_yscale("log")
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        elif x == "round":
            axes.xaxis.set_major_locator(
                MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
            )
        axes.set(xlabel=X[x], ylabel=Y[y])
        width = 0.245 * picture.get_figwidth()
        legend = axes.legend(
            [Line2D([], [], **line) for _, _, line in lines],
            [drawing.wrap(text, width) for _, text, _ in lines],
            loc="upper left",
            bbox_to_anchor=(1, 1),
            frameon=False,
            handlelength=2.7,
        )
        for text in legend.get_texts():
            text.set(parse_math=False, gid="label")
        height = max(3.1, legend.get_window_extent().height / picture.dpi)
        caption = f"{seeds}." if (seeds := seeds_in_words(methods)) else ""
        if any(len(m.whole) > 1 for m in methods):
            spread = "95 % interval" if interval else "standard deviation"
            caption = f"Mean and {spread} over {caption}"
        if any(m.broken for m in methods):
            caption += " Thin line with a cross: a run that stopped there"
            caption += "; it is in no mean." if seeds else "; none finished."
        drawing.finish(picture, axes, height, title, caption.strip())
    return picture


def _wide(values: np.ndarray) -> bool:
    """Return whether positive values differ by so much that only a logarithmic axis shows them all."""
    positive = values[np.isfinite(values) & (values > 0)]
    return len(positive) > 0 and bool(positive.max() > LOG_ABOVE * positive.min())


def _draw(
    axes: Axes, method: Method, xy: tuple[str, str], log: bool, interval: bool, line: dict[str, Any]
) -> float:
    """Draw a method's runs; return the height at which its line ends."""
    x, y = xy
    end = -np.inf
    thin = {**line, "linestyle": "-", "linewidth": 0.6}
    cross: dict[str, Any] = {"marker": "x", "markersize": 4.5, "markeredgewidth": 1}
    for curve in method.broken:
        points = curve.points[np.isfinite(curve.points[y]).cummin()]
        points = points[points[x] > 0] if log else points
        axes.plot(points[x], points[y], gid=f"stopped {method.label}", **thin)
        last = points[-1:]
        axes.plot(last[x], last[y], gid=f"cross {method.label}", clip_on=False, **thin, **cross)
        end = max([end, *last[y]])
    if not method.whole:
        return end
    mean = method.mean(x, y, interval)
    mean = mean[mean["x"] > 0] if log else mean
    if len(method.whole) > 1:
        edges = mean["y"] - mean["spread"], mean["y"] + mean["spread"]
        fill: dict[str, Any] = {"color": line["color"], "alpha": 0.16, "linewidth": 0, "zorder": 2}
        axes.fill_between(mean["x"], *edges, gid=f"band {method.label}", **fill)
    dot: dict[str, Any] = {"marker": "o", "markersize": 4} if len(mean) == 1 else {}
    axes.plot(mean["x"], mean["y"], gid=f"mean {method.label}", **line, **dot)
    return float(mean["y"].iloc[-1]) if len(mean) else end


def over_clients(curves: Sequence[Curve], *, title: str = "", look: Look | None = None) -> Picture:
    """Draw the spread over clients: a row for each label, a point for each client of each seed.

    Points at nearly the same accuracy are stacked, which moves a point by at most 1 / 150 of the spread.
    Below them stand the median and the quartiles over all clients of all seeds. Runs that stopped have no
    final model; the label counts them. A NaN is a client that was not measured, and left out.

    Raises ValueError if no run holds clients' accuracies.
    """
    methods, look = by_label(curves), look or Look()
    pooled = [100 * np.array([a for c in m.whole for a in c.clients], float) for m in methods]
    values = [np.sort(v[np.isfinite(v)]) for v in pooled]
    every = np.concatenate(values)
    if not len(every):
        raise ValueError(
            "no whole run holds the clients' accuracies: expected them in Curve.clients"
        )
    column = max(np.ptp(every) / 75, 1e-9)  # about a point's width
    columns = [np.round((v - every.min()) / column).astype(int) for v in values]
    levels = [np.arange(len(c)) - np.searchsorted(c, c) for c in columns]
    step = min(0.09, 0.6 / (1 + np.concatenate(levels).max()))
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 3, "markeredgewidth": 0}
    with drawing.style(look):
        picture = Picture(look)
        axes = picture.add_subplot()
        for row, method in enumerate(methods):
            colour = drawing.line(row, len(methods), False)["color"]
            x, y = every.min() + column * columns[row], row - step * levels[row]
            axes.plot(x, y, color=colour, alpha=0.55, gid=f"points {method.label}", **dot)
            if len(x):
                first, median, third = np.quantile(values[row], [0.25, 0.5, 0.75])
                for name, ends, low, high, width, alpha in (
                    ("quartiles", (first, third), 0.16, 0.16, 3.5, 0.45),
                    ("median", (median, median), 0.09, 0.23, 1.8, 1.0),
                ):
                    bar: dict[str, Any] = {"color": colour, "linewidth": width, "alpha": alpha}
                    axes.plot(ends, (row + low, row + high), gid=f"{name} {method.label}", **bar)
        names = [drawing.wrap(m.text, 1.6) for m in methods]
        axes.set_yticks(range(len(methods)), names, parse_math=False)
        axes.margins(x=0.03)
        axes.set_ylim(len(methods) - 0.62, -0.75)
        label = "test accuracy of a client with the final model (%)"
        axes.set_xlabel(drawing.wrap(label, 0.6 * picture.get_figwidth()))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        sizes = sorted({len(c.clients) for m in methods for c in m.whole if len(c.clients)})
        number = " to ".join(str(n) for n in dict.fromkeys((sizes[0], sizes[-1])))
        seeds = seeds_in_words([m for m, v in zip(methods, values, strict=True) if len(v)])
        caption = (
            f"Points: {number} clients of each seed. Bars: median and quartiles over them, {seeds}."
        )
        lines = 1 + max(name.count("\n") for name in names)
        row_height = max(0.5 if len(methods) <= 8 else 0.34, 0.05 + 0.14 * lines)
        drawing.finish(picture, axes, row_height * len(methods), title, caption)
    return picture
