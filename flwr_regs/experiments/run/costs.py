"""What runs cost: from a step and a test batch of each model, and what one client takes in Ray."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid

from flwr_regs import InProcessGrid, Mean, StackedGrid
from flwr_regs.client.train.batches import forked
from flwr_regs.client.train.optimizer import optimizer_of
from flwr_regs.experiments.calls import Call
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.run.clients import RunClients
from flwr_regs.experiments.run.process_state import quiet, threads, warm_up
from flwr_regs.experiments.run.progress import Heartbeat, Progress, counted, duration, rounds_of
from flwr_regs.experiments.run.server_accuracy import ServerTest
from flwr_regs.experiments.settings import split_in_words
from flwr_regs.flower.loop import in_seconds
from flwr_regs.methods.registry import METHODS

QUICK = 0.1
"""Seconds: what is quicker is timed several times, and counts with what a client does beside it."""
SAMPLE = 250
"""Examples of the test that is timed."""
DOMINANT = 0.5
"""A share of a run's time; where tests take more, a way to shorten them is named."""


MARGIN = 1.2
"""The memory that is asked for, over what was seen: an allocator's needs differ from round to round."""
ROUNDS = 4
"""Of a stack, with and without ``torch.compile``."""
STEPS = 100
"""A GPU's shares are rounded up to a multiple of 1 / STEPS."""


def _trained(run: Run, rounds: int, one: bool, grid: Callable[..., Grid], **changes: Any) -> Any:
    """Train a run for some rounds on a new grid, no client dropping out; return strategy and grid.

    With `one`, a round has one client; else all train, and none evaluates. `changes` are of the settings.
    Raises RuntimeError if the run would fail.
    """
    settings = replace(run.settings, rounds=rounds, drop_out=0.0, **changes)
    clients = RunClients(replace(run, settings=settings), client_data_of(settings))
    strategy, share = clients.run.strategy(), one / settings.num_clients
    strategy.fraction_evaluate = min(strategy.fraction_evaluate, share)
    if one:
        strategy.fraction_train, strategy.min_replies, strategy.aggregator = share, 1, Mean()
    made = grid(clients)
    with quiet(), threads(1), forked():
        warm_up()
        try:
            clients.start(strategy, made)
        except Exception as error:
            raise RuntimeError(f"{run.method}: {type(error).__name__}: {error}") from error
    return strategy, made


def try_out(run: Run, **changes: Any) -> dict[str, Any]:
    """Train one client of a run for two rounds, no client slow; return the second round's entry.

    The first round tells less: some methods take it easy there. `changes` are of the settings. Raises
    RuntimeError if the run would fail.
    """
    usual = {"cohorts": "uniform", "straggler_share": 0.0, **changes}
    history: list[dict[str, Any]] = _trained(run, 2, True, InProcessGrid, **usual)[0].history
    return history[-1]


Key = tuple[str, int]
"""Which run: its label and its seed."""
Begun = Mapping[Key, int]
"""The rounds that runs have trained already."""


class Cost(NamedTuple):
    """What a run costs.

    Attributes
    ----------
    cohort, steps : int, float
        Clients that train in a round; a client's mean number of local steps.
    test, run : float
        Seconds of one test; of the run, with a test of the initial model too.
    """

    cohort: int
    steps: float
    test: float
    run: float


class Timed(NamedTuple):
    """What was timed of a model: seconds of a step, of the rest of a client's turn, and of a test batch."""

    step: float
    turn: float
    test: float
    tested: int


def timed(run: Run) -> Timed:
    """Time a step of a run's model, and a batch of its test; RuntimeError if the run would fail.

    Where a step is quick, also what a client's turn takes beside its steps counts, of plain FedAvg.
    """
    settings, data = run.settings, client_data_of(run.settings)
    clients = RunClients(run, data)
    model, test = clients.new_model(), ServerTest(clients.new_model(), data, 1)
    model, loss_fn = model.to(test.device), LOSSES[data.data.loss]
    train, _ = clients.examples(0, 1)
    x, y = (part.to(test.device) for part in train[: settings.batch_size])
    optimizer = optimizer_of(settings.train_config)(model.parameters(), lr=settings.lr)

    def passed() -> float:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        torch.autograd.backward(loss)
        return loss.item()

    with quiet(), threads(1), forked():
        arrays, tested = ArrayRecord(model.state_dict()), min(SAMPLE, len(test.x))
        one = _seconds(partial(optimizer.step, passed))
        a_test = _seconds(lambda: test.outputs(arrays, tested))
    turn = 0.0
    if one < QUICK:
        plain = replace(run, calls=(Call("FedAvg", (), {}, False),))
        spent = try_out(plain, local_steps=1, test_on_clients=False, personalise="")["seconds"]
        turn = max(sum(spent.values()) - one, 0.0)
    return Timed(one, turn, a_test, tested)


