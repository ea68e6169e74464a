"""Pictures of runs, fit for a paper: accuracy or loss over rounds, bytes or seconds, and over clients.

The functions return matplotlib figures and never touch pyplot's state. They take a table of points: a
row for each run (``label``, ``seed``) and round with a test. Its columns are ``round`` (0 is the untrained
model), ``accuracy`` in per cent, ``loss``, ``megabytes`` (10^6 bytes down and up until the end of the
round, per client of the population), ``seconds`` of training until then, ``hours`` that it would take on
phones, ``stopped``, whether the run diverged or failed after its last round, and ``filled``, whether the
row is of a run that diverged as it counts in the mean: with the untrained accuracy from there on.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import multimode
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from scipy import stats

from flwr_regs.experiments.report import drawing
from flwr_regs.experiments.report.drawing import Look, Picture

X = {
    "round": "round",
    "megabytes": "megabytes per client, down and up",
    "seconds": "seconds",
    "hours": "estimated hours on phones (Field Guide, Eqs. 9 and 10)",
}
Y = {"accuracy": "test accuracy (%)", "loss": "test loss"}
LOG_ABOVE = 30  # times: from the smallest to the largest, for a logarithmic axis


def over_rounds(
    points: pd.DataFrame,
    x: str = "round",
    y: str = "accuracy",
    *,
    target: float | None = None,
    title: str = "",
    heading: str = "",
    ordered: bool = False,
    interval: bool = False,
    look: Look | None = None,
) -> Picture:
    """Draw accuracy or loss as a line for each label: the mean over seeds, in a band of their spread.

    The band is one standard deviation of the sample (n - 1), or with `interval` the mean's 95 % interval
    (Student's t), and there is none for one seed. The mean is taken round by round, over the rounds that
    all seeds have: with ``x="megabytes"`` or ``"seconds"`` a point is the seeds' mean x after a round
    against their mean y after it. A run that diverged counts in the accuracy's mean as untrained from
    there on. Other runs that stopped, or whose y is not finite, are in neither mean nor band. Each of both
    kinds is also a thin line to its last finite y, with a cross there, and the label counts them.

    Parameters
    ----------
    points : the runs' points, in the order of the lines' looks
    x : a key of `X`; megabytes are logarithmic if the labels' totals differ by more than 30 times
    y : a key of `Y`; the loss is logarithmic if it changes by more than 30 times
    target : an accuracy in per cent to mark
    title : one sentence above the axes, if the look has none
    heading : what the labels are, above their list
    ordered : whether the labels are an ordered parameter's values, given in order: so are the colours and
        the list of labels then; else the list is in the order of the lines' ends

    Returns
    -------
    the picture; :func:`flwr_regs.experiments.report.drawing.save` writes it

    Raises ValueError if `x` or `y` is another word.
    """
    for word, legal in ((x, X), (y, Y)):
        if word not in legal:
            raise ValueError(f"a picture of {word!r}: expected one of {', '.join(legal)}")
    look = look or Look()
    if y != "accuracy":
        points = points[~points["filled"]]
    finite = np.isfinite(points[y]).groupby([points["label"], points["seed"]]).transform("all")
    points = points.assign(stopped=points["stopped"] | ~finite, x=points[x], y=points[y])
    labels, whole = points["label"].unique(), points[~points["stopped"]]
    seeds = whole.groupby("label")["seed"].nunique().reindex(labels, fill_value=0)
    log = x == "megabytes" and _wide(points.groupby("label")[x].max())
    with drawing.style(look):
        picture = Picture(look)
        axes = picture.add_subplot()
        lines = []
        for index, label in enumerate(labels):
            line = drawing.line(index, len(labels), ordered)
            of_label = points[points["label"] == label]
            of_label = of_label[of_label[x] > 0] if log else of_label
            broken = of_label["stopped"]
            end = _draw_mean(axes, of_label[~broken], interval, line)
            end = max(end, _draw_broken(axes, of_label[broken], line))
            lines.append((end, _counted(label, points), line))
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
        elif _wide(points[y]):
            axes.set_yscale("log")
        if log:
            axes.set_xscale("log")
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
        elif x == "round":
            ticks = MaxNLocator(8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
            axes.xaxis.set_major_locator(ticks)
        axes.set(xlabel=X[x], ylabel=Y[y])
        legend = axes.legend(
            [Line2D([], [], **line) for _, _, line in lines],
            [drawing.wrap(text, 0.245 * picture.get_figwidth()) for _, text, _ in lines],
            loc="upper left",
            bbox_to_anchor=(1, 1),
            frameon=False,
            handlelength=2.7,
            title=heading,
            alignment="left",
        )
        for text in legend.get_texts():
            text.set(parse_math=False, gid="label")
        height = max(3.1, legend.get_window_extent().height / picture.dpi)
        words = seeds_in_words(seeds.to_dict())
        caption = f"{words}." if words else ""
        if seeds.max() > 1:
            spread = "95 % interval" if interval else "standard deviation"
            caption = f"Mean and {spread} over {caption}"
        if points["stopped"].any():
            caption += " Thin line with a cross: a run that stopped there"
            if points["filled"].any():
                caption += "; if it diverged, it counts in the mean as untrained from there."
            else:
                caption += "; it is in no mean." if words else "; none finished."
        drawing.finish(picture, axes, height, title, caption.strip())
    return picture


def _wide(values: pd.Series) -> bool:
    """Return whether positive values differ by so much that only a logarithmic axis shows them all."""
    positive = values[np.isfinite(values) & (values > 0)]
    return bool(positive.max() > LOG_ABOVE * positive.min())


def seeds_in_words(seeds: Mapping[str, int]) -> str:
    """Return the caption's words on n: the usual n, and the methods that have another."""
    seeds = {label: n for label, n in seeds.items() if n}
    if not seeds:
        return ""
    usual = max(multimode(seeds.values()))
    others = [f"{label}: n = {n}" for label, n in seeds.items() if n != usual]
    return f"n = {usual} seed{'s' * (usual > 1)}" + (f" ({'; '.join(others)})" if others else "")


def _counted(label: str, points: pd.DataFrame) -> str:
    """Return a label, with the number of its stopped runs if there are any."""
    stopped = points[points["label"] == label].groupby("seed")["stopped"].any()
    if not stopped.any():
        return label
    return f"{label} ({stopped.sum()}\u00a0of\u00a0{len(stopped)}\u00a0stopped)"


def _draw_mean(axes: Axes, points: pd.DataFrame, interval: bool, line: dict[str, Any]) -> float:
    """Draw the mean of a method's whole runs and its band; return the height at which its line ends."""
    seeds = points["seed"].nunique()
    rounds = points.groupby("round")
    rounds = rounds.filter(lambda of: len(of) == seeds).groupby("round")
    across, mean, spread = rounds["x"].mean(), rounds["y"].mean(), rounds["y"].std()
    if mean.empty:
        return -np.inf
    label = points["label"].iloc[0]
    if interval:
        spread *= stats.t.ppf(0.975, seeds - 1) / np.sqrt(seeds)
    if seeds > 1:
        fill: dict[str, Any] = {"color": line["color"], "alpha": 0.16, "linewidth": 0, "zorder": 2}
        axes.fill_between(across, mean - spread, mean + spread, gid=f"band {label}", **fill)
    dot: dict[str, Any] = {"marker": "o", "markersize": 4} if len(mean) == 1 else {}
    axes.plot(across, mean, gid=f"mean {label}", **line, **dot)
    return float(mean.iloc[-1])


def _draw_broken(axes: Axes, points: pd.DataFrame, line: dict[str, Any]) -> float:
    """Draw a method's broken runs; return the height at which the highest one ends."""
    end = -np.inf
    thin = {**line, "linestyle": "-", "linewidth": 0.6}
    cross: dict[str, Any] = {"marker": "x", "markersize": 4.5, "markeredgewidth": 1}
    for (label, _), run in points.groupby(["label", "seed"]):
        run = run[np.isfinite(run["y"]).cummin()]
        axes.plot(run["x"], run["y"], gid=f"stopped {label}", **thin)
        last = run[-1:]
        axes.plot(last["x"], last["y"], gid=f"cross {label}", clip_on=False, **thin, **cross)
        end = max([end, *last["y"]])
    return end


def over_clients(
    points: pd.DataFrame,
    accuracies: Mapping[tuple[str, int], Any],
    *,
    title: str = "",
    look: Look | None = None,
) -> Picture:
    """Draw the spread over clients: a row for each label, a tick for each client of each seed.

    Below them stand the median and the quartiles over all clients of all seeds. Runs that stopped have no
    final model; the label counts them.

    Parameters
    ----------
    points : the runs' points
    accuracies : (label, seed) -> each client's accuracy with the final model, in per cent; NaN: not
        measured

    Raises ValueError if no run holds clients' accuracies.
    """
    look = look or Look()
    each = [
        pd.DataFrame({"accuracy": values, "label": label, "seed": seed})
        for (label, seed), values in accuracies.items()
    ]
    clients = pd.concat(each).dropna()
    if clients.empty:
        raise ValueError("no whole run holds the clients' accuracies")
    pooled = clients.groupby("label", sort=False)["accuracy"]
    dot: dict[str, Any] = {"linestyle": "", "marker": "|", "markersize": 9, "alpha": 0.55}
    bar: dict[str, Any] = {"linestyle": "-", "linewidth": 3.5, "alpha": 0.45}
    with drawing.style(look):
        picture = Picture(look)
        axes = picture.add_subplot()
        for row, (label, values) in enumerate(pooled):
            colour = drawing.line(row, len(pooled), False)["color"]
            low, middle, high = values.quantile([0.25, 0.5, 0.75])
            axes.plot(values, np.full(len(values), row), color=colour, gid=f"points {label}", **dot)
            axes.plot((low, high), (row + 0.25,) * 2, color=colour, gid=f"quartiles {label}", **bar)
            axes.plot([middle], [row + 0.25], "o", color=colour, gid=f"median {label}")
        names = [drawing.wrap(_counted(label, points), 1.6) for label, _ in pooled]
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.margins(x=0.03)
        axes.set_ylim(len(names) - 0.4, -0.5)
        label = "test accuracy of a client with the final model (%)"
        axes.set_xlabel(drawing.wrap(label, 0.6 * picture.get_figwidth()))
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        sizes = clients.groupby(["label", "seed"]).size()
        number = " to ".join(dict.fromkeys((str(sizes.min()), str(sizes.max()))))
        seeds = seeds_in_words(sizes.groupby("label", sort=False).size().to_dict())
        caption = (
            f"Ticks: {number} clients of each seed. Bars: median and quartiles over them, {seeds}."
        )
        lines = 1 + max(name.count("\n") for name in names)
        height = len(names) * max(0.4, 0.05 + 0.14 * lines)
        drawing.finish(picture, axes, height, title, caption)
    return picture
