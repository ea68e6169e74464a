"""``flwr-regs plot partition``: which clients hold what, and what a partition changes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from flwr_regs.experiments.data import arrays as data
from flwr_regs.experiments.data import domains
from flwr_regs.experiments.partition import shifts
from flwr_regs.experiments.partition.partitions import BY_GROUP
from flwr_regs.experiments.report import plots, shift_pictures
from flwr_regs.experiments.report.folders import check_writable
from flwr_regs.experiments.settings.job import Job

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROUNDS = 20  # that a picture shows at most
COLUMNS = 6  # clients whose inputs a picture shows at most
EXAMPLES = 3  # of each


def draw(job: Job, folder: Path) -> str:
    """Write the pictures of a job's partition into `folder`; return what to print.

    ``partition``: how many examples of each class each client holds. ``partition-groups``: of each group,
    where these decide. ``partition-inputs``: the same images as several clients have them, where clients
    change theirs. ``partition-rounds``: what changes from round to round. Each as PNG and PDF.
    """
    check_writable(folder)
    written = [
        path for name, figure in _pictures(job) for path in plots.save(figure, folder / name)
    ]
    counts = job.label_counts()
    sizes, kinds = counts.sum(1), (counts > 0).sum(1)
    said = [
        _title(job),
        f"examples a client: {sizes.min()} to {sizes.max()}; "
        f"labels a client: {kinds.min()} to {kinds.max()}",
        f"partition hash: {job.partition_hash()}",
        *map(str, written),
    ]
    return "\n".join(said)


def _title(job: Job) -> str:
    return f"{job.dataset}, partition {job.partition}, {job.num_clients} clients, seed {job.seed}"


def _pictures(job: Job) -> Iterator[tuple[str, Figure]]:
    found = job.data()
    first = " in round 1" if job.partition == "long-tail-rounds" else ""
    yield "partition", plots.labels(job.label_counts(), title=_title(job) + first)
    groups = found.groups
    if groups is not None and job.partition in (*BY_GROUP, "label-swaps-rounds"):
        parts = job.parts_of(found, job.num_clients)[: job.num_clients]
        table = np.stack([np.bincount(groups[p], minlength=groups.max() + 1) for p in parts])
        yield "partition-groups", plots.labels(table, title=_title(job), rows="group")
    if found.train_x.ndim == 4 and (job.partition == "noise" or job.dataset.endswith("-domains")):
        yield "partition-inputs", _inputs(job, found)
    last = min(job.rounds, ROUNDS)
    if job.partition == "long-tail-rounds":
        rounds = [job.rows(found, job.num_clients, 0, t) for t in range(1, last + 1)]
        table = np.stack(
            [np.bincount(found.train_y[rows], minlength=found.num_classes) for rows in rounds]
        )
        words = {"columns": "round", "who": f"In rounds 1 to {last}, client 0 has"}
        yield "partition-rounds", plots.labels(table, title=_title(job), first=1, **words)
    if job.partition == "label-swaps-rounds":
        maps = [
            shifts.swapped(found.num_classes, t, job.seed, job.swap_probability)
            for t in range(last + 1)
        ]
        yield "partition-rounds", shift_pictures.swaps(np.stack(maps), title=_title(job))


def _inputs(job: Job, found: data.Data) -> Figure:
    """Draw the first examples as some clients have them."""
    x = found.train_x[:EXAMPLES]
    if job.partition == "noise":
        clients = np.unique(np.linspace(0, job.num_clients - 1, COLUMNS).round().astype(int))
        caption = "The same examples, with each client's noise on them."
    else:
        clients = np.arange(min(job.num_clients, len(domains.DOMAINS)))
        caption = "The same examples in each client's domain."
    columns, names = [], []
    for client in map(int, clients):
        shown, said = x, f"client {client}"
        if job.dataset.endswith("-domains"):
            domain = client % len(domains.DOMAINS)
            shown = domains.shifted(shown, domain, job.seed)
            said += f": {domains.DOMAINS[domain]}"
        if job.partition == "noise":
            shown = shifts.noisy(shown, client, job.num_clients, job.noise_level, job.seed)
            variance = shifts.noise_variance(client, job.num_clients, job.noise_level)
            said += f": variance {variance:.3g}"
        columns.append(shown)
        names.append(said)
    return shift_pictures.inputs(np.stack(columns), names, title=_title(job), caption=caption)
