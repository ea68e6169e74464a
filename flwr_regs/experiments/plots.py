"""Pictures fit for a paper: accuracy over rounds, bytes or seconds; clients; the labels of a partition.

The functions return matplotlib figures and never touch pyplot's state. Each raises ImportError without
matplotlib; the message names the extra to install.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]

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
        if any(b <= a for a, b in zip(self.rounds, self.rounds[1:], strict=False)):
            raise ValueError(f"run {self.label!r}, seed {self.seed}: rounds must increase")

    @property
    def broken(self) -> bool:
        """Whether the run stopped, measured nothing, or has an accuracy that is not finite."""
        return bool(self.stopped) or not len(self.rounds) or not np.isfinite(self.accuracy).all()


@dataclass(frozen=True)
class _Method:
    """The runs of one label: whole ones, which are averaged, and broken ones."""

    label: str
    whole: list[Curve]
    broken: list[Curve]

    @property
    def text(self) -> str:
        """The label, with the number of stopped runs if there are any."""
        if not self.broken:
            return self.label
        return f"{self.label} ({len(self.broken)} of {len(self.whole) + len(self.broken)} stopped)"


def _methods(curves: Sequence[Curve]) -> list[_Method]:
    """Return the curves by label, in the order of the labels' first runs."""
    if not curves:
        raise ValueError("there are no curves to draw: expected at least one run")
    for (label, seed), count in Counter((c.label, c.seed) for c in curves).items():
        if count > 1:
            raise ValueError(
                f"{label!r} has {count} runs with seed {seed}: expected one for each seed"
            )
    groups: dict[str, list[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve.label, []).append(curve)
    return [
        _Method(label, [c for c in runs if not c.broken], [c for c in runs if c.broken])
        for label, runs in groups.items()
    ]


def _mean(method: _Method, x: str) -> tuple[Array, Array, Array]:
    """Return x, mean and sample deviation (accuracies in per cent) by round, over a method's whole runs."""
    rounds = set.intersection(*(set(c.rounds) for c in method.whole))
    if not rounds:
        raise ValueError(f"the runs of {method.label!r} have no round in common")
    kept = [[i for i, r in enumerate(c.rounds) if r in rounds] for c in method.whole]
    across = [np.asarray(_across(c, x), float)[i] for c, i in zip(method.whole, kept, strict=True)]
    up = 100 * np.array(
        [np.asarray(c.accuracy)[i] for c, i in zip(method.whole, kept, strict=True)]
    )
    deviation = up.std(axis=0, ddof=1) if len(up) > 1 else np.zeros(up.shape[1])
    return np.mean(across, axis=0), up.mean(axis=0), deviation


def _across(curve: Curve, x: str) -> Sequence[float]:
    values: Sequence[float] = getattr(curve, "rounds" if x == "round" else x)
    if not np.isfinite(values).all():
        raise ValueError(
            f"run {curve.label!r}, seed {curve.seed}: {x} holds values that are not finite"
        )
    return values


def _seeds(methods: Sequence[_Method], name: str) -> str:
    """Return the caption's sentence on n: the usual n, and the methods that have another."""
    numbers = {m.label: len(m.whole) for m in methods if m.whole}
    if not numbers:
        return ""
    usual = max(Counter(numbers.values()).items(), key=lambda item: (item[1], item[0]))[0]
    others: dict[int, list[str]] = {}
    for label, n in numbers.items():
        if n != usual:
            others.setdefault(n, []).append(label)
    rest = "; ".join(f"{', '.join(labels)}: n = {n}" for n, labels in others.items())
    said = f"n = {usual} seed{'s' * (usual > 1)}" + (f" ({rest})" if rest else "")
    return f"{said}." if set(numbers.values()) == {1} else f"{name} over {said}."


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
    over the rounds that all seeds have: with ``x="megabytes"`` or ``"seconds"`` a point is the seeds' mean x
    after a round against their mean accuracy after it. Runs that stopped, or whose accuracy is not finite,
    are in neither mean nor band: each is a thin line to its last finite accuracy, with a cross there, and the
    label counts them.

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

    Raises ValueError if there are no curves, `x` is another word, a label has a seed twice or seeds without a
    common round, or an x is not finite.
    """
    from flwr_regs.experiments import drawing

    if x not in AXES:
        raise ValueError(f"x is {x!r}: expected one of {', '.join(AXES)}")
    methods = _methods(curves)
    with drawing.style():
        figure, axes = drawing.canvas()
        log = x == "megabytes" and _logarithmic(methods)
        labels = []
        for index, method in enumerate(methods):
            look = drawing.look(index, len(methods), ordered)
            labels.append(drawing.Label(method.text, *_draw(axes, method, x, log, look)))
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
        stopped = any(m.broken for m in methods)
        cross = (
            "Thin line to a cross: a run that stopped there; it is in no mean." if stopped else ""
        )
        right, height, write = drawing.margin(figure, axes, labels, mark)
        caption = f"{_seeds(methods, 'Mean and standard deviation')} {cross}".strip()
        drawing.frame(figure, axes, title=title, caption=caption, right=right, at_least=height)
        write()
    return figure


def _logarithmic(methods: Sequence[_Method]) -> bool:
    totals = [max(_across(c, "megabytes"), default=0) for m in methods for c in m.whole or m.broken]
    positive = [t for t in totals if t > 0]
    return bool(positive) and max(positive) > LOG_ABOVE * min(positive)


def _draw(
    axes: Axes, method: _Method, x: str, log: bool, look: dict[str, Any]
) -> tuple[dict[str, Any], tuple[float, float] | None]:
    """Draw a method's runs; return the look of its label's sample and the end of its line."""
    ends: list[tuple[float, float]] = []
    thin = {**look, "linestyle": "-", "linewidth": 0.6}
    for curve in method.broken:
        finite = np.isfinite(curve.accuracy)
        length = len(finite) if finite.all() else int(finite.argmin())
        across = np.asarray(_across(curve, x)[:length], float)
        up = 100 * np.asarray(curve.accuracy[:length], float)
        shown = across > 0 if log else slice(None)
        across, up = across[shown], up[shown]
        axes.plot(across, up, gid=f"stopped {method.label}", label="_stopped", **thin)
        crossed = {"marker": "x", "markersize": 4.5, "markeredgewidth": 1.0, "clip_on": False}
        axes.plot(
            across[-1:], up[-1:], gid=f"cross {method.label}", label="_cross", **thin, **crossed
        )
        if len(up):
            ends.append((float(across[-1]), float(up[-1])))
    if not method.whole:
        return thin, max(ends, default=None)
    across, mean, deviation = _mean(method, x)
    if log:
        shown = across > 0
        across, mean, deviation = across[shown], mean[shown], deviation[shown]
    if len(method.whole) > 1:
        fill = {"color": look["color"], "alpha": 0.16, "linewidth": 0, "zorder": 2}
        axes.fill_between(
            across, mean - deviation, mean + deviation, gid=f"band {method.label}", **fill
        )
    dot = {"marker": "o", "markersize": 4} if len(mean) == 1 else {}
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
    room = max(0.04 * (top - low), 0.25)
    axes.set_ylim(low - room, top + room)
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

    Points at nearly the same accuracy are stacked. Below them stand the median and the quartiles over
    all clients of all seeds. Runs that stopped have no final model; the label counts them. A NaN is a
    client that was not measured, and left out.

    Raises ValueError if there are no curves, a label has a seed twice, or no run holds clients' accuracies.
    """
    from flwr_regs.experiments import drawing

    methods = _methods(curves)
    values = [
        100 * np.concatenate([np.asarray(c.clients, float) for c in m.whole] or [[]])
        for m in methods
    ]
    values = [v[np.isfinite(v)] for v in values]
    if not any(len(v) for v in values):
        raise ValueError(
            "no whole run holds the clients' accuracies: expected them in Curve.clients"
        )
    low, top = min(v.min() for v in values if len(v)), max(v.max() for v in values if len(v))
    room = max(0.03 * (top - low), 0.25)
    with drawing.style():
        figure, axes = drawing.canvas(2.0)
        width = max((top - low) / 75, 1e-9)  # of a stack: about a point's width
        tallest = 1
        stacks = []
        for these in values:
            bins = np.round((np.sort(these) - low) / width).astype(int)
            level = np.arange(len(bins)) - np.searchsorted(bins, bins)
            stacks.append((np.sort(these), level))
            tallest = max(tallest, *level + 1) if len(level) else tallest
        step = min(0.09, 0.6 / tallest)
        for row, (method, (x, level)) in enumerate(zip(methods, stacks, strict=True)):
            colour = drawing.look(row, len(methods), False)["color"]
            point = {
                "linestyle": "",
                "marker": "o",
                "markersize": 3,
                "markeredgewidth": 0,
                "alpha": 0.55,
            }
            axes.plot(x, row - step * level, color=colour, gid=f"points {method.label}", **point)
            if len(x):
                first, median, third = np.quantile(x, [0.25, 0.5, 0.75])
                bar = {
                    "color": colour,
                    "gid": f"quartiles {method.label}",
                    "solid_capstyle": "butt",
                }
                axes.plot([first, third], [row + 0.16] * 2, linewidth=3.5, alpha=0.45, **bar)
                bar["gid"] = f"median {method.label}"
                axes.plot([median] * 2, [row + 0.09, row + 0.23], linewidth=1.8, **bar)
        size = 8
        names = [drawing.wrap(figure, m.text, 1.6, size) for m in methods]
        axes.set_yticks(range(len(methods)), names, fontsize=size, parse_math=False)
        axes.set(xlim=(low - room, top + room), ylim=(len(methods) - 0.62, -0.75))
        axes.set_xlabel(f"{measured} of a client with the final model (%)")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        each = sorted({len(c.clients) for m in methods for c in m.whole if len(c.clients)})
        number = f"{each[0]}" if len(each) == 1 else f"{each[0]} to {each[-1]}"
        caption = (
            f"Points: {number} clients of each seed; below, their median and quartiles over "
            + _seeds(
                [m for m, v in zip(methods, values, strict=True) if len(v)], "clients and seeds,"
            )
        )
        drawing.frame(figure, axes, title=title, caption=caption, at_least=0.5 * len(methods))
    return figure


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write `path` as PNG (200 dots per inch) and PDF, and return the two paths.

    `path` may end in ``.png`` or ``.pdf``, or in neither. A file is replaced as a whole or not at all.
    Nothing in it depends on the date, so equal figures give equal bytes.
    """
    from flwr_regs.experiments import drawing

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
