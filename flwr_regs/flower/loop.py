"""The loop of `start`: rounds, further attempts at a round, evaluations, callbacks, and an early end."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from logging import INFO, WARNING
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.common import log
from flwr.serverapp import Grid

from flwr_regs.flower.checkpoints import Best, Checkpoints, TrainingResult
from flwr_regs.server.failures import name_failures
from flwr_regs.server.options import NoLearningRate
from flwr_regs.server.refusals import as_many
from flwr_regs.server.round import NoMajority, TooFewReplies
from flwr_regs.server.stopping import sign, values
from flwr_regs.term import plain_number
from flwr_regs.wire.records import metric_record, to_record

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]
SHOWN = {
    "train_metrics": "",
    "evaluate_metrics": "clients: ",
    "server_metrics": "server: ",
    "averaged_metrics": "averaged model: ",
}
"""Metrics in a round's line of the log -> what stands before them."""
COUNTS = ("examples-processed", "local-steps", "planned-steps", "num-examples")
"""Metrics that the history alone has."""


@dataclass
class Loop:
    """A training from its first round to its last.

    Attributes
    ----------
    strategy : RegStrategy
        Runs rounds and evaluations on clients. It has a training once the first round has begun.
    grid : Grid
    train, evaluate : ConfigRecord
        The configs of rounds and evaluations.
    evaluate_fn : callable
        ``evaluate_fn(round, arrays) -> MetricRecord or None``, on the server; round 0 is the initial model.
    num_rounds : int
    result : TrainingResult
        Filled in round by round.
    saved : Checkpoints
        Where the training begins, and where finished rounds are saved.
    """

    strategy: Any
    grid: Grid
    train: ConfigRecord
    evaluate: ConfigRecord
    evaluate_fn: EvaluateFn
    num_rounds: int
    result: TrainingResult
    saved: Checkpoints
    _initial: MetricRecord | None = field(default=None, init=False)
    """What `evaluate_fn` says of the initial model, for the first entry of the history."""

    def run(self, arrays: ArrayRecord) -> TrainingResult:
        """Train from `arrays` on; return the result."""
        began, first = time.monotonic(), 1
        if self.saved.resumed is None:
            self._initial = self._tested(0, arrays)
        else:
            self.result.arrays, first = arrays, self.saved.resumed.round + 1
            if self._stopped(last := self.strategy.training.history[-1]):
                return self.result
            if first <= self.num_rounds:
                last.pop("stopped", None)  # it goes on
        for number in range(first, self.num_rounds + 1):
            arrays = self._trained(number, arrays)
            entry = self._measured(number, arrays)
            log(INFO, "%s", line_of(entry, self.num_rounds))
            self._keep_best(entry, arrays)
            if self._ends(entry):
                break
        log(INFO, "finished in %.2f s", time.monotonic() - began)
        # an entry of an evaluation alone names no one who trained
        rounds = [entry for entry in self.strategy.training.history if "cohort" in entry]
        used = {pid for entry in rounds for pid in entry["replies"]}
        never = {pid: why for e in rounds for pid, why in e["failures"].items() if pid not in used}
        if never:
            text = name_failures(never, what="gave no usable reply")
            log(WARNING, "in the whole training, %s", text)
        return self.result

    def _trained(self, number: int, arrays: ArrayRecord) -> ArrayRecord:
        """Run one round, with further attempts if it has too few usable replies; return the new model."""
        config = dict(self.train)
        for attempt in count(1):
            self.train.update(config)  # a user's configure_train may have changed it
            try:
                new, metrics = self.strategy.run_round(
                    "train", number, arrays, self.train, self.grid
                )
                break
            except TooFewReplies as error:
                options = self.strategy.training.options
                if attempt > options.retries:
                    if not isinstance(error, NoMajority):
                        raise
                    log(WARNING, "%s; the model stays as it is, and the run goes on", error)
                    new, metrics = arrays, None
                    break
                pause = options.retry_pause
                log(WARNING, "%s", error)
                log(WARNING, "attempt %d of %d in %g s", attempt + 1, options.retries + 1, pause)
                time.sleep(pause)
        if new is not None:
            self.result.arrays = arrays = new
        self._note(number, "train_metrics", metrics)
        self.strategy.follow(number, arrays)
        return arrays

    def _measured(self, number: int, arrays: ArrayRecord) -> dict[str, Any]:
        """Evaluate on the clients and on the server; return the round's entry of the history."""
        metrics = self.strategy.run_round("evaluate", number, arrays, self.evaluate, self.grid)
        self._note(number, "evaluate_metrics", metrics)
        if (metrics := self._tested(number, arrays)) is not None:
            self._note(number, "server_metrics", metrics)
            averaged = self.strategy.training.model.averaged
            if averaged and (metrics := self._tested(number, to_record(averaged))):
                self._note(number, "averaged_metrics", metrics)
        self._note(number, "initial_metrics", self._initial)
        self._initial = None
        entry: dict[str, Any] = self.strategy.training.history[-1]
        self.result.note(entry)
        return entry

    def _note(self, number: int, key: str, metrics: MetricRecord | None) -> None:
        """Let the round's entry of the history have these metrics, also in place of the package's own.

        There may be no entry yet: nobody has trained, or evaluated.
        """
        history = self.strategy.training.history
        if not history or history[-1]["round"] != number:
            history.append({"round": number, "seconds": {}})
        if metrics is None:
            history[-1].pop(key, None)
        else:
            history[-1][key] = dict(metrics)

    def _tested(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """Return the metrics of `evaluate_fn`; raise TypeError if it returns something else."""
        metrics = self.evaluate_fn(number, arrays.copy())  # it may put other arrays into its record
        if metrics is not None and not isinstance(metrics, Mapping):
            given = type(metrics).__name__
            raise TypeError(f"evaluate_fn must return a MetricRecord or None, not a {given}")
        return metric_record("evaluate_fn", metrics)

    def _keep_best(self, entry: dict[str, Any], arrays: ArrayRecord) -> None:
        """Keep the round's model if it is better than all before."""
        training, number, best = self.strategy.training, entry["round"], self.result.best
        wanted = training.options.keep_best
        if isinstance(wanted, str):
            known = dict(values(training.history, wanted))
            value, factor = known.get(number), sign(wanted, None)
            # a better source may have the metric by now
            if best is not None and best.round not in known:
                best = None
        else:
            factor = 1
            value = wanted and _called("keep_best", wanted, copy.deepcopy(entry), number, _number)
        if value is None or math.isnan(value):
            return
        if best is None or factor * value > factor * best.value:
            self.result.best = Best(number, value, arrays)

    def _ends(self, entry: dict[str, Any]) -> bool:
        """Ask `stop_when` and hand the finished entry to `on_round`; return whether training ends early."""
        number = entry["round"]
        self._stopped(entry)
        self.saved.after(number)
        saved = dict(entry)
        for callback in as_many(self.strategy.training.options.on_round):
            said = _called("on_round", callback, copy.deepcopy(entry), number, plain_number)
            if said is True:
                entry.setdefault("stopped", f"{callback!r} returned True")
        if entry != saved:
            self.saved.after(number)
        if "stopped" in entry:
            log(INFO, "training ends after round %d: %s", number, entry["stopped"])
        return "stopped" in entry

    def _stopped(self, entry: dict[str, Any]) -> bool:
        """Return whether a `stop_when`, or the end of `lr_schedule`, ends the training after this entry.

        Note why.
        """
        reasons, training = list[str](), self.strategy.training
        for condition in as_many(training.options.stop_when):
            history = [*training.history]
            if why := _called("stop_when", condition, history, entry["round"], _true_or_none):
                text = why if isinstance(why, str) else f"{condition!r} returned {why!r}"
                reasons.append(text)
        if entry["round"] < self.num_rounds:
            try:
                training.learning_rate(entry["round"] + 1, self.train.get("lr"))
            except NoLearningRate as error:
                reasons.append(str(error))
        if reasons:
            entry.setdefault("stopped", reasons[0])
        return bool(reasons)


def line_of(entry: Mapping[str, Any], num_rounds: int) -> str:
    """Return a round as a line of the log: who replied, the metrics, the seconds."""
    parts = [f"round {entry['round']:>{len(str(num_rounds))}}/{num_rounds}"]
    if "cohort" in entry:
        parts.append(f"{len(entry.get('replies', ()))} of {len(entry['cohort'])} clients")
    for key, where in SHOWN.items():
        metrics = {n: value for n, value in entry.get(key, {}).items() if n not in COUNTS}
        single = [f"{n} {v:.4g}" for n, v in metrics.items() if isinstance(v, int | float)]
        parts += [where + ", ".join(single)] if single else []
    return "   ".join([*parts, in_seconds(sum(entry["seconds"].values()))])


def in_seconds(time: float) -> str:
    """Return seconds as text: with two digits, from 100 on with all whole ones."""
    return f"{time:.2g} s" if time < 99.5 else f"{time:.0f} s"


def _number(said: Any) -> float | None:
    return None if said is None else float(said)


def _true_or_none(said: Any) -> Any:
    return said or None  # raises for an array


def _called(
    setting: str,
    function: Callable[[Any], Any],
    argument: Any,
    number: int,
    read: Callable[[Any], Any] = lambda said: said,
) -> Any:
    """Return what `read` makes of what a user's function says.

    If either raises, that is logged: a log that fails must not end a training.
    """
    try:
        return read(function(argument))
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        log(WARNING, "%s: %r failed in round %d: %s", setting, function, number, text)
        return None
