"""Pictures of runs, fit for a paper: accuracy or loss over rounds, bytes or seconds, and over clients.

The functions return matplotlib figures and never touch pyplot's state. They take a table of points: a
row for each run (``label``, ``seed``) and round with a test. Its columns are ``round`` (0 is the untrained
model), ``accuracy`` in per cent, ``loss``, ``megabytes`` (10^6 bytes down and up until the end of the
round, per client of the population), ``seconds`` of training until then by the clock,
``processor_seconds`` with tests, ``hours`` that it would take on phones, and ``part``, what the run is:
``whole``; ``stopped``, as it diverged or failed after its last round; ``unfinished``; or ``filled``: it
diverged, as it counts in the mean: with the untrained accuracy from there on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import multimode
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from flwr_regs.experiments.report import drawing
from flwr_regs.experiments.report.drawing import Look, Picture
from flwr_regs.experiments.report.statistics import LEVEL, Ranks, half_interval
from flwr_regs.wire.config import nearest

X = {
    "round": "round",
    "megabytes": "traffic per client, down and up (MB)",
    "seconds": "wall-clock time of training (s)",
    "processor_seconds": "processor time, with tests (s)",
    "hours": "estimated time on phones (hours)",
    "clients": "quantile of the clients (%): 0 is the worst, 100 the best",
}
Y = {"accuracy": "test accuracy (%)", "loss": "test loss"}
Y |= {"expected": "expected accuracy (%)", "held-out": "accuracy on held-out data (%)"}
"""What is measured, or what an accuracy is that is no test's -> its axis."""
DECIDED = {True: "#0072b2", False: "#d55e00"}
"""Whether a decided difference is positive -> its colour."""
LONG = 10
"""Rounds from which on an axis of accuracies may leave out the first ones."""
LOG_ABOVE = 30  # times: from the smallest to the largest, for a logarithmic axis
Style = dict[str, Any]
"""What matplotlib is told of an artist's look."""


