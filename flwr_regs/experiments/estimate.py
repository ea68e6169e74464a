"""How long a plan would take, from a few steps of each of its methods."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import numpy as np

from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.engine import Plan, one_thread, quiet
from flwr_regs.experiments.job import Job
from flwr_regs.experiments.progress import duration
from flwr_regs.experiments.records import Run

STEPS = (1, 5)
"""Local steps of the two short trainings; their difference is the cost of a step."""


def estimate(plan: Plan, workers: int, after: Plan | None = None) -> str:
    """Return what would run and how long that would take, measured with one client of each method.

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
    """Return about how long a run takes: one client trains a few steps, the rest is arithmetic."""
    from flwr_regs import InProcessGrid
    from flwr_regs.experiments.clients import app
    from flwr_regs.experiments.comparison import Comparison

    tiny = replace(job, rounds=1, fraction_train=1e-9, straggler_share=0.0, drop_out=0.0)
    spent = dict[int, float]()
    with quiet(), one_thread():
        for steps in (1, *STEPS):  # the first one warms up
            short = replace(tiny, local_steps=steps)
            comparison = Comparison(short, InProcessGrid(app, short.num_clients, short.config))
            began = time.monotonic()
            tested = list[float]()

            def on_round(run: Run, began: float = began, tested: list[float] = tested) -> None:
                tested.append(time.monotonic() - began)

            comparison.train(job.methods, on_round=on_round)
            spent[steps] = time.monotonic() - began
    test = tested[0]
    step = max((spent[STEPS[1]] - spent[STEPS[0]]) / (STEPS[1] - STEPS[0]), 0.0)
    call = max(spent[STEPS[0]] - 2 * test - step, 0.0)
    cohort = max(int(job.num_clients * job.fraction_train), 1)
    return job.rounds * (cohort * (call + step * planned_steps(job)) + test) + test


def planned_steps(job: Job) -> float:
    """Return a client's mean number of local steps in a round."""
    if job.local_steps:
        return float(job.local_steps)
    sizes = job.label_counts().sum(1)
    return float(np.mean(np.ceil(sizes / job.batch_size)) * job.local_epochs)
