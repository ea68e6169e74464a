"""FedBuff: rounds without a cohort. Clients come and go, and every K updates the server makes a step.

| *Init*       nothing
| *Broadcast*  the global model ``w_t``, to one client whenever one is free
| *Step*       ``v ← ClientOpt(v, ∇f_k(v))``, from ``v = w_{t−τ}``, the model when the client began
| *Upload*     ``v_k``
| *Update*     after K uploads ``w_{t+1} = w_t + η_g (1/K) Σ Δ_k / √(1 + τ_k)``,  ``Δ_k = v_k − w_{t−τ_k}``

τ_k counts the server's steps since client k began; the server knows it, whatever the client says. A step is
a round of the history. A client that is done may be drawn again at once; two updates of one client in a
buffer count as two. Of clients that end at one instant, all hand in before the next begin.
Buffers of the model (BatchNorm's statistics) are averaged as they are, without a weight for staleness.

In one process (``InProcessGrid``, ``StackedGrid``) the clock is simulated: `seconds` says how long each
training takes, and two runs with one seed are equal to the bit. Elsewhere the clients' own time counts, and
only clients that do not train evaluate.

Source: Nguyen et al., "Federated learning with buffered asynchronous aggregation" (2022), Alg. 1, with the
staleness weight of Sec. 5 and its half-normal durations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from typing import Any, ClassVar

import numpy as np
from flwr.common import log

from flwr_regs.abilities import Addresses, Carries, Compresses, Folds, Personalises, Probes, Weighs
from flwr_regs.chain import chain, check_instances
from flwr_regs.flower.grids.grid_network import GridNetwork
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.hook_contexts import Arrays, ServerContext, ServerStep, Slot
from flwr_regs.methods.registry import METHODS
from flwr_regs.methods.server_step.fedavg import FedAvgClient
from flwr_regs.server.aggregate.updates import update_of
from flwr_regs.server.exchange.exchange import Exchange
from flwr_regs.server.exchange.network import Course, Network, Replies
from flwr_regs.server.exchange.replies import Reader, output_layer
from flwr_regs.server.failures import name_failures, read_each
from flwr_regs.server.options import Options
from flwr_regs.server.population.cohorts import further, uniform_cohort
from flwr_regs.server.round import Reply, Round
from flwr_regs.server.training import Training
from flwr_regs.term import COUNT, POSITIVE, ParameterError, Ranges, Term
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel, Record
from flwr_regs.wire.precision import widen

__all__ = ["FedBuff", "FedBuffClient"]

DURATIONS: Mapping[str, Callable[[np.random.Generator], float]] = {
    "half-normal": lambda rng: abs(rng.normal()),
    "exponential": lambda rng: rng.exponential(),
    "uniform": lambda rng: 1.0 - rng.random(),
}
ASSUMES: tuple[tuple[type, str], ...] = (
    (Weighs, "weighs the updates of one cohort against each other"),
    (Probes, "asks a cohort before it trains"),
    (Folds, "adds up over a cohort what its clients send"),
    (Addresses, "sends each client of a cohort something of its own"),
    (Compresses, "codes updates by what its clients keep of the rounds before"),
    (Personalises, "trains a client's own model beside the global one of each round"),
    (Carries, "hands the clients' optimisers on from round to round"),
)
REFUSED = {
    "incomplete": "it weighs the updates of a cohort; use 'average' or 'drop'",
    "privacy": "its noise is for the mean over a cohort that was drawn at random",
    **dict.fromkeys(("cohorts", "overlap", "retry_cohort"), "clients begin one by one"),
    "downlink": "clients begin from models of many rounds",
    "drop_inactive": "it counts a client's turns by rounds",
}
"""Settings that must have their default -> why."""
Seconds = str | float | Callable[[int, int], float]


@dataclass(frozen=True)
class Buffer(Term):
    """FedBuff's settings; the server multiplies the mean by η_g."""

    name: ClassVar[str] = "fedbuff"
    reads_lr: ClassVar[bool] = False
    ranges: ClassVar[Ranges] = {"buffer": COUNT, "server_lr": POSITIVE, "max_concurrency": COUNT}
    buffer: int
    server_lr: float
    seconds: Seconds
    max_concurrency: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        named = isinstance(self.seconds, str) and self.seconds in DURATIONS
        if not named and not callable(self.seconds) and not POSITIVE.fits(self.seconds):
            expected = f"one of {', '.join(DURATIONS)}, a number, or a function of (client, turn)"
            raise ParameterError("FedBuff", "seconds", expected, self.seconds)

    def update(self, server: Slot, delta: Arrays, uploads: Any, ctx: ServerContext) -> ServerStep:
        return server, {n: self.server_lr * d for n, d in delta.items()}

    def duration(self, seed: int, pid: int, turn: int) -> float:
        """Return how many simulated seconds a client's training takes, by (seed, client, turn) alone."""
        given = self.seconds
        if isinstance(given, str):
            key = np.random.SeedSequence((seed, pid, turn), spawn_key=(3, 0))  # cohorts have 0 to 2
            return float(DURATIONS[given](np.random.default_rng(key)))
        value = given(pid, turn) if callable(given) else given
        POSITIVE.check("FedBuff", f"seconds({pid}, {turn})", value)
        return float(value)