def over_rounds(
    points: pd.DataFrame,
    x: str = "round",
    y: str = "accuracy",
    *,
    target: float | None = None,
    kind: str = "",
    seeds: Mapping[str, int] | None = None,
    labels: Sequence[str] = (),
    title: str = "",
    heading: str = "",
    ordered: bool = False,
    look: Look | None = None,
) -> Picture:
    """Draw accuracy or loss as a line for each label: the mean over seeds, in a band of their spread.

    The band is the mean's 95 % interval (Student's t), as far as values can be. Fewer than three seeds have
    none. The mean is taken round by round, over the rounds that all seeds have: with ``x="megabytes"`` or
    ``"seconds"`` a point is the seeds' mean x after a round against their mean y after it. A run that
    diverged counts in the accuracy's mean as untrained from there on. Other runs that stopped, or whose y
    is not finite, are in neither mean nor band. Each of both kinds is also a thin line to its last finite
    y, with a cross there, and the label counts them. So is a run that has not ended, without the cross.

    Parameters
    ----------
    points : the runs' points, label after label
    x : a key of `X`; megabytes are logarithmic if the labels' totals differ by more than 30 times
    y : a key of `Y`; the loss is logarithmic if it changes by more than 30 times
    target : an accuracy in per cent to mark
    kind : what an accuracy is that is no test's: "expected" or "held-out". On held-out data, the line
        is the first "seed", with stripes to the second
    seeds : label -> how many runs its points are means of, where they are; by default, the points' seeds
    labels : all that a folder's pictures have, so that each has one look; by default, the points'
    title : one sentence above the axes, if the look has none
    heading : what the labels are, above them
    ordered : whether the labels are an ordered parameter's values, given in order: so are the colours then

    Returns
    -------
    the picture; :func:`flwr_regs.experiments.report.drawing.save` writes it

    Raises ValueError if `x` or `y` is another word.
    """
    for axis, word, legal in (("x", x, X), ("y", y, [name for name in Y if name in points])):
        if word not in legal:
            one = f"{axis} must be one of {', '.join(legal)}"
            raise ValueError(f"{one}, not {word!r}{nearest(word, legal)}")
    look, best = look or Look(), kind == "held-out"
    looks = {label: index for index, label in enumerate(labels or points["label"].unique())}
    points = _chosen(points, look)
    if y != "accuracy":
        points = points[points["part"] != "filled"]
    finite = np.isfinite(points[y]).groupby([points["label"], points["seed"]]).transform("all")
    part = points["part"].where(finite | (points["part"] == "unfinished"), "stopped")
    broken = part.isin(["stopped", "unfinished"])
    points = points.assign(part=part, broken=broken, x=points[x], y=points[y])
    log = x == "megabytes" and _wide(points.groupby("label")["x"].max())
    shade = 0.16 * min(1, 4 / points["label"].nunique())  # more than four bands hide each other
    band: Style = {"alpha": shade, "linewidth": 0}
    if best:  # striped, as it is no interval
        band = {"facecolor": "none", "hatch": "////", "alpha": 0.45, "linewidth": 0.6}
    with drawing.drawn(look) as picture:
        axes, lines, counted = picture.add_subplot(), [], dict[str, int]()
        heights, most = np.empty(0), 100 if y == "accuracy" else np.inf
        for label, of_label in points.groupby("label", sort=False):
            line = drawing.line(looks[label], len(looks), ordered)  # the same as among all
            lost, number = of_label["broken"], of_label["seed"].nunique()
            counted[label], text = of_label[~lost]["seed"].nunique(), label
            for what, some in of_label[lost].groupby("part")["seed"].nunique().items():
                text += f" ({some}\u00a0of\u00a0{number}\u00a0{what})"
            shown, before = (of_label["x"] > 0) | (not log), len(axes.lines)
            _draw_mean(axes, of_label[~lost & shown], line, band, most)
            _draw_broken(axes, of_label[lost & shown], line)
            curves = [np.asarray(of.get_ydata(), float) for of in axes.lines[before:]]
            ends = [float(curve[-1]) for curve in curves if len(curve)]
            lines.append((max(ends, default=-np.inf), text, line))
            heights = np.concatenate([heights, *curves])
        if target is not None:
            line = {"color": "0.35", "linestyle": (0, (1, 2)), "linewidth": 0.9, "zorder": 2.5}
            axes.axhline(target, gid="target", **line)
            lines.append((target, f"target {target:.4g} %", line))
        axes.margins(x=0.015, y=0.04)
        hidden = False
        if y == "accuracy":
            low, top = axes.get_ylim()
            low = max(low, -1, -1 if x == "clients" else _lowest_later(axes, points, target))
            top = min(top, 101)  # half a line's width beyond what can be
            low, top = look.accuracy or (low, top)
            axes.set_ylim(low, top)
            axes.yaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))
            hidden = not look.accuracy and axes.dataLim.y0 < low
            if look.accuracy and not ((low <= heights) & (heights <= top)).any():
                picture.flaws.append(f"no curve has a point from {low:g} to {top:g} %")
        elif _wide(points["y"]):
            axes.set_yscale("log")
        if log:
            axes.set_xscale("log")
            _plain_ticks(axes.xaxis, axes.bbox.width / picture.dpi)
        elif x == "round":
            axes.set_xlim(left=min(axes.get_xlim()[0], -0.015 * points["x"].max()))
            ticks = MaxNLocator("auto", integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
            axes.xaxis.set_major_locator(ticks)
        axes.set(xlabel=X[x], ylabel=Y[kind or y])
        words, parts = seeds_in_words(seeds or counted), {*points["part"]}
        over = ("", "", "Mean over ", "Mean and 95 % interval over ")[min(max(counted.values()), 3)]
        if best and over:
            over = "Tuning's best point by its last rounds' mean, with stripes to the second best; "
        stopped = "the mean leaves it out." if words else "none finished."
        if "filled" in parts:
            stopped = "if it diverged, it counts in the mean as untrained from there."
        sentences = {
            f"{over}{words}.": bool(words),
            "Expected from each client's label shares.": kind == "expected",
            "By the clock, with all that ran beside.": x == "seconds",
            "Time by Eqs. 9 and 10 of the Field Guide.": x == "hours",
            "There is no test before round 1.": x == "round" and points["x"].min() == 1,
            f"Thin line with a cross: a run that stopped there; {stopped}": "stopped" in parts,
            "Thin line: a run that has not ended; the mean leaves it out.": "unfinished" in parts,
            "Lower accuracies of the first rounds are not shown.": hidden,
        }
        drawing.head(picture, title, " ".join(text for text, said in sentences.items() if said))
        height = _name_lines(axes, lines, heading, picture.get_figwidth())
        drawing.finish(picture, axes, max(3.1, height))
    return picture


def _chosen(table: pd.DataFrame, look: Look) -> pd.DataFrame:
    """Return the rows of the methods that the look names; all if it names none of them."""
    chosen = table["label"].isin(look.methods)
    return table[chosen | (not chosen.any())]


def _plain_ticks(axis: Axis, length: float) -> None:
    """Write plain numbers at a logarithmic axis, as many as there is room for in its `length` (inches)."""
    low, high = axis.get_view_interval()
    letters = 0.75 * length * 72 / rcParams["font.size"]  # other texts take the rest
    room = letters / np.log10(high / low)
    if high < 5 * low:  # too few powers of ten and their parts lie in it
        axis.set_major_locator(MaxNLocator(max(1, int(letters / 3.5)), steps=[1, 2, 5, 10]))
    else:
        subs = (1, 2, 5) if room > 8 else (1, 3) if room > 5 else (1,)
        axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _wide(values: pd.Series) -> bool:
    """Return whether positive values differ by so much that only a logarithmic axis shows them all."""
    positive = values[np.isfinite(values) & (values > 0)]
    return bool(positive.max() > LOG_ABOVE * positive.min())


def _lowest_later(axes: Axes, points: pd.DataFrame, target: float | None) -> float:
    """Return where an axis of accuracies may begin: below all but the first fifth of the rounds.

    Below single runs and bands too, the ends of runs that stopped early, and the `target`.
    """
    last = points["round"].max()
    if last < LONG:
        return -np.inf
    later = points[points["round"] >= last / 5]
    edges = [path.vertices for band in axes.collections for path in band.get_paths()]
    bands = np.concatenate([np.empty((0, 2)), *edges])
    ends = points.groupby(["label", "seed"])["y"].last()
    goal = np.inf if target is None else target
    low = min(*later["y"], *ends, *bands[bands[:, 0] >= later["x"].min(), 1], goal)
    return float(low - max(0.05 * (points["y"].max() - low), 0.5))


def seeds_in_words(seeds: Mapping[str, int]) -> str:
    """Return the caption's words on n: the usual n, and the methods that have another."""
    seeds = {label: n for label, n in seeds.items() if n}
    if not seeds:
        return ""
    usual = max(multimode(seeds.values()))
    others = [f"{label}: n = {n}" for label, n in seeds.items() if n != usual]
    return f"n = {usual} seed{'s' * (usual > 1)}" + (f" ({'; '.join(others)})" if others else "")


def _draw_mean(axes: Axes, points: pd.DataFrame, line: Style, band: Style, most: float) -> None:
    """Draw the mean of a method's whole runs, and its band.

    The band ends at 0 and at `most`, beyond which no value can be. A hatched one reaches from the
    first run to the second, and the line is the first, which may be longer.
    """
    each = points.pivot(index="round", columns="seed", values="y")
    heights = each.dropna()
    if heights.empty:  # the seeds have no round in common
        return
    label, seeds = points["label"].iloc[0], points["seed"].nunique()
    across = points.groupby("round")["x"].mean()
    mean, interval = heights.mean(axis=1), half_interval(heights)
    low, high = mean - interval, mean + interval
    if "hatch" in band:
        mean, low, high = each.iloc[:, 0].dropna(), heights.min(axis=1), heights.max(axis=1)
    if seeds > (1 if "hatch" in band else 2):
        band = {"color": line["color"], "zorder": 2, "gid": f"band {label}", **band}
        edges = low.clip(lower=0), high.clip(upper=most)
        axes.fill_between(across[heights.index], *edges, **band)
    every = line["markevery"] if len(mean) > 1 else None  # one point has no length to measure
    axes.plot(across[mean.index], mean, gid=f"mean {label}", **{**line, "markevery": every})


def _draw_broken(axes: Axes, points: pd.DataFrame, line: Style) -> None:
    """Draw a method's broken runs."""
    thin = {**line, "linestyle": "-", "linewidth": 0.6, "marker": "", "markevery": None}
    cross: Style = {**thin, "marker": "x", "markersize": 4.5, "markeredgewidth": 1}
    for (label, _), run in points.groupby(["label", "seed"]):
        run = run[np.isfinite(run["y"]).cummin()]
        axes.plot(run["x"], run["y"], gid=f"stopped {label}", **thin)
        last = run[-1:]
        if {*run["part"]} == {"stopped"}:
            axes.plot(last["x"], last["y"], gid=f"cross {label}", clip_on=False, **cross)


def _name_lines(
    axes: Axes, lines: Sequence[tuple[float, str, Style]], heading: str, width: float
) -> float:
    """Name the lines right of the axes, in the order of their ends; return the height of all, in inches."""
    room = max(0.22 * width, min(1.3, 0.26 * width))  # 17 letters, if the picture allows it
    lines = sorted(lines, key=lambda line: -line[0])
    samples = [Line2D([], [], **{**line, "markevery": None}) for *_, line in lines]
    names = [drawing.wrap(label, room) for _, label, _ in lines]
    how: Style = {"handlelength": 2.4, "labelspacing": 0.35, "alignment": "left", "frameon": False}
    how |= {"borderpad": 0, "loc": "upper left", "bbox_to_anchor": (1, 1), "title": heading or None}
    legend = axes.legend(samples, names, **how)
    legend.get_title().set(parse_math=False, gid="heading")
    for text in legend.get_texts():
        text.set(parse_math=False, gid="label")
    row = 1.35 * rcParams["font.size"] / 72
    return float(row * sum(1 + name.count("\n") for name in (*names, heading)))


def over_panels(ranks: Ranks, *, title: str = "", look: Look | None = None) -> Picture:
    """Draw mean ranks over panels, a row for each method, with Nemenyi's critical difference.

    A bar joins each group of methods that are not told apart (Demsar 2006, Fig. 1, turned upright).
    """
    names, means, groups = [*ranks.mean.index], ranks.mean.to_numpy(), ranks.alike()
    with drawing.drawn(look) as picture:
        axes, gap = picture.add_subplot(), 0.03 * len(names)
        axes.plot(means, range(len(names)), "o", color="black", markersize=3.5, gid="ranks")
        for number, group in enumerate(groups, 1):
            across = [len(names) + gap * number] * 2
            axes.plot(across, group, "-", color="0.5", linewidth=2, gid="group")
        axes.plot((1, 1 + ranks.critical), (-1.2, -1.2), "|-", color="black", gid="critical")
        axes.text(1, -1.7, f"critical difference {ranks.critical:.2f}", gid="label")
        row = _name_rows(picture, axes, names, short=True)
        axes.set_ylim(len(names) - 0.4, -2.6)
        axes.set_xlim(0.6, max(len(names) + gap * (len(groups) + 1), 1.4 + ranks.critical))
        ticks = MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]).tick_values(1, len(names))
        axes.set_xticks([1, *(tick for tick in ticks if 1 < tick <= len(names))])
        axes.set_xlabel("mean rank (1 is the best)")
        apart = ": too few panels, or too equal ranks, to tell methods apart"
        friedman = f"Friedman's test: p = {ranks.p:.2g}{apart * (not ranks.p < LEVEL)}"
        bars = "Grey bars join methods whose mean ranks differ by less than Nemenyi's critical difference"
        caption = f"Ranks over {ranks.blocks} panels by the mean over seeds. {friedman}. {bars}."
        drawing.head(picture, title, caption)
        drawing.finish(picture, axes, row * (len(names) + 3), grows=True)
    return picture


