"""What `start` returns, and its checkpoints: refuses what does not fit, restores, saves after rounds."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from logging import INFO, WARNING
from os import PathLike
from pathlib import Path
from typing import Any, Self

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from flwr_regs.server.checkpoint.checkpoint import CheckpointError, Folder, latest, versions
from flwr_regs.server.checkpoint.fingerprint import differences
from flwr_regs.server.options import Options
from flwr_regs.server.training import Training
from flwr_regs.wire.errors import described
from flwr_regs.wire.files import write_atomically

Given = str | PathLike[str] | None
LEDGER = "privacy.json"
"""Beside the checkpoints: what the privacy accountant has counted, also since the last checkpoint."""
_PHASES = {
    "train_metrics": "train_metrics_clientapp",
    "evaluate_metrics": "evaluate_metrics_clientapp",
    "server_metrics": "evaluate_metrics_serverapp",
}
"""Metrics in an entry of the history -> where Flower's result has them."""


@dataclass(frozen=True)
class Best:
    """The best round so far.

    Attributes
    ----------
    round : int
    value : float
        Of the metric, or what the function returned.
    arrays : ArrayRecord
        The global model after that round.
    """

    round: int
    value: float
    arrays: ArrayRecord


@dataclass(repr=False)
class TrainingResult(Result):
    """Flower's result, and the best round's model, where `keep_best` asks for it."""

    best: Best | None = None

    def note(self, entry: Mapping[str, Any]) -> None:
        """Take over the metrics of a round's entry of the history."""
        if (initial := entry.get("initial_metrics")) is not None:
            self.evaluate_metrics_serverapp[0] = MetricRecord({**initial})
        for key, phase in _PHASES.items():
            if (metrics := entry.get(key)) is not None:
                getattr(self, phase)[entry["round"]] = MetricRecord({**metrics})


