"""Pictures in rows and columns: the labels of a partition, the inputs of clients, labels that swap.

As those of `plots`, they are matplotlib figures without pyplot's state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flwr_regs.experiments.report import drawing

MOST = 250  # cells: more numbers than this nobody reads


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
    most = max(1, table.max())
    tall = min(max(0.2 * classes, 0.9), 4.5)
    with drawing.style():
        figure = drawing.canvas()
        above, axes = figure.subplots(2, sharex=True, height_ratios=[0.5, tall])
        # Empty cells stay white, and the scale starts below 0, so that a single example shows.
        shades: dict[str, Any] = {"cmap": "Blues", "vmin": -0.15 * most, "vmax": most}
        image = _cells(axes, np.ma.masked_equal(table.T, 0), **shades)
        axes.set(xlabel=columns, ylabel=rows)
        axes.xaxis.set_major_formatter(lambda at, _: f"{at + first:g}")
        if class_names is not None:
            shown = range(0, classes, -(-classes // 30))
            names = [drawing.wrap(figure, class_names[i], 1.3, 7) for i in shown]
            axes.set_yticks(shown, names, fontsize=7, parse_math=False)
            axes.set_ylabel("")
        bar = figure.colorbar(image, ax=axes, label="examples", aspect=25, pad=0.01)
        bar.outline.set(visible=False)
        bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        bar.ax.set_ylim(0, most)
        above.grid(visible=False)
        above.bar(range(many), totals, width=0.8, color="0.55", gid="totals")
        above.tick_params(axis="x", bottom=False, labelbottom=False)
        above.set(ylabel="total", ylim=(0, 1.35 * max(1, totals.max())))
        above.set_yticks([0, totals.max()], ["0", f"{totals.max():,}"])
        plural = "classes" if rows == "class" else f"{rows}s"
        each = f"{totals.min():,} to {totals.max():,} (median {np.median(totals):,.0f})"
        who = who or f"{many} {columns}s hold"
        caption = f"{who} {totals.sum():,} examples of {classes} {plural}, each {each}."
        drawing.finish(figure, axes, tall, title, caption)
        wide, high = axes.bbox.width / figure.dpi / many, tall / classes

        def fits(number: int) -> bool:
            width, height = drawing.measure(figure, f"{number:,}", 6.5)
            return bool(width + 0.02 < wide and height < high)

        look: dict[str, Any] = {"ha": "center", "fontsize": 6.5}
        if table.size <= MOST and fits(table.max()):
            for (client, label), count in np.ndenumerate(table):
                colour = "white" if count > 0.6 * most else "black"
                if count:  # white says that a cell is empty
                    look |= {"va": "center_baseline", "color": colour}
                    axes.text(client, label, f"{count:,}", gid="count", **look)
        if fits(totals.max()):
            above.set_yticks([])
            look |= {"va": "bottom", "color": "black"}
            for client, total in enumerate(totals):
                above.text(client, total, f"{total:,}", gid="total", **look)
    return figure


def inputs(images: Any, names: Sequence[str], *, title: str = "", caption: str = "") -> Figure:
    """Draw the same examples as several clients have them: a column of images for each client.

    Parameters
    ----------
    images : array, ``(clients, examples, channels, height, width)``
        With 3 channels they are shown in colour, else the first channel in grey. The darkest value of all
        is black, the brightest white.
    names : what stands below each column
    title, caption : one sentence above and below

    Raises ValueError if `images` has another shape, or there is not one name for each client.
    """
    tiles = np.asarray(images, float)
    if tiles.ndim != 5 or not tiles.size:
        raise ValueError(
            f"images has the shape {tiles.shape}: expected (clients, examples, channels, height, width)"
        )
    if len(names) != len(tiles):
        raise ValueError(f"there are {len(names)} names for {len(tiles)} clients")
    tiles = tiles if tiles.shape[2] == 3 else tiles[:, :, :1].repeat(3, axis=2)
    tiles = (tiles - tiles.min()) / max(np.ptp(tiles), 1e-12)
    clients, examples = tiles.shape[:2]
    with drawing.style():
        figure = drawing.canvas()
        grid = figure.subplots(examples, clients, squeeze=False)
        width = figure.get_figwidth() / clients
        for (row, client), axes in np.ndenumerate(grid):
            axes.imshow(tiles[client, row].transpose(1, 2, 0), interpolation="nearest")
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
        for axes, name in zip(grid[-1], names, strict=True):
            text = drawing.wrap(figure, name, width * 0.9, 7)
            axes.set_xlabel(text, fontsize=7, parse_math=False)
        side = width * 0.85 * tiles.shape[3] / tiles.shape[4]
        drawing.finish(figure, grid[0, 0], min(side, 6 / examples), title, caption)
    return figure


def swaps(table: Any, *, title: str = "") -> Figure:
    """Draw which label each class has in each round: coloured where it is not its own.

    Parameters
    ----------
    table : integers, ``(rounds + 1, classes)``
        The labels in round 0, 1, and so on, as of :func:`flwr_regs.experiments.partition.shifts.swapped`.
        A cell has its label in it if there is room for all.
    title : one sentence above the axes

    Raises ValueError if `table` has another shape.
    """
    table = np.asarray(table)
    if table.ndim != 2 or not table.size or table.dtype.kind not in "iu":
        raise ValueError(
            f"labels is {table.dtype} of shape {table.shape}: expected integers, (rounds + 1, classes)"
        )
    rounds, classes = table.shape
    unmoved = table == np.arange(classes)
    swapped = (table[1:] != table[:-1]).any(axis=1).sum()
    with drawing.style():
        figure = drawing.canvas()
        axes = figure.add_subplot()
        shades: dict[str, Any] = {"cmap": "viridis", "vmin": -0.6 * classes, "vmax": classes - 1}
        _cells(axes, np.ma.masked_array(table, unmoved).T, **shades)
        axes.set(xlabel="round", ylabel="class of the example")
        if table.size <= MOST:
            for (t, label), name in np.ndenumerate(table):
                colour = "white" if name < 0.6 * classes else "black"
                look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 6.5}
                colour = "0.6" if unmoved[t, label] else colour
                axes.text(t, label, str(name), color=colour, gid="label", **look)
        caption = (
            "A cell is the label that a class has in a round, coloured if it is not its own. "
            f"In {rounds - 1} rounds, two labels swap {swapped} times."
        )
        drawing.finish(figure, axes, min(max(0.2 * classes, 1.4), 4.5), title, caption)
    return figure


def _cells(axes: Axes, cells: Any, **shades: Any) -> Any:
    """Draw a matrix as coloured cells, and ticks at whole numbers; return matplotlib's image."""
    axes.grid(visible=False)
    for axis, number in ((axes.yaxis, cells.shape[0]), (axes.xaxis, cells.shape[1])):
        axis.set_major_locator(
            MaxNLocator(min(20, number), integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])
        )
    return axes.imshow(cells, aspect="auto", interpolation="nearest", **shades)