class BufferedTraining(Training):
    """A training whose round ends when the buffer is full."""

    def __init__(self, options: Options, *more: Any) -> None:
        check_settings(options)  # they may have changed since the strategy was made
        super().__init__(options, *more)
        self._plan: Buffer = options.term.able(Buffer)[0]
        self._clock, self._turns = 0.0, 0
        self._at_work: dict[int, tuple[int, float, Parcel]] = {}
        """Client -> its turn, the simulated time at which it ends, its message."""
        self._unsent: set[int] = set()  # clients at work whose message is not on its way
        self._done: dict[int, Parcel | str] = {}  # simulated: what comes once the time has come
        self._arrived: list[tuple[int, Parcel]] = []
        self._network: Network | None = None  # the first: it knows what is on its way
        self._fill: Callable[[Round], bool]  # of the round

    def snapshot(self) -> dict[str, Any]:
        at_work = {
            pid: [turn, end, {n: dict(r) for n, r in sent.records.items()}, dict(sent.config)]
            for pid, (turn, end, sent) in self._at_work.items()
        }
        return {**super().snapshot(), "work": [self._clock, self._turns, at_work]}

    def restore(self, state: Mapping[str, Any], history: Sequence[dict[str, Any]]) -> None:
        super().restore(state, history)
        self._clock, self._turns, at_work = state["work"]
        for pid, (turn, end, records, config) in at_work.items():
            sent = Parcel({n: Record(arrays) for n, arrays in records.items()}, config)
            self._at_work[pid] = turn, end, sent
        self._unsent = set(self._at_work)

    def evaluators(self, connected: list[int], network: Network) -> list[int]:
        busy = () if _open_ended(network) is None else self._at_work
        return [p for p in connected if p not in busy]

    def _draw(self, *_: Any) -> list[int]:
        return []  # clients begin one by one

    def _round(
        self, this_round: Round, config: Mapping[str, Any], network: Network
    ) -> Course[None]:
        yield []
        network = self._network = self._network or network
        exchange, members = self._opened(this_round, config, network)
        this_round.events |= {"began": [], "arrived": [], "staleness": []}
        self._fill = partial(self._filled, exchange, members, network)
        try:
            self._fill_up(this_round)
            self._close(this_round)
        finally:
            del self._fill  # it holds the round

    def _fill_up(self, this_round: Round) -> None:
        """Fill the buffer; others take the places of clients that do not fit the rest."""
        while self._fill(this_round) and not self._full(this_round):
            pass

    def _filled(
        self, exchange: Exchange, members: list[int], network: Network, this_round: Round
    ) -> bool:
        """Let clients train until the buffer is full, or none is left; return whether some do not fit."""
        elsewhere, number = _open_ended(network), this_round.number
        reader = Reader(self.method, self.options, self.model)
        this_round.came = came = {**this_round.came}
        events = this_round.events
        while not self._full(this_round):
            if not self._arrived:
                # first all hand in that end now, also in a resumed run
                if elsewhere or self._clock not in [end for _, end, _ in self._at_work.values()]:
                    self._begin(members, exchange, network)
                if not self._at_work:  # every client has failed
                    break
                wait = self.options.deadline
                replies = elsewhere.receive(wait) if elsewhere else self._simulated(network)
                self._arrived = list(exchange.noted(replies).items())
                for pid in replies.failures:
                    del self._at_work[pid]
                continue
            pid, parcel = self._arrived.pop(0)
            sent = self._at_work.pop(pid)[2]
            version, came[pid] = sent.config[keys.ROUND_KEY], parcel
            this_round.bytes_up[pid] = this_round.bytes_up.get(pid, 0) + parcel.nbytes
            read, wrong = read_each({pid: parcel}, partial(reader.read, config=sent.config))
            this_round.failures |= wrong
            counted = set[int]()
            if pid in read:
                before, this_round.received[pid] = this_round.used.get(pid), read[pid]
                self.participation.select(this_round)
                if counted := {pid} & this_round.used.keys():
                    buffered = self._buffered(before, read[pid], sent, number - version)
                    this_round.received[pid] = buffered
                    events["arrived"].append(pid)
                    events["staleness"].append(number - version)
                elif before is not None:
                    this_round.received[pid] = before
                    this_round.failures[pid] = "it took too few steps when it trained again"
                self.participation.select(this_round)
            self.remembered.note(version, {pid: parcel}, counted)
        this_round.cohort = this_round.asked = sorted({*came, *this_round.failures})
        events["at_work"] = sorted(self._at_work)
        if elsewhere is None:
            events["clock"] = self._clock
        if (layer := output_layer(came)) is not None:
            events["output_layer"] = layer
        this_round.lap("clients")
        came_in = len(this_round.received)
        reader.compare(this_round, dict(sorted(this_round.received.items())))
        self.participation.select(this_round)
        return len(this_round.received) < came_in

    def _full(self, this_round: Round) -> bool:
        return sum(reply.turns for reply in this_round.used.values()) >= self._plan.buffer

    def _begin(self, members: list[int], exchange: Exchange, network: Network) -> None:
        """Give the model to clients that are free and have not failed in this round."""
        this_round, options, plan = exchange.this_round, self.options, self._plan
        elsewhere = _open_ended(network)
        began, number = this_round.events["began"], this_round.number
        failed = {*this_round.failures, *(this_round.received.keys() - this_round.used.keys())}
        free = [p for p in members if p not in self._at_work and p not in failed]
        cohort = max(int(len(members) * options.fraction_train), options.min_train_nodes)
        places = (plan.max_concurrency or cohort) - len(self._at_work)
        if places > 0 and free:
            # with nobody at work, the cohort that the round would have
            first = not (self._at_work or began or "attempts" in this_round.events)
            purpose = further(0 if first else 1 + self._turns)
            drawn = uniform_cohort(free, (options.seed, number), places, purpose)
            request = exchange.train(drawn, lost=True)  # everything, whatever a client has
            for pid in drawn:
                sent, again = request.parcels[pid], began.count(pid)
                if again:  # other batches than from the same model before
                    key = options.seed, number, pid, again
                    seed = np.random.SeedSequence(key).generate_state(1)
                    sent = replace(sent, config={**sent.config, keys.SEED_KEY: int(seed[0])})
                took = 0.0 if elsewhere else plan.duration(options.seed, pid, self._turns)
                self._at_work[pid] = self._turns, self._clock + took, sent
                self._turns += 1
                began.append(pid)
            self._unsent |= set(drawn)
        if elsewhere and self._unsent:
            for pid in self._unsent - set(members):  # of a run that was resumed
                del self._at_work[pid]
                this_round.failures[pid] = "it has left"
            here = sorted(self._unsent & set(members))
            elsewhere.send(self.population.request("train", {p: self._at_work[p][2] for p in here}))
            self._unsent = set()

    def _simulated(self, network: Network) -> Replies:
        """Move the clock on to the next instant at which clients end; return what they send then."""
        self._clock = min(end for _, end, _ in self._at_work.values())
        in_turn = sorted(self._at_work, key=lambda p: self._at_work[p][0])
        due = [p for p in in_turn if self._at_work[p][1] == self._clock]
        if not self._done.keys() >= set(due):
            # Together they train faster. But what a client keeps must not be ahead of the clock.
            ready = due if self.remembered.came else in_turn
            by_round: dict[int, dict[int, Parcel]] = {}
            for pid in [p for p in ready if p not in self._done]:
                sent = self._at_work[pid][2]
                by_round.setdefault(sent.config[keys.ROUND_KEY], {})[pid] = sent
            for parcels in by_round.values():
                replies = network.ask(self.population.request("train", parcels))
                self._done |= {**replies.failures, **replies.came}
        ended = {pid: self._done.pop(pid) for pid in due}
        came = {p: reply for p, reply in ended.items() if isinstance(reply, Parcel)}
        return Replies(came, {p: why for p, why in ended.items() if isinstance(why, str)})

    def _buffered(self, before: Reply | None, reply: Reply, sent: Parcel, staleness: int) -> Reply:
        """Return an update by ``1/√(1 + τ)``; with the client's others in the buffer, if there are any."""
        if before is None and staleness == 0:
            return reply
        half, arrays = self.options.wire_dtype, sent.records[keys.ARRAYS]
        base = arrays if half is None else widen(arrays, half)
        scale = (1 + staleness) ** -0.5
        delta = {n: scale * move for n, move in update_of(reply, base, reply.buffers).items()}
        turns, examples, metrics = 1, reply.num_examples, {**reply.metrics}
        buffers = {n: reply.arrays.get(n, base[n]) for n in reply.buffers}
        if before is not None:
            by_examples = self.options.weighting == "num-examples"
            old, new = (before.num_examples, examples) if by_examples else (before.turns, 1)
            given = self.model.given

            def mean(one: Any, other: Any) -> Any:
                return (old * one + new * other) / (old + new)

            moves = update_of(before, given, before.buffers)
            delta = {n: mean(m, delta[n]) for n, m in moves.items()}
            for n, value in buffers.items():  # the step rounds whole numbers, once
                buffers[n] = mean(before.arrays.get(n, given[n]), value)
            turns, examples = before.turns + 1, before.num_examples + examples
            counts = ("examples-processed", self.options.weighted_by_key)
            for name in metrics.keys() & before.metrics.keys():
                pair = before.metrics[name], metrics[name]
                if all(type(number) in (int, float) for number in pair):
                    metrics[name] = sum(pair) if name in counts else mean(*pair)
        return replace(
            reply, arrays=buffers, delta=delta, metrics=metrics, num_examples=examples, turns=turns
        )

    def _remember(self, this_round: Round) -> None:
        """Do nothing: it is noted when a reply comes, under the round of its message."""

    def _check_enough(self, this_round: Round) -> None:
        received = this_round.received
        kept = {*this_round.used, *this_round.inactive, *this_round.incomplete}
        if received.keys() - kept:  # they were left out since: others take their places
            this_round.received = {pid: received[pid] for pid in received if pid in kept}
            self._fill_up(this_round)
            this_round.lose(this_round.came)
        if not self._full(this_round):
            used = sum(reply.turns for reply in this_round.used.values())
            raise this_round.too_few(
                f"round {this_round.number} of FedBuff: {used} usable replies for a buffer of "
                f"{self._plan.buffer}, and no client is left: {name_failures(this_round.failures)}"
            )


