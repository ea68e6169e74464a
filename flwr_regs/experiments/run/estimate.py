"""How long a plan would take, from a few steps of each of its methods."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np

from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report.run_records import Run
from flwr_regs.experiments.run.engine import Plan, try_out
from flwr_regs.experiments.run.progress import duration
from flwr_regs.experiments.settings.calls import parse_methods
from flwr_regs.experiments.settings.job import Job

STEPS = (1, 11)
"""Local steps of the two short trainings; their difference is the cost of a step."""
CLIENTS = 4
"""Clients that train in them, at most."""


def estimate(plan: Plan, workers: int, after: Plan | None = None) -> str:
    """Return what would run and how long that would take, measured with a few clients of each method.

    `after` is a second plan that runs when the first has ended.
    """
    cost: dict[tuple[str, Job], float] = {}
    labels: dict[str, list[float]] = {}
    for label, job in [*plan.jobs, *(after.jobs if after else ())]:
        targets = "+".join(c.target for calls in parse_methods(job.methods).values() for c in calls)
        alike = replace(job, methods="FedAvg", seed=0, lr=1.0, held_out_share=0.0)
        if (targets, alike) not in cost:
            cost[targets, alike] = seconds(job)
        labels.setdefault(label, []).append(cost[targets, alike])
    lines = [
        f"{label[:50]:<50}  {len(each)} x {duration(each[0])}" for label, each in labels.items()
    ]
    runs = sum(map(len, labels.values()))
    whole = sum(map(sum, labels.values())) / min(workers, runs, os.cpu_count() or 1)
    first = plan.jobs[0][1]
    return "\n".join(
        [
            f"would run on {first.dataset}, partition {first.partition} over {first.num_clients} clients, "
            f"{first.rounds} rounds of about {planned_steps(first):.0f} local steps:",
            *lines,
            f"in all {runs} runs, about {duration(whole)} with {workers} at a time",
        ]
    )


def seconds(job: Job) -> float:
    """Return about how long a run takes: a few clients train a few steps, the rest is arithmetic.

    Raises RuntimeError if the run would fail at once.
    """
    tiny = replace(job, fraction_train=min(job.fraction_train, CLIENTS / job.num_clients))
    spent: dict[int, tuple[float, float]] = {}  # steps -> of a client, of the server and its test
    for steps in (1, *STEPS):  # the first one warms up
        tests = [time.monotonic()]

        def tested(_: Run, tests: list[float] = tests) -> None:
            tests.append(time.monotonic())

        entry = try_out(replace(tiny, local_steps=steps), tested)
        phases = dict(entry.get("seconds", {}))
        clients = sum(phases.pop(name, 0.0) for name in ("clients", "probe"))
        test = 0.0 if job.tested_on_clients else tests[1] - tests[0]
        spent[steps] = clients / len(entry["cohort"]), sum(phases.values()) + test
    (few, rest), (more, _) = (spent[steps] for steps in STEPS)
    step = max(more - few, 0.0) / (STEPS[1] - STEPS[0])
    cohort = max(int(job.num_clients * job.fraction_train), 1)
    return job.rounds * (cohort * (few + step * (planned_steps(job) - STEPS[0])) + rest)


def planned_steps(job: Job) -> float:
    """Return a client's mean number of local steps in a round."""
    if job.local_steps:
        return float(job.local_steps)
    sizes = client_data_of(job).label_counts.sum(1)
    return float(np.mean(np.ceil(sizes / job.batch_size)) * job.local_epochs)
