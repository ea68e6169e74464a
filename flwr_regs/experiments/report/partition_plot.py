"""``flwr-regs plot partition``: which clients hold what, and what a partition changes.

As those of `plots`, the pictures are matplotlib figures without pyplot's state.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from flwr_regs import __version__
from flwr_regs.experiments.partition import shifts
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.experiments.partition.partitions import IN_GROUPS
from flwr_regs.experiments.report import drawing
from flwr_regs.experiments.report.drawing import Look, Picture
from flwr_regs.experiments.report.folders import check_writable
from flwr_regs.experiments.settings import PLACES, Settings, split_in_words

ROUNDS = 20  # that a picture shows at most
MOST = 250  # cells: more numbers than this nobody reads


CARD = Path(__file__).with_name("partition_card.md").read_text(encoding="utf-8")
"""The data card of an exported partition."""


def draw(settings: Settings, folder: Path, look: Look | None = None, exported: bool = False) -> str:
    """Write the pictures of a partition into `folder`; return what to print.

    ``partition``: how many examples of each class each client holds. ``partition-groups``: of each group,
    where these decide. ``partition-rounds``: what changes from round to round. Each as PNG and PDF.
    `exported`: also a folder ``partition-<hash>`` with the indices and a data card of Hugging Face.
    """
    check_writable(folder)
    split = f"{settings.dataset}, partition {split_in_words(settings.config)}"
    title = f"{split}, {settings.num_clients} clients, seed {settings.seed}"
    clients = client_data_of(settings)
    written = []
    for name, picture in _pictures(settings, clients, title, look or Look()):
        written += drawing.save(picture, folder / name)
    if exported:
        written += _export(settings, clients, title, folder / f"partition-{clients.hash}")
    counts = clients.label_counts
    each = {"examples": counts.sum(1), "labels": (counts > 0).sum(1)}
    said = "; ".join(f"{what} a client: {of.min()} to {of.max()}" for what, of in each.items())
    return "\n".join([title, said, f"partition hash: {clients.hash}", *map(str, written)])


def _export(settings: Settings, clients: ClientData, title: str, folder: Path) -> list[Path]:
    """Write which examples each client holds, and a data card; return the files."""
    if settings.partition == "long-tail-rounds":
        raise ValueError("--export: in each round, clients of long-tail-rounds hold other examples")
    if settings.examples or settings.num_classes or settings.synthetic:
        whole = "--export names examples by their places in the whole data set"
        raise ValueError(f"{whole}: leave examples, num-classes and synthetic out")
    folder.mkdir(exist_ok=True)
    held = [{"client": client, "train": rows.tolist()} for client, rows in enumerate(clients.parts)]
    changed = (f"{name}={v}" for name, v in settings.changed.items() if name not in PLACES)
    card = CARD.format(
        title=title,
        name=json.dumps(title),
        dataset=settings.dataset,
        hash=clients.hash,
        clients=len(clients.parts),
        examples=sum(map(len, clients.parts)),
        version=__version__,
        words=shlex.join(changed),
    )
    texts = {"clients.jsonl": "".join(json.dumps(of) + "\n" for of in held), "README.md": card}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def _pictures(
    settings: Settings, clients: ClientData, title: str, look: Look
) -> Iterator[tuple[str, Picture]]:
    data, rounds = clients.data, range(min(settings.rounds, ROUNDS) + 1)
    by_round = settings.partition == "long-tail-rounds"
    yield "partition", label_counts(clients.label_counts, look, title + " in round 1" * by_round)
    if data.groups is not None and settings.partition in IN_GROUPS:
        groups = data.groups.max() + 1
        counts = [np.bincount(data.groups[rows], minlength=groups) for rows in clients.parts]
        yield "partition-groups", label_counts(np.stack(counts), look, title, row="group")
    if by_round:
        drawn = (data.train_y[clients.rows(0, t)] for t in rounds[1:])
        counts = [np.bincount(y, minlength=data.num_classes) for y in drawn]
        yield "partition-rounds", label_counts(np.stack(counts), look, title, column="round")
    if settings.partition == "label-swaps-rounds":
        how = settings.seed, settings.swap_probability
        table = np.stack([shifts.swapped(data.num_classes, t, *how) for t in rounds])
        yield "partition-rounds", label_swaps(table, look, title)


def label_counts(
    counts: np.ndarray, look: Look, title: str, column: str = "client", row: str = "class"
) -> Picture:
    """Draw the label spread of a partition: a column for each client, a row for each class.

    So can be drawn what else is counted, by `column` and `row`: the classes of client 0 in each round from
    the first, or the clients' groups. A cell's colour is the number of examples; the number stands in the
    cell if there is room for all. The bars above are the clients' totals.

    Parameters
    ----------
    counts : how many examples of each class each client holds, integers, ``(clients, classes)``
    title : one sentence above the axes
    column, row : the words for one of axis 0 and one of axis 1, in the singular
    """
    many, classes = counts.shape
    totals, most = counts.sum(axis=1), max(1, counts.max())
    tall = min(max(0.2 * classes, 0.9), 4.5)
    with drawing.drawn(look) as picture:
        above, axes = picture.subplots(2, sharex=True, height_ratios=[0.5, tall])
        # Empty cells stay white, and the scale starts below 0, so that a single example shows.
        shades: dict[str, Any] = {"cmap": "Blues", "vmin": -0.15 * most, "vmax": most}
        cells = np.ma.masked_equal(counts, 0)
        image = _cells(axes, look, cells.T, **shades)
        axes.set(xlabel=column, ylabel=row)
        axes.xaxis.set_major_formatter(lambda at, _: f"{at + (column == 'round'):g}")
        bar = picture.colorbar(image, ax=axes, label="examples", aspect=25, pad=0.01)
        bar.outline.set(visible=False)
        bar.ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        bar.ax.set_ylim(0, most)
        above.grid(visible=False)
        above.bar(range(many), totals, width=0.8, color="0.55", gid="totals")
        above.tick_params(axis="x", bottom=False, labelbottom=False)
        above.set(ylabel="total", ylim=(0, 1.35 * max(1, totals.max())))
        above.set_yticks([0, totals.max()], ["0", f"{totals.max():,}"])
        plural = "classes" if row == "class" else f"{row}s"
        each = f"{totals.min():,} to {totals.max():,} (median {np.median(totals):,.0f})"
        of_rounds = f"In rounds 1 to {many}, client 0 has"
        who = of_rounds if column == "round" else f"{many} clients hold"
        caption = f"{who} {totals.sum():,} examples of {classes} {plural}, each {each}."
        drawing.head(picture, title, caption)
        drawing.finish(picture, axes, tall)
        digit = 0.53 * look.font_size / 72  # a small digit's width
        if len(f"{most:,}") < (axes.bbox.width / picture.dpi / many - 0.02) / digit:
            _write(axes, cells, np.where(counts > 0.6 * most, "white", "black"))
    return picture


def label_swaps(table: np.ndarray, look: Look, title: str) -> Picture:
    """Draw which label each class has in each round: coloured where it is not its own.

    `table` has the labels in round 0, 1, and so on, ``(rounds + 1, classes)``, as of
    :func:`flwr_regs.experiments.partition.shifts.swapped`. A cell has its label in it if there is room for
    all.
    """
    rounds, classes = table.shape
    unmoved = table == np.arange(classes)
    swapped = (table[1:] != table[:-1]).any(axis=1).sum()
    with drawing.drawn(look) as picture:
        axes = picture.add_subplot()
        shades: dict[str, Any] = {"cmap": "viridis", "vmin": -0.6 * classes, "vmax": classes - 1}
        _cells(axes, look, np.ma.masked_array(table, unmoved).T, **shades)
        axes.set(xlabel="round", ylabel="class of the example")
        colours = np.where(table < 0.2 * classes, "white", "black")
        _write(axes, table, np.where(unmoved, "0.6", colours))
        cell = "A cell is the label that a class has in a round, coloured if it is not its own."
        caption = f"{cell} In {rounds - 1} rounds, two labels swap {swapped} times."
        drawing.head(picture, title, caption)
        drawing.finish(picture, axes, min(max(0.2 * classes, 1.4), 4.5))
    return picture


def _cells(axes: Axes, look: Look, cells: Any, **shades: Any) -> Any:
    """Draw a matrix as coloured cells, and ticks at whole numbers; return matplotlib's image."""
    axes.grid(visible=False)
    for axis, number in ((axes.yaxis, cells.shape[0]), (axes.xaxis, cells.shape[1])):
        # without a size of the user's, the picture is as high as its ticks need
        most: Any = "auto" if look.size else min(20, number)
        axis.set_major_locator(MaxNLocator(most, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    return axes.imshow(cells, aspect="auto", interpolation="nearest", **shades)


def _write(axes: Axes, table: np.ndarray, colours: np.ndarray) -> None:
    """Write the numbers of a table into its cells, if they are not too many for that."""
    if table.size <= MOST:
        how: dict[str, Any] = {"ha": "center", "va": "center_baseline", "gid": "count"}
        for (x, y), number in np.ma.ndenumerate(table):  # type: ignore[no-untyped-call]
            axes.text(x, y, f"{number:,}", color=str(colours[x, y]), fontsize="small", **how)