def _open_ended(network: Network) -> GridNetwork | None:
    """Return a network on which clients take their own time; None for one with a simulated clock."""
    return network if isinstance(network, GridNetwork) and not network.at_once else None


def check_settings(options: Options) -> None:
    """Raise ValueError for settings that assume a cohort, or more replies than a step has."""
    for name, why in REFUSED.items():
        value = getattr(options, name)
        if value not in (getattr(Options, name), "drop"):  # incomplete="drop" is taken
            raise ValueError(f"FedBuff does not go with {name}={value!r}: {why}")
    plan, least = options.term.able(Buffer)[0], options.min_replies
    if least > plan.buffer:
        few = f"buffer={plan.buffer} does not go with min_replies={least}"
        raise ValueError(f"FedBuff: {few}: a step is made of as many replies as the buffer holds")


class FedBuff(RegStrategy):
    """Buffered asynchronous rounds, of FedAvg or of `terms`.

    Parameters
    ----------
    buffer : int
        K: the server makes a step after so many usable updates.
    max_concurrency : int, optional
        How many clients train at a time. Default: a cohort, by `fraction_train` and `min_train_nodes`.
    server_lr : float
        η_g > 0.
    seconds : str, float or callable
        How long a client trains on the simulated clock: "half-normal", "exponential" or "uniform" (each of
        scale 1, drawn by seed, client and turn); a number; or ``seconds(client, turn)``, where turn counts
        all trainings from 0. Where clients run elsewhere, their own time counts.
    terms : sequence of Term
        The method. Clients are those of its strategy: ``FedProxClient`` for ``[Proximal(0.1)]``,
        ``FedAvgClient`` or Flower's own where only the server runs terms.
    weighting : {"uniform", "num-examples"}
        The paper's ``1/K``; or by examples.
    **kwargs
        The arguments of every strategy: see :class:`flwr_regs.RegStrategy`.

    Raises
    ------
    ValueError
        Terms or settings that assume a cohort; numbers out of range; `min_replies` above `buffer`.
    """

    training_kind = BufferedTraining

    def __init__(
        self,
        buffer: int = 10,
        max_concurrency: int | None = None,
        server_lr: float = 1.0,
        seconds: Seconds = "half-normal",
        terms: Sequence[Term] = (),
        weighting: str = "uniform",
        **kwargs: Any,
    ) -> None:
        for t in chain(check_instances(terms, "FedBuff")).terms:
            reasons = [why for ability, why in ASSUMES if isinstance(t, ability)]
            if t.acts("finish"):
                reasons.append("sends something of a round, or keeps it for the next, in `finish`")
            if reasons:
                methods = [m.name for m in METHODS.values() if type(t).__name__ in m.terms]
                named = f"'{t.name}'" + (f" (of {', '.join(methods)})" if methods else "")
                raise ValueError(
                    f"FedBuff has no cohorts, but {named} {reasons[0]}: run it in rounds, with a "
                    "strategy of its own"
                )
        plan = Buffer(buffer, server_lr, seconds, max_concurrency)
        super().__init__([*terms, plan], weighting=weighting, **kwargs)
        check_settings(self.options)

    def _begin(self, *given: Any) -> None:
        super()._begin(*given)
        if own := [h for h in ("configure_train", "aggregate_train") if not self._is_ours(h)]:
            text = "clients begin one by one, so your %s sees no messages and no replies: only what it "
            text += "does to the config and to the model counts"
            log(WARNING, text, " and ".join(own))

    @property
    def method_name(self) -> str:
        """The name that clients check: of the method that has the terms which clients run."""
        kinds = tuple(type(t).__name__ for t in self.term.terms if not t.server_only)
        rows = [m.name for m in METHODS.values() if m.terms == kinds]
        return rows[0] if len(rows) == 1 else super().method_name

    def summary(self) -> None:
        """Log the settings."""
        super().summary()
        plan = self.term.able(Buffer)[0]
        at_a_time = plan.max_concurrency or "a cohort"
        log(INFO, "FedBuff: a step after %d updates, %s at a time", plan.buffer, at_a_time)


class FedBuffClient(FedAvgClient):
    """The client of :class:`FedBuff` without terms: FedAvg's."""
