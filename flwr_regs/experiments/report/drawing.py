"""What the pictures share: style, the look of a line, title and caption, the files. Lengths are inches."""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from flwr_regs.experiments.extras import missing_extra
from flwr_regs.experiments.report.folders import write
from flwr_regs.experiments.report.terminal import folded
from flwr_regs.term import Range

try:
    from matplotlib import colormaps, rc_context, rcParams
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox
except ImportError as error:
    raise missing_extra("matplotlib", "a picture") from error

PAD = 0.06  # at the figure's edge
MARKERS = "osD^vPX*<"


@dataclass(frozen=True)
class Look:
    """What a user may choose of a picture.

    Attributes
    ----------
    title : str or None
        Above the axes; None: what the data and the partition are.
    size : (float, float) or None
        Width and height in inches; None: 6.3 wide, and as high as its content needs. Pictures with a row
        for each method, or a map, are higher than this if they need it.
    font_size : float
        In points.
    methods : sequence of str
        The labels of the lines to draw; all where a picture has none of them.
    accuracy : (float, float) or None
        The part of an axis of accuracies that is drawn, in per cent; None: what the lines need.
    """

    title: str | None = None
    size: tuple[float, float] | None = None
    font_size: float = 8.0
    methods: Sequence[str] = ()
    accuracy: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Check what cannot be drawn, before a picture is replaced."""
        points = Range("a number of points from 4 to 40", lambda v: 4 <= v <= 40)
        points.check("a picture", "font_size", self.font_size)
        inches = Range("inches from 1.5 to 40, such as (3.3, 2.5)", lambda v: 1.5 <= v <= 40)
        percent = Range("per cent, such as (80, 90)")
        for name, part, pair in ("size", inches, self.size), ("accuracy", percent, self.accuracy):
            two = isinstance(pair, tuple | list) and len(pair) == 2 and all(map(part.fits, pair))
            if pair is not None and not (two and (name == "size" or pair[0] < pair[1])):
                must = f"must be two numbers, {part.expected}, not {pair!r}"
                raise ValueError(f"a picture's {name} {must}")


def style(look: Look) -> AbstractContextManager[None]:
    """Return the context to make and save pictures in: the style file over matplotlib's defaults."""
    size: Any = {"figure.figsize": look.size} if look.size else {}
    file = Path(__file__).with_name("mplstyle.yaml")
    return rc_context({"font.size": look.font_size, **size}, file)


@contextmanager
def drawn(look: Look | None) -> Iterator[Picture]:
    """Yield a new picture of a look, and keep its style meanwhile."""
    look = look or Look()
    with style(look):
        yield Picture(look)


class Picture(Figure):
    """A figure without pyplot that a notebook shows; its layout cuts no text off.

    `flaws` says what the look makes of it: texts without room, or no point in a part of an axis.
    """

    def __init__(self, look: Look) -> None:
        super().__init__(layout=ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD))
        FigureCanvasAgg(self)
        self.look, self.flaws = look, list[str]()

    def rendered(self, kind: str, dpi: float) -> bytes:
        """Return it as ``png`` or ``pdf``, without a date: equal pictures give equal bytes."""
        out, undated = io.BytesIO(), {"png": "Software", "pdf": "CreationDate"}[kind]
        with style(self.look):
            self.savefig(out, format=kind, dpi=dpi, metadata={undated: None})
        return out.getvalue()

    def _repr_png_(self) -> bytes:
        return self.rendered("png", self.dpi)


def line(index: int, count: int, ordered: bool = False) -> dict[str, Any]:
    """Return the look of line `index` of `count`: colour, dashes, width, layer and markers.

    No two of the first 40 have the same colour and dashes, and no two of 360 the same marker too. Later
    lines are thinner, and dashed lines lie above solid ones, so that one of two equal lines shows through
    the other; their markers stand at other places.
    """
    cycle = [*rcParams["axes.prop_cycle"]]
    colour, dashes = (cycle[index % len(cycle)][name] for name in ("color", "linestyle"))
    if ordered:  # the map's last colours are too light for a line on white
        colour = colormaps[rcParams["image.cmap"]](0.82 * index / max(count - 1, 1))
    return {
        "color": colour,
        "linestyle": dashes,
        "linewidth": 1.1 + 0.7 / (1 + index),
        "zorder": 3 + (dashes != "-") + index / 1000,
        "marker": MARKERS[index % len(MARKERS)],
        "markersize": 0.4 * rcParams["font.size"],
        "markevery": (0.02 + 0.12 * index / count, 0.12),  # of the axes' diagonal
    }


