"""``flwr_regs.simulate``: the command line's engine in three lines of Python."""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import flwr_regs
from flwr_regs.experiments.cards.card_files import save
from flwr_regs.experiments.data.datasets import load
from flwr_regs.experiments.experiment import Experiment, initial_model
from flwr_regs.experiments.report.folders import locked
from flwr_regs.experiments.report.results import Results, provenance
from flwr_regs.experiments.run import engine
from flwr_regs.experiments.run.progress import Progress, progress
from flwr_regs.experiments.settings import SETTINGS, Setting, checked, key, named
from flwr_regs.experiments.user_code import offer
from flwr_regs.experiments.words import out_folder

RUNNERS = ("process", "stacked", "ray")
_ONE_AT_A_TIME = threading.RLock()
"""Runs set what a process has once: the number of torch's threads, logging."""


def simulate(
    methods: Any = "FedAvg, FedFOR",
    dataset: Any = "digits",
    model: Any = "auto",
    partition: str = "shards",
    seeds: Iterable[int] = (1, 2, 3),
    runner: str = "process",
    *,
    workers: int = 1,
    baseline: str = "",
    out: str | os.PathLike[str] | None = None,
    show: bool = False,
    **settings: Any,
) -> Results:
    """Compare methods on the same data, cohorts and seeds, and return the results. Quiet.

    Calls from several threads wait for each other.

    Parameters
    ----------
    methods : str, or list of str, class, function or Term
        As on the command line: ``"FedAvg, FedFOR(alpha=0.5), FedBN+FedFOR"``; or each of a list, which may
        also hold strategy classes, terms, and functions that return one of these.
    dataset, model : str or callable
        A name, ``"mine.py:load"``, or a function or class that is called without arguments.
    partition : str
        How the clients share the data: a name of ``flwr-regs list partitions``, or Flower Datasets' own,
        ``"fds:DirichletPartitioner(alpha=0.3)"``.
    seeds : iterable of int
        Each method trains once for each: its split, initial model, cohorts and batches.
    runner : str
        ``"process"``: this process (or `workers` of them). ``"stacked"``: the same, and all clients of a
        round train at once (vmap). ``"ray"``: Flower's simulation.
    workers : int
        Runs at a time. More than one, and Ray, need methods, data set and model by name.
    baseline : str
        A row's label, such as ``"FedAvg"``: the table then has 95 % intervals, and each row's difference to
        this one, paired by seed, with Holm's adjusted p-value.
    out : path, optional
        A folder for records, tables, pictures and models. Default: nothing is kept.
    show : bool
        Whether to show progress.
    **settings
        Every other setting of ``flwr-regs list settings``, with underscores: ``rounds=50, lr=0.1``.

    Returns
    -------
    Results
        ``table()`` is a DataFrame with a row for each method, ``plot()`` a matplotlib Figure.

    Raises
    ------
    ValueError
        A setting, method, partition or model that is wrong, before anything trains.
    RuntimeError
        A run failed for another reason than divergence.

    Examples
    --------
    >>> import flwr_regs
    >>> result = flwr_regs.simulate("FedAvg, FedFOR", rounds=2, seeds=(1, 2))
    >>> result.table()["n"].tolist()
    [2, 2]
    """
    if not isinstance(seeds, Iterable):
        raise TypeError(f"seeds must be several, such as (1, 2, 3) or [{seeds}], not {seeds!r}")
    seeds = [checked(SETTINGS["seed"], _plain(seed)) for seed in seeds]
    if not seeds or len({*seeds}) < len(seeds):
        raise ValueError(f"seeds must be different numbers, such as (1, 2, 3), not {seeds}")
    if "seed" in settings:
        raise ValueError("simulate takes seeds=(1, 2, 3), not seed")
    workers = checked(Setting("workers", 1, "", low=1), _plain(workers))
    runner = checked(Setting("runner", "process", "", choices=RUNNERS), runner)
    if out is not None and not (isinstance(out, str | os.PathLike) and str(out)):
        raise ValueError(f"out must be the path of a folder, or None, not {out!r}")
    several = methods if isinstance(methods, list | tuple) else [methods]
    far = workers > 1 or runner == "ray"
    if far and any(not isinstance(x, str) for x in (*several, dataset, model)):
        by_name = "other processes find methods, data set and model by name alone"
        raise ValueError(f"{by_name}: give 'mine.py:name', or runner='process' with workers=1")
    with _ONE_AT_A_TIME:
        given = {key(name): _plain(value) for name, value in settings.items()}
        given |= {"methods": "; ".join(map(_named, several)), "partition": partition}
        given |= {"dataset": _named(dataset), "model": _named(model)}
        given = named({**given, "code-dir": given.get("code-dir") or os.getcwd()})
        if re.match("image-folder|.*:", given["dataset"]):  # a user's own may have changed
            load.cache_clear()
            initial_model.cache_clear()
        experiment = Experiment.of_methods(given, seeds).checked()
        runs = experiment.tests(experiment.panel)
        labels = dict.fromkeys(["", *(run.label for run in runs)])
        baseline = checked(Setting("baseline", "", "", choices=labels), baseline)
        bars = (progress if show else Progress)(runs)
        folder = None if out is None else out_folder(str(Path(out).expanduser().resolve()))
        alone = locked(folder) if folder else nullcontext()
        with alone, tempfile.TemporaryDirectory(prefix="flwr-regs-") as temporary:
            if folder:
                came = provenance(["flwr_regs.simulate"])
                save(experiment, folder, {**came, "baseline": baseline})
            place = folder or (Path(temporary) if runner == "ray" else None)
            records = engine.execute(runs, place, bars, workers, runner)
            if failed := [record for record in records if not record.ended]:
                raise RuntimeError(f"{failed[0].label}, seed {failed[0].seed}: {failed[0].error}")
            results = Results(records, baseline=baseline)
            if folder:
                results.save(folder)
        return results


def _plain(value: Any) -> Any:
    """Return a number of numpy's as Python's."""
    return value.item() if isinstance(value, np.generic) else value


def _named(thing: Any) -> str:
    """Return a thing's name in settings."""
    if isinstance(thing, flwr_regs.RegStrategy):
        kind = type(thing).__name__
        raise ValueError(f"give the class {kind}, or the text '{kind}(...)', not an instance")
    if isinstance(thing, str):
        return thing
    name = getattr(thing, "__name__", "")
    return name if thing is getattr(flwr_regs, name, None) else offer(thing)
