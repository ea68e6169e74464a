"""One training: what the server keeps between rounds, and the course of a round from top to bottom."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from flwr_regs.abilities import Compresses, Probes, Weighs
from flwr_regs.server.aggregate.aggregators import Mean, TooFewVectors
from flwr_regs.server.aggregate.robust_round import AggregatorFailed, RobustMeans
from flwr_regs.server.aggregate.weights import (
    Stats,
    StepScaling,
    UnusableReplies,
    WithheldStats,
    aggregation_weights,
    update_weights,
)
from flwr_regs.server.client_metrics import common_metrics, usable
from flwr_regs.server.divergence import DivergenceGuard
from flwr_regs.server.exchange.first_exchange import Exchange
from flwr_regs.server.exchange.network import Course, Network
from flwr_regs.server.exchange.replies import Reader, Usable
from flwr_regs.server.failures import name_failures
from flwr_regs.server.global_model import GlobalModel
from flwr_regs.server.options import Options
from flwr_regs.server.population.lost_state import name_losses
from flwr_regs.server.population.participation import Participation
from flwr_regs.server.population.population import Population
from flwr_regs.server.privacy import Budget, PrivateRounds, refuse_statistics
from flwr_regs.server.reply import Reply
from flwr_regs.server.round import Round, RoundFailed, TooFewReplies
from flwr_regs.term import ServerContext
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError
from flwr_regs.wire.text import shown

LOG = logging.getLogger("flwr")
MeanOfMetrics = Callable[[str, Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""Averages the clients' metrics: ("train" or "evaluate", the metrics that all report) -> their mean."""


