"""Pictures of runs, fit for a paper: accuracy over rounds, bytes or seconds, and the spread over clients.

The functions return matplotlib figures and never touch pyplot's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from flwr_regs.experiments.report import drawing

AXES = {"round": "round", "megabytes": "megabytes per client, down and up", "seconds": "seconds"}
LOG_ABOVE = 30  # times: from the smallest to the largest total, for a logarithmic axis


@dataclass(frozen=True)
class Curve:
    """One run: one method, one seed.

    Attributes
    ----------
    label : the method, or a sweep's value; the runs of one label are its seeds
    seed : the run's seed
    rounds : the rounds with a measured accuracy, increasing; round 0 is the untrained model
    accuracy : fractions, one for each of `rounds`; may hold NaN
    megabytes : 10^6 bytes down and up until the end of each of `rounds`, per client of the population
    seconds : training time until the end of each of `rounds`
    clients : each client's accuracy (a fraction) with the final model; empty if not measured
    stopped : why the run diverged or failed after the last of `rounds`; empty if it did not

    Raises ValueError if the lengths differ or the rounds do not increase.
    """

    label: str
    seed: int
    rounds: Sequence[int]
    accuracy: Sequence[float]
    megabytes: Sequence[float]
    seconds: Sequence[float]
    clients: Sequence[float] = ()
    stopped: str = ""

    def __post_init__(self) -> None:
        for name in ("accuracy", "megabytes", "seconds"):
            if len(getattr(self, name)) != len(self.rounds):
                raise ValueError(
                    f"run {self.label!r}, seed {self.seed}: {name} has {len(getattr(self, name))} values "
                    f"for {len(self.rounds)} rounds: expected one for each round"
                )
        if (np.diff(self.rounds) <= 0).any():
            raise ValueError(f"run {self.label!r}, seed {self.seed}: rounds must increase")

    @property
    def broken(self) -> bool:
        """Whether the run stopped, measured nothing, or has an accuracy that is not finite."""
        return bool(self.stopped) or not len(self.rounds) or not np.isfinite(self.accuracy).all()

    def points(self, x: str) -> pd.DataFrame:
        """Return ``x`` and ``y``, the accuracy in per cent, by round."""
        across = np.asarray(self.rounds if x == "round" else getattr(self, x), float)
        if not np.isfinite(across).all():
            raise ValueError(
                f"run {self.label!r}, seed {self.seed}: {x} holds values that are not finite"
            )
        up = 100 * np.asarray(self.accuracy, float)
        return pd.DataFrame({"x": across, "y": up}, index=self.rounds)


@dataclass(frozen=True)
class Method:
    """The runs of one label: whole ones, which are averaged, and broken ones."""

    label: str
    whole: list[Curve]
    broken: list[Curve]

    @property
    def text(self) -> str:
        """The label, with the number of stopped runs if there are any."""
        if not self.broken:
            return self.label
        runs = len(self.whole) + len(self.broken)
        return f"{self.label} ({len(self.broken)}\u00a0of\u00a0{runs}\u00a0stopped)"

    def mean(self, x: str) -> pd.DataFrame:
        """Return ``x``, ``y`` and ``deviation`` by round, of the rounds that all whole runs have."""
        runs = {c.seed: c.points(x) for c in self.whole}
        joined = pd.concat(runs, axis=1, join="inner").swaplevel(axis=1)
        if joined.empty:
            raise ValueError(f"the runs of {self.label!r} have no round in common")
        columns = {"x": joined["x"].mean(axis=1), "y": joined["y"].mean(axis=1)}
        return pd.DataFrame({**columns, "deviation": joined["y"].std(axis=1)})


def by_label(curves: Sequence[Curve]) -> list[Method]:
    """Return the curves by label, in the order of the labels' first runs."""
    if not curves:
        raise ValueError("there are no curves to draw: expected at least one run")
    for (label, seed), count in Counter((c.label, c.seed) for c in curves).items():
        if count > 1:
            raise ValueError(
                f"{label!r} has {count} runs with seed {seed}: expected one for each seed"
            )
    methods = {c.label: Method(c.label, [], []) for c in curves}
    for curve in curves:
        method = methods[curve.label]
        (method.broken if curve.broken else method.whole).append(curve)
    return [*methods.values()]