def _name_rows(picture: Picture, axes: Axes, names: Sequence[str], short: bool) -> float:
    """Write each row's method left of it; return the height of a row in inches, where no two names meet.

    A `short` name has its parameters only where it takes them.
    """
    without = [name.partition("(")[0] for name in names]
    pairs = zip(without, names, strict=True)
    shown = [s if short and without.count(s) == 1 else name for s, name in pairs]
    texts = [drawing.wrap(name, 0.3 * picture.get_figwidth()) for name in shown]
    axes.set_yticks(range(len(names)), texts, parse_math=False)
    axes.tick_params(axis="y", length=0)
    lines = [1 + text.count("\n") for text in texts]
    between = [(one + two) / 2 for one, two in pairwise(lines)]
    return float(0.021 * rcParams["font.size"] * max(between, default=1.0))


def differences(
    panels: Mapping[str, Sequence[Mapping[str, Any]]],
    first: str,
    *,
    last: str = "last 5",
    seeds: Mapping[str, int] | None = None,
    title: str = "",
    note: str = "",
    look: Look | None = None,
) -> Picture:
    """Draw each method's difference to the first one, with its interval: a column for each panel.

    Parameters
    ----------
    panels : a panel's name -> rows of its table (:func:`flwr_regs.experiments.report.metrics.rows`) that
        have a difference and an interval; every panel has the same methods
    first : the method that they are compared with
    last : over how many rounds an accuracy is a mean
    seeds : method -> its number of seeds; by default the caption does not say it
    title : one sentence above the axes, if the look has none
    note : one more sentence below them
    """
    chosen = [row["method"] for row in next(iter(panels.values()))]
    with drawing.drawn(look) as picture:
        labels = [label for label in chosen if label in picture.look.methods] or chosen
        every = picture.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (name, rows) in zip(every, panels.items(), strict=True):
            axes.axvline(0, color="0.35", linewidth=0.8)
            by_label = {row["method"]: row for row in rows}
            for at, label in enumerate(labels):
                row = by_label[label]
                x, half = 100 * row["difference"], 100 * row["difference_interval"]
                colour = DECIDED[x > 0] if row["decided"] else "0.6"
                fill = colour if row["decided"] else "white"
                bar: Style = {"markersize": 3, "linewidth": 0.9, "color": colour}
                bars = axes.errorbar(x, at, None, half, "o", markerfacecolor=fill, **bar)
                bars.lines[0].set_gid(f"difference {label}")
            axes.set_title(drawing.wrap(name, 1.0), fontsize="medium", parse_math=False)
            axes.tick_params(axis="y", length=0)
        row_height = _name_rows(picture, every[0], labels, short=len(panels) > 1)
        every[0].set_ylim(len(labels) - 0.4, -0.6)
        what = f"points of accuracy above {first}, mean of the {last} rounds"
        if len(panels) == 1:
            every[0].set_xlabel(what)
        axes_show = f"The axes show {what}. " * (len(panels) > 1)
        words = f"; {seeds_in_words(seeds)}" if seeds else ""
        mean = f"Mean and 95 % interval of the difference, paired by seed{words}"
        marks = "Blue: decided better; orange: decided worse; hollow: not decided"
        holm = f"Holm's adjusted p below {LEVEL:g}; the intervals are not adjusted"
        caption = f"{axes_show}{mean}. {marks} ({holm}). {note}"
        drawing.head(picture, title, caption.strip())
        lines = max(len(labels) + 1, 4)  # the texts around want some height
        drawing.finish(picture, every[0], row_height * lines, grows=True)
    return picture


