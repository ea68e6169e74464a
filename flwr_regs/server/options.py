"""A strategy's settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from os import PathLike
from typing import Any, Self

import numpy as np

from flwr_regs.chain import Chain
from flwr_regs.server.aggregate.aggregators import Aggregator, Mean
from flwr_regs.server.privacy import CentralDP
from flwr_regs.server.refusals import check
from flwr_regs.term import plain_numbers
from flwr_regs.wire import keys
from flwr_regs.wire.config import NEEDS, TRAIN_KEYS, check_train_config

MEAN = Mean()
StopWhen = Callable[[list[dict[str, Any]]], Any]
OnRound = Callable[[dict[str, Any]], Any]


def _constant(_: int) -> float:
    return 1.0


class NoLearningRate(ValueError):
    """The learning rate's schedule has come to its end: it is not above 0."""


def factor_of(setting: str, schedule: Callable[[int], float], number: int) -> float:
    """Return what a schedule says of a round, as Python's float; ValueError if it is no number."""
    factor = schedule(number)
    try:
        return float(factor)
    except (TypeError, ValueError):
        said = f"{setting}({number}) returned {factor!r:.80}"
        raise ValueError(f"{said}, expected a number") from None


@dataclass(frozen=True)
class Options:
    """The settings that every strategy of the package takes.

    Parameters
    ----------
    term : Chain
        The method.
    weighting : {"num-examples", "uniform"}
        Aggregation weights ``p_k``: ``n_k / Σ n`` or ``1/|S_t|``, over the replies that are used.
    seed : int, optional
        Cohorts depend on (seed, round), a client's shuffling on (seed, round, partition id).
        Default: drawn at random and logged.
    downlink : {"model", "delta"}
        ``"model"`` sends ``w_t`` and the terms' broadcasts to everyone. ``"delta"`` sends only
        ``w_t − w_{t−1}`` to a client that took part in the last round and kept its model, with the
        broadcasts that do not follow from this step; other clients get the full pair. Always
        ``"delta"`` for a method that compresses the global step.
    wire_dtype : {"bfloat16", "float16"}, optional
        Every float32 array of the model travels rounded to 16 bits, down and up; the server keeps
        float32. The terms' own records, and arrays of other dtypes, travel unchanged.
    lr_schedule : callable, optional
        ``lr_schedule(round) -> factor`` on train_config's ``"lr"``; rounds count from 1. Before a round in
        which it is 0 or less, training ends (the history's ``"stopped"``); so it must not be in round 1.
    cohorts : {"uniform", "class-covering"}
        ``"class-covering"`` draws cohorts whose clients together hold every class (FedADC, Sec. IV-E).
        **Privacy cost**: each client sends the server, once, how many examples of each class it holds.
        Its operator must allow that with ``share_label_counts=True``.
    overlap : bool
        With ``downlink="delta"``: while round t trains, the clients of round t + 1 already get ``w_t``, so
        that round t + 1 sends only the step (FedADC, Sec. II-A). The weights are the same. The history has
        the bytes sent ahead as ``bytes_ahead``, those of the round itself as ``bytes_down``. A round also
        waits for the clients that get a model ahead.
    incomplete : {"average", "scale", "drop"}
        How a client counts if it took only ``s_k`` of its E local steps, because its budget was spent.
        ``"average"``: like any other. ``"scale"``: with ``E / s_k`` times its weight (EFL, Sec. 4.2).
        ``"drop"``: not at all. A client with ``s_k = 0`` is inactive and never counts.
    drop_inactive : float, optional
        Drop a client for good once it was inactive in more than ``drop_inactive / (T E)`` of its turns
        (T rounds, E local steps, the median of what clients plan), and had at least two. This is the
        constant C/J of EFL, Eq. 9.
    restart_lr : bool
        When clients arrive, depart or are dropped, `lr_schedule` counts from 1 again (EFL, Sec. 4.4).
    privacy : CentralDP, optional
        Clip each client's update and add noise to the mean: see :class:`flwr_regs.CentralDP`.
    aggregator : Aggregator
        How the updates, and what else the clients upload, become one: `Mean()`, `CoordinateMedian()`,
        `TrimmedMean(share)`, `Krum(byzantine, keep)`, `GeometricMedian()`, `NormBound(max_norm)`,
        `CenteredClipping(radius, iters)`, or one of your own
        (:class:`flwr_regs.server.aggregate.aggregators.Aggregator`). Only `Mean` weighs clients by p_k. See
        docs/robustness.md.
    max_weight : float, optional
        No p_k is above this share, from above 0 to 1. What is cut off goes to the other clients in
        proportion to their weights. With fewer than ``1 / max_weight`` replies all weigh alike. No ω_k of
        `incomplete="scale"` or of a method that weighs is above this share of their sum either.
    max_scale : float
        How many times as much a client may count for the steps that it says it took: ``E / s_k`` is at
        most this, and FedNova's normaliser within this factor of the cohort's median.
    on_divergence : {"exclude", "warn", "stop"}
        What happens at a sign of divergence (:mod:`flwr_regs.server.divergence`). ``"exclude"``: a client
        whose update, upload, buffer or first exchange is over 1,000 times as long as its cohort's median
        (of one or two clients: as the last rounds'), or that is behind a mean or a global step over 1,000
        times the median of the last five, or that sends a negative variance, is left out and named, and
        the step is made again. A mean or step that is as long whoever is left out raises
        :class:`RoundFailed`, after five steps or more. Other signs (a step over 10 times the median, twice;
        the clients' median loss over 3 times the first round's) give one warning. ``"warn"``: one warning
        of the first sign of any kind. ``"stop"``: :class:`RoundFailed` at each, before the model moves.
        The history's ``"divergence"`` has the text.
    min_replies : int
        A round with fewer usable replies raises :class:`TooFewReplies`, a :class:`RoundFailed`.
    retries : int
        Further attempts at a round that has fewer than `min_replies` usable replies. Clients that trained
        for a failed attempt go back to their state before it. The history's ``"attempts"`` has what failed.
    retry_cohort : {"new", "same"}
        Each further attempt draws a new cohort, or asks the same one again.
    retry_pause : float
        Seconds before a further attempt.
    deadline : float, optional
        Seconds after which each exchange of a round (first exchange, training, evaluation) goes on with the
        clients that replied. Late clients are named (``"late"``), and not inactive for `drop_inactive`.
    stop_when : callable or several, optional
        ``stop_when(history) -> reason or falsy``, after each round; a reason ends the training early
        (``"stopped"``). See :class:`flwr_regs.Target` and :class:`flwr_regs.Patience`.
    keep_best : str or callable, optional
        Which round's model ``result.best`` keeps: a metric, looked up as :class:`flwr_regs.Target` does, or
        ``keep_best(entry) -> number or None`` of the round's entry, of which more is better.
    on_round : callable or several, optional
        ``on_round(entry)`` gets a copy of each finished round's entry of the history. True ends the
        training. An error in it is logged, and training goes on. See :class:`flwr_regs.JsonLines` and
        :class:`flwr_regs.TensorBoard`. Only `start` follows this and the six settings above.
    population : int, optional
        How many clients to wait for before round 1. Default: the nodes' own ``num-partitions`` if they
        have one, else `min_available_nodes`.
    wait_timeout : float
        Seconds to wait for the population. After that, training starts without the missing clients, and
        names them, if `min_available_nodes` clients are connected. Else an error says how many came.
    checkpoint_dir : path, optional
        Where `start` saves a checkpoint after every `checkpoint_every` rounds and when it ends, also by
        Ctrl-C; the last two are kept. ``start(..., resume_from=folder)`` goes on from there (see
        docs/checkpoints.md). The folder must not hold checkpoints of another run.
    checkpoint_every : int or datetime.timedelta
        Rounds, or the time, from one checkpoint to the next.
    fraction_train, fraction_evaluate, min_train_nodes, min_evaluate_nodes, min_available_nodes
        As for Flower's FedAvg. So are ``weighted_by_key``, ``train_metrics_aggr_fn`` and
        ``evaluate_metrics_aggr_fn``.

    Raises
    ------
    ValueError
        The settings break a row of `RANGES` or `pairs` (`refusals.py`); the message is its sentence.
    """

    term: Chain
    weighting: str = "num-examples"
    seed: int = 0
    downlink: str = "model"
    wire_dtype: str | None = None
    lr_schedule: Callable[[int], float] = _constant
    cohorts: str = "uniform"
    overlap: bool = False
    incomplete: str = "average"
    drop_inactive: float | None = None
    restart_lr: bool = False
    privacy: CentralDP | None = None
    aggregator: Aggregator = MEAN
    max_weight: float | None = None
    max_scale: float = 10.0
    on_divergence: str = "exclude"
    min_replies: int = 1
    retries: int = 0
    retry_cohort: str = "new"
    retry_pause: float = 0.0
    deadline: float | None = None
    stop_when: StopWhen | Sequence[StopWhen] | None = None
    keep_best: str | Callable[[dict[str, Any]], float | None] | None = None
    on_round: OnRound | Sequence[OnRound] | None = None
    population: int | None = None
    wait_timeout: float = 300.0
    checkpoint_dir: str | PathLike[str] | None = None
    checkpoint_every: int | timedelta = 1
    # Flower's own
    fraction_train: float = 1.0
    fraction_evaluate: float = 1.0
    min_train_nodes: int = 2
    min_evaluate_nodes: int = 2
    min_available_nodes: int = 2
    weighted_by_key: str = "num-examples"
    arrayrecord_key: str = keys.ARRAYS
    configrecord_key: str = keys.CONFIG
    train_metrics_aggr_fn: Callable[..., Any] | None = None
    evaluate_metrics_aggr_fn: Callable[..., Any] | None = None

    @classmethod
    def of(cls, term: Chain, **settings: Any) -> Self:
        """Return the options of a strategy of `term`; fill in defaults that depend on others."""
        if settings.get("seed") is None:
            settings["seed"] = int(np.random.SeedSequence().generate_state(1)[0])
        if settings.get("lr_schedule") is None:
            settings["lr_schedule"] = _constant
        if term.coder("release") is not None and settings.get("downlink") in (None, "model"):
            settings["downlink"] = "delta"
        return cls(term, **settings)

    @classmethod
    def names(cls) -> set[str]:
        """Return the names of the settings."""
        return {f.name for f in fields(cls)} - {"term"}

    @property
    def counts_steps(self) -> str:
        """The setting that needs the steps of each client; "" if none does."""
        if self.incomplete != "average":
            return f"incomplete='{self.incomplete}'"
        return "" if self.drop_inactive is None else f"drop_inactive={self.drop_inactive}"

    def check_train_config(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError for an unknown, missing or wrong key of a train config.

        Clients that only train as in FedAvg may have their learning rate and duration from elsewhere; then
        all these keys may be missing, unless the server needs them. Of a method that adds something on the
        server, as Flower's quickstarts would run it, all but "lr" may be.
        """
        needs = {"lr": "", "duration": ""}
        if readers := [t.name for t in self.term.terms if t.reads_lr]:
            who = f"{readers} may read on the server (reads_lr)"
            needs["lr"] = f"the clients' learning rate, which {who}"
        elif self.lr_schedule is not _constant:
            needs["lr"] = "the clients' learning rate, which lr_schedule multiplies"
        if self.counts_steps:
            needs["duration"] = f"because {self.counts_steps} compares the clients' steps with it"
        given = [k for k in TRAIN_KEYS if k in config and not needs.get(k, needs["duration"])]
        if not self.term.plain:
            needs = {**NEEDS}
        elif given and not (self.term.terms and given == ["lr"]):
            needs = {key: why or NEEDS[key] for key, why in needs.items()}
        check_train_config(config, noise=self.privacy is not None, needs=needs)
        if "lr" in config:
            self.learning_rate(config["lr"], 1)

    def learning_rate(self, given: float, number: int) -> float:
        """Return the clients' η in a round of the schedule.

        Raises NoLearningRate if it is not above 0, and ValueError if it is not finite.
        """
        lr = float(given) * factor_of("lr_schedule", self.lr_schedule, number)
        what = f"lr_schedule({number}) makes the learning rate {lr:g}"
        if self.lr_schedule is _constant:
            what = f"the train_config's 'lr' is {lr:g}"
        if not math.isfinite(lr):
            raise ValueError(f"{what}: expected a positive number")
        if lr <= 0:
            raise NoLearningRate(f"{what}, with which clients cannot train")
        return lr

    def __post_init__(self) -> None:
        plain_numbers(self)
        check(self)
