"""The strategy base: seeded cohorts, the server's half of a round, and a history of costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from logging import INFO, WARNING
from typing import Any, ClassVar
from uuid import uuid4

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from flwr.serverapp.strategy import Result

from flwr_regs.chain import chain
from flwr_regs.flower.arguments import check_arguments
from flwr_regs.flower.privacy import Privacy, beside, check_driven, refuse_statistics
from flwr_regs.server.aggregation import aggregation_weights
from flwr_regs.server.downlink import Downlink
from flwr_regs.server.evaluation import Evaluation, NobodyEvaluated
from flwr_regs.server.model import GlobalState
from flwr_regs.server.outbox import Exchange, says
from flwr_regs.server.participation import Participation
from flwr_regs.server.population import Population
from flwr_regs.server.privacy import CentralDP
from flwr_regs.server.replies import sort_replies, told, usable_replies, with_common_metrics
from flwr_regs.term import Term
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError, tie
from flwr_regs.wire.config import (
    EVALUATE_KEYS,
    FLOWER_KEYS,
    TRAIN_KEYS,
    check_config_keys,
    check_evaluate_config,
    check_train_config,
)
from flwr_regs.wire.precision import DTYPES, to_half
from flwr_regs.wire.records import content_bytes, from_record, to_record


class RoundFailed(RuntimeError):
    """A round ended with fewer usable replies than it needs; the global model is as before it."""


class RegStrategy(FlowerFedAvg):
    """A strategy for any list of terms; the named methods are this with their terms filled in.

    Parameters
    ----------
    terms : sequence of Term
        The method, left to right.
    weighting : {"num-examples", "uniform"}
        Aggregation weights ``p_k``: ``n_k / Σ n`` or ``1/|S_t|``, over the replies that are used.
    seed : int, optional
        Cohorts depend on (seed, round), a client's shuffling on (seed, round, partition id).
        Default: drawn at random and logged.
    downlink : {"model", "delta"}
        ``"model"`` sends ``w_t`` and the terms' broadcasts to everyone. ``"delta"`` sends only
        ``w_t − w_{t−1}`` to a client that took part in the last round and kept its model, the full
        pair to any other; broadcasts that do not follow from the step travel beside it. Always
        ``"delta"`` for a method that compresses the global step.
    wire_dtype : {"bfloat16", "float16"}, optional
        Send every float32 array of the model rounded to 16 bits, and take the clients' so; the server
        keeps float32. The terms' own records, and arrays of other dtypes, travel as they are.
    lr_schedule : callable, optional
        ``lr_schedule(round) -> factor`` on train_config's ``"lr"``; rounds count from 1.
    cohorts : {"uniform", "class-covering"}
        ``"class-covering"`` draws cohorts whose clients together hold every class (FedADC, Sec. IV-E).
        **Privacy cost**: each client tells the server, once, how many examples of each class it holds;
        it does so only if its own operator built it with ``share_label_counts=True``.
    overlap : bool
        With ``downlink="delta"``: while round t trains, the clients of round t + 1 are already sent
        ``w_t``, so that round t + 1 only sends the step (FedADC, Sec. II-A). Same weights; the history
        shows the bytes sent ahead as ``bytes_ahead``, those on the critical path as ``bytes_down``. A
        node that hangs on a model sent ahead holds the round up as one that trains would.
    incomplete : {"average", "scale", "drop"}
        What becomes of a client that took ``s_k`` of its E local steps, its own budget being spent:
        ``"average"`` takes it as any other, ``"scale"`` weighs it ``E / s_k`` times as much (EFL,
        Sec. 4.2), ``"drop"`` leaves it out. One with ``s_k = 0`` is inactive and always left out.
    drop_inactive : float, optional
        Drop a client for good once it was inactive in more than ``drop_inactive / (T E)`` of its turns
        (T rounds, E local steps; EFL, Eq. 9, whose constant C/J this is).
    restart_lr : bool
        When clients arrive, depart or are dropped, `lr_schedule` counts from 1 again (EFL, Sec. 4.4).
    privacy : CentralDP, optional
        Clip each client's update and noise their mean: see :class:`flwr_regs.CentralDP`.
    min_replies : int
        A round with fewer usable replies raises :class:`RoundFailed`.
    population : int, optional
        How many clients to wait for before round 1. Default: the clients' own ``num-partitions``
        where they have one, else `min_available_nodes`.
    wait_timeout : float
        Seconds to wait for the population, then an error says how many came.
    **kwargs
        Flower's FedAvg arguments: ``fraction_train``, ``fraction_evaluate``, ``min_train_nodes``, …

    Attributes
    ----------
    history : list of dict
        One entry a round: cohort, failures, bytes down and up per client, seconds per phase,
        examples processed, losses and metrics. Plain numbers and lists, ready for ``json``.

    Raises
    ------
    ValueError
        A parameter out of range, or terms that do not go together.
    """

    method: ClassVar[str | None] = None
    history: list[dict[str, Any]]

    # One training's state; _begin and configure_train set it.
    _state: GlobalState
    _released: ArrayRecord | None  # what the last aggregate_train returned
    _held: dict[int, int]  # partition id -> round whose model that client last kept
    _used: dict[int, int]  # partition id -> round whose reply of that client was last averaged
    _settings: dict[str, Any]  # the round's config
    _entry: dict[str, Any]
    _start_id: str
    _evaluation: Evaluation
    _exchange: Exchange
    _asked: list[int]  # who was sent the last messages

    def __init__(
        self,
        terms: Sequence[Term],
        *,
        weighting: str = "num-examples",
        seed: int | None = None,
        downlink: str = "model",
        wire_dtype: str | None = None,
        lr_schedule: Callable[[int], float] | None = None,
        cohorts: str = "uniform",
        overlap: bool = False,
        incomplete: str = "average",
        drop_inactive: float | None = None,
        restart_lr: bool = False,
        privacy: CentralDP | None = None,
        min_replies: int = 1,
        population: int | None = None,
        wait_timeout: float = 300.0,
        **kwargs: Any,
    ) -> None:
        check_arguments(type(self), kwargs)
        super().__init__(**kwargs)
        if (self.arrayrecord_key, self.configrecord_key) != (keys.ARRAYS, keys.CONFIG):
            raise ValueError(
                "the record keys are part of the protocol: leave them 'arrays', 'config'"
            )
        if weighting not in ("num-examples", "uniform"):
            raise ValueError(f"weighting must be 'num-examples' or 'uniform', not {weighting!r}")
        if downlink not in ("model", "delta"):
            raise ValueError(f"downlink must be 'model' or 'delta', not {downlink!r}")
        if cohorts not in ("uniform", "class-covering"):
            raise ValueError(f"cohorts must be 'uniform' or 'class-covering', not {cohorts!r}")
        self.term = chain(terms)
        if self.term.ternary[1]:
            downlink = "delta"
        if wire_dtype not in (None, *DTYPES):
            raise ValueError(f"wire_dtype must be one of {DTYPES} or None, not {wire_dtype!r}")
        if wire_dtype and any(self.term.ternary):
            raise ValueError(
                f"wire_dtype='{wire_dtype}' does not go with compression, whose updates have a code of "
                "their own; leave one of the two out"
            )
        if wire_dtype and downlink == "delta":
            raise ValueError(
                f"wire_dtype='{wire_dtype}' needs downlink='model': a client's rounded model does not "
                "follow from the rounded step"
            )
        if overlap and downlink != "delta":
            raise ValueError("overlap=True needs downlink='delta'")
        if overlap and self.term.ternary[1]:
            raise ValueError(
                "overlap=True sends whole models ahead, which a compressed downlink is there to avoid"
            )
        if min_replies < 1:
            raise ValueError(f"min_replies must be at least 1, not {min_replies}")
        for name in ("fraction_train", "fraction_evaluate"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], not {getattr(self, name)}")
        if seed is not None and seed < 0:
            raise ValueError(f"seed must not be negative, but is {seed}")
        self.weighting = weighting
        self.seed = int(np.random.SeedSequence().generate_state(1)[0]) if seed is None else seed
        self.downlink = downlink
        self.wire_dtype = wire_dtype
        self.lr_schedule = lr_schedule or (lambda _: 1.0)
        self.cohorts = cohorts
        self.overlap = overlap
        self.min_replies = min_replies
        self.participation = Participation(incomplete, drop_inactive, restart_lr)
        self.population = Population(self.min_available_nodes, population, wait_timeout)
        self.privacy = privacy
        self._privacy = Privacy(self, privacy)
        self._timeout = 3600.0
        self._num_rounds = 0  # 0 while a wrapper, not our own start, drives the rounds
        self.history = []

    @property
    def method_name(self) -> str:
        """The name clients must know: the class's own, or the terms' joined by ``+``."""
        return self.method or "+".join(t.name for t in self.term.terms if not t.server_only)

    @property
    def arrays(self) -> ArrayRecord:
        """The global model as it is now: after an error, that of the last good round."""
        return to_record(self._state.model)

    def summary(self) -> None:
        """Log the method, its hyper-parameters and the seed, then Flower's own summary."""
        settings = {**self.term.config(), "weighting": self.weighting, "downlink": self.downlink}
        settings |= {"wire_dtype": self.wire_dtype} if self.wire_dtype else {}
        log(INFO, "\t├──> Method: %s %s (seed %d)", self.method_name, settings, self.seed)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run `num_rounds` rounds; see Flower's ``Strategy.start`` for the parameters.

        `train_config` takes ``"lr"`` and one of ``"local-epochs"`` and ``"local-steps"``.

        Raises
        ------
        ValueError
            An unknown, missing or wrong config key, or a model that the method cannot train, before any
            client is contacted.
        RoundFailed
            A round had fewer than `min_replies` usable replies.
        """
        self.check_model(initial_arrays)
        train, evaluate = self._prepare(num_rounds, timeout, train_config, evaluate_config)
        try:
            return super().start(
                grid, initial_arrays, num_rounds, timeout, train, evaluate, evaluate_fn
            )
        finally:
            self._num_rounds = 0

    def check_model(self, initial_arrays: ArrayRecord) -> None:
        """Raise ValueError for initial arrays that this strategy cannot train, and say why.

        `start` does so first; call it yourself where other work comes before.
        """
        shared = self._shared(initial_arrays)
        if self.privacy is not None:
            refuse_statistics(shared)
        GlobalState(self.term, shared, self.wire_dtype)

    def _prepare(
        self,
        num_rounds: int,
        timeout: float,
        train_config: Mapping[str, Any] | None,
        evaluate_config: Mapping[str, Any] | None,
    ) -> tuple[ConfigRecord, ConfigRecord]:
        """Check what a training is told and note how long it is; return configs Flower may write into."""
        self._check_config(train_config or {})
        # A wrapper leaves it in the config that it was given.
        if "clipping_norm" in (train_config or {}):
            raise ValueError(
                "train_config key 'clipping_norm' is for Flower's privacy wrappers, which noise what their "
                "mods clip; here nobody would: leave it out, or use privacy=CentralDP(...)"
            )
        evaluate = {**(evaluate_config or {})}
        check_config_keys(evaluate, [*EVALUATE_KEYS, *FLOWER_KEYS], "evaluate_config")
        check_evaluate_config(evaluate, "evaluate_config")
        self._timeout, self._num_rounds = timeout, num_rounds
        return ConfigRecord({**(train_config or {})}), ConfigRecord(evaluate)

    def initialize_parameters(self, client_manager: Any) -> None:
        """Refuse Flower's older server, which asks its strategy for this first."""
        raise TypeError(
            f"{type(self).__name__} is a strategy of the Message API: for ServerAppComponents wrap it in "
            "flwr_regs.LegacyStrategy (docs/migration.md)"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort and build its messages. Round 1 also asks the clients who they are."""
        if server_round == 1 or not hasattr(self, "_state"):
            self._begin(arrays, config)
        elif arrays is not self._released and self._state.adopt(from_record(arrays)):
            self._held = {}
        if self.fraction_train == 0.0:
            return []
        if self._entry and self.history and self.history[-1] is not self._entry:
            # Flower's privacy wrappers skip a round with a failed client.
            log(WARNING, "round %d was skipped by whoever drives us", self._entry["round"])
        began = time.monotonic()
        self._grid = grid
        here = self.population.refresh(grid)
        members = self._privacy.members(here)
        entry: dict[str, Any] = {"round": server_round, "population": len(members), "failures": {}}
        members = self.participation.remaining(members, server_round, self._num_rounds, entry)
        cohort = self._cohort(server_round, members, grid)
        self._privacy.before(server_round, cohort)
        settings: dict[str, Any] = dict(config)
        on_schedule = self.participation.schedule_round(server_round)
        lr = float(settings["lr"]) * float(self.lr_schedule(on_schedule))
        if not 0 < lr < float("inf"):
            raise ValueError(f"lr_schedule({on_schedule}) makes the learning rate {lr}")
        self._ctx = self._state.context(server_round, lr)
        entry |= {
            "cohort": cohort,
            "lr": lr,
            "seconds": {"configure": time.monotonic() - began},
        }
        self._entry = entry
        downlink = Downlink(
            self.downlink,
            server_round,
            self._state,
            self.term.ternary[1],
            lambda: self.term.broadcast(self._state.server, self._ctx),
            {t.name for t in self.term.terms if type(t).recover is not Term.recover},
            self.wire_dtype,
        )
        settings |= {
            **self.term.config(),
            **beside(self.term),
            "lr": lr,
            keys.ROUND_KEY: server_round,
            keys.METHOD_KEY: self.method_name,
            keys.PROTOCOL_KEY: keys.PROTOCOL,
            keys.START_KEY: self._start_id,
            **({keys.HALF_KEY: self.wire_dtype} if self.wire_dtype else {}),
        }
        self._settings = settings
        self._exchange = Exchange(
            server_round,
            self.seed,
            settings,
            downlink,
            self.population,
            self._held,
            self._used if self.term.ternary[0] else None,
            self._entry,
        )
        ready = [p for p in cohort if p in here]
        entry["failures"] |= dict.fromkeys(set(cohort) - set(ready), "it has left")
        if any(t.probes for t in self.term.terms):
            ready = self._exchange.probe(ready, self.term, grid, self._timeout)
        messages = self._exchange.train(ready)
        log(INFO, "configure_train: cohort of %d (out of %d)", len(cohort), len(members))
        if self.overlap and server_round < self._num_rounds:
            later = self._cohort(server_round + 1, members, grid)
            messages += self._exchange.ahead(
                sorted(set(later) & set(here) - set(cohort)), self.arrays
            )
        self._asked = ready
        self._clock = time.monotonic()
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, average what is usable and move the global model.

        Raises
        ------
        RoundFailed
            Fewer than `min_replies` usable replies. Model and server state stay as they were.
        """
        if self.fraction_train == 0.0:
            return None, None
        entry = self._entry
        replies = list(replies)
        trained = [r for r in replies if r.metadata.message_type != keys.PREFETCH]
        answered, failures = sort_replies(trained, self.population.nodes(self._asked))
        # A client that lost its model (a restarted SuperNode) gets the full pair in the same round.
        if lost := [p for p, m in answered.items() if says(m, keys.OUT_OF_SYNC_KEY)]:
            log(WARNING, "clients %s have lost their model; sending the full pair", lost)
            messages = self._exchange.train(lost, lost=True)
            again = self._grid.send_and_receive(messages, timeout=self._timeout)
            late, late_failures = sort_replies(again, self.population.nodes(lost))
            failures |= late_failures
            answered = {p: m for p, m in answered.items() if p not in lost} | late
        entry["seconds"]["clients"] = time.monotonic() - self._clock
        began = time.monotonic()

        entry["bytes_up"] = {
            p: content_bytes(m.content) + entry.get("bytes_probe_up", {}).get(p, 0)
            for p, m in answered.items()
        }
        received = usable_replies(
            answered,
            self._state,
            self.method_name,
            self.term,
            self._settings,
            self.weighted_by_key,
        )
        fixed = (received.buffers or frozenset()) - set(received.tied or ())
        wrong = self._privacy.wrong(received.replies, self._state.given, fixed, self._settings)
        failures |= received.failures | wrong
        usable = {pid: reply for pid, reply in received.replies.items() if pid not in wrong}
        if failures:
            log(WARNING, "\t> %s", told(failures))
        failures |= entry["failures"]  # those of the first exchange, already told
        entry["failures"] = failures
        usable = self.participation.usable(entry["cohort"], usable, entry)
        entry["replies"] = sorted(usable)
        entry["lost_private"] = [
            p for p in entry["replies"] if p in self._used and says(answered[p], keys.FRESH_KEY)
        ]
        if entry["lost_private"]:
            log(
                WARNING,
                "clients %s have lost their private entries and began anew with their model's own",
                entry["lost_private"],
            )
        self.history.append(entry)
        needed = self._privacy.needed(self.min_replies, len(entry["cohort"]))
        if self.min_replies <= len(usable) < needed and self._released is not None:
            log(
                WARNING, "round %d is skipped: the wrapper's noise is for all replies", server_round
            )
            return None, None
        if len(usable) < needed:
            raise RoundFailed(
                f"round {server_round} of {self.method_name}: {len(usable)} usable replies from a "
                f"cohort of {len(entry['cohort'])}, needed {needed}; "
                + "; ".join(
                    [told(failures)] * bool(failures)
                    + [f"{k}: {entry[k]}" for k in ("inactive", "incomplete") if entry[k]]
                )
            )

        self._state.buffers, self._state.tied = received.buffers, received.tied
        mean = self._privacy.mean(received.buffers or (), len(entry["cohort"]), entry)
        try:
            weights = aggregation_weights(usable, self.weighting)
            scale = self.participation.incomplete == "scale"
            self._state.advance(usable, weights, self._ctx, scale, mean)
        except ProtocolError as error:
            raise RoundFailed(
                f"round {server_round} of {self.method_name} diverged: {error}; `strategy.arrays` is "
                "the model before it; try a smaller learning rate"
            ) from error
        self._held |= dict.fromkeys(answered, server_round)
        self._used |= dict.fromkeys(usable, server_round)
        self._exchange.got_ahead(replies)

        metrics = self.train_metrics_aggr_fn(
            with_common_metrics(r.metrics for r in usable.values()), self.weighted_by_key
        )
        entry["train_metrics"] = dict(metrics)
        processed = [r.metrics.get("examples-processed", 0) for r in usable.values()]
        entry["examples_processed"] = sum(n for n in processed if isinstance(n, int))
        entry["seconds"]["aggregate"] = time.monotonic() - began
        self._released = self.arrays
        return self._released, metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the clients that evaluate the global model and build their messages."""
        if self._entry and not self.history:
            raise RoundFailed(
                f"round {self._entry['round']} was never aggregated: Flower's privacy wrappers skip a "
                "round in which a client failed, and log its error"
            )
        if self.fraction_evaluate == 0.0:
            return []
        members = self.population.refresh(grid)
        size = max(int(len(members) * self.fraction_evaluate), self.min_evaluate_nodes)
        if self.wire_dtype or self._state.tied:
            model = tie(from_record(arrays), self._state.tied or {})
            halved, told = to_half(model, self.wire_dtype)
            arrays = to_record(halved)
            config = ConfigRecord({**config, **told})
        return self._evaluation.messages(server_round, size, arrays, config)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the clients' metrics and note each client's own in the history.

        Raises
        ------
        RoundFailed
            No usable reply, and none in any round before: an evaluation that never works is a mistake.
            A later failure is logged and kept in the history, and training goes on.
        """
        if self.fraction_evaluate == 0.0:
            return None
        if not self.history or self.history[-1]["round"] != server_round:
            self.history.append({"round": server_round, "seconds": {}})  # evaluation alone
        try:
            return self._evaluation.result(
                replies, self.history[-1], self.evaluate_metrics_aggr_fn, self.weighted_by_key
            )
        except NobodyEvaluated as error:
            raise RoundFailed(f"round {server_round} of {self.method_name}: {error}") from error

    def _check_config(self, config: Any) -> None:
        known = [*TRAIN_KEYS, *FLOWER_KEYS]
        check_config_keys(config, known, "train_config")
        check_train_config(config, "train_config")

    def _begin(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Start afresh: also where a wrapper (Flower's DP strategies) calls round 1 directly."""
        self._check_config(config)
        if not self._num_rounds:
            check_driven(self)
        shared = self._shared(arrays)
        if private := len(arrays) - len(shared):
            log(INFO, "%d of %d arrays stay with the clients", private, len(arrays))
        self._privacy.begin(shared)
        self._state = GlobalState(self.term, shared, self.wire_dtype)
        self._held = {}
        self.participation.forget()
        self._used = {}
        self._entry = {}
        self._released = None
        self._start_id = uuid4().hex[:8]
        settings: dict[str, Any] = {keys.METHOD_KEY: self.method_name}
        settings |= {keys.START_KEY: self._start_id, **self.term.config()}  # for what is private
        self._evaluation = Evaluation(self.population, self.seed, settings)
        self.history = []
        self.population.forget()

    def _shared(self, arrays: ArrayRecord) -> NDArrays:
        model = from_record(arrays)
        private = self.term.private(model)
        return {name: a for name, a in model.items() if name not in private}

    def _cohort(self, server_round: int, members: list[int], grid: Grid) -> list[int]:
        size = max(int(len(members) * self.fraction_train), self.min_train_nodes)
        key = (self._privacy.cohort_seed, server_round)
        return self.population.cohort(members, key, size, self.cohorts, grid)
