"""A comparison: each method on the same data, cohorts and seed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import client_data_of
from flwr_regs.experiments.report.folders import check_writable, new_folder
from flwr_regs.experiments.report.run_records import (
    Recorder,
    RunRecord,
    diverged,
    read,
    record_path,
)
from flwr_regs.experiments.settings import Settings
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.server.checkpoint.checkpoint import CheckpointError, latest
from flwr_regs.server.round import RoundFailed

OnRound = Callable[[RunRecord], None]
"""Called with the run after each round, and after the initial test."""


def results_folder(out: str) -> Path:
    """Return (and make) the folder for the results.

    It is `out` if that is set. Else it is ``results/<time>`` in the server's folder, if that is a
    writable checkout of this project, and a folder under the home folder if not: Flower's local server
    keeps the folder of its first start, whatever the folder of a later ``flwr run``.
    """
    if out and not Path(out).is_absolute():
        raise ValueError(
            f"setting 'out' must be an absolute path, not '{out}': Flower runs the server in another folder"
        )
    if out:
        folder = Path(out)
        check_writable(folder)
        return folder
    try:
        here = Path.cwd()
        if (here / "simulations" / "server_app.py").is_file() and os.access(here, os.W_OK):
            return new_folder(here / "results")
    except FileNotFoundError:  # that first folder is gone
        pass
    return new_folder(Path.home() / "flwr-regs-results")


def run(methods: Sequence[Run], grid: Grid, folder: Path | None) -> dict[str, Any]:
    """Train runs that share their settings on `grid`, report into `folder`, and return the history.

    Records and models are written as they come. A method that diverges is a result; any other failure of
    a method is raised when all have had their turn. With no folder, nothing is written or printed.
    """
    from flwr_regs.experiments.report import results

    comparison = Comparison(methods[0].settings, grid)
    for note in comparison.notes:
        say(f"NOTE: {note}")

    def show(run: RunRecord) -> None:
        if folder is not None:
            at = f"round {run.test[-1]['round']:>4}/{run.job['rounds']}"
            say(f"{run.label:<10} {at}   accuracy {run.test[-1]['accuracy']:7.2%}")

    runs, failed = [], list[Exception]()
    for method in methods:
        try:
            comparison.train(method, folder=folder, on_round=show)
        except Exception as error:
            failed.append(error)
        finally:
            runs.append(comparison.last)
            if folder is not None:
                results.Results(runs, comparison.notes).save(folder, pictures=False)
    trained = results.Results(runs, comparison.notes)
    if folder is not None:
        trained.save(folder)
        say(trained.text().rstrip())
        say(f"results: {folder}")
    if failed:
        raise failed[0]
    return trained.history()


class Comparison:
    """Data and a model, and the course of each method on them.

    Raises ValueError for settings or a partition that are impossible, before any client starts.

    Attributes
    ----------
    notes : list of str
        What the user should know beside the figures.
    last : RunRecord
        The last run, as far as it got.
    """

    last: RunRecord

    def __init__(self, settings: Settings, grid: Grid) -> None:
        import torch

        from flwr_regs.client.train.batches import resolve_device
        from flwr_regs.experiments.data import datasets as data
        from flwr_regs.experiments.data.losses import LOSSES
        from flwr_regs.experiments.models import models
        from flwr_regs.flower.grids.grid_network import GridNetwork
        from flwr_regs.server.population.population import Population

        self.settings, self.grid = settings, grid
        self.model = models.build(*settings.model_arguments)
        self.start = ArrayRecord(self.model.state_dict())
        clients = len(Population(1, None, 120.0).refresh(GridNetwork(grid)))
        self.clients, self.notes = clients, list[str]()
        if clients != settings.num_clients:
            self.notes.append(
                f"this run has {clients} SuperNodes, but num-clients asks for {settings.num_clients}: the data "
                f"is split over {clients} clients. Flower starts 2 unless told otherwise; use "
                f"`flwr-regs run`, or: flwr run . --stream --federation-config "
                f'"num-supernodes={settings.num_clients} client-resources-num-cpus=1"'
            )
        try:
            self.data = client_data_of(settings, clients)
            assert self.data.parts  # raises for a partition that is impossible
        except ValueError as error:
            raise ValueError(". NOTE: ".join([str(error), *self.notes])) from error
        dataset = self.data.data
        trained_on, rows = self.data.server_rows()
        if trained_on:
            x = data.untouched(dataset.train_x[rows], dataset.augment)
            y = dataset.train_y[rows]
        else:
            x, y = dataset.test_x[rows], dataset.test_y[rows]
        self.device = resolve_device("auto")
        self.test_x = torch.from_numpy(x).to(self.device)
        self.test_y = torch.from_numpy(y).to(self.device)
        self.num_classes, self.loss_fn = dataset.num_classes, LOSSES[dataset.loss]
        counts = self.data.label_counts
        self.shares = counts / counts.sum(1, keepdims=True)  # each client's class shares

    def train(
        self,
        method: Run,
        folder: Path | None = None,
        on_round: OnRound = lambda run: None,
        clock: Callable[[], float] | None = None,
        warnings: Collection[str] = (),
        checkpoints: Path | None = None,
    ) -> RunRecord:
        """Train one method and return its run; a run that diverged says so.

        Parameters
        ----------
        method : Run
            With the comparison's settings, or settings that differ in the method alone.
        folder : Path, optional
            It gets the record, round by round, and at the end the model.
        on_round : callable
        clock : callable, optional
            Counts the processor's seconds of all that trains.
        warnings : collection of str
            Filled with what the log warns of.
        checkpoints : Path, optional
            The run's own folder for checkpoints; it goes on from the one that is there. The folder is
            removed when the run has ended.

        Raises
        ------
        Exception
            Whatever ended the run early, but divergence. `last` is the run as far as it got.
        """
        from safetensors.torch import save_file

        settings, strategy = self.settings, method.strategy()
        self._last: list[Any] = []  # the probabilities of the last global models
        config = {**settings.config, "methods": method.method}
        run = self.last = RunRecord(
            *(method.label, method.method, settings.seed, config),
            *(self.clients, strategy.term.config()),
        )
        resumed = self._resumed(run, folder, checkpoints)
        if checkpoints is not None:
            strategy.checkpoint_dir = checkpoints
            strategy.checkpoint_every = timedelta(seconds=settings.checkpoint_every)
        recorder = Recorder(folder, run)
        before = sum(run.clock[-1:])

        def test(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            run.rounds = strategy.history if server_round else []
            again = [t["round"] for t in run.test[-1:]] == [server_round]  # the mean of two models
            if not settings.test_on_clients:
                figures = self._measured(arrays, server_round)
            elif server_round == 0 or again or not strategy.history[-1]["evaluate"]["clients"]:
                return None  # no client has tested it
            else:
                tested = strategy.history[-1]
                figures = {m: float(_on_clients(tested, m).mean()) for m in ("loss", "accuracy")}
            if not again:
                together = self._together(arrays, server_round)
                run.test.append({"round": server_round, **figures, **together})
                recorder.round(run)
                on_round(run)
            return MetricRecord({**figures})

        began, ticks = time.monotonic(), clock() if clock else 0.0
        try:
            strategy.start(
                grid=self.grid,
                initial_arrays=self.start,
                num_rounds=settings.rounds,
                train_config=ConfigRecord(settings.train_config),
                evaluate_config=ConfigRecord(settings.evaluate_config),
                evaluate_fn=test,
                resume_from=resumed,
            )
            run.ended = True
        except Exception as error:
            run.error = f"{type(error).__name__}: {error}"
            run.rounds = strategy.history
            run.diverged = isinstance(error, RoundFailed) and diverged(run.error, run.rounds)
            run.ended = run.diverged
            if not run.diverged:
                raise
        finally:
            run.seconds = before + time.monotonic() - began
            run.processor_seconds = clock() - ticks if clock and resumed is None else None
            if strategy.history:
                run.per_client = self._per_client(strategy)
                if folder is not None:
                    name = record_path(folder, run.label, run.seed).stem
                    path = folder / f"{name}.safetensors"
                    save_file(strategy.arrays.to_torch_state_dict(), path)
            run.warnings = [*warnings]
            recorder.end(run)
            if checkpoints is not None and run.ended:
                shutil.rmtree(checkpoints, ignore_errors=True)
        return run

    def _resumed(
        self, run: RunRecord, folder: Path | None, checkpoints: Path | None
    ) -> Path | None:
        """Take up a run where its last checkpoint was; return the checkpoint, None to begin anew.

        A checkpoint without the record of its rounds is of no use, and is removed.
        """
        if checkpoints is None or folder is None or not checkpoints.is_dir():
            return None
        path = record_path(folder, run.label, run.seed)
        record = read(path) if path.is_file() else None
        with suppress(CheckpointError):
            checkpoint = latest(checkpoints)
            points = [p for p in record.test if p["round"] <= checkpoint.round] if record else []
            if points and points[-1]["round"] == checkpoint.round:
                run.test, run.rounds = points, list(checkpoint.history)
                return checkpoint.path
        shutil.rmtree(checkpoints, ignore_errors=True)
        return None

    def _outputs(self, arrays: ArrayRecord) -> Any:
        """Return a model's outputs on the test data."""
        import torch

        self.model.load_state_dict(arrays.to_torch_state_dict())
        self.model.to(self.device).eval()
        with torch.no_grad():
            return torch.cat([self.model(batch) for batch in torch.split(self.test_x, 1000)])

    def _together(self, arrays: ArrayRecord, server_round: int) -> dict[str, float]:
        """Return the accuracy of the last models' mean prediction, where the job asks for it.

        FedADC's temporal ensemble (Sec. IV-E): the mean of the probabilities that the last `ensemble`
        global models give. A run that is taken up begins the ensemble anew.
        """
        if not self.settings.ensemble or self.settings.test_on_clients or server_round == 0:
            return {}
        self._last.append(self._outputs(arrays).softmax(1))
        del self._last[: -self.settings.ensemble]
        guess = sum(self._last[1:], self._last[0]).argmax(1)
        return {"ensemble": float((guess == self._targets(server_round)).double().mean())}

    def _measured(self, arrays: ArrayRecord, server_round: int) -> dict[str, float]:
        """Return a model's mean loss and accuracy on the test data, as it is in a round."""
        output, y = self._outputs(arrays), self._targets(server_round)
        accuracy = (output.argmax(1) == y).double().mean()
        return {"loss": float(self.loss_fn(output, y)), "accuracy": float(accuracy)}

    def _targets(self, server_round: int) -> Any:
        """Return the labels of the test data in a round."""
        import torch

        if self.settings.partition != "label-swaps-rounds":
            return self.test_y
        classes = self.data.labels(np.arange(self.num_classes), server_round)
        return torch.from_numpy(classes).to(self.device)[self.test_y]

    def _per_client(self, strategy: RegStrategy) -> dict[str, Any]:
        """Return each client's accuracy, or the expected one on new data of its label distribution."""
        import torch

        if self.settings.test_on_clients:
            tested = [e for e in strategy.history if "evaluate" in e]
            return _spread(_on_clients(tested[-1])) if tested else {}
        y = self._targets(strategy.history[-1]["round"])
        right = (self._outputs(strategy.arrays).argmax(1) == y).double()
        there = torch.bincount(self.test_y, minlength=self.num_classes).cpu().numpy()
        hits = torch.bincount(self.test_y, right, minlength=self.num_classes).cpu().numpy()
        seen = self.shares * (there > 0)  # a class without test data tells nothing
        return _spread(seen @ (hits / np.maximum(there, 1)) / np.maximum(seen.sum(1), 1e-12))


def _on_clients(entry: dict[str, Any], metric: str = "accuracy") -> Any:
    """Return each client's metric on its own test data, where the clients test the model.

    It is that of the client's own model, where the method gives it one.
    """
    by_client = entry["evaluate"]["clients"]
    each = (by_client[pid] for pid in sorted(by_client))
    return np.array([told.get(f"personal-{metric}", told[metric]) for told in each])


def _spread(each: Any) -> dict[str, Any]:
    numbers = {"mean": each.mean(), "std": each.std(), "worst": each.min()}
    return {"clients": each.tolist(), **{k: float(v) for k, v in numbers.items()}}


def say(text: str) -> None:
    """Print without delay: Flower forwards the server's output to ``flwr run --stream``."""
    print(text, flush=True)
