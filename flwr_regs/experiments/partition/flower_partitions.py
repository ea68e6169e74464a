"""Partitions by Flower Datasets' partitioners: ``fds:DirichletPartitioner(alpha=0.3)``."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np

from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.extras import needed
from flwr_regs.wire.config import nearest

Array = np.ndarray[Any, Any]
PREFIX = "fds:"


def split(
    kind: str, labels: Array, groups: Array | None, num_clients: int, seed: int
) -> list[Array]:
    """Return the rows of each client, as one of `flwr_datasets.partitioner` splits them.

    The partitioner sees a data set with the columns ``label`` and, if there are `groups`, ``group``. What
    the call leaves out is filled in where the partitioner takes it: ``num_partitions``,
    ``partition_by="label"`` and ``seed``.

    Raises
    ------
    ImportError
        flwr-datasets is not installed.
    ValueError
        There is no such partitioner, or an argument is wrong; or it does not make a part for each client.
    """
    partitioners = needed(
        "flwr_datasets.partitioner", "flwr-datasets", f"partition '{kind}'", "fds"
    )
    datasets = needed("datasets", "flwr-datasets", f"partition '{kind}'", "fds")
    ((call,),) = parse_methods(kind.removeprefix(PREFIX)).values()
    known = [name for name in partitioners.__all__ if name.endswith("Partitioner")]
    if call.target not in known:
        raise ValueError(
            f"Flower Datasets has no {call.target}{nearest(call.target, known)}; it has {', '.join(known)}"
        )
    make = getattr(partitioners, call.target)
    usual = {"num_partitions": num_clients, "partition_by": "label", "seed": seed}
    taken = inspect.signature(make).parameters
    given = {name: value for name, value in usual.items() if name in taken} | call.kwargs
    try:
        partitioner = make(*call.args, **given)
    except TypeError as error:
        raise ValueError(f"{error}; it takes {', '.join(taken)}") from error
    columns = {"index": np.arange(len(labels)), "label": labels}
    columns |= {} if groups is None else {"group": groups}
    partitioner.dataset = datasets.Dataset.from_dict(columns)
    if partitioner.num_partitions != num_clients:
        raise ValueError(
            f"it makes {partitioner.num_partitions} parts, not one for each of {num_clients} clients"
        )
    return [np.asarray(partitioner.load_partition(k)["index"]) for k in range(num_clients)]