class Training:
    """One training of one global model.

    Parameters
    ----------
    options : Options
    method : str
        The name that clients check.
    model : NDArrays
        ``w_1`` by name; what the method keeps on the clients is left out.
    num_rounds : int or None
        Rounds of the training; None if unknown.
    mean_of_metrics : callable
    budget : Budget, optional
        For a `privacy` with an accountant.

    Attributes
    ----------
    model : GlobalModel
    population : Population
    history : list of dict
        One entry a round.
    identity : dict
        Entries of every message's config: method, training and hyper-parameters.
    evaluated : bool
        Whether any client could ever evaluate.
    trained : set of int
        The clients of which a reply was used.
    used : dict of int to int
        Client that keeps state -> the last round whose reply was used.
    options, method, num_rounds, mean_of_metrics
        As given.

    Raises
    ------
    ValueError
        A model that the method or the options cannot train; options that need `num_rounds`.
    """

    def __init__(
        self,
        options: Options,
        method: str,
        model: NDArrays,
        num_rounds: int | None,
        mean_of_metrics: MeanOfMetrics,
        budget: Budget | None = None,
    ) -> None:
        if num_rounds is None and options.drop_inactive is not None:
            raise ValueError(
                "drop_inactive needs the number of rounds: use the strategy's own start"
            )
        self.options = options
        self.method = method
        self.model = self.begin(options, model)
        self.population = Population(
            options.min_available_nodes, options.population, options.wait_timeout
        )
        self.history: list[dict[str, Any]] = []
        self.identity: dict[str, Any] = {
            keys.METHOD_KEY: method,
            keys.START_KEY: uuid4().hex[:8],
            **options.term.config(),
        }
        self.num_rounds = num_rounds
        self.mean_of_metrics = mean_of_metrics
        self._privacy = PrivateRounds(options.privacy, options.seed, budget)
        self._participation = Participation(
            options.incomplete, options.drop_inactive, options.restart_lr, num_rounds or 1
        )
        self._guard = DivergenceGuard()
        self._warned_of_weights = False
        self._held: dict[int, int] = {}  # client -> round whose model it last kept
        self.evaluated = False
        self.trained: set[int] = set()
        self.used: dict[int, int] = {}

    @staticmethod
    def begin(options: Options, model: NDArrays) -> GlobalModel:
        """Return the global model of the initial arrays; raise ValueError if it cannot train."""
        shared = _shared(options, model)
        if options.privacy is not None:
            refuse_statistics(shared)
        return GlobalModel(options.term, shared, options.wire_dtype, options.downlink == "delta")

    def adopt(self, model: NDArrays) -> bool:
        """Continue from `model`, which the caller may have changed between rounds; return if it has."""
        changed = self.model.adopt(_shared(self.options, model))
        if changed:
            self._held = {}
        return changed

    @property
    def start_id(self) -> str:
        """What identifies this training to the clients, also after it was resumed."""
        return str(self.identity[keys.START_KEY])

    def keep_ledger(self, write: Callable[[Mapping[str, Any]], None] | None) -> None:
        """Let `write` have what the privacy accountant has counted, before a noisy mean is used."""
        self._privacy.ledger = write

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, beside the history; later rounds do not change it."""
        return {
            **self._bound(),
            "start": self.start_id,
            "population": self.population.snapshot(),
            "privacy": self._privacy.snapshot(),
            "evaluated": self.evaluated,
        }

    def restore(self, state: Mapping[str, Any], history: Sequence[dict[str, Any]]) -> None:
        """Continue from a snapshot and its history."""
        self.identity[keys.START_KEY] = state["start"]
        self._bind(state)
        self.population.restore(state["population"])
        self._privacy.restore(state["privacy"])
        self.evaluated = state["evaluated"]
        self.history[:] = history

    def round(self, number: int, config: Mapping[str, Any], network: Network) -> Course[Round]:
        """Run one round, from its cohort to the new global model.

        `config` is the train config. The course pauses while the clients train. At its end, also after a
        failure, the round's entry is in the history.

        Raises
        ------
        RoundFailed
            Fewer than `min_replies` usable replies, or a diverged model; at signs of divergence too if the
            strategy says so. The model stays as it was.
        """
        before = self._bound()
        try:
            return (yield from self._round(number, config, network))
        except BaseException:  # a failed round binds nobody
            self._bind(before)
            raise

    def _bound(self) -> dict[str, Any]:
        """Return what a round changes, and a failed one leaves as it was: see :meth:`snapshot`."""
        return {
            "model": self.model.snapshot(),
            "participation": self._participation.snapshot(),
            "guard": self._guard.snapshot(),
            "held": dict(self._held),
            "used": dict(self.used),
            "trained": set(self.trained),
        }

    def _bind(self, state: Mapping[str, Any]) -> None:
        self.model.restore(state["model"])
        self._participation.restore(state["participation"])
        self._guard.restore(state["guard"])
        self._held, self.used, self.trained = state["held"], state["used"], state["trained"]

    def _round(self, number: int, config: Mapping[str, Any], network: Network) -> Course[Round]:
        """Run one round; an error may leave the training half changed."""
        term, options = self.options.term, self.options
        now, failed = Round(number), self._failed(number)
        connected = self.population.refresh(network)
        if self.population.missing:
            now.events["missing"] = self.population.missing
        clients = self._privacy.members(connected)
        now.population = len(clients)
        if failed is not None:
            now.continue_from(failed)
        members = self._participation.remaining(clients, now)
        now.cohort = self._draw(number, members, network, failed)
        if left_out := self.population.left_out:
            now.events["refused"] = left_out
        self._privacy.check_budget(now)
        now.lr = self._learning_rate(number, config.get("lr"))
        now.context = self._context(now)
        now.config = self._config(now, config)
        term.restrict(now.config)  # with this round's learning rate
        memory = (self._held, self.used)
        exchange = Exchange(now, options, self.model, self.population.request, network, memory)
        now.lap("configure")

        here = self.population.here
        now.asked = [p for p in now.cohort if p in here]
        now.failures = dict.fromkeys(set(now.cohort) - set(now.asked), "it has left")
        if any(isinstance(t, Probes) for t in term.terms):
            now.asked = exchange.probe()
            self._held |= dict.fromkeys(now.asked, number)
            now.lap("probe")
        requests = [exchange.train(now.asked)]
        if options.overlap and number != self.num_rounds:
            later = self._draw(number + 1, members, network)
            requests += exchange.ahead(p for p in later if p in here)
        LOG.info("configure_train: cohort of %d (out of %d)", len(now.cohort), len(members))

        came, *acknowledged = yield requests
        exchange.collect(came)
        now.lap("clients")

        usable = self._read(now)
        self._participation.select(now)
        name_losses(now, self.trained)
        if failed is not None:  # its entry is among the attempts of the new one
            self.history.pop()
        self.history.append(entry := now.entry())
        try:
            self._advance(now, usable)
            self._participation.note(now)
            self._held |= dict.fromkeys(now.came, number)
            self._held |= {p: number for replies in acknowledged for p in replies.came}
            self.trained |= set(now.used)
            keeping = {p for p in now.used if now.came[p].says(keys.KEEPS_KEY)}
            for p in set(now.used) - keeping:
                self.used.pop(p, None)
            # Krum leaves out the uploads of clients that it did not select
            counted = set(now.events.get("selected", now.used))
            self.used |= dict.fromkeys(keeping & counted, number)
            self._measure(now)
        except Exception as error:
            now.events["failed"] = str(error)
            raise
        finally:
            entry |= now.entry()  # also what a failed round has cost
        return now

    def _failed(self, number: int) -> dict[str, Any] | None:
        """Return the entry of the last attempt at this round, if it failed."""
        last = self.history[-1] if self.history else {}
        return last if last.get("round") == number and "failed" in last else None

    def _draw(
        self,
        number: int,
        members: list[int],
        network: Network,
        failed: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the cohort of a round; `failed` is the last attempt at it."""
        options = self.options
        if failed is not None and options.retry_cohort == "same":
            here = set(members)
            return [p for p in failed["cohort"] if p in here]
        size = max(int(len(members) * options.fraction_train), options.min_train_nodes)
        key = (self._privacy.cohort_seed, number)
        attempt = 0 if failed is None else 1 + len(failed.get("attempts", []))
        return self.population.cohort(members, key, size, options.cohorts, network, attempt)

    def _learning_rate(self, number: int, given: Any) -> float | None:
        if given is None:  # plain clients have their own
            return None
        lr = float(given)
        on_schedule = self._participation.schedule_round(number)
        lr *= float(self.options.lr_schedule(on_schedule))
        if not 0 < lr < float("inf"):
            raise ValueError(f"lr_schedule({on_schedule}) makes the learning rate {lr}")
        return lr

    def _config(self, now: Round, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the round's config, the same for every client."""
        options, term = self.options, self.options.term
        codes = bool(term.coder("finish") or term.coder("release"))
        coding = [t.name for t in term.terms if codes and isinstance(t, Compresses)]
        beside = [*term.uploading, *coding]
        return {
            **config,
            **self.identity,
            **({keys.BESIDE_KEY: ", ".join(beside)} if beside else {}),
            **({keys.INCOMPLETE_KEY: "scale"} if options.incomplete == "scale" else {}),
            **({} if now.lr is None else {"lr": now.lr}),
            keys.ROUND_KEY: now.number,
            keys.PROTOCOL_KEY: keys.PROTOCOL,
            **({keys.FROZEN_DIGEST_KEY: self.model.frozen} if self.model.frozen else {}),
            **({keys.HALF_KEY: options.wire_dtype} if options.wire_dtype else {}),
        }

    def _read(self, now: Round) -> Usable:
        """Check the replies; note the usable ones, and why the others are not."""
        options = self.options
        by, counts_steps = options.weighted_by_key, options.counts_steps
        reader = Reader(self.method, options.term, self.model, by, counts_steps)
        usable = reader.read_all(now.came, now.config)
        fixed = (usable.buffers or frozenset()) - set(usable.tied or ())
        uncovered = self._privacy.uncovered(usable.replies, self.model.given, fixed)
        now.failures = {**now.failures, **usable.failures, **uncovered}
        now.received = {p: reply for p, reply in usable.replies.items() if p not in uncovered}
        if failed := {p: why for p, why in now.failures.items() if p in now.asked}:
            LOG.warning("\t> %s", name_failures(failed))  # the others were named before
        return usable

    def _advance(self, now: Round, usable: Usable) -> None:
        """Average the used replies and move the model; RoundFailed if they are too few or it diverges."""
        now.check_enough(self.options.min_replies, self.method)
        self.model.agree(usable.buffers, usable.tied, usable.frozen)
        mean, robust = self._privacy.mean(now), self._robust()
        watch = partial(self._guard.watch, now, self.options, self.method)
        while True:
            now.check_enough(self.options.min_replies, self.method)
            now.context = self._context(now)  # the trained arrays are known now
            try:
                scaled = update_weights(*self._weigher, now.used, now.context)
                self.model.advance(now.used, now.context, scaled, mean, watch, robust)
                self._note_bounds(now, robust)
                return
            except UnusableReplies as error:  # go on without these clients
                why = {p: shown(f"the reply of client {p}: {y}") for p, y in error.why.items()}
                now.failures |= why
                now.used = {p: r for p, r in now.used.items() if p not in why}
                LOG.warning("\t> %s", name_failures(why))
            except TooFewVectors as error:
                raise TooFewReplies(f"round {now.number} of {self.method}: {error}") from error
            except AggregatorFailed as error:
                text = (
                    f"round {now.number} of {self.method}: {error}; the model is as it was before"
                )
                raise AggregatorFailed(text) from error
            except ProtocolError as error:
                raise RoundFailed(
                    f"round {now.number} of {self.method} diverged: {error}; `strategy.arrays` is "
                    "the model before it; try a smaller learning rate"
                ) from error

    def _context(self, now: Round) -> ServerContext:
        """Return the context of the terms' server hooks; with weights and replies, once there are any."""
        lr = math.nan if now.lr is None else now.lr
        context = self.model.context(now.number, lr, self.population.size)
        if (robust := self._robust()) is not None:
            context = replace(context, aggregated=robust.aggregated, robust=True)
        if not now.used:
            return context
        given, fixed = self.model.given, self.model.fixed
        measured = {p: Stats(p, r, given, fixed) for p, r in now.used.items()}
        return replace(
            context,
            weights=self._weights(now.used),
            replies=measured if self.options.privacy is None else WithheldStats(),
            answers=now.answers,
        )

    def _weights(self, used: Mapping[int, Reply]) -> dict[int, float]:
        """Return ``p_k`` by partition id, none above `max_weight`."""
        return aggregation_weights(used, self.options.weighting, self.options.max_weight)

    def _robust(self) -> RobustMeans | None:
        """Return a robust aggregator's means, for one round; None for `Mean`."""
        aggregator = self.options.aggregator
        return None if isinstance(aggregator, Mean) else RobustMeans(aggregator)

    def _note_bounds(self, now: Round, robust: RobustMeans | None) -> None:
        """Note in a round whom the aggregator selected, and whose updates or weights were bounded."""
        bounded = set() if robust is None else set(robust.bounded)
        if (most := self.options.max_weight) is not None:
            given = aggregation_weights(now.used, self.options.weighting)
            weights, n = self._weights(now.used), len(now.used)
            bounded |= {p for p in given if weights[p] < given[p]}
            if most * n < 1 and not self._warned_of_weights:
                self._warned_of_weights = True
                LOG.warning(
                    "max_weight=%g is impossible for %d replies: each weighs 1/%d", most, n, n
                )
        if bounded:
            now.events["bounded"] = sorted(bounded)
        if robust is not None and robust.selected is not None:
            now.events["selected"] = robust.selected

    @property
    def _weigher(self) -> tuple[Weighs | None, str]:
        """What sets the weights of the updates (a term, ``incomplete="scale"``, or nothing); its name."""
        if self.options.incomplete == "scale":
            return StepScaling(), StepScaling.name
        chain = self.options.term
        found = next((t.name for t in chain.terms if isinstance(t, Weighs)), "")
        return (chain if found else None), found  # the chain hands each term its own uploads

    def _measure(self, now: Round) -> None:
        """Note the mean of the clients' metrics, and what the round took."""
        used = now.used
        processed = [reply.metrics.get("examples-processed", 0) for reply in used.values()]
        now.examples_processed = sum(n for n in processed if isinstance(n, int) and usable(n))
        reported, left_out = common_metrics({pid: reply.metrics for pid, reply in used.items()})
        if left_out:
            now.events["metrics_left_out"] = left_out
        now.metrics = dict(self.mean_of_metrics("train", reported)) if reported else {}
        now.lap("aggregate")


def _shared(options: Options, model: NDArrays) -> NDArrays:
    """Return the arrays that do not stay with the clients."""
    private = options.term.private(model)
    return {name: a for name, a in model.items() if name not in private}