def wrap(text: str, width: float, scale: float = 1.0) -> str:
    """Break a text of `scale` times the font's size into lines of about `width`."""
    return folded(text, int(width * 72 / (0.62 * scale * rcParams["font.size"])))


def head(picture: Picture, title: str, caption: str) -> None:
    """Write title and caption."""
    chosen, width = picture.look.title, picture.get_figwidth()
    place: dict[str, Any] = {"x": PAD / width, "ha": "left", "parse_math": False}
    text = wrap(title if chosen is None else chosen, width, 1.15)
    picture.suptitle(text, fontsize=rcParams["axes.titlesize"], gid="title", **place)
    picture.supxlabel(wrap(caption, width), fontsize="medium", gid="caption", **place)


def finish(picture: Picture, axes: Axes, height: float, grows: bool = False) -> None:
    """Make the picture as high as it takes for the axes to have `height`, if the look has no size.

    If it has one, nothing but a picture that `grows` is made higher.
    """
    size = picture.look.size
    if size is None or grows:
        picture.set_figheight(height + 3)  # room for a first layout
        for _ in range(2):  # the ticks depend on the axes' size, and their room on the ticks
            lay_out(picture)
            picture.set_figheight(picture.get_figheight() + height - axes.bbox.height / picture.dpi)
        if size is not None:
            picture.set_figheight(max(size[1], picture.get_figheight()))
    lay_out(picture)
    check_room(picture)


def lay_out(picture: Picture) -> None:
    """Lay the picture out, with the axes' labels in lines that are no longer than the axes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "constrained_layout not applied")  # `check_room` says so
        for _ in range(4):  # a label's lines take room from the axes
            picture.draw_without_rendering()
            wrapped = False
            for axes in picture.axes:
                for axis, length in ((axes.xaxis, axes.bbox.width), (axes.yaxis, axes.bbox.height)):
                    before = axis.label.get_text()
                    text = wrap(before.replace("\n", " "), length / picture.dpi)
                    axis.label.set_text(text)
                    wrapped |= text != before
            if not wrapped:
                break


def check_room(picture: Picture) -> None:
    """Note it if a text is cut off, or title, axes and caption meet, or numbers of an axis do."""
    parts = [axes for axes in picture.axes if axes.get_visible()]
    beside = [text for text in picture.findobj(Text) if text.get_gid() in ("title", "caption")]
    shown = [*parts, *(text for text in beside if text.get_text())]
    boxes = [box for part in shown if (box := part.get_tightbbox()) is not None]
    inside, font = picture.bbox.padded(1), picture.look.font_size
    cut_off = any(not (inside.contains(*box.min) and inside.contains(*box.max)) for box in boxes)
    apart = [boxes, *(_numbers(axis) for axes in parts for axis in (axes.xaxis, axes.yaxis))]
    met = any(a.fully_overlaps(b) for group in apart for a, b in combinations(group, 2))
    flat = max(axes.bbox.height for axes in parts) < 5 * font / 72 * picture.dpi
    if cut_off or met or flat:
        width, height = picture.look.size or picture.get_size_inches()
        flaw = f"{width:.3g}x{height:.3g} inches have no room for its texts at {font:g} points"
        picture.flaws.append(f"{flaw}: give a larger size, a smaller font size, or fewer methods")


def _numbers(axis: Axis) -> list[Bbox]:
    """Return where the numbers at an axis' ticks are."""
    low, high = sorted(axis.get_view_interval())
    texts = [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]


def save(picture: Picture, path: Path) -> list[Path]:
    """Write ``path.png`` (200 dots per inch) and ``path.pdf``; return the two paths, and tell of flaws."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "pdf")]
    for file in paths:
        write(file, picture.rendered(file.suffix[1:], 200))
    for flaw in dict.fromkeys(picture.flaws):
        print(f"flwr-regs: {path.name}: {flaw}", file=sys.stderr)
    return paths


def remove(folder: Path, name: str) -> None:
    """Remove the pictures of a name, or of a pattern, that no longer show what is in a folder."""
    for path in [*folder.glob(f"{name}.png"), *folder.glob(f"{name}.pdf")]:
        path.unlink()
