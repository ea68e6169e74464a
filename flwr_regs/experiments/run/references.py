"""The rows between which the methods lie: clients that train alone, and one model on all their data.

Both take about as many local steps as the clients of a FedAvg run do together, without stragglers and
drop-outs. `Local`: each client trains a model of its own on its own data, as often as it is in a cohort on
average, beginning in round 1; accuracies are means over the models. `Pooled`: one model trains on all
clients' data, in each round as many steps as a cohort together, in full batches. They begin with the
methods' initial model, and are tested on the same data. Nothing travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from torch.utils.data import TensorDataset

from flwr_regs import InProcessGrid
from flwr_regs.experiments.data.augment import Augmented
from flwr_regs.experiments.data.losses import LOSSES
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import ClientData, client_data_of
from flwr_regs.experiments.report.run_records import diverged
from flwr_regs.experiments.run.clients import Examples, RunClients
from flwr_regs.experiments.run.trainer import Trainer
from flwr_regs.experiments.strategies import build
from flwr_regs.server.round import RoundFailed

Curve = list[tuple[list[list[float]], list[float]]]
"""Of a model after each turn: the loss and accuracy of each test, and its accuracy for each member."""


class _OneClient(RunClients):
    """One client, which trains on the data of all `members`."""

    def __init__(self, run: Run, data: ClientData, members: Sequence[int]) -> None:
        super().__init__(run, data)
        self.members = members

    def __len__(self) -> int:
        return 1

    def examples(self, pid: int, server_round: int = 0) -> Examples:
        """Return the training data of the members in a round."""
        each = [super(_OneClient, self).examples(k, server_round)[0].tensors for k in self.members]
        whole = [torch.cat(tensors) for tensors in zip(*each, strict=True)]
        augment = self.data.data.augment
        return Augmented(augment, *whole) if augment else TensorDataset(*whole), None


class References(Trainer):
    """Trains a run of `Local` or `Pooled`; if one of its models diverges, the run does."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.record.weighting = ""  # no server weighs clients
        self._model = self.clients.new_model().eval()
        self._examples = lru_cache(self.record.clients)(self.clients.examples)

    def _train(self, grid: Grid, resumed: Path | None) -> None:
        """Train each model from its first turn to its last, and then record the means of each round."""
        settings = replace(self.run.settings, straggler_share=0.0, drop_out=0.0)
        number, last_round = settings.num_clients, settings.rounds
        data = client_data_of(settings)
        share = max(int(settings.fraction_train * number), 1) / number
        groups = [[client] for client in range(number)]
        turns = [ceil(share * t - 1e-9) for t in range(last_round + 1)]  # after each round
        if self.run.calls[0].target == "Pooled":
            groups, turns = [[*range(number)]], [*range(last_round + 1)]
            steps = sum(map(self.clients.planned_steps, range(number)))
            settings = replace(settings, local_steps=max(round(share * steps), 1))
        alone = replace(self.run, settings=replace(settings, rounds=turns[-1]))
        record, curves, histories = self.record, list[Curve](), list[Any]()
        for done, members in enumerate(groups, 1):
            self.heartbeat.at(f"model {done}/{len(groups)}")
            one = _OneClient(alone, data, members)
            strategy = build(
                self.run.calls,
                seed=self.run.seed,
                on_divergence=settings.on_divergence,
                lr_schedule=lambda turn: settings.lr_decay ** (turns.index(turn) - 1),
                fraction_evaluate=0.0,
                min_train_nodes=1,
                min_available_nodes=1,
            )
            curves.append([])
            test = partial(self._tested, members, curves[-1])
            try:
                one.start(strategy, InProcessGrid(one), evaluate_fn=test)
            except RoundFailed as failed:
                record.error = f"{type(failed).__name__}: {failed}"
                record.diverged = record.ended = diverged(record.error, strategy.history)
                break
            finally:
                histories.append(strategy.history)
        tested = min(map(len, curves))
        for t, turn in enumerate(turn for turn in turns if turn < tested):
            tests = [test for curve in curves for test in curve[turn][0]]
            loss, accuracy = np.mean(tests, axis=0).tolist()
            record.test.append({"round": t, "loss": loss, "accuracy": accuracy})
            if t:
                each = [history[turn - 1] for history in histories if turn > turns[t - 1]]
                seconds = {"clients": float(sum(sum(of["seconds"].values()) for of in each))}
                examples = sum(of["examples_processed"] for of in each)
                entry = {"round": t, "seconds": seconds, "examples_processed": examples}
                entry["steps"] = dict(enumerate(sum(of["steps"].values()) for of in each))
                record.rounds.append(entry)
            self.recorder.round()
        if not record.error:
            record.keep_clients(np.concatenate([curve[-1][1] for curve in curves]))
        if record.test:
            self._tell()

    def _test_clients(self) -> None:
        """Do nothing: each model's last test says it of its clients."""

    def _testing(self, done: int, total: int) -> None:
        """Tell nothing: a model's training and its tests are told as one."""

    def _tested(self, members: Sequence[int], curve: Curve, turn: int, arrays: ArrayRecord) -> None:
        """Add what a model's tests give to its curve; a member without a test has the accuracy NaN."""
        if self._test is not None:
            figures = self._test.measured(arrays, turn)
            each = self._test.expected_accuracies()[[*members]]
            curve.append(([[figures["loss"], figures["accuracy"]]], [*each]))
            return
        self._model.load_state_dict(arrays.to_torch_state_dict())
        loss_fn = LOSSES[self.clients.data.data.loss]
        tested = dict[int, list[float]]()
        for pid in members:
            if test := self._examples(pid, turn * self.clients.data.by_round)[1]:
                x, y = test.tensors
                with torch.no_grad():
                    output = self._model(x.clone())
                accuracy = float((output.argmax(1) == y).double().mean())
                tested[pid] = [float(loss_fn(output, y)), accuracy]
        none = [np.nan, np.nan]
        curve.append(([*tested.values()], [tested.get(pid, none)[1] for pid in members]))
