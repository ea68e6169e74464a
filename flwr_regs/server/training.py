"""One training: what the server keeps between rounds, and the course of a round from top to bottom."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any
from uuid import uuid4

from flwr_regs.abilities import Compresses, Probes
from flwr_regs.server.aggregate import weights as weighing
from flwr_regs.server.aggregate.aggregators import Mean, TooFewVectors
from flwr_regs.server.aggregate.robust_round import AggregatorFailed, Means
from flwr_regs.server.client_metrics import common_metrics, usable
from flwr_regs.server.divergence import BEFORE, STEP, DivergenceGuard, Diverges
from flwr_regs.server.exchange.exchange import Exchange, Remembered, name_losses
from flwr_regs.server.exchange.network import Course, Network
from flwr_regs.server.exchange.replies import Reader
from flwr_regs.server.failures import UnusableReplies, name_failures
from flwr_regs.server.global_model import GlobalModel, Step
from flwr_regs.server.options import Options
from flwr_regs.server.population.cohorts import further, uniform_cohort
from flwr_regs.server.population.participation import Participation
from flwr_regs.server.population.population import Population
from flwr_regs.server.privacy import Budget, PrivateRounds, refuse_statistics
from flwr_regs.server.round import Numbers, Replied, Round, RoundFailed, TooFewReplies
from flwr_regs.term import ServerContext
from flwr_regs.wire import keys
from flwr_regs.wire.arrays import NDArrays, ProtocolError
from flwr_regs.wire.text import shown

LOG = logging.getLogger("flwr")
MANY = 5
"""Replies of which one client should not have over half of the weight."""
OVER_SCALE = (
    "max_scale=%g has bounded what clients weigh for the number of their steps; the paper has no bound: "
    "set a larger one if you trust all clients"
)
BOUND = ("model", "participation", "guard", "remembered")
KNOWN = ("population", "privacy")
"""Parts that rounds change and checkpoints hold; those in the first are as before after a failed round."""
FIXED = ("wire_dtype", "privacy", "seed")
"""Settings on which the model, the noise and the cohorts of a whole training rest."""
MeanOfMetrics = Callable[[str, Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""Averages the clients' metrics: ("train" or "evaluate", the metrics that all report) -> their mean."""


