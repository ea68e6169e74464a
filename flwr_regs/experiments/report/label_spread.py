"""The labels of a partition as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW = 250  # cells: more numbers than this nobody reads


def labels(
    counts: Any,
    *,
    title: str = "",
    class_names: Sequence[str] | None = None,
    columns: str = "client",
    rows: str = "class",
    first: int = 0,
    who: str = "",
) -> Figure:
    """Draw the label spread of a partition: a column for each client, a row for each class.

    So can be drawn whatever else is counted, by `columns` and `rows`: a client's classes in each round, or
    the clients' groups. A cell's colour is the number of examples; the number stands in the cell if there
    is room for all. The bars above are the clients' totals.

    Parameters
    ----------
    counts : how many examples of each class each client holds, integers, ``(clients, classes)``
    title : one sentence above the axes
    class_names : the classes, in the order of axis 1; their numbers if None
    columns, rows : the words for one of axis 0 and one of axis 1, in the singular
    first : the number of the first column
    who : what the caption begins with; as in ``"10 clients hold"`` if empty

    Raises ValueError if `counts` is not such a matrix, or there is not one name for each class.
    """
    from matplotlib.ticker import MaxNLocator

    from flwr_regs.experiments.report import drawing

    table = np.asarray(counts)
    if table.ndim != 2 or not table.size or table.dtype.kind not in "iu" or (table < 0).any():
        raise ValueError(
            f"counts is {table.dtype} of shape {table.shape}: expected integers from 0 on, "
            "of shape (clients, classes)"
        )
    many, classes = table.shape
    if class_names is not None and len(class_names) != classes:
        raise ValueError(f"there are {len(class_names)} class names for {classes} classes")
    totals = table.sum(axis=1)
    plural = "classes" if rows == "class" else f"{rows}s"
    most = max(1, table.max())
    with drawing.style():
        figure, axes = drawing.canvas(1.0)
        axes.grid(visible=False)
        # Empty cells stay white, and the scale starts below 0, so that a single example shows.
        shades: dict[str, Any] = {"cmap": "Blues", "vmin": -0.15 * most, "vmax": most}
        cells = np.ma.masked_equal(table.T, 0)
        image = axes.imshow(cells, aspect="auto", interpolation="nearest", **shades)
        axes.set(xlabel=columns, ylabel=rows, xlim=(-0.5, many - 0.5))
        for axis, number in ((axes.xaxis, many), (axes.yaxis, classes)):
            steps = [1, 2, 5, 10]
            axis.set_major_locator(
                MaxNLocator(min(20, number), integer=True, min_n_ticks=1, steps=steps)
            )
        axes.xaxis.set_major_formatter(lambda at, _: f"{at + first:g}")
        if class_names is not None:
            shown = range(0, classes, -(-classes // 30))
            names = [drawing.wrap(figure, class_names[i], 1.3, 7) for i in shown]
            axes.set_yticks(shown, names, fontsize=7, parse_math=False)
            axes.set_ylabel("")
        each = f"{totals.min():,} to {totals.max():,} (median {np.median(totals):,.0f})"
        who = who or f"{many} {columns}s hold"
        caption = f"{who} {totals.sum():,} examples of {classes} {plural}, each {each}."
        tall = min(max(0.2 * classes, 0.9), 4.5)
        right = 0.45 + drawing.measure(figure, f"{totals.max():,}", 8)[0]
        drawing.frame(
            figure, axes, title=title, caption=caption, right=right, top=0.62, at_least=tall
        )

        width, height = figure.get_size_inches()
        box = axes.get_position()
        above = figure.add_axes(
            (box.x0, box.y1 + 0.08 / height, box.width, 0.5 / height), sharex=axes
        )
        above.grid(visible=False)
        above.bar(range(many), totals, width=0.8, color="0.55", gid="totals")
        above.tick_params(axis="x", bottom=False, labelbottom=False)
        above.set_ylabel("total")
        above.yaxis.tick_right()
        above.spines["left"].set_visible(False)
        above.spines["right"].set_visible(True)
        above.set_yticks([0, totals.max()], ["0", f"{totals.max():,}"])
        beside = figure.add_axes((box.x1 + 0.1 / width, box.y0, 0.1 / width, box.height))
        bar = figure.colorbar(image, cax=beside, label="examples")
        bar.outline.set(visible=False)
        beside.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        beside.set_ylim(0, most)
        _numbers(figure, axes, above, table)
    return figure


def _numbers(figure: Figure, axes: Axes, above: Axes, table: np.ndarray[Any, Any]) -> None:
    """Write the counts into the cells and the totals over the bars where they have room."""
    from flwr_regs.experiments.report import drawing

    many, classes = table.shape
    totals = table.sum(axis=1)
    box = axes.get_position()
    width = box.width * figure.get_figwidth() / many
    height = box.height * figure.get_figheight() / classes
    look: dict[str, Any] = {"ha": "center", "fontsize": 6.5}

    def fits(number: int) -> bool:
        wide, tall = drawing.measure(figure, f"{number:,}", 6.5)
        return bool(wide + 0.02 < width and tall < height)

    if many * classes <= FEW and fits(table.max()):
        for (client, label), count in np.ndenumerate(table):
            colour = "white" if count > 0.6 * table.max() else "black"
            if count:  # white says that a cell is empty
                look |= {"va": "center_baseline", "color": colour}
                axes.text(client, label, f"{count:,}", gid="count", **look)
    if fits(totals.max()):
        above.set_ylim(0, 1.35 * max(1, totals.max()))
        above.set_yticks([])
        above.spines["right"].set_visible(False)
        look |= {"va": "bottom", "color": "black"}
        for client, total in enumerate(totals):
            above.text(client, total, f"{total:,}", gid="total", **look)