def over_points(trials: pd.DataFrame, *, title: str = "", look: Look | None = None) -> Picture:
    """Draw the accuracy on held-out data over what was tuned: curves for each method, or a map.

    A curve joins the points that were trained for equally many rounds; a map has each point once, after its
    last round. The values of a whole grid stand at equal distances; others, if positive, at a logarithmic
    axis.

    Parameters
    ----------
    trials : the rows of :func:`flwr_regs.experiments.report.tried.table`
    """
    keys = [*trials.columns.drop(["label", "point", "rounds", "accuracy"])]
    with drawing.drawn(look) as picture:
        look, trials = picture.look, _chosen(trials, picture.look)
        groups = trials.groupby("label", sort=False)
        *shorter, longest = lengths = sorted(trials["rounds"].unique())
        low, high = trials["accuracy"].agg(["min", "max"]).fillna({"min": 0.0, "max": 100.0})
        width, circled = picture.get_figwidth(), drawing.line(2, 3)["color"]
        columns = min(len(groups), max(1, int(width / (1.5 if len(keys) == 1 else 2))))
        coloured, curves = None, set()
        grid = picture.subplots(-(-len(groups) // columns), columns, squeeze=False)
        for axes, (label, of_label) in zip(grid.flat, groups, strict=False):
            x, y, *_ = [*(key for key in keys if of_label[key].notna().any()), None, None]
            x = x or "label"
            for rounds, curve in of_label.sort_values(x).groupby("rounds"):
                if y is None and len(curve) > 1:
                    curves.add(rounds)
                    shade = str(0.75 - 0.75 * lengths.index(rounds) / len(lengths))
                    line: Style = {"color": shade, "linewidth": 0.9, "linestyle": "-"}
                    axes.plot(x, "accuracy", data=curve, gid=f"after {rounds} {label}", **line)
            of_label = of_label.drop_duplicates("point")
            shown, lost = of_label["accuracy"], of_label["accuracy"].isna()
            across, up = of_label[x], of_label[y] if y else shown.fillna(low)
            values: dict[Any, Any] = {}
            if y and len(of_label) == across.nunique() * up.nunique():
                values = {key: np.unique(of_label[key]) for key in (x, y)}
                across, up = (of_label[key].rank(method="dense") - 1 for key in (x, y))
            filled: Style = {"c": shown, "vmin": low, "vmax": high} if y else {"c": "0.45"}
            dots = axes.scatter(across, up, 30, gid=f"trials {label}", **filled)
            short = of_label["rounds"] < longest  # a hole in their dots
            axes.plot(across[short], up[short], "ow", markersize=3, gid=f"short {label}")
            coloured = dots if y else coloured
            axes.plot(across[lost], up[lost], "x", color="0.4", markersize=4, gid=f"lost {label}")
            ring: Style = {"color": circled, "fillstyle": "none", "clip_on": False}
            marks = zip(of_label.index[~lost], ("best", "second"), "*o", (15, 10), strict=False)
            for at, name, marker, size in marks:  # around the points
                mark: Style = {"marker": marker, "markersize": size, **ring}
                axes.plot([across[at]], [up[at]], gid=f"{name} {label}", **mark)
            axes.margins(0.15)
            sides = (axes.xaxis, x, across, axes.bbox.width), (axes.yaxis, y, up, axes.bbox.height)
            for axis, key, places, length in sides:
                axis.set_label_text("accuracy (%)" if key is None else key.rpartition(".")[2])
                if key in values:
                    texts = [f"{v:g}" if isinstance(v, float) else f"{v}" for v in values[key]]
                    axis.set_ticks(range(len(texts)), texts)
                elif key is not None and places.dtype.kind == "f" and places.min() > 0:
                    getattr(axes, f"set_{axis.axis_name}scale")("log")
                    _plain_ticks(axis, length / picture.dpi)
            if y is None:
                room = 1 + 0.2 * (high - low)
                axes.set_ylim(low - room, high + room)
                if len(keys) == 1 and not axes.get_subplotspec().is_first_col():
                    axes.tick_params(labelleft=False)
                    axes.set_ylabel("")
            name = drawing.wrap(label, 0.8 * width / columns)
            axes.set_title(name, fontsize="medium", parse_math=False)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        if coloured is not None:
            picture.colorbar(coloured, ax=grid, label=Y["held-out"], fraction=0.05)
        caption = "Accuracy on held-out data, mean of the last rounds. "
        caption += "Star: the best point; ring: the second best; cross: diverged."
        if shorter:
            caption += f" Hollow: trained for fewer than {longest:g} rounds, which alone lowers it."
        if curves:
            *fewer, last = (f"{rounds:g}" for rounds in sorted(curves))
            dark = ", from light to dark" * bool(fewer)
            caption += f" Lines: after {', '.join(fewer)}{' or ' * bool(fewer)}{last} rounds{dark}."
        height = 0.1 * look.font_size + (1.2 + 0.09 * look.font_size) * len(grid)
        picture.set_figheight(max(look.size[1], height) if look.size else height)
        drawing.head(picture, title, caption)
        drawing.lay_out(picture)
        drawing.check_room(picture)
    return picture