def _seconds(action: Callable[[], Any]) -> float:
    """Return the seconds of an action, after a first time that loads what it needs."""
    action()
    began, times = time.perf_counter(), 0
    while not times or time.perf_counter() - began < QUICK:
        action()
        times += 1
    return (time.perf_counter() - began) / times


def cost_of(run: Run, of_model: Timed) -> Cost:
    """Return what a run costs where its model takes what was timed."""
    settings, clients = run.settings, client_data_of(run.settings)
    every = range(settings.num_clients)
    steps = float(np.mean([*map(RunClients(run, clients).planned_steps, every)]))
    of_training, rows = clients.server_rows()
    tested = len((clients.data.train_y if of_training else clients.data.test_y)[rows])
    if settings.test_on_clients and not settings.held_out_share:
        tested = sum(len(clients.test_rows(pid)) for pid in every)
    test = of_model.test * tested / of_model.tested
    cohort = max(int(settings.num_clients * settings.fraction_train), 1)
    trained = settings.rounds * cohort * (of_model.turn + steps * of_model.step)
    return Cost(cohort, steps, test, trained + (settings.rounds + 1) * test)


def announcement(runs: Sequence[Run], workers: int, progress: Progress, begun: Begun) -> None:
    """Tell about how long some runs take, from the first of them; nothing if it would fail.

    `begun` are the rounds that runs have trained already.
    """
    settings = runs[0].settings
    with Heartbeat(progress.say, "timing a client's step"):
        try:
            of_model = timed(runs[0])
            cost, most = cost_of(runs[0], of_model), client_data_of(settings).most_tested
        except Exception:  # the run says it better
            return
    shares = sum(run.settings.rounds - begun.get(run.key, 0) for run in runs) / settings.rounds
    about = duration(cost.run * shares / _at_a_time(runs, workers))
    steps = f"{counted(round(cost.steps), 'step')} of {duration(of_model.step)}"
    all_runs = f"{counted(len(runs), 'run')} of {rounds_of(runs)}"
    each = f"{counted(cost.cohort, 'client')} with {steps}, and a test of {duration(cost.test)}"
    text = f"about {about}: {all_runs}; in each round {each}"
    if (settings.rounds + 1) * cost.test > max(DOMINANT * cost.run, 60) and most > 2000:
        text += " (test-examples=2000 would test on so many examples)"
    beside = dict.fromkeys(f"{run.row}: {what}" for run in runs for what in _not_counted(run))
    progress.say(f"{text}{'; not counted: ' * bool(beside)}{', '.join(beside)}")


