"""Partitions: which examples each client holds, as the papers split a data set. numpy only."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np

from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.extras import needed
from flwr_regs.experiments.partition import splits
from flwr_regs.experiments.settings import Settings
from flwr_regs.wire.config import nearest

Array = np.ndarray[Any, Any]
Kinds = Array | None
"""The group or coarse label of each example, where the data says it."""

PREFIX = "fds:"
"""What the partitions of Flower Datasets begin with."""
BY_GROUP = ("domains", "natural", "interpolated")
"""The partitions that need the group (writer, speaker, user or domain) of each example."""
IN_GROUPS = (*BY_GROUP, "label-swaps-rounds")
"""Those whose clients have groups of their own, where the data says the group."""
BY_ROUND = ("long-tail-rounds", "label-swaps-rounds")
"""The partitions whose data changes from round to round: see `flwr_regs.experiments.partition.shifts`."""


def partition(
    labels: Array, settings: Settings, num_clients: int, groups: Kinds = None, coarse: Kinds = None
) -> list[Array]:
    """Split ``range(len(labels))`` into `num_clients` index arrays, drawn from the settings' seed alone.

    Every example goes to exactly one client. But groups that no client stands for are left out (with
    ``natural`` and ``interpolated``; with ``domains`` and ``label-swaps-rounds`` if there are fewer clients
    than groups), and clients of ``long-tail-rounds`` draw from all examples.

    Parameters
    ----------
    labels : integers, ``(n,)``
    settings : Settings
        ``partition`` is one of the kinds below, each with the settings that it names; ``seed``.
    num_clients : int
    groups : the writer, speaker, user or domain of each example, ``(n,)``; for the kinds in `BY_GROUP`
    coarse : the coarse label of each example, ``(n,)``, for ``pachinko``

    ``shards``
        FedADC's sort-and-partition (Ozfatura et al. 2021, Sec. IV-B2): at most s = `shards_per_client`
        labels for each client. The examples are sorted by label and cut into n·s shards of one label each,
        as equal in size as can be; each client gets s of them at random. With fewer shards than labels this
        is ``shards-mcmahan``.
    ``shards-mcmahan``
        McMahan et al. (2017), Sec. 3: n·s shards of equal size. Where classes differ in size, some of them
        hold two labels. Where none does, this is ``shards``.
    ``classes``
        EFL's (Ma et al. 2021, Sec. 5.2): exactly m = `classes_per_client` classes for each client. Classes
        are cut into n·m blocks as for ``shards``, and no client gets two of one class.
    ``dirichlet-hsu``
        Hsu et al. (2019): clients of equal size. Each draws class shares q from Dir(α · prior), the prior
        being the data's class shares, and its examples by q without replacement. When a class runs
        out, q is renormalised over the others. So the last clients get what the first have left.
    ``dirichlet-niid-bench``, ``dirichlet``
        Yurochkin et al. (2019) and NIID-Bench (Li et al. 2022): each class is spread over the clients by
        shares from Dir(α), drawn again until each client has 10 examples. NIID-Bench's code also gives
        nothing more to a client that has 1/n of the data; its paper does not, and nor does this.
    ``similarity``
        rFedAvg's (Wang et al. 2023, Sec. VI): this per cent of the data is IID, the rest is sorted by
        label and cut in order.
    ``iid``
        At random.
    ``pachinko``
        Reddi et al. (2021), App. F: clients of equal size. Each draws shares of the coarse labels from
        Dir(`pachinko_alpha`), and of each coarse label's fine ones from Dir(`pachinko_beta`), then its
        examples by them without replacement; the shares of what runs out go to its siblings.
    ``quantity``
        NIID-Bench's: at random, in sizes drawn from Dir(`quantity_alpha`), again until each has 10.
    ``noise``
        NIID-Bench's: ``iid``; client k's inputs get noise (`flwr_regs.experiments.partition.shifts.noisy`).
    ``domains``
        Client k gets examples of group k mod g (FedBN, Li et al. 2021, with as many clients as domains).
        The clients of one group share it equally, at random.
    ``natural``
        Each client gets all examples of one group (LEAF, Caldas et al. 2018); if there are more groups than
        clients, they are drawn at random.
    ``interpolated``
        Field Guide (Wang et al. 2021), Sec. 4.3.3: ``natural``, with a share `interpolation` of each
        client's examples pooled, shuffled and dealt back. 0 is ``natural``, 1 has IID clients of its sizes.
    ``long-tail-rounds``
        FedFOR's prior shift: `flwr_regs.experiments.partition.shifts.long_tail` by `sample_share` and
        `long_tail`; here for round 1.
    ``label-swaps-rounds``
        FedFOR's concept shift, `flwr_regs.experiments.partition.shifts.swapped`. The examples are split
        as by ``domains`` if there are `groups`, else as by ``iid``; they stay, and their labels change.

    ``fds:DirichletPartitioner(alpha=0.3)`` and the like
        Flower Datasets'. The partitioner sees a data set with the columns ``label`` and, if there are
        `groups`, ``group``. What the call leaves out is filled in where the partitioner takes it:
        ``num_partitions``, ``partition_by="label"`` and ``seed``.

    Raises ValueError, with the reason, for a split that is impossible.
    """
    of, n, kind = np.asarray(labels), num_clients, settings.partition
    by_group = "domains" if groups is not None else "iid"
    like = by_group if kind == "label-swaps-rounds" else kind
    needs = dict.fromkeys(BY_GROUP, (groups, "group (writer, speaker, user or domain)"))
    needs["pachinko"] = coarse, "coarse label"
    try:
        if n > len(of) and kind != "long-tail-rounds":
            raise ValueError("each client needs an example: use fewer clients")
        values, what = needs.get(like, (of, "label"))
        if values is None:
            raise ValueError(f"the data does not say the {what} of each example")
        of = np.stack([values, of]) if like == "pachinko" else np.asarray(values)
        if like.startswith(PREFIX):
            parts = _of_flower(kind, of, groups, n, settings.seed)
        else:
            split = getattr(splits, like.replace("-", "_"))
            parts = split(of, n, np.random.default_rng(settings.seed), settings)
        if empty := sum(len(p) == 0 for p in parts):
            raise ValueError(f"{empty} of the clients would get no data: use fewer clients")
    except ValueError as error:
        what = f"partition '{kind}' of {len(labels)} examples over {n} clients"
        raise ValueError(f"{what}: {error}") from error
    return parts


def partition_hash(parts: Sequence[Array]) -> str:
    """Return 16 hex digits that tell one partition from another, the same on every platform.

    They are of the clients' sizes and examples, in their order.

    >>> partition_hash([np.array([0, 2]), np.array([1])])
    '363a551de55f8c05'
    """
    every = np.concatenate([[len(p) for p in parts], *parts])
    return hashlib.sha256(every.astype("<i8").tobytes()).hexdigest()[:16]


def _of_flower(kind: str, labels: Array, groups: Any, num_clients: int, seed: int) -> list[Array]:
    """Return the rows of each client, as one of `flwr_datasets.partitioner` splits them.

    Raises ImportError without flwr-datasets; ValueError if there is no such partitioner, an argument is
    wrong, or it does not make a part for each client.
    """
    package = "flwr-datasets", f"partition '{kind}'", "fds"
    partitioners = needed("flwr_datasets.partitioner", *package)
    datasets = needed("datasets", *package)
    text = kind.removeprefix(PREFIX)
    calls = [call for parts in parse_methods(text).values() for call in parts] if text else []
    if len(calls) != 1:
        raise ValueError("expected one partitioner, such as fds:DirichletPartitioner(alpha=0.3)")
    (call,) = calls
    known = [name for name in partitioners.__all__ if name.endswith("Partitioner")]
    if call.target not in known:
        hint = f"{nearest(call.target, known)}; it has {', '.join(known)}"
        raise ValueError(f"Flower Datasets has no {call.target}{hint}")
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
    if (made := partitioner.num_partitions) != num_clients:
        raise ValueError(f"it makes {made} parts, not one for each of {num_clients} clients")
    return [np.asarray(partitioner.load_partition(k)["index"]) for k in range(num_clients)]
