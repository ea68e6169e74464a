"""Pictures of what a partition changes: the inputs of clients, and labels that swap over the rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GAP = 2  # white pixels between two images
FEW = 330  # cells: more numbers than this nobody reads


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
    from flwr_regs.experiments.report import drawing

    tiles = np.asarray(images, float)
    if tiles.ndim != 5 or not tiles.size:
        raise ValueError(
            f"images has the shape {tiles.shape}: expected (clients, examples, channels, height, width)"
        )
    clients, examples, channels, height, width = tiles.shape
    if len(names) != clients:
        raise ValueError(f"there are {len(names)} names for {clients} clients")
    tiles = tiles if channels == 3 else tiles[:, :, :1].repeat(3, axis=2)
    low, high = tiles.min(), tiles.max()
    tiles = (tiles - low) / max(high - low, 1e-12)
    across, down = width + GAP, height + GAP
    whole = np.ones((examples * down - GAP, clients * across - GAP, 3))
    for client, column in enumerate(tiles):
        for row, image in enumerate(column):
            top, left = row * down, client * across
            whole[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    with drawing.style():
        figure, axes = drawing.canvas(1.0)
        axes.grid(visible=False)
        axes.imshow(whole, interpolation="nearest", aspect="auto")
        room = figure.get_figwidth() / clients * 0.95
        said = [drawing.wrap(figure, name, room, 7) for name in names]
        centres = [client * across + (width - 1) / 2 for client in range(clients)]
        axes.set_xticks(centres, said, fontsize=7, parse_math=False)
        axes.set_yticks([])
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        tall = figure.get_figwidth() * whole.shape[0] / whole.shape[1]
        drawing.frame(figure, axes, title=title, caption=caption, at_least=min(tall, 6.0))
    return figure


def swaps(labels: Any, *, title: str = "") -> Figure:
    """Draw which label each class has in each round: coloured where it is not its own.

    Parameters
    ----------
    labels : integers, ``(rounds + 1, classes)``
        The labels in round 0, 1, and so on, as of :func:`flwr_regs.experiments.partition.shifts.swapped`. A cell has
        its label in it if there is room for all.
    title : one sentence above the axes

    Raises ValueError if `labels` has another shape.
    """
    from matplotlib.ticker import MaxNLocator

    from flwr_regs.experiments.report import drawing

    table = np.asarray(labels)
    if table.ndim != 2 or not table.size or table.dtype.kind not in "iu":
        raise ValueError(
            f"labels is {table.dtype} of shape {table.shape}: expected integers, (rounds + 1, classes)"
        )
    rounds, classes = table.shape
    own = table == np.arange(classes)
    moved = (table[1:] != table[:-1]).any(axis=1).sum()
    with drawing.style():
        figure, axes = drawing.canvas(1.0)
        axes.grid(visible=False)
        shades: dict[str, Any] = {"cmap": "viridis", "vmin": -0.6 * classes, "vmax": classes - 1}
        axes.imshow(
            np.ma.masked_array(table, own).T, aspect="auto", interpolation="nearest", **shades
        )
        axes.set(xlabel="round", ylabel="class of the example")
        for axis, number in ((axes.xaxis, rounds), (axes.yaxis, classes)):
            axis.set_major_locator(MaxNLocator(min(20, number), integer=True, min_n_ticks=1))
        caption = (
            "A cell is the label that a class has in a round, coloured if it is not its own. "
            f"In {rounds - 1} rounds, two labels swap {moved} times."
        )
        tall = min(max(0.2 * classes, 0.9), 4.5)
        drawing.frame(figure, axes, title=title, caption=caption, at_least=tall)
        if table.size <= FEW:
            for (t, label), now in np.ndenumerate(table):
                colour = "0.6" if own[t, label] else "white" if now < 0.6 * classes else "black"
                look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "color": colour}
                axes.text(t, label, str(now), fontsize=6.5, gid="label", **look)
    return figure
