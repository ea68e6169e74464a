"""What runs cost, from one client's round and one test of a sample; the rest is arithmetic."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord

from flwr_regs import InProcessGrid, Mean
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.run.clients import ClientFactory
from flwr_regs.experiments.run.process_state import quiet, threads, warm_up
from flwr_regs.experiments.run.progress import Heartbeat, Progress, duration
from flwr_regs.experiments.run.server_accuracy import ServerTest

STEPS = 6
"""Local steps of the longer one of two trainings; the other has one. Their difference is a step's cost."""
SAMPLE = 250
"""Examples of the test that is timed."""
DOMINANT = 0.5
"""A share of a run's time; where tests take more, a way to shorten them is named."""


def try_out(run: Run, **changes: Any) -> dict[str, Any]:
    """Train one client of a run for two rounds, no client slow; return the second round's entry.

    The first round tells less: some methods take it easy there. `changes` are of the settings. Raises
    RuntimeError if the run would fail.
    """
    short = {"rounds": 2, "cohorts": "uniform", "straggler_share": 0.0, "drop_out": 0.0}
    settings = replace(run.settings, **{**short, **changes})
    factory = ClientFactory(replace(run, settings=settings), client_data_of(settings))
    strategy, one = factory.run.strategy(), 1 / settings.num_clients
    strategy.fraction_train, strategy.min_replies, strategy.aggregator = one, 1, Mean()
    strategy.fraction_evaluate = min(strategy.fraction_evaluate, one)
    with quiet(), threads(1), torch.random.fork_rng(devices=[]):
        warm_up()
        try:
            strategy.start(
                grid=InProcessGrid(factory.app(), settings.num_clients),
                initial_arrays=ArrayRecord(factory.new_model().state_dict()),
                num_rounds=2,
                train_config=ConfigRecord(settings.train_config),
                evaluate_config=ConfigRecord(settings.evaluate_config),
            )
        except Exception as error:
            raise RuntimeError(f"{run.method}: {type(error).__name__}: {error}") from error
    return strategy.history[-1]


@dataclass(frozen=True)
class Cost:
    """What a run costs, in seconds.

    Attributes
    ----------
    cohort, steps : int, float
        Clients that train in a round; a client's mean number of local steps.
    step, test : float
        A client's step; the tests of a model.
    tests, run : float
        All tests, the initial model's too; the run.
    """

    cohort: int
    steps: float
    step: float
    test: float
    tests: float
    run: float


def cost_of(run: Run) -> Cost:
    """Measure what a run costs; RuntimeError if it would fail."""
    settings, clients = run.settings, client_data_of(run.settings)
    sizes = clients.label_counts.sum(1)
    epochs = float(np.mean(np.ceil(sizes / settings.batch_size)) * settings.local_epochs)
    planned = float(settings.local_steps or epochs)
    more = max(2, min(STEPS, round(planned)))
    own_tests = settings.test_on_clients and not settings.held_out_share
    tested = len(clients.test_rows(0)) if own_tests else 1
    sample = {"test_examples": min(tested, SAMPLE)} if own_tests else {}
    trained = []
    for steps in (1, more):
        phases = dict(try_out(run, local_steps=steps, **sample)["seconds"])
        trained.append(phases.pop("clients", 0.0) + phases.pop("probe", 0.0))
        on_clients = phases.pop("evaluate", 0.0)
    test = on_clients * settings.num_clients * max(tested / SAMPLE, 1.0)
    if not settings.test_on_clients:
        test += _server_test(run)
    cohort = max(int(settings.num_clients * settings.fraction_train), 1)
    step = max(trained[1] - trained[0], 0.0) / (more - 1)
    a_round = cohort * (trained[0] + (planned - 1) * step) + sum(phases.values())
    tests = (settings.rounds + 1) * test
    return Cost(cohort, planned, step, test, tests, settings.rounds * a_round + tests)


def _server_test(run: Run) -> float:
    """Return the seconds of the server's test, from that of a sample."""
    factory = ClientFactory(run, client_data_of(run.settings))
    model = factory.new_model()
    arrays = ArrayRecord(model.state_dict())
    with threads(1) as allowed:
        test = ServerTest(model, factory.clients, allowed)
        test.outputs(arrays, 1)  # what torch loads at its first pass does not count
        began = time.monotonic()
        test.outputs(arrays, SAMPLE)
    return (time.monotonic() - began) * max(len(test.x) / SAMPLE, 1.0)


def announcement(runs: Sequence[Run], workers: int, progress: Progress) -> None:
    """Tell about how long some runs take, from the first of them; nothing if it would fail."""
    with Heartbeat(progress.say) as heartbeat:
        heartbeat.at("timing one client's steps")
        try:
            cost = cost_of(runs[0])
        except RuntimeError:  # the run says it better
            return
    settings = runs[0].settings
    whole = cost.run * len(runs) / _at_a_time(runs, workers)
    text = (
        f"about {duration(whole)}: {len(runs)} run{'s' * (len(runs) > 1)} of {settings.rounds} rounds, "
        f"in each {cost.cohort} clients with {cost.steps:.0f} steps of {1000 * cost.step:.2g} ms, and "
        f"a test of {duration(cost.test)}"
    )
    if cost.tests > DOMINANT * cost.run and cost.tests > 60 and not settings.test_examples:
        text += " (test-examples=2000 would test on so many examples)"
    progress.say(text)


def estimate(runs: Sequence[Run], workers: int) -> Iterator[str]:
    """Yield lines, as they are known, on what would run and how long that would take."""
    first = runs[0].settings
    yield (
        f"would run on {first.dataset}, partition {first.partition} over {first.num_clients} clients, "
        f"{first.rounds} rounds; now timing one client's round and a part of a test of each method:"
    )
    known: dict[Any, Cost] = {}
    numbers, whole = Counter(run.label for run in runs), 0.0
    for run in runs:
        targets = tuple(call.target for call in run.calls)
        alike = targets, replace(run.settings, methods="", seed=0, lr=1.0, held_out_share=0.0)
        if alike not in known:
            known[alike] = cost_of(run)
        cost = known[alike]
        whole += cost.run / _at_a_time(runs, workers)
        if number := numbers.pop(run.label, 0):
            each = f"{number} x {duration(cost.run)}, {cost.steps:.0f} local steps a round"
            yield f"{run.label[:50]:<50}  {each}"
    yield f"in all {len(runs)} runs, about {duration(whole)} with {workers} at a time"


def _at_a_time(runs: Sequence[Run], workers: int) -> int:
    return min(workers, len(runs), os.cpu_count() or 1)
