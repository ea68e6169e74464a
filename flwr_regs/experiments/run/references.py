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
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
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


class _OneClient(ClientFactory):
    """Makes one client, which trains on the data of all `members`."""

    def __init__(self, run: Run, clients: ClientData, members: Sequence[int]) -> None:
        swift = replace(clients.settings, straggler_share=0.0, drop_out=0.0)
        super().__init__(run, replace(clients, settings=swift))
        self.members = members

    def _made(self, pid: int, server_round: int) -> Examples:
        each = [super(_OneClient, self)._made(k, server_round)[0].tensors for k in self.members]
        whole = [torch.cat(tensors) for tensors in zip(*each, strict=True)]
        augment = self.clients.data.augment
        return Augmented(augment, *whole) if augment else TensorDataset(*whole), None


class _Tests:
    """Tests models of a run as those of methods are tested."""

    def __init__(self, run: Run, clients: ClientData, threads: int) -> None:
        self.factory = ClientFactory(run, clients)
        self.server: ServerTest | None = None
        if not run.settings.test_on_clients:
            self.server = ServerTest(self.factory.new_model(), clients, threads)
        self.model, self.loss = self.factory.new_model().eval(), LOSSES[clients.data.loss]

    def on(self, members: Sequence[int], arrays: ArrayRecord, server_round: int) -> Array:
        """Return a model's loss and accuracy: of the server's test, or the members' means."""
        if self.server is not None:
            figures = self.server.measured(arrays, server_round)
            return np.array([figures["loss"], figures["accuracy"]])
        each = self._each(members, arrays)
        return np.array(each.mean(0))

    def of_clients(self, members: Sequence[int], arrays: ArrayRecord) -> Array:
        """Return the accuracy for each member, of the model that was tested last."""
        if self.server is not None:
            return np.asarray(self.server.expected_accuracies()[[*members]])
        return self._each(members, arrays)[:, 1]

    def _each(self, members: Sequence[int], arrays: ArrayRecord) -> Array:
        self.model.load_state_dict(arrays.to_torch_state_dict())
        rows = []
        for member in members:
            test = self.factory.examples(member)[1]
            assert test is not None  # the clients test
            x, y = test.tensors
            with torch.no_grad():
                output = self.model(x)
            rows.append(
                (float(self.loss(output, y)), float((output.argmax(1) == y).double().mean()))
            )
        return np.array(rows)


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
    settings, clients = run.settings, client_data_of(run.settings)
    number, last_round, config = clients.num_clients, settings.rounds, {**settings.train_config}
    record = RunRecord(
        *(run.label, run.method, run.seed, settings.config, number, {}, left(settings, clients))
    )
    began, ticks = time.monotonic(), time.process_time()
    share = max(int(settings.fraction_train * number), 1) / number
    groups = [[client] for client in range(number)]
    turns = [ceil(share * t - 1e-9) for t in range(last_round + 1)]  # after each round
    if run.calls[0].target == "Pooled":
        groups, turns = [[*range(number)]], [*range(last_round + 1)]
        epoch = np.ceil(clients.label_counts.sum(1) / settings.batch_size).sum()
        steps = settings.local_steps * number or settings.local_epochs * epoch
        config.pop("local-epochs", None)
        config["local-steps"] = max(round(share * steps), 1)
    tests, trained = _Tests(run, clients, threads), list[_Trained]()
    for done, members in enumerate(groups, 1):
        heartbeat.at(f"model {done}/{len(groups)}")
        trained.append(_Trained(run, members, turns, config, tests))
        if error := trained[-1].error:
            record.error, record.ended = f"{type(error).__name__}: {error}", False
            record.diverged = record.ended = diverged(record.error, trained[-1].history)
            break
    curve = np.mean([*zip(*(one.curve for one in trained), strict=False)], axis=1)
    record.test = [
        {"round": t, "loss": float(curve[turn, 0]), "accuracy": float(curve[turn, 1])}
        for t, turn in enumerate(turns)
        if turn < len(curve)
    ]
    record.rounds = [{"round": test["round"], "seconds": {}} for test in record.test[1:]]
    for entry in record.rounds:
        turn = turns[entry["round"]]
        new = turn > turns[entry["round"] - 1]
        each = [one.history[turn - 1] for one in trained if new]
        entry["examples_processed"] = sum(of["examples_processed"] for of in each)
        entry["seconds"]["clients"] = float(sum(sum(of["seconds"].values()) for of in each))
    if not record.error:
        record.ended = True
        record.keep_clients(np.concatenate([one.of_clients for one in trained]))
    record.seconds, record.processor_seconds = time.monotonic() - began, time.process_time() - ticks
    record.warnings = [*warnings]
    Recorder(folder, record).end(record)
    if record.test:
        on_round(record)
    return record


class _Trained:
    """A model that has trained by itself on the members' data, as FedAvg with one client does.

    `curve` has loss and accuracy after each turn, `of_clients` the members' accuracies at the end.
    """

    def __init__(
        self, run: Run, members: Sequence[int], turns: Sequence[int], config: Any, tests: _Tests
    ) -> None:
        self.curve = list[Array]()
        self.error: RoundFailed | None = None
        strategy = build(
            run.calls,
            seed=run.seed,
            on_divergence=run.settings.on_divergence,
            lr_schedule=lambda turn: run.settings.lr_decay ** (turns.index(turn) - 1),
            fraction_evaluate=0.0,
            min_train_nodes=1,
            min_available_nodes=1,
        )

        def test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
            self.curve.append(tests.on(members, arrays, server_round))
            return MetricRecord({})

        factory = _OneClient(run, tests.factory.clients, members)
        try:
            strategy.start(
                InProcessGrid(factory.app(), 1),
                ArrayRecord(factory.new_model().state_dict()),
                turns[-1],
                train_config=ConfigRecord(config),
                evaluate_fn=test,
            )
            self.of_clients = tests.of_clients(members, strategy.arrays)
        except RoundFailed as error:
            self.error = error
        self.history = strategy.history
