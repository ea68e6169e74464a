"""One run: its method trains, each round is tested and recorded, and whatever ends it is said."""

from __future__ import annotations

import shutil
import time
import traceback
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord
from flwr.serverapp import Grid
from safetensors.torch import save as as_bytes

from flwr_regs.cohort.stacks import ALONE
from flwr_regs.experiments.experiment import Run
from flwr_regs.experiments.partition.client_data import left
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.folders import FULL, CannotWrite, write, writing
from flwr_regs.experiments.report.metrics import on_clients
from flwr_regs.experiments.report.run_records import RunRecord, record_path
from flwr_regs.experiments.run.clients import RunClients
from flwr_regs.experiments.run.progress import Heartbeat, Progress
from flwr_regs.experiments.run.server_accuracy import ServerTest
from flwr_regs.server.checkpoint.checkpoint import CheckpointError, latest
from flwr_regs.server.round import RoundFailed

OF_CLIENTS = "the table has the model that clients receive; its paper judges the averaged model"


class Trainer:
    """Trains one run, and keeps its record, also of a run that fails.

    Parameters
    ----------
    clients : RunClients
    folder : Path or None
        It gets the record, round by round, checkpoints as the settings say, and at the end the model. A run
        that it holds checkpoints of goes on from there.
    progress : Progress
        Told of each round, of the initial test, and what the run is at.
    threads : int
        That a test may use.

    Attributes
    ----------
    record : RunRecord
        The run as far as it got.
    """

    def __init__(
        self, clients: RunClients, folder: Path | None, progress: Progress, threads: int
    ) -> None:
        self.run, self.clients, self.folder, self.progress = clients.run, clients, folder, progress
        self.heartbeat = Heartbeat(partial(progress.within, *self.run.key))
        self.strategy, run, data = self.run.strategy(), self.run, clients.data
        self._test: ServerTest | None = None
        if not run.settings.test_on_clients:
            self._test = ServerTest(clients.new_model(), data, threads, self._testing)
        self.record = RunRecord(
            *(run.label, run.method, run.seed, run.settings.config, run.settings.num_clients),
            self.strategy.term.config(),
            *(left(run.settings, data), run.row, {**run.point}, self.strategy.weighting),
        )

    def client_begins(self, server_round: int) -> None:
        """Tell that one more client of this exchange begins."""
        # a round is in the history once its clients have trained
        phase = "evaluate" if len(self.strategy.history) == server_round else "train"
        share = getattr(self.strategy, f"fraction_{phase}")
        total = max(int(share * self.record.clients), 1)
        self.heartbeat.one_more(self._at(server_round, phase), total)

    def _testing(self, done: int, total: int) -> None:
        """Tell how far a test is."""
        self.heartbeat.at("testing examples", done, total)

    def _at(self, server_round: int, phase: str = "train") -> str:
        """Say what the clients do in a round; nothing behind the last one."""
        rounds: int = self.run.settings.rounds
        return f"round {server_round:>4}/{rounds}   clients {phase}" * (server_round <= rounds)

    def train(self, grid: Grid, here: bool, warned: Collection[str]) -> RunRecord:
        """Train on a grid, and return the record; if the run ended early, it says why.

        Parameters
        ----------
        grid : Grid
        here : bool
            Whether all that trains is in this process. Else there are no checkpoints, as the clients'
            memory is elsewhere, and no count of the processor's seconds.
        warned : collection of str
            What the log warns of meanwhile; kept in the record at the end.

        Raises
        ------
        CannotWrite
            The disk is full, for instance.
        """
        record, strategy, folder = self.record, self.strategy, self.folder
        checkpoints, resumed = None, None
        if folder is not None and here and (every := self.run.settings.checkpoint_every):
            strategy.checkpoint_dir = checkpoints = checkpoints_of(self.run, folder)
            strategy.checkpoint_every = max(timedelta(seconds=every), timedelta.resolution)
            resumed = self._resumed(folder, checkpoints)
        self.recorder, record.seconds = records.Recorder(folder, record), sum(record.clock[-1:])
        began = time.monotonic()
        self._began = time.process_time() if here and resumed is None else None
        try:
            self._train(grid, resumed)
            self._test_clients()
            record.ended = record.ended or not record.error
        except CannotWrite:
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in FULL:  # of a checkpoint
                with writing(Path(error.filename or checkpoints or Path())):
                    raise
            record.error, record.rounds = f"{type(error).__name__}: {error}", strategy.history
            if isinstance(error, RoundFailed) and records.diverged(record.error, record.rounds):
                record.diverged = record.ended = True
            elif not here:  # on Flower's grid: into its log
                traceback.print_exc()
        finally:  # also after Ctrl-C: nothing here takes long
            self.heartbeat.at("")
            record.seconds += time.monotonic() - began
            record.processor_seconds = self._spent
            reasons = [why for why in getattr(grid, "fallbacks", ()) if why != ALONE]
            told = [f"StackedGrid: clients train one by one: {why}" for why in reasons]
            record.warnings = [*dict.fromkeys([*record.warnings, *warned, *told])]
            if strategy.history and folder is not None:
                path = folder / f"{record_path(folder, *self.run.key).stem}.safetensors"
                write(path, as_bytes(strategy.arrays.to_torch_state_dict()))
            self.recorder.end()
            if checkpoints is not None and record.ended:
                shutil.rmtree(checkpoints, ignore_errors=True)
                with suppress(OSError):  # another run still has some
                    checkpoints.parent.rmdir()
        return record

    @property
    def _spent(self) -> float | None:
        """The processor's seconds so far; None where not all of the run is in this process."""
        return None if self._began is None else time.process_time() - self._began

    def _train(self, grid: Grid, resumed: Path | None) -> None:
        """Train, test and record all rounds."""
        self.clients.start(self.strategy, grid, evaluate_fn=self, resume_from=resumed)

    def _resumed(self, folder: Path, checkpoints: Path) -> Path | None:
        """Take up the run where its last checkpoint was; return the checkpoint, None to begin anew.

        A checkpoint without the record of its rounds is of no use, and is removed.
        """
        with suppress(CheckpointError):
            checkpoint = latest(checkpoints)
            (record,) = records.recorded([self.run], folder).values() or [self.record]
            points = [point for point in record.test if point["round"] <= checkpoint.round]
            if points and points[-1]["round"] == checkpoint.round:
                self.record.test, self.record.rounds = points, list(checkpoint.history)
                if not record.runner.endswith(self.record.runner):
                    record.runner += f", {self.record.runner}"
                self.record.runner, self.record.warnings = record.runner, record.warnings
                return checkpoint.path
        shutil.rmtree(checkpoints, ignore_errors=True)
        return None

    def snapshot(self) -> list[np.ndarray] | None:
        """Return what the test needs of earlier rounds, for a checkpoint."""
        return None if self._test is None else [one.cpu().numpy() for one in self._test.ensemble]

    def restore(self, state: list[np.ndarray]) -> None:
        """Go on with a snapshot."""
        assert self._test is not None
        self._test.ensemble = [torch.from_numpy(one).to(self._test.device) for one in state]

    def __call__(self, server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Test a round's model, and record the round; the second time, the mean of two models."""
        record, history = self.record, self.strategy.history
        record.rounds = history if server_round else []
        again = [point["round"] for point in record.test[-1:]] == [server_round]
        if self._test is not None:
            figures = self._test.measured(arrays, server_round, keep=not again)
        elif server_round == 0 or again or not on_clients(history[-1]):
            if again and OF_CLIENTS not in record.warnings:
                record.warnings = [*record.warnings, OF_CLIENTS]
            return None  # no client has tested it
        else:
            metrics = ("loss", "accuracy")
            figures = {name: float(np.mean(on_clients(history[-1], name))) for name in metrics}
        if again:
            record.averaged = figures["accuracy"]
            return MetricRecord({**figures})
        record.test.append({"round": server_round, **figures})
        if self._test is not None and self.run.settings.ensemble and server_round:
            record.test[-1] |= self._test.together(self.run.settings.ensemble)
        if (spent := self._spent) is not None:
            record.spent.append(spent)
        self.recorder.round()
        self._tell()
        self.heartbeat.at(self._at(server_round + 1))
        return MetricRecord({**figures})

    def _tell(self) -> None:
        """Tell of the last test."""
        test = self.record.test[-1]
        self.progress.round(*self.run.key, test["round"], test["accuracy"])

    def _test_clients(self) -> None:
        """Keep each client's accuracy by the last test, or the expected one on data of its labels.

        A run that was resumed at its end has no test yet: its models are tested here.
        """
        history, record = self.strategy.history, self.record
        if self._test is not None:
            if self._test.last is None:  # it was resumed at its end
                last_round = history[-1]["round"]
                self._test.measured(self.strategy.arrays, last_round)
                if (averaged := self.strategy.averaged_arrays) is not None:
                    of_averaged = self._test.measured(averaged, last_round, keep=False)
                    record.averaged = of_averaged["accuracy"]
            record.keep_clients(self._test.expected_accuracies())
        elif tested := [*filter(on_clients, history)]:  # all may fail to, in a round
            every = np.full(record.clients, np.nan)
            every[sorted(tested[-1]["evaluate"]["clients"])] = on_clients(tested[-1])
            record.keep_clients(every)


def checkpoints_of(run: Run, folder: Path) -> Path:
    """Return the folder of a run's checkpoints in that of its results."""
    return folder / "checkpoints" / record_path(Path(), *run.key).stem


def begun(runs: Iterable[Run], folder: Path) -> dict[tuple[str, int], int]:
    """Return which runs would go on from a checkpoint in `folder` -> the rounds that they have by then."""
    rounds = {}
    for run in runs:
        with suppress(CheckpointError):
            rounds[run.key] = latest(checkpoints_of(run, folder)).round
    return rounds