class Checkpoints:
    """The checkpoints of one `start`.

    Parameters
    ----------
    options : Options
        Their `checkpoint_dir` and `checkpoint_every`.
    grid : Grid
        One whose clients live in this process has ``snapshot()``, which returns their ``Context.state`` by
        node id, and ``restore(states)``: a checkpoint then holds their state too.
    result : TrainingResult
        What `start` returns; restored, and saved.
    resume_from : path or None
    evaluate_fn : callable, optional
        One that has ``snapshot()`` and ``restore(state)`` too: a checkpoint then holds its state.

    Attributes
    ----------
    resumed : Checkpoint or None
        What the training goes on from.
    configs : sequence of ConfigRecord
        Those of the training, which a strategy of the user's may change from round to round.

    Raises
    ------
    CheckpointError
        The folder cannot be written, or is in use; there is nothing to resume from, or it does not belong
        to the folder.
    """

    def __init__(
        self,
        options: Options,
        grid: Grid,
        result: TrainingResult,
        resume_from: Given = None,
        evaluate_fn: Any = None,
    ) -> None:
        self.resumed = None if resume_from is None else latest(resume_from)
        folder = options.checkpoint_dir
        self._folder = None if folder is None else Folder(folder, self.resumed)
        self._every, self._grid, self._result = options.checkpoint_every, grid, result
        self._test = evaluate_fn
        self._same: Mapping[str, Any] = {}
        self.configs: Sequence[ConfigRecord] = ()
        self._training: Training | None = None
        self._unsaved: tuple[int, dict[str, Any], list[dict[str, Any]]] | None = None
        self._last = 0 if self.resumed is None else self.resumed.round
        self._saved = time.monotonic()

    @contextmanager
    def guarded(self) -> Iterator[Self]:
        """Save the last finished round at the end of a `start`, whatever ends it.

        An error, Ctrl-C and SIGTERM go on after that. SIGTERM is caught only in the main thread, and only
        if nobody else handles it.
        """
        with ExitStack() as at_the_end:
            at_the_end.callback(self.close)
            at_the_end.enter_context(_terminable(self._folder is not None))
            at_the_end.callback(self.save)
            yield self

    def check(self, fingerprint: Mapping[str, Mapping[str, Any]], num_rounds: int) -> None:
        """Raise CheckpointError unless the checkpoint is of this training, and not beyond its end."""
        self._same = fingerprint
        if (resumed := self.resumed) is None:
            if self._folder is not None and (self._folder.path / LEDGER).exists():
                raise CheckpointError(
                    f"{self._folder.path} holds {LEDGER}, the releases of a run that ended before its "
                    "first checkpoint: count them with an accountant of yours, and name another folder"
                )
            return
        if other := differences(resumed.state["fingerprint"], fingerprint):
            remedy = "resume with the same settings, or begin anew with its model as initial_arrays"
            if resumed.state["fingerprint"]["setting"].get("privacy") is not None:
                remedy += ", counting on from what it has released"
            which = f"another training: {'; '.join(other)}"
            raise CheckpointError(f"{resumed.path} is of {which}; {remedy}")
        if resumed.round > num_rounds:
            total = f"beyond num_rounds={num_rounds}; this is the total"
            raise CheckpointError(f"{resumed.path} is of round {resumed.round}, {total}")
        if resumed.versions != versions():
            written = "%s was written with %s, this is %s"
            log(WARNING, written, resumed.path, resumed.versions, versions())

    def restore(self, training: Training) -> None:
        """Put a new training, the clients of this process, and the result where the checkpoint was.

        Raises CheckpointError if the clients are others, or the privacy spent is not known.
        """
        resumed = self.resumed
        assert resumed is not None
        state = resumed.state
        if (spent := state["training"]["privacy"]["spent"]) is not None:
            start = state["training"]["start"]
            state["training"]["privacy"]["spent"] = self._spent(resumed.path, start, spent)
        try:
            training.restore(state["training"], resumed.history)
            for config, kept in zip(self.configs, state["configs"], strict=True):
                config.update(kept)
            if state["clients"] is not None and (restore := getattr(self._grid, "restore", None)):
                restore({n: _records(s) for n, s in state["clients"].items()})
            if state.get("test") is not None and (restore := getattr(self._test, "restore", None)):
                restore(state["test"])
            for entry in resumed.history:
                self._result.note(entry)
            if (best := state["best"]) is not None:
                number, value, arrays = best
                self._result.best = Best(number, value, _arrays(arrays))
        except (KeyError, ValueError, TypeError) as error:
            # another version of the package may not have written a key
            why = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{resumed.path} cannot be resumed: {why}") from error
        log(INFO, "Resuming after round %d, from %s", resumed.round, resumed.path)

    def watch(self, training: Training) -> None:
        """Save this training from now on."""
        self._training = training
        if self._folder is not None:
            training.privacy.ledger = partial(_write_ledger, self._folder.path / LEDGER, training)

    def after(self, number: int) -> None:
        """Note a finished round, and save it if it is time to.

        If it cannot be saved, the run goes on: a warning and the history's ``"checkpoint"`` say why.
        """
        if self._folder is None or self._training is None:
            return
        best, kept = self._result.best, getattr(self._grid, "snapshot", None)
        try:
            of_test = getattr(self._test, "snapshot", lambda: None)()
        except Exception as error:  # whatever a user's code raises
            why = f"evaluate_fn.snapshot failed: {described(error)}"
            _not_saved(self._folder, self._training.history[-1], why)
            return
        state = {
            "fingerprint": self._same,
            "best": best and [best.round, best.value, _parts(best.arrays)],
            "clients": None if kept is None else {n: _plain(s) for n, s in kept().items()},
            "configs": [dict(config) for config in self.configs],
            "training": self._training.snapshot(),
            "test": of_test,
        }
        self._unsaved = number, state, list(self._training.history)
        if isinstance(self._every, timedelta):
            due = time.monotonic() - self._saved >= self._every.total_seconds()
        else:
            due = number - self._last >= self._every
        if due:
            self.save()

    def save(self) -> None:
        """Save the last finished round, unless it is saved."""
        if self._folder is None or self._unsaved is None:
            return
        number, state, history = self._unsaved
        history[-1].pop("checkpoint", None)
        clock = time.monotonic()
        try:
            self._folder.save(number, state, history)
        except (OSError, TypeError, ValueError, MemoryError) as error:
            _not_saved(self._folder, history[-1], str(error))
            return
        self._unsaved, self._last, self._saved = None, number, time.monotonic()
        history[-1]["seconds"]["checkpoint"] = self._saved - clock

    def close(self) -> None:
        """Let another run write into the folder."""
        if self._folder is not None:
            self._folder.close()
        if self._training is not None:
            self._training.privacy.ledger = None

    def _spent(self, checkpoint: Path, start: str, spent: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what was spent up to a checkpoint and since; raise CheckpointError if it is not known."""
        home = checkpoint.parent
        if self._folder is None or self._folder.path.resolve() != home.resolve():
            only = f"checkpoint_dir={str(home)!r}: that folder counts all that was released"
            raise CheckpointError(f"a run with a privacy accountant goes on only with {only}")
        try:
            ledger = json.loads((home / LEDGER).read_text())
            if ledger["start"] != start:
                raise ValueError("it is of another training")
            since, then = ledger["spent"]["compositions"], spent["compositions"]
            if since[: len(then)] != then:
                raise ValueError("it lacks releases of the checkpoint")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            unknown = f"it is not known what was released after {checkpoint.name}"
            raise CheckpointError(f"{home / LEDGER} cannot be used ({error}): {unknown}") from error
        if more := len(since) - len(then):
            log(WARNING, "%d releases after %s were lost, but count", more, checkpoint.name)
        return ledger["spent"]  # type: ignore[no-any-return]


def _write_ledger(path: Path, training: Training, spent: Mapping[str, Any]) -> None:
    """Write what the accountant has counted, before a noisy mean is used."""
    ledger = json.dumps({"start": training.start_id, "spent": spent})
    try:
        write_atomically(path, [ledger.encode()])
    except OSError as error:
        spends = f"the privacy that this round spends cannot be written to {path} ({error})"
        why = "a resumed run would not count it: training ends before the round's mean is used"
        raise CheckpointError(f"{spends}; {why}") from error


@contextmanager
def _terminable(wanted: bool) -> Iterator[None]:
    """Let SIGTERM end the block by SystemExit, as Ctrl-C does by KeyboardInterrupt."""
    main = threading.current_thread() is threading.main_thread()
    if not wanted or not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _plain(state: RecordDict) -> dict[str, list[Any]]:
    """Return one client's records as plain values; the bytes of arrays are not copied."""
    return {
        key: [type(r).__name__, _parts(r) if isinstance(r, ArrayRecord) else dict(r)]
        for key, r in state.items()
    }


def _parts(arrays: ArrayRecord) -> dict[str, list[Any]]:
    return {n: [a.dtype, a.shape, a.stype, a.data] for n, a in arrays.items()}


def _records(plain: Mapping[str, list[Any]]) -> RecordDict:
    """Return one client's records again."""
    return RecordDict({key: _RECORDS[kind](values) for key, (kind, values) in plain.items()})


def _arrays(values: Mapping[str, list[Any]]) -> ArrayRecord:
    return ArrayRecord({n: Array(*parts) for n, parts in values.items()})


_RECORDS = {c.__name__: c for c in (ConfigRecord, MetricRecord)} | {"ArrayRecord": _arrays}


def _not_saved(folder: Folder, entry: dict[str, Any], why: str) -> None:
    """Say in a round's entry, and in the log, why its checkpoint is not there."""
    entry["checkpoint"] = f"round {entry['round']} is not saved in {folder.path}: {why}"
    log(WARNING, "%s; the run goes on without this checkpoint", entry["checkpoint"])