def estimate(
    runs: Sequence[Run], workers: int, known: dict[Any, Timed], begun: Begun, panel: str = ""
) -> Iterator[str]:
    """Yield lines, as they are known, on what would run and how long that would take.

    One for each model that is not `known`, one for each run that is `begun`, with the rounds that it has,
    and one for each row, or for a card's `panel`.
    """
    first, rounds = runs[0].settings, max(run.settings.rounds for run in runs)  # trials take fewer
    where = f"{first.dataset}, partition {split_in_words(first.config)} over "
    where += f"{counted(first.num_clients, 'client')}, {counted(rounds, 'round')}"
    if not panel:
        yield f"would run on {where}"
    rows: dict[str, list[Run]] = {}
    steps, seconds = dict[str, float](), dict[Key, float]()
    for run in runs:
        settings = run.settings
        alike = settings.dataset, settings.model, settings.projection, settings.batch_size
        if alike not in known:
            known[alike] = of_model = timed(run)
            step, test = duration(of_model.step), duration(of_model.test)
            model = f"model {settings.model}: a step of {settings.batch_size} examples takes {step}"
            yield f"{model}, a test of {of_model.tested} takes {test}"
        cost, there = cost_of(run, known[alike]), begun.get(run.key, 0)
        if there:
            yield f"{run.label}, seed {run.seed}: {there} of {counted(settings.rounds, 'round')} are there"
        rows.setdefault(run.row, []).append(run)  # with its trials
        steps[run.row], seconds[run.key] = cost.steps, cost.run * (1 - there / settings.rounds)
    for label, of_row in [] if panel else rows.items():
        tests = sum(run.label == label for run in of_row)
        kinds = f" ({counted(len(of_row) - tests, 'trial')} and {counted(tests, 'test')})"
        mean = float(np.mean([seconds[run.key] for run in of_row]))
        each = f"{len(of_row)} x {duration(mean)}{kinds * (tests < len(of_row))}, "
        each += f"{counted(round(steps[label]), 'local step')} a round"
        beside = "".join(f"; and, not counted, {what}" for what in _not_counted(of_row[0]))
        yield f"{label[:50]:<50}  {each}{beside}"
    about = duration(sum(seconds.values()) / _at_a_time(runs, workers))
    where = f"{panel}: {where}; {counted(len(rows), 'row')}," if panel else "in all"
    yield f"{where} {counted(len(runs), 'run')}, about {about} with {workers} at a time"


def _not_counted(run: Run) -> list[str]:
    """Return what a run computes beside a gradient a step, and plain tests."""
    rows = (METHODS[call.target] for call in run.calls if call.target in METHODS)
    personal = ["the clients' models of their own"] * bool(run.settings.personalise)
    return [row.gradients for row in rows if row.gradients] + personal


def _at_a_time(runs: Sequence[Run], workers: int) -> int:
    return min(workers, len(runs), os.cpu_count() or 1)


def measure(run: Run) -> str:
    """Train one client of a run for two rounds; say what it took, and the option of ``flwr run`` for that.

    That is the seconds of its second round, and the most bytes that the process has had in memory, with
    torch and the data. On a GPU, all that is in use there counts: measure where nothing else runs. Raises
    RuntimeError if the run would fail.
    """
    entry, option = try_out(run), "client-resources-num-cpus=1"
    spent = sum(entry["seconds"].get(name, 0.0) for name in ("clients", "probe"))
    memory = "there is no CUDA GPU here, so none is asked for; memory bounds the clients"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        used = total - free + given_back  # at most, with the process' CUDA context
        share = min(math.ceil(STEPS * MARGIN * used / total) / STEPS, 1.0)
        gpu = f"{used / 2**20:,.0f} of the GPU's {total / 2**20:,.0f} MiB, and a fifth more to be safe"
        memory = f"{gpu}: {int(1 / share)} clients at a time on a GPU"
        option += f" client-resources-num-gpus={share:g}"
    each = in_seconds(spent / len(entry["cohort"]))
    took = f"{each} a round, {_resident() / 2**20:,.0f} MiB of memory"
    federation = f'--federation-config "num-supernodes={run.settings.num_clients} {option}"'
    return f"one client: {took} for its process\n{memory}\n{federation}\n{compiling(run)}"


def compiling(run: Run) -> str:
    """Return from how many rounds on ``StackedGrid(compile=True)`` pays for a run, as measured."""
    seconds = []
    for way in (False, True):
        stacks = partial(StackedGrid, check=False, compile=way)
        strategy, grid = _trained(run, ROUNDS, False, stacks)
        if grid.fallbacks:
            return f"in a stack: clients of this run train one by one: {'; '.join(grid.fallbacks)}"
        seconds.append([entry["seconds"]["clients"] for entry in strategy.history])
    (first, *later), (first_compiled, *later_compiled) = seconds
    before, after = min(later), min(later_compiled)
    stacked, compiled = in_seconds(before), in_seconds(after)
    text = f"a cohort in a stack: {stacked} a round, {compiled} with compile=True"
    if after >= before:
        return f"{text}, which does not pay"
    rounds = max(math.ceil((first_compiled - first) / (before - after)), 1)
    return f"{text}, which pays from {rounds} rounds on"


def _resident() -> int:
    """Return the most bytes that this process has had in memory; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