def seeds_in_words(methods: Sequence[Method]) -> str:
    """Return the caption's words on n: the usual n, and the methods that have another."""
    numbers = {m.label: len(m.whole) for m in methods if m.whole}
    if not numbers:
        return ""
    usual = max(Counter(numbers.values()).items(), key=lambda item: (item[1], item[0]))[0]
    others: dict[int, list[str]] = {}
    for label, n in numbers.items():
        if n != usual:
            others.setdefault(n, []).append(label)
    rest = "; ".join(f"{', '.join(labels)}: n = {n}" for n, labels in others.items())
    return f"n = {usual} seed{'s' * (usual > 1)}" + (f" ({rest})" if rest else "")


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
    ordered : whether the labels are an ordered parameter's values, given in order: so are the colours and
        the list of labels then; else the list is in the order of the lines' ends
    measured : what the accuracy is, for the axis

    Returns
    -------
    the figure, 6.3 inches wide; :func:`flwr_regs.experiments.report.drawing.save` writes it

    Raises ValueError if there are no curves, `x` is another word, a label has a seed twice or seeds
    without a common round, or an x is not finite.
    """
    if x not in AXES:
        raise ValueError(f"x is {x!r}: expected one of {', '.join(AXES)}")
    methods = by_label(curves)
    totals = [c.points(x)["x"].max() for m in methods for c in m.whole or m.broken]
    positive = [total for total in totals if total > 0]
    log = x == "megabytes" and bool(positive) and max(positive) > LOG_ABOVE * min(positive)
    with drawing.style():
        figure = drawing.canvas()
        axes = figure.add_subplot()
        lines = []
        for index, method in enumerate(methods):
            look = drawing.look(index, len(methods), ordered)
            lines.append((_draw(axes, method, x, log, look), method.text, look))
        if target is not None:
            look = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 0.9, "zorder": 2.5}
            axes.axhline(100 * target, gid="target", **look)
            lines.append((100 * target, f"target {100 * target:.4g} %", look))
        if not ordered:
            lines.sort(key=lambda line: -line[0])
        axes.margins(x=0.015, y=0.04)
        low, top = axes.get_ylim()
        axes.set_ylim(max(low, -4), min(top, 104))
        axes.yaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        elif x == "round":
            axes.xaxis.set_major_locator(
                MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
            )
        axes.set(xlabel=AXES[x], ylabel=f"{measured} (%)")
        legend = axes.legend(
            [Line2D([], [], **look) for _, _, look in lines],
            [drawing.wrap(figure, text, 1.55, 8) for _, text, _ in lines],
            loc="upper left",
            bbox_to_anchor=(1, 1),
            frameon=False,
            handlelength=2.7,
        )
        for text in legend.get_texts():
            text.set(parse_math=False, gid="label")
        height = max(3.1, legend.get_window_extent().height / figure.dpi)
        caption = f"{seeds}." if (seeds := seeds_in_words(methods)) else ""
        if any(len(m.whole) > 1 for m in methods):
            caption = f"Mean and standard deviation over {caption}"
        if any(m.broken for m in methods):
            caption += " Thin line with a cross: a run that stopped there"
            caption += "; it is in no mean." if seeds else "; none finished."
        drawing.finish(figure, axes, height, title, caption.strip())
    return figure


def _draw(axes: Axes, method: Method, x: str, log: bool, look: dict[str, Any]) -> float:
    """Draw a method's runs; return the height at which its line ends."""
    end = -np.inf
    thin = {**look, "linestyle": "-", "linewidth": 0.6}
    cross: dict[str, Any] = {"marker": "x", "markersize": 4.5, "markeredgewidth": 1}
    for curve in method.broken:
        points = curve.points(x)
        points = points[np.isfinite(points["y"]).cummin() & (not log or points["x"] > 0)]
        axes.plot(points["x"], points["y"], gid=f"stopped {method.label}", **thin)
        last = points[-1:]
        axes.plot(last["x"], last["y"], gid=f"cross {method.label}", clip_on=False, **thin, **cross)
        end = max([end, *last["y"]])
    if not method.whole:
        return end
    mean = method.mean(x)
    if log:
        mean = mean[mean["x"] > 0]
    if len(method.whole) > 1:
        edges = mean["y"] - mean["deviation"], mean["y"] + mean["deviation"]
        fill: dict[str, Any] = {"color": look["color"], "alpha": 0.16, "linewidth": 0, "zorder": 2}
        axes.fill_between(mean["x"], *edges, gid=f"band {method.label}", **fill)
    dot: dict[str, Any] = {"marker": "o", "markersize": 4} if len(mean) == 1 else {}
    axes.plot(mean["x"], mean["y"], gid=f"mean {method.label}", **look, **dot)
    return float(mean["y"].iloc[-1]) if len(mean) else end


def clients(curves: Sequence[Curve], *, title: str = "", measured: str = "test accuracy") -> Figure:
    """Draw the spread over clients: a row for each label, a point for each client of each seed.

    Points at nearly the same accuracy are stacked, which moves a point by at most 1 / 150 of the spread.
    Below them stand the median and the quartiles over all clients of all seeds. Runs that stopped have no
    final model; the label counts them. A NaN is a client that was not measured, and left out.

    Raises ValueError if there are no curves, a label has a seed twice, or no run holds clients' accuracies.
    """
    methods = by_label(curves)
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
    with drawing.style():
        figure = drawing.canvas()
        axes = figure.add_subplot()
        dot = {"linestyle": "", "marker": "o", "markersize": 3, "markeredgewidth": 0, "alpha": 0.55}
        for row, method in enumerate(methods):
            colour = drawing.look(row, len(methods), False)["color"]
            bar: dict[str, Any] = {"color": colour}
            x = every.min() + column * columns[row]
            y = row - step * levels[row]
            axes.plot(x, y, color=colour, gid=f"points {method.label}", **dot)  # type: ignore[arg-type]
            if len(x):
                first, median, third = np.quantile(values[row], [0.25, 0.5, 0.75])
                bar["gid"] = f"quartiles {method.label}"
                axes.plot([first, third], [row + 0.16] * 2, linewidth=3.5, alpha=0.45, **bar)
                bar["gid"] = f"median {method.label}"
                axes.plot([median] * 2, [row + 0.09, row + 0.23], linewidth=1.8, **bar)
        names = [drawing.wrap(figure, m.text, 1.6, 8) for m in methods]
        axes.set_yticks(range(len(methods)), names, fontsize=8, parse_math=False)
        axes.margins(x=0.03)
        axes.set_ylim(len(methods) - 0.62, -0.75)
        axes.set_xlabel(f"{measured} of a client with the final model (%)")
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
        drawing.finish(figure, axes, row_height * len(methods), title, caption)
    return figure
