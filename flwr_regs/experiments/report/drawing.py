"""What the pictures share: the style, the look of a line, texts that cover nothing. Lengths are inches."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flwr_regs.experiments.extras import missing_extra

try:
    from matplotlib import colormaps, rc_context, rcParams
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Text
except ImportError as error:
    raise missing_extra("matplotlib", "a picture") from error

Array = np.ndarray[Any, Any]

PAD = 0.06  # between two texts, and at the figure's edge
GUTTER = 0.3  # from the axes to the labels at the right: room for the lines that lead there
SAMPLE = 0.3  # the sample of a line's look before its label
AT_THE_LINES = 8  # more labels than this are listed from the top instead

# Seven colours and five dashes: 35 looks before one comes again.
DASHES: tuple[Any, ...] = (
    "-",
    (0, (4, 1.5)),
    (0, (6, 1.5, 1, 1.5)),
    (0, (1.2, 1.2)),
    (0, (9, 1.5, 1, 1.5, 1, 1.5)),
)


def style() -> AbstractContextManager[None]:
    """Return the context to make and save pictures in: the style file over matplotlib's defaults."""
    return rc_context(fname=Path(__file__).with_name("mplstyle.yaml"))


class Picture(Figure):
    """A figure without pyplot that a notebook shows."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        with style():
            self.savefig(out, format="png", dpi=self.dpi)
        return out.getvalue()


def canvas(height: float | None = None) -> tuple[Picture, Axes]:
    """Return an empty figure and its axes."""
    figure = Picture()
    FigureCanvasAgg(figure)
    if height is not None:
        figure.set_figheight(height)
    return figure, figure.add_subplot()


def look(index: int, count: int, ordered: bool) -> dict[str, Any]:
    """Return the colour, dashes, width and layer of line `index` of `count`.

    Later lines are thinner, and dashed lines lie above solid ones, so that one of two equal lines shows
    through the other.
    """
    if ordered:  # the map's last colours are too light for a line on white
        colour: Any = colormaps[rcParams["image.cmap"]](0.82 * index / max(count - 1, 1))
    else:
        colours = rcParams["axes.prop_cycle"].by_key()["color"]
        colour = "#" + colours[index % len(colours)].lstrip("#")
    dashes = DASHES[index % len(DASHES)]
    return {
        "color": colour,
        "linestyle": dashes,
        "linewidth": 1.1 + 0.7 / (1 + index),
        "zorder": 3 + (dashes != "-") + index / 1000,
    }


def extent(figure: Figure, artist: Text) -> tuple[float, float]:
    """Return the width and height of a text."""
    box = artist.get_window_extent()
    return box.width / figure.dpi, box.height / figure.dpi


def measure(figure: Figure, text: str, size: float) -> tuple[float, float]:
    """Return the width and height that a text would have."""
    probe = figure.text(0, 0, text, fontsize=size, parse_math=False)
    room = extent(figure, probe)
    probe.remove()
    return room


def wrap(figure: Figure, text: str, width: float, size: float) -> str:
    """Break `text` into lines of at most `width`.

    It breaks after a space or one of ``,;+/``; a piece that is too long for a line also after a ``(``,
    and only as a last resort anywhere.
    """

    def fits(line: str) -> bool:
        return measure(figure, line.rstrip(" "), size)[0] <= width

    pieces = [re.sub(r"[ \t\n]+", " ", text)]
    for gap in (r"(?<=[ ,;+/])", r"(?<=\w\()", r"(?<=.)"):
        pieces = [p for piece in pieces for p in ([piece] if fits(piece) else re.split(gap, piece))]
    lines = [""]
    for piece in pieces:
        if lines[-1] and not fits(lines[-1] + piece):
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.strip(" ") for line in lines)


def frame(
    figure: Figure,
    axes: Axes,
    *,
    title: str,
    caption: str,
    right: float = 0.0,
    top: float = 0.0,
    at_least: float = 0.0,
) -> None:
    """Place the axes between title and caption so that nothing is cut off.

    `right` and `top` are left free beside and above the axes. The figure grows until the axes are
    `at_least` high.
    """
    width = figure.get_figwidth()
    above, below = PAD, PAD
    texts = []
    for text, size, name in (
        (title, rcParams["axes.titlesize"], "title"),
        (caption, 7.5, "caption"),
    ):
        if text:
            lines = wrap(figure, text, width - 2 * PAD, size)
            texts.append(figure.text(0, 0, lines, fontsize=size, parse_math=False, gid=name))
            room = extent(figure, texts[-1])[1] + 1.5 * PAD
            above, below = (above + room, below) if name == "title" else (above, below + room)
    for _ in range(3):  # the ticks depend on the axes' size, and their room on the ticks
        figure.draw_without_rendering()
        inner = axes.bbox
        boxes = [b for a in (axes.xaxis, axes.yaxis) if (b := a.get_tightbbox(None)) is not None]
        left = PAD + max([0.0, *(inner.x0 - b.x0 for b in boxes)]) / figure.dpi
        beside = max([right, *((b.x1 - inner.x1) / figure.dpi for b in boxes)]) + PAD
        under = below + max([0.0, *(inner.y0 - b.y0 for b in boxes)]) / figure.dpi
        over = above + max([top, *((b.y1 - inner.y1) / figure.dpi for b in boxes)])
        figure.set_figheight(max(figure.get_figheight(), at_least + over + under))
        height = figure.get_figheight()
        axes.set_position(
            (
                left / width,
                under / height,
                (width - left - beside) / width,
                (height - under - over) / height,
            )
        )
    for artist in texts:
        high = artist.get_gid() == "title"
        artist.set(
            va="top" if high else "bottom",
            x=PAD / width,
            y=1 - PAD / height if high else PAD / height,
        )


def spread(wanted: Sequence[float], sizes: Sequence[float], low: float, high: float) -> Array:
    """Return the centres nearest to `wanted` (least squares) at which boxes of `sizes` do not overlap.

    The boxes lie between `low` and `high` if there is room for all. Of two equal centres the earlier is
    the lower one.
    """
    order = np.argsort(np.asarray(wanted, float), kind="stable")
    tall = np.asarray(sizes, float)[order]
    shift = np.cumsum(tall) - tall / 2  # less its shift, a centre must not be below the one before
    blocks: list[
        tuple[float, int]
    ] = []  # the mean and number of centres that touch: isotonic regression
    for value in np.asarray(wanted, float)[order] - shift:
        mean, count = float(value), 1
        while blocks and blocks[-1][0] >= mean:
            before, number = blocks.pop()
            mean, count = (before * number + mean * count) / (number + count), number + count
        blocks.append((mean, count))
    free = np.concatenate([np.full(count, mean) for mean, count in blocks])
    centres = np.empty(len(order))
    centres[order] = np.clip(free, low, max(low, high - tall.sum())) + shift
    return centres


@dataclass(frozen=True)
class Label:
    """A text for the right margin, the line's look, and where the line ends, if it was drawn at all."""

    text: str
    look: dict[str, Any]
    end: tuple[float, float] | None = None


def margin(
    figure: Figure, axes: Axes, labels: Sequence[Label], target: Label | None
) -> tuple[float, float, Callable[[], None]]:
    """Return the width and height that the right margin needs, and what writes it once the axes are placed.

    Up to `AT_THE_LINES` labels, and the target's, stand as near to the ends of their lines as they go
    without an overlap, each with a thin line that leads there. More are listed from the top, beside the
    target's.
    """
    attached = len(labels) <= AT_THE_LINES
    listed = [*labels, target] if target and attached else [*labels]
    size = float(rcParams["font.size"])

    def text(lines: str) -> Text:
        return figure.text(0, 0, lines, fontsize=size, parse_math=False, va="center", gid="label")

    texts = [text(wrap(figure, label.text, 1.55, size)) for label in listed]
    apart = text(target.text.replace(" ", "\n", 1)) if target and not attached else None
    start = GUTTER if attached else 2 * PAD
    if apart:
        start += extent(figure, apart)[0] + PAD
    sizes = [extent(figure, t)[1] + 0.04 for t in texts]

    def write() -> None:
        width, height = figure.get_size_inches()
        box = axes.get_position()
        edge, low, high = box.x1 * width, box.y0 * height, box.y1 * height

        def place(label: Label) -> tuple[float, float]:
            x, y = axes.transData.transform(label.end or (0, 0)) / figure.dpi
            return float(x), low if label.end is None else float(y)

        def line(points: Sequence[tuple[float, float]], **looks: Any) -> None:
            x, y = np.array(points).T
            figure.add_artist(Line2D(x / width, y / height, transform=figure.transFigure, **looks))

        if attached:  # reversed: the first of several lines with equal ends has the highest label
            wanted = [place(label)[1] for label in reversed(listed)]
            centres = spread(wanted, sizes[::-1], low, high)[::-1]
        else:
            centres = high - np.cumsum(sizes) + np.array(sizes) / 2
        x = edge + start
        for label, artist, y in zip(listed, texts, centres, strict=True):
            artist.set(x=(x + SAMPLE + PAD) / width, y=y / height)
            line([(x, y), (x + SAMPLE, y)], **label.look)
            if attached and label.end is not None:
                end = place(label)
                thin = {"color": label.look["color"], "linewidth": 0.5, "gid": "leader"}
                if end[0] < edge - 0.2:  # dotted, for the run does not go on
                    line([end, (edge, end[1])], linestyle=(0, (1, 3)), **thin)
                    end = edge, end[1]
                line([end, (edge + 0.05, end[1]), (x - 0.03, y)], **thin)
        if apart and target:
            apart.set(x=(edge + PAD) / width, y=place(target)[1] / height)

    wide = max(extent(figure, t)[0] for t in texts)
    return start + SAMPLE + PAD + wide, sum(sizes), write