@dataclass(eq=False)
class Training:
    """One training of one global model.

    Parameters
    ----------
    options : Options
    method : str
        The name that clients check.
    initial : NDArrays
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
    start_id : str
        What identifies this training to the clients, also after it was resumed.
    evaluated : bool
        Whether any client could ever evaluate.
    privacy, participation, guard : PrivateRounds, Participation, DivergenceGuard
    remembered : Remembered
        With which of its earlier rounds a client's next one begins.
    options, method, num_rounds, mean_of_metrics
        As given.

    Raises
    ------
    ValueError
        A model that the method or the options cannot train; options that need `num_rounds`.
    """

    options: Options
    method: str
    initial: InitVar[NDArrays]
    num_rounds: int | None
    mean_of_metrics: MeanOfMetrics
    budget: InitVar[Budget | None] = None

    def __post_init__(self, initial: NDArrays, budget: Budget | None) -> None:
        self._begun = o = self.options
        if self.num_rounds is None and o.drop_inactive is not None:
            raise ValueError("drop_inactive needs the number of rounds: use the strategy's start")
        self.model = self.begin(o, initial)
        self.population = Population(o.min_available_nodes, o.population, o.wait_timeout)
        self.history: list[dict[str, Any]] = []
        self.start_id = uuid4().hex[:8]
        self.privacy = PrivateRounds(o.privacy, o.seed, budget)
        self.participation = Participation(o, self.num_rounds or 1)
        self.guard = DivergenceGuard(o, self.method)
        self._warned_of_weights = self._warned_of_scale = False
        self._before: dict[str, Any] = {}  # the parts that bind, before the last round
        self.evaluated = False
        self.remembered = Remembered()

    @staticmethod
    def begin(options: Options, model: NDArrays) -> GlobalModel:
        """Return the global model of the initial arrays; raise ValueError if it cannot train."""
        shared = _shared(options, model)
        if options.privacy is not None:
            refuse_statistics(shared)
        return GlobalModel(options.term, shared, options.wire_dtype, options.downlink == "delta")

    def use(self, options: Options) -> None:
        """Go on with other settings; a round refuses another of `FIXED`."""
        self.options = self.guard.options = self.participation.options = options

    def adopt(self, model: NDArrays, what: str = "the arrays handed to configure_train") -> bool:
        """Continue from `model`, which the caller may have changed between rounds; return if it has.

        Raises ProtocolError, which names the arrays by `what`, if they do not fit.
        """
        changed = self.model.adopt(_shared(self.options, model), what)
        if changed:
            self.remembered.held = {}
        return changed

    @property
    def identity(self) -> dict[str, Any]:
        """Entries of every message's config: method, training, hyper-parameters, how the model travels."""
        half, frozen = self.options.wire_dtype, self.model.frozen
        return {
            keys.METHOD_KEY: self.method,
            keys.START_KEY: self.start_id,
            **self.options.term.config(),
            **({keys.HALF_KEY: half} if half else {}),
            **({keys.FROZEN_DIGEST_KEY: frozen} if frozen else {}),
        }

    def snapshot(self) -> dict[str, Any]:
        """Return what a checkpoint holds of it, beside the history; later rounds do not change it."""
        states = {name: getattr(self, name).snapshot() for name in (*BOUND, *KNOWN)}
        return {**states, "start": self.start_id, "evaluated": self.evaluated}

    def restore(self, state: Mapping[str, Any], history: Sequence[dict[str, Any]]) -> None:
        """Continue from a snapshot and its history."""
        self.start_id = state["start"]
        for name in (*BOUND, *KNOWN):
            getattr(self, name).restore(state[name])
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
        ValueError
            A setting of `FIXED` is another than when the training began.
        """
        for name in FIXED:
            if (now := getattr(self.options, name)) != (given := getattr(self._begun, name)):
                kept = f"{name} must stay {given!r} until the training ends, but is {now!r}"
                raise ValueError(f"round {number} of {self.method}: {kept}; start another with it")
        this_round = Round(number)
        if (failed := self._failed(number)) is not None:
            this_round.continue_from(failed)
            if self.options.downlink == "delta":  # who replied then holds this round's model
                self.remembered.held |= dict.fromkeys(failed["bytes_up"], number)
        before = {name: getattr(self, name).snapshot() for name in BOUND}
        self._before = before
        try:
            yield from self._round(this_round, config, network)
        except BaseException as error:  # a failed round binds nobody
            self._restore_bound(before)
            if not isinstance(error, GeneratorExit):  # which ends a round that is never aggregated
                this_round.events["failed"] = str(error) or type(error).__name__
                self._note(this_round)
            raise
        return this_round

    def take_back(self, number: int, error: BaseException) -> None:
        """Let a round fail that has ended well: a user's code has raised after it."""
        if self.history and self.history[-1]["round"] == number and not self._failed(number):
            self._restore_bound(self._before)
            self.history[-1]["failed"] = str(error) or type(error).__name__

    def _restore_bound(self, before: Mapping[str, Any]) -> None:
        for name, state in before.items():
            getattr(self, name).restore(state)

    def _round(
        self, this_round: Round, config: Mapping[str, Any], network: Network
    ) -> Course[None]:
        """Run one round; an error may leave the training half changed."""
        term, options, number = self.options.term, self.options, this_round.number
        exchange, members = self._opened(this_round, config, network)
        asked, least = len(this_round.cohort), self.options.min_replies
        if asked < least:  # before they train
            few = f"a cohort of {asked} cannot give min_replies={least}"
            raise TooFewReplies(f"round {number} of {self.method}: {few}")
        here = set(self.population.connected)
        this_round.asked = [p for p in this_round.cohort if p in here]
        this_round.failures = {p: "it has left" for p in this_round.cohort if p not in here}
        if term.able(Probes):
            this_round.asked = exchange.probe()
            self.remembered.held |= dict.fromkeys(this_round.asked, number)
            this_round.lap("probe")
        requests = [exchange.train(this_round.asked)]
        if options.overlap and number != self.num_rounds:
            later = self._draw(number + 1, members, network)
            requests.append(exchange.ahead(p for p in later if p in here))
        LOG.debug("round %d: %d of %d clients", number, len(this_round.cohort), len(members))

        came, *acknowledged = yield requests
        exchange.collect(came)
        this_round.lap("clients")

        Reader(self.method, options, self.model).read_all(this_round)
        self.participation.select(this_round)
        self._close(this_round)
        for replies in acknowledged:
            self.remembered.held |= dict.fromkeys(replies.came, number)
            if replies.failures:  # the round has waited for them
                what = f"got no model ahead of round {number + 1}"
                LOG.warning("%s", name_failures(replies.failures, what=what))

    def _opened(
        self, this_round: Round, config: Mapping[str, Any], network: Network
    ) -> tuple[Exchange, list[int]]:
        """Give a round its cohort and config; return (its exchange, whom the cohort is drawn from)."""
        options, number = self.options, this_round.number
        clients = self.privacy.members(self.population.refresh(network))
        if self.population.missing:
            this_round.events["missing"] = self.population.missing
        this_round.population = len(clients)
        members = self.participation.remaining(clients, this_round)
        this_round.cohort = self._draw(number, members, network)
        if left_out := self.population.left_out:
            this_round.events["refused"] = left_out
        self.privacy.check_budget(this_round)
        this_round.lr = self.learning_rate(number, config.get("lr"))
        context = self._context(this_round, Means(options.aggregator))
        this_round.config = self._config(this_round, config)
        options.term.restrict(this_round.config)  # with this round's learning rate
        exchange = Exchange(
            *(this_round, options, self.model, network, context),
            *(self.population.request, self.remembered),
            partial(self.guard.check_uploads, this_round, what="reply in the first exchange,"),
        )
        this_round.lap("configure")
        return exchange, members

    def _close(self, this_round: Round) -> None:
        """Make the step of a round whose replies are selected; note the round in the history."""
        wrong = {p: why for p, why in this_round.failures.items() if p in this_round.asked}
        if wrong and len(this_round.used) >= self.options.min_replies:  # else the error says it
            LOG.warning("\t> %s", name_failures(wrong))  # the others were named before
        this_round.lose(this_round.came)
        name_losses(this_round)
        self._advance(this_round)
        self.participation.note(this_round)
        self._remember(this_round)
        self._measure(this_round)
        self._note(this_round)

    def _note(self, this_round: Round) -> None:
        """Note a round in the history, also what a failed one has cost."""
        if self._failed(this_round.number) is not None:  # its attempts hold that one
            self.history.pop()
        self.history.append(this_round.entry())

    def _remember(self, this_round: Round) -> None:
        """Note with which of its rounds each client's next one begins."""
        # Krum leaves out the uploads of clients that it did not select
        counted = this_round.events.get("selected", this_round.used)
        self.remembered.note(this_round.number, this_round.came, counted)

    def evaluators(self, connected: list[int], network: Network) -> list[int]:
        """Return those of the `connected` clients that may evaluate now."""
        return connected

    def _failed(self, number: int) -> dict[str, Any] | None:
        """Return the entry of the last attempt at this round, if it failed."""
        last = self.history[-1] if self.history else {}
        return last if last.get("round") == number and "failed" in last else None

    def _draw(self, number: int, members: list[int], network: Network) -> list[int]:
        """Return the cohort of a round, or of a further attempt at it."""
        options, failed = self.options, self._failed(number)
        asked = [] if failed is None else failed["cohort"]
        if options.retry_cohort == "same" and len(asked) >= options.min_replies:
            here = set(members)
            return [p for p in asked if p in here]
        size = max(int(len(members) * options.fraction_train), options.min_train_nodes)
        key = (self.privacy.cohort_seed, number)
        attempt = 0 if failed is None else 1 + len(failed.get("attempts", []))
        if options.cohorts == "uniform":
            return uniform_cohort(members, key, size, further(attempt))
        return self.population.covering_cohort(members, key, size, attempt, network)

    def learning_rate(self, number: int, given: Any) -> float | None:
        """Return the clients' η in a round; None if plain clients have their own.

        Raises what :meth:`Options.learning_rate` raises.
        """
        number = self.participation.schedule_round(number)
        return None if given is None else self.options.learning_rate(given, number)

    def _config(self, this_round: Round, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the round's config, the same for every client."""
        options, term = self.options, self.options.term
        coding = [t for t in term.able(Compresses) if t.acts("finish") or t.acts("release")]
        beside = [*term.uploading, *(t.name for t in coding)]
        return {
            **config,
            **self.identity,
            **({keys.BESIDE_KEY: ", ".join(beside)} if beside else {}),
            **({keys.INCOMPLETE_KEY: "scale"} if options.incomplete == "scale" else {}),
            **({} if this_round.lr is None else {"lr": this_round.lr}),
            keys.ROUND_KEY: this_round.number,
            keys.PROTOCOL_KEY: keys.PROTOCOL,
        }

    def _advance(self, this_round: Round) -> None:
        """Average the used replies and move the model; RoundFailed if they are too few or it diverges."""
        plain = self.guard if self.options.privacy is None else self.privacy
        where = f"round {this_round.number} of {self.method}"
        while True:
            self._check_enough(this_round)
            means = Means(self.options.aggregator, partial(plain.mean, this_round))
            context, used = self._context(this_round, means), this_round.used
            try:
                self.guard.check_uploads(this_round, {p: r.uploads for p, r in used.items()})
                self.guard.check_variances(this_round, self.model.given)
                step, given, scaled = self._step(used, context, means)
                self.guard.watch(this_round, step.square)
                self.model.move(step, context)
                self._note_bounds(this_round, means, context.weights, given, scaled)
                return
            except UnusableReplies as error:  # go on without these clients
                wrong = error.why
            except Diverges as error:
                again = partial(self._again, this_round, context)
                wrong = self.guard.behind(this_round, str(error), again)
            except TooFewVectors as error:
                raise TooFewReplies(f"{where}: {error}") from error
            except AggregatorFailed as error:
                raise AggregatorFailed(f"{where}: {error}; the model is as before") from error
            except ProtocolError as error:
                text = f"{where} diverged: {error}; {BEFORE}; try a smaller learning rate"
                raise RoundFailed(text) from error
            why = {p: shown(f"the reply of client {p}: {y}") for p, y in wrong.items()}
            this_round.failures |= why
            this_round.used = {p: r for p, r in used.items() if p not in why}
            if why:
                LOG.warning("\t> %s", name_failures(why))

    def _check_enough(self, this_round: Round) -> None:
        """Raise TooFewReplies unless enough replies are used."""
        this_round.check_enough(self.options.min_replies, self.method)

    def _step(
        self, used: Replied, ctx: ServerContext, means: Means
    ) -> tuple[Step, Numbers, Numbers]:
        """Return the step of these replies, and their ``ω_k`` before and after they were bounded."""
        scale = self.options.incomplete == "scale"
        weigher = weighing.StepScaling() if scale else self.options.term.weigher
        given = weighing.update_weights(weigher, used, ctx)
        if not self._warned_of_scale and weigher is not None and weigher.bounds_steps:
            wider = replace(ctx, max_scale=2 * ctx.max_scale)
            self._warned_of_scale = weighing.update_weights(weigher, used, wider) != given
            if self._warned_of_scale:
                LOG.warning(OVER_SCALE, ctx.max_scale)
        scaled = weighing.bounded_shares(given, self.options.max_weight)
        return self.model.stepped(used, ctx, scaled, means), given, scaled

    def _again(self, this_round: Round, context: ServerContext, pids: Collection[int]) -> None:
        """Make the step of some of the clients, which no one sees; raise Diverges if it is too long."""
        some = {p: this_round.used[p] for p in pids}
        means = Means(Mean(), partial(self.guard.mean, this_round, compares=False))
        step, *_ = self._step(some, weighing.restricted(context, pids), means)
        self.guard.limit(this_round, STEP, step.square, some)

    def _context(self, this_round: Round, means: Means) -> ServerContext:
        """Return the context of the terms' server hooks; it has weights and replies, once there are any."""
        lr = math.nan if this_round.lr is None else this_round.lr
        options, used, model = self.options, this_round.used, self.model
        more: dict[str, Any] = {"max_scale": options.max_scale}
        if means.robust:
            more |= {"aggregated": means.aggregated, "robust": True}
        if used:
            measured = {p: weighing.Stats(p, r, model.given, model.fixed) for p, r in used.items()}
            weights = weighing.aggregation_weights(used, options.weighting, options.max_weight)
            more |= {"weights": weights, "answers": this_round.answers}
            more["replies"] = measured if options.privacy is None else weighing.WithheldStats()
        return model.context(this_round.number, lr, self.population.size, **more)

    def _note_bounds(
        self, this_round: Round, means: Means, weights: Numbers, given: Numbers, scaled: Numbers
    ) -> None:
        """Note in a round whom the aggregator selected, and whose updates or weights were bounded.

        `weights` are ``p_k``; `given` and `scaled` are ``ω_k`` before and after they were bounded. With the
        mean, the first time that a client has over half of the weight of five or more, it is named.
        """
        events = this_round.events
        bounded = {p for p in given if scaled[p] < given[p]} | means.bounded
        heavy = max(scaled, key=scaled.__getitem__)
        share = scaled[heavy] / (sum(scaled.values()) or 1.0)
        is_heavy = not means.robust and len(scaled) >= MANY and share > 0.5
        ended = (entry for entry in self.history if "failed" not in entry)
        if is_heavy and not any(heavy in entry.get("heavy", {}) for entry in ended):
            events["heavy"] = {heavy: share}
            has = f"client {heavy} has {share:.3g} of the weight of {len(scaled)} clients"
            LOG.warning("%s, by what it says of itself: max_weight=0.2 would bound it", has)
        if (most := self.options.max_weight) is not None:
            given = weighing.aggregation_weights(this_round.used, self.options.weighting)
            bounded |= {p for p in given if weights[p] < given[p]}
            if most * (n := len(given)) < 1 and not self._warned_of_weights:
                self._warned_of_weights = True
                impossible = "max_weight=%g is impossible for %d replies: each weighs 1/%d"
                LOG.warning(impossible, most, n, n)
        if bounded:
            events["bounded"] = sorted(bounded)
        if means.selected is not None:
            events["selected"] = means.selected

    def _measure(self, this_round: Round) -> None:
        """Note the mean of the clients' metrics, and what the round took."""
        metrics = {pid: reply.metrics for pid, reply in this_round.used.items()}
        worked = {*metrics, *this_round.incomplete}  # also those that `incomplete` drops
        said = [this_round.received[p].metrics.get("examples-processed") for p in sorted(worked)]
        processed = [n for n in said if isinstance(n, int) and usable(n) and n > 0]
        this_round.examples_processed = sum(processed)
        reported, left_out = common_metrics(metrics)
        if left_out:
            this_round.events["metrics_left_out"] = left_out
        this_round.train_metrics = dict(self.mean_of_metrics("train", reported)) if reported else {}
        this_round.lap("aggregate")


def _shared(options: Options, model: NDArrays) -> NDArrays:
    """Return the arrays that do not stay with the clients."""
    private = options.term.private(model)
    return {name: a for name, a in model.items() if name not in private}
