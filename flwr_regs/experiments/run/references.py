"""The rows between which the methods lie: clients that train alone, and one model on all their data.

Both process about as many examples as the clients of a FedAvg run do together. `Local`: each client trains
a model of its own on its own data, as often as it is in a cohort on average; accuracies are means over the
models. `Pooled`: one model trains on all clients' data, in each round as many steps as a cohort together.
They begin with the methods' initial model, and are tested on the same data. Nothing travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from torch.utils.data import TensorDataset

from flwr_regs import InProcessGrid
from flwr_regs.experiments.data.augment import Augmented
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of, left
from flwr_regs.experiments.report.run_records import Recorder, RunRecord, diverged
from flwr_regs.experiments.run.clients import ClientFactory, Examples
from flwr_regs.experiments.run.progress import Heartbeat
from flwr_regs.experiments.run.server_accuracy import ServerTest
from flwr_regs.experiments.strategies import build
from flwr_regs.server.round import RoundFailed

Array = np.ndarray[Any, Any]
Test = Callable[[Sequence[int], ArrayRecord, int], Array]
"""Of some clients, their model and a round: its loss, its accuracy, and its accuracy for each of them."""


class _OneClient(ClientFactory):
    """Makes one client, which trains on the data of all `members`."""

    def __init__(self, run: Run, clients: ClientData, members: Sequence[int]) -> None:
        super().__init__(run, clients)
        self.members = members

    def _made(self, pid: int, server_round: int) -> Examples:
        each = [super(_OneClient, self)._made(k, server_round)[0].tensors for k in self.members]
        whole = [torch.cat(tensors) for tensors in zip(*each, strict=True)]
        augment = self.clients.data.augment
        return Augmented(augment, *whole) if augment else TensorDataset(*whole), None

    def train_alone(
        self, turns: Sequence[int], test: Test
    ) -> tuple[list[Array], list[dict[str, Any]], str]:
        """Train as FedAvg with one client does; `turns` says how many turns are done after each round.

        Return the model's test after each turn, the history, and why the training ended early.
        """
        run, curve, error = self.run, list[Array](), ""
        strategy = build(
            run.calls,
            seed=run.seed,
            on_divergence=run.settings.on_divergence,
            lr_schedule=lambda turn: run.settings.lr_decay ** (turns.index(turn) - 1),
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=1,
        )

        def after_turn(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            curve.append(test(self.members, arrays, server_round))
            return MetricRecord({})

        try:
            self.train(strategy, InProcessGrid(self.app(), 1), evaluate_fn=after_turn)
        except RoundFailed as failed:
            error = f"{type(failed).__name__}: {failed}"
        return curve, strategy.history, error


def _tester(run: Run, clients: ClientData, threads: int) -> Test:
    """Return what tests models of a run as those of methods are tested."""
    factory = ClientFactory(run, clients)
    model, loss_fn = factory.new_model().eval(), LOSSES[clients.data.loss]
    if not run.settings.test_on_clients:
        server = ServerTest(model, clients, threads)

        def by_server(members: Sequence[int], arrays: ArrayRecord, server_round: int) -> Array:
            figures = server.measured(arrays, server_round)
            each = server.expected_accuracies()[[*members]]
            return np.array([figures["loss"], figures["accuracy"], *each])

        return by_server

    def by_members(members: Sequence[int], arrays: ArrayRecord, server_round: int) -> Array:
        model.load_state_dict(arrays.to_torch_state_dict())
        losses, accuracies = [], []
        for test in filter(None, (factory.examples(member)[1] for member in members)):
            x, y = test.tensors
            with torch.no_grad():
                output = model(x)
            losses.append(float(loss_fn(output, y)))
            accuracies.append(float((output.argmax(1) == y).double().mean()))
        return np.array([np.mean(losses), np.mean(accuracies), *accuracies])

    return by_members


def train(
    run: Run,
    folder: Path | None,
    on_round: Callable[[RunRecord], None],
    heartbeat: Heartbeat,
    threads: int,
    warnings: Collection[str],
) -> RunRecord:
    """Train a run of `Local` or `Pooled`, and return its record, which is written at the end.

    If one of its models diverges, the run does.
    """
    settings = replace(run.settings, straggler_share=0.0, drop_out=0.0)
    clients, number, last_round = client_data_of(settings), settings.num_clients, settings.rounds
    record = RunRecord(
        *(run.label, run.method, run.seed, run.settings.config, number, {}),
        *(left(settings, clients), run.row, {**run.point}),
    )
    began, ticks = time.monotonic(), time.process_time()
    share = max(int(settings.fraction_train * number), 1) / number
    groups = [[client] for client in range(number)]
    turns = [ceil(share * t - 1e-9) for t in range(last_round + 1)]  # after each round
    if run.calls[0].target == "Pooled":
        groups, turns = [[*range(number)]], [*range(last_round + 1)]
        epoch = np.ceil(clients.label_counts.sum(1) / settings.batch_size).sum()
        steps = settings.local_steps * number or settings.local_epochs * epoch
        settings = replace(settings, local_steps=max(round(share * steps), 1))
    alone = replace(run, settings=replace(settings, rounds=turns[-1]))
    test, curves, histories = _tester(run, clients, threads), list[list[Array]](), list[Any]()
    for done, members in enumerate(groups, 1):
        heartbeat.at(f"model {done}/{len(groups)}")
        factory = _OneClient(alone, clients, members)
        curve, history, record.error = factory.train_alone(turns, test)
        curves.append(curve)
        histories.append(history)
        if record.error:
            record.diverged = record.ended = diverged(record.error, history)
            break
    means = np.mean([[of[:2] for of in turn] for turn in zip(*curves, strict=False)], axis=1)
    for t, turn in enumerate(turns):
        if turn < len(means):
            loss, accuracy = map(float, means[turn])
            record.test.append({"round": t, "loss": loss, "accuracy": accuracy})
    for t, (before, turn) in enumerate(pairwise(turns[: len(record.test)]), 1):
        each = [history[turn - 1] for history in histories if turn > before]
        seconds = {"clients": float(sum(sum(of["seconds"].values()) for of in each))}
        examples = sum(of["examples_processed"] for of in each)
        record.rounds.append({"round": t, "seconds": seconds, "examples_processed": examples})
    if not record.error:
        record.ended = True
        record.keep_clients(np.concatenate([of[-1][2:] for of in curves]))
    record.seconds, record.processor_seconds = time.monotonic() - began, time.process_time() - ticks
    record.warnings = [*warnings]
    Recorder(folder, record).end(record)
    if record.test:
        on_round(record)
    return record
