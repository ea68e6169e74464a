"""How long a plan would take, from a few steps of each of its methods."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.run.engine import try_out
from flwr_regs.experiments.run.progress import duration
from flwr_regs.experiments.settings import Settings

STEPS = (1, 11)
"""Local steps of the two short trainings; their difference is the cost of a step."""
CLIENTS = 4
"""Clients that train in them, at most."""


def estimate(runs: Sequence[Run], workers: int) -> str:
    """Return what would run and how long that would take, measured with a few clients of each method."""
    cost: dict[tuple[str, Settings], float] = {}
    labels: dict[str, list[float]] = {}
    for run in runs:
        targets = "+".join(call.target for call in run.calls)
        alike = replace(run.settings, methods="", seed=0, lr=1.0, held_out_share=0.0)
        if (targets, alike) not in cost:
            cost[targets, alike] = seconds(run)
        labels.setdefault(run.label, []).append(cost[targets, alike])
    lines = [
        f"{label[:50]:<50}  {len(each)} x {duration(each[0])}" for label, each in labels.items()
    ]
    whole = sum(map(sum, labels.values())) / min(workers, len(runs), os.cpu_count() or 1)
    first = runs[0].settings
    return "\n".join(
        [
            f"would run on {first.dataset}, partition {first.partition} over {first.num_clients} clients, "
            f"{first.rounds} rounds of about {planned_steps(first):.0f} local steps:",
            *lines,
            f"in all {len(runs)} runs, about {duration(whole)} with {workers} at a time",
        ]
    )


def seconds(run: Run) -> float:
    """Return about how long a run takes: a few clients train a few steps, the rest is arithmetic.

    Raises RuntimeError if the run would fail at once.
    """
    job = run.settings
    tiny = replace(job, fraction_train=min(job.fraction_train, CLIENTS / job.num_clients))
    spent: dict[int, tuple[float, float]] = {}  # steps -> of a client, of the server and its test
    for steps in (1, *STEPS):  # the first one warms up
        tests = [time.monotonic()]

        def tested(_: RunRecord, tests: list[float] = tests) -> None:
            tests.append(time.monotonic())

        entry = try_out(replace(run, settings=replace(tiny, local_steps=steps)), tested)
        phases = dict(entry.get("seconds", {}))
        clients = sum(phases.pop(name, 0.0) for name in ("clients", "probe"))
        test = 0.0 if job.test_on_clients else tests[1] - tests[0]
        spent[steps] = clients / len(entry["cohort"]), sum(phases.values()) + test
    (few, rest), (more, _) = (spent[steps] for steps in STEPS)
    step = max(more - few, 0.0) / (STEPS[1] - STEPS[0])
    cohort = max(int(job.num_clients * job.fraction_train), 1)
    return job.rounds * (cohort * (few + step * (planned_steps(job) - STEPS[0])) + rest)


def planned_steps(job: Settings) -> float:
    """Return a client's mean number of local steps in a round."""
    if job.local_steps:
        return float(job.local_steps)
    sizes = client_data_of(job).label_counts.sum(1)
    return float(np.mean(np.ceil(sizes / job.batch_size)) * job.local_epochs)
