"""What the pictures share: style, the look of a line, title and caption, the files. Lengths are inches."""

from __future__ import annotations

import io
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr_regs.experiments.extras import missing_extra
from flwr_regs.experiments.report.folders import write

try:
    from matplotlib import colormaps, rc_context, rcParams
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
except ImportError as error:
    raise missing_extra("matplotlib", "a picture") from error

PAD = 0.06  # at the figure's edge


@dataclass(frozen=True)
class Look:
    """What a user may choose of a picture.

    Attributes
    ----------
    title : str or None
        Above the axes; None: what the data and the partition are.
    size : (float, float) or None
        Width and height in inches; None: 6.3 wide, and as high as its content needs.
    font_size : float
        In points.
    """

    title: str | None = None
    size: tuple[float, float] | None = None
    font_size: float = 8.0


def style(look: Look) -> AbstractContextManager[None]:
    """Return the context to make and save pictures in: the style file over matplotlib's defaults."""
    chosen: Any = {"font.size": look.font_size}
    if look.size:
        chosen["figure.figsize"] = look.size
    return rc_context(chosen, Path(__file__).with_name("mplstyle.yaml"))


class Picture(Figure):
    """A figure without pyplot that a notebook shows; its layout cuts no text off."""

    def __init__(self, look: Look) -> None:
        super().__init__(layout=ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD))
        FigureCanvasAgg(self)
        self.look = look

    def rendered(self, kind: str, dpi: float) -> bytes:
        """Return it as ``png`` or ``pdf``, without a date: equal pictures give equal bytes."""
        out = io.BytesIO()
        undated = {"png": "Software", "pdf": "CreationDate"}[kind]
        with style(self.look):
            self.savefig(out, format=kind, dpi=dpi, metadata={undated: None})
        return out.getvalue()

    def _repr_png_(self) -> bytes:
        return self.rendered("png", self.dpi)


def line(index: int, count: int, ordered: bool) -> dict[str, Any]:
    """Return the colour, dashes, width and layer of line `index` of `count`.

    Later lines are thinner, and dashed lines lie above solid ones, so that one of two equal lines shows
    through the other.
    """
    cycle = rcParams["axes.prop_cycle"].by_key()
    colour, dashes = (cycle[name][index % 35] for name in ("color", "linestyle"))
    if ordered:  # the map's last colours are too light for a line on white
        colour = colormaps[rcParams["image.cmap"]](0.82 * index / max(count - 1, 1))
    width, layer = 1.1 + 0.7 / (1 + index), 3 + (dashes != "-") + index / 1000
    return {"color": colour, "linestyle": dashes, "linewidth": width, "zorder": layer}


def wrap(text: str, width: float, scale: float = 1.0) -> str:
    """Break a text of `scale` times the font's size into lines of about `width`.

    It breaks after a space or one of ``,;+/``, or a bracket of a call, and only as a last resort anywhere.
    """
    most = max(int(width * 72 / (0.62 * scale * rcParams["font.size"])), 8)
    gap = r"(?:(?<=[ ,;+/])|(?<=\w\()|$)"
    lines = re.findall(rf"\S.{{0,{most - 1}}}{gap}|\S.{{0,{most - 1}}}", text)
    return "\n".join(line.strip() for line in lines)


def head(picture: Picture, title: str, caption: str) -> None:
    """Write title and caption."""
    look, width = picture.look, picture.get_figwidth()
    place: dict[str, Any] = {"x": PAD / width, "ha": "left", "parse_math": False}
    text = wrap(title if look.title is None else look.title, width, 1.15)
    picture.suptitle(text, fontsize=rcParams["axes.titlesize"], gid="title", **place)
    picture.supxlabel(wrap(caption, width), fontsize="medium", gid="caption", **place)


def finish(picture: Picture, axes: Axes, height: float, title: str, caption: str) -> None:
    """Write title and caption, and make the picture as high as it takes for the axes to have `height`."""
    head(picture, title, caption)
    if picture.look.size is None:
        picture.set_figheight(height + 3)  # room for a first layout
        for _ in range(2):  # the ticks depend on the axes' size, and their room on the ticks
            picture.draw_without_rendering()
            picture.set_figheight(picture.get_figheight() + height - axes.bbox.height / picture.dpi)


def save(picture: Picture, path: Path) -> list[Path]:
    """Write ``path.png`` (200 dots per inch) and ``path.pdf``, and return the two paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf")]
    for file in paths:
        write(file, picture.rendered(file.suffix[1:], 200))
    return paths
