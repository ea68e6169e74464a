"""``flwr-regs plot partition``: which clients hold what, and what a partition changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flwr_regs.experiments.data import domains
from flwr_regs.experiments.data.datasets import Data
from flwr_regs.experiments.partition import shifts
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.partition.partitions import BY_GROUP
from flwr_regs.experiments.report import cell_pictures as cells
from flwr_regs.experiments.report import drawing
from flwr_regs.experiments.report.folders import check_writable
from flwr_regs.experiments.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS = 20  # that a picture shows at most
COLUMNS = 6  # clients whose inputs a picture shows at most
EXAMPLES = 3  # of each


def draw(job: Settings, folder: Path) -> str:
    """Write the pictures of a job's partition into `folder`; return what to print.

    ``partition``: how many examples of each class each client holds. ``partition-groups``: of each group,
    where these decide. ``partition-inputs``: the same images as several clients have them, where clients
    change theirs. ``partition-rounds``: what changes from round to round. Each as PNG and PDF.
    """
    check_writable(folder)
    title = f"{job.dataset}, partition {job.partition}, {job.num_clients} clients, seed {job.seed}"
    written = [
        path
        for name, figure in _pictures(job, title)
        for path in drawing.save(figure, folder / name)
    ]
    clients = client_data_of(job)
    counts = clients.label_counts
    sizes, kinds = counts.sum(1), (counts > 0).sum(1)
    lines = [
        title,
        f"examples a client: {sizes.min()} to {sizes.max()}; "
        f"labels a client: {kinds.min()} to {kinds.max()}",
        f"partition hash: {clients.hash}",
        *map(str, written),
    ]
    return "\n".join(lines)


def _pictures(job: Settings, title: str) -> Iterator[tuple[str, Figure]]:
    clients = client_data_of(job)
    data = clients.data
    by_round = job.partition == "long-tail-rounds"
    first = " in round 1" if by_round else ""
    yield "partition", cells.labels(clients.label_counts, title=title + first)
    groups = data.groups
    if groups is not None and job.partition in (*BY_GROUP, "label-swaps-rounds"):
        groups_of = [np.bincount(groups[p], minlength=groups.max() + 1) for p in clients.parts]
        table = np.stack(groups_of)
        yield "partition-groups", cells.labels(table, title=title, rows="group")
    if data.train_x.ndim == 4 and (job.partition == "noise" or job.dataset.endswith("-domains")):
        yield "partition-inputs", _inputs(job, data, title)
    last = min(job.rounds, ROUNDS)
    if by_round:
        rounds = [clients.rows(0, t) for t in range(1, last + 1)]
        counts = [np.bincount(data.train_y[r], minlength=data.num_classes) for r in rounds]
        words = {"columns": "round", "who": f"In rounds 1 to {last}, client 0 has"}
        yield "partition-rounds", cells.labels(np.stack(counts), title=title, first=1, **words)
    if job.partition == "label-swaps-rounds":
        maps = [
            shifts.swapped(data.num_classes, t, job.seed, job.swap_probability)
            for t in range(last + 1)
        ]
        yield "partition-rounds", cells.swaps(np.stack(maps), title=title)


def _inputs(job: Settings, data: Data, title: str) -> Figure:
    """Draw the first examples as some clients have them."""
    if job.partition == "noise":
        clients = np.unique(np.linspace(0, job.num_clients - 1, COLUMNS).round().astype(int))
        caption = "The same examples, with each client's noise on them."
    else:
        clients = np.arange(min(job.num_clients, len(domains.DOMAINS)))
        caption = "The same examples in each client's domain."
    columns, names = [], []
    for client in map(int, clients):
        x, name = data.train_x[:EXAMPLES], f"client {client}"
        if job.dataset.endswith("-domains"):
            domain = client % len(domains.DOMAINS)
            x = domains.shifted(x, domain, job.seed)
            name += f": {domains.DOMAINS[domain]}"
        if job.partition == "noise":
            x = shifts.noisy(x, client, job.num_clients, job.noise_level, job.seed)
            variance = shifts.noise_variance(client, job.num_clients, job.noise_level)
            name += f": variance {variance:.3g}"
        columns.append(x)
        names.append(name)
    return cells.inputs(np.stack(columns), names, title=title, caption=caption)
