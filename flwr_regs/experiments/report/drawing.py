"""What the pictures share: style, the look of a line, title and caption, the files. Lengths are inches."""

from __future__ import annotations

import io
import os
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from flwr_regs.experiments.extras import missing_extra

try:
    from matplotlib import colormaps, rc_context, rcParams
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
except ImportError as error:
    raise missing_extra("matplotlib", "a picture") from error

PAD = 0.06  # at the figure's edge

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


def canvas() -> Picture:
    """Return an empty figure whose layout cuts no text off."""
    figure = Picture(layout=ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD))
    FigureCanvasAgg(figure)
    return figure


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


def measure(figure: Figure, text: str, size: float) -> tuple[float, float]:
    """Return the width and height that a text would have."""
    probe = figure.text(0, 0, text, fontsize=size, parse_math=False)
    box = probe.get_window_extent()
    probe.remove()
    return box.width / figure.dpi, box.height / figure.dpi


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


def finish(figure: Figure, axes: Axes, height: float, title: str, caption: str) -> None:
    """Write title and caption, and make the figure as high as it takes for the axes to have `height`."""
    width = figure.get_figwidth()
    place: dict[str, Any] = {"x": PAD / width, "ha": "left", "parse_math": False}
    for write, text, size, name in (
        (figure.suptitle, title, rcParams["axes.titlesize"], "title"),
        (figure.supxlabel, caption, 7.5, "caption"),
    ):
        if text:
            lines = wrap(figure, text, width - 2 * PAD, size)
            write(lines, fontsize=size, gid=name, **place)
    figure.set_figheight(height + 3)  # room for a first layout
    for _ in range(2):  # the ticks depend on the axes' size, and their room on the ticks
        figure.draw_without_rendering()
        figure.set_figheight(figure.get_figheight() + height - axes.bbox.height / figure.dpi)


def save(figure: Figure, path: str | Path) -> list[Path]:
    """Write `path` as PNG (200 dots per inch) and PDF, and return the two paths.

    `path` may end in ``.png`` or ``.pdf``, or in neither. A file is replaced as a whole or not at all.
    Nothing in it depends on the date, so equal figures give equal bytes.
    """
    base = Path(path)
    base = base.with_suffix("") if base.suffix in (".png", ".pdf") else base
    base.parent.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, undated in (("png", "Software"), ("pdf", "CreationDate")):
        final = base.with_name(f"{base.name}.{kind}")
        part = base.with_name(f".{base.name}.{os.getpid()}.{kind}")
        try:
            with style():
                figure.savefig(part, format=kind, dpi=200, metadata={undated: None})
            part.replace(final)
        finally:
            part.unlink(missing_ok=True)
        written.append(final)
    return written
