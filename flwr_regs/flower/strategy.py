"""The strategy base: Flower's Strategy around a `Training`, which runs the rounds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import signature
from logging import INFO, WARNING
from os import PathLike
from typing import Any, ClassVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from flwr_regs.abilities import Addresses, Folds, Steers, Weighs
from flwr_regs.chain import chain, check_instances, name_of
from flwr_regs.flower.accounting import AccountedBudget
from flwr_regs.flower.checkpoints import Checkpoints, TrainingResult
from flwr_regs.flower.grids.grid_network import GridNetwork, Paused
from flwr_regs.flower.grids.in_process import InProcessGrid
from flwr_regs.flower.loop import EvaluateFn, Loop
from flwr_regs.server.checkpoint.fingerprint import fingerprint
from flwr_regs.server.client_metrics import weighted_mean
from flwr_regs.server.evaluation import evaluation
from flwr_regs.server.exchange.network import Network
from flwr_regs.server.options import Options
from flwr_regs.server.refusals import Refused
from flwr_regs.server.round import Round
from flwr_regs.server.training import Training
from flwr_regs.term import COUNT, POSITIVE, ParameterError, Term, plain_number
from flwr_regs.wire import keys
from flwr_regs.wire.config import (
    OPTIMIZER_KEYS,
    check_arguments,
    check_evaluate_config,
)
from flwr_regs.wire.records import metric_record, record_of_state, to_record, views_of

WRAPPED = (
    "another strategy is wrapped around this one, or it has a start of your own, which must first call "
    "prepare(num_rounds, timeout, train_config, evaluate_config). Flower's DifferentialPrivacy... do not "
    "know all that a method sends: use privacy=CentralDP(...) on the strategy itself"
)
OTHER_RATES = (
    "clients get the learning rate %s, but %s may compute on the server with %s: a configure_train of your "
    "own changes the config before it calls super(), not the messages; or use lr_schedule"
)

RETURNS = {
    "train": "(ArrayRecord or None, MetricRecord or None)",
    "evaluate": "a MetricRecord or None",
}
"""Phase -> what its ``aggregate_...`` returns."""


class RegStrategy(Strategy):
    """A strategy for any list of terms; the named strategies fix their terms.

    Parameters
    ----------
    terms : sequence of Term
        The method, left to right; none of them is FedAvg.
    **settings
        Weighting, cohorts, downlink, incomplete clients, privacy, …: the fields of
        :class:`flwr_regs.server.options.Options`, which says what each does.

    Attributes
    ----------
    options : Options
        The settings above, checked and frozen; each is also an attribute of the strategy.
    history : list of dict
        One entry a round: cohort, failures, bytes down and up per client, seconds per phase, examples
        processed, losses and metrics. Plain numbers and lists, ready for ``json``.

    Raises
    ------
    ValueError
        A setting out of range; settings or terms that exclude each other.
    TypeError
        A setting that does not exist; no list of terms, or a term that is not an instance of Term.
    """

    method: ClassVar[str | None] = None
    training_kind: ClassVar[type[Training]] = Training

    def __init__(self, terms: Sequence[Term], **settings: Any) -> None:
        makers = [vars(c)["__init__"] for c in type(self).__mro__[:-1] if "__init__" in vars(c)]
        # a named strategy's own: `terms` is none of its arguments
        own = makers[:-1] or makers
        taken = {name for make in own for name in signature(make).parameters} - {"self"}
        check_arguments(type(self).__name__, settings, Options.names(), taken)
        self.term = chain(check_instances(terms, type(self).__name__))
        self.options = Options.of(self.term, **settings)
        self._seeded = settings.get("seed") is not None
        self.history: list[dict[str, Any]] = []
        self._saved: Checkpoints | None = None  # while `start` runs
        self._training: Training | None = None
        self._num_rounds: int | None = None  # set by `prepare`, used once
        self._timeout: float | None = 3600.0
        self._wrapped = self._named_rates = False
        # begun by configure_*, ended by aggregate_*
        self._trained: Paused[Round] | None = None
        self._evaluated: Paused[Mapping[str, Any] | None] | None = None
        self._released: ArrayRecord | None = None  # the last aggregate_train's result

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let errors of parameters and settings name the method that the user called, and not its terms."""
        super().__init_subclass__(**kwargs)
        if (make := vars(cls).get("__init__")) is None:
            return

        @wraps(make)
        def named(self: RegStrategy, *args: Any, **kwargs: Any) -> None:
            plain = {name: plain_number(value) for name, value in kwargs.items()}
            try:
                make(self, *map(plain_number, args), **plain)
            except (ParameterError, Refused) as error:
                raise error.of(type(self).__name__) from None
            except TypeError as error:
                if not re.search("multiple values for .*'terms'", str(error)):
                    raise
                what = f"{type(self).__name__} fixes its terms; use RegStrategy for others"
                raise TypeError(what) from None

        cls.__init__ = named  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        if name in Options.names():
            return getattr(self.options, name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in Options.names():  # checked like the constructor's
            if "options" not in vars(self):
                remedy = "hand it to super().__init__(...), or set it afterwards"
                raise AttributeError(f"'{name}' is a setting of every strategy: {remedy}")
            name, value = "options", replace(self.options, **{name: value})
            if self._training is not None:
                self._training.use(value)
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        terms = f" of {[*self.term.terms]}" * bool(self.term.terms)
        return f"{type(self).__name__}{terms}, seed {self.options.seed}"

    @property
    def method_name(self) -> str:
        """The name that clients check: the class's own, or that of the terms: see :func:`name_of`."""
        return self.method or name_of(self.term.terms)

    @property
    def arrays(self) -> ArrayRecord:
        """The current global model; after an error, that of the last good round."""
        return to_record(self.training.model.model)

    @property
    def averaged_arrays(self) -> ArrayRecord | None:
        """The model of a term that is judged by another than the global one; None before the first step."""
        averaged = None if self._training is None else self._training.model.averaged
        return None if averaged is None else to_record(averaged)

    @property
    def training(self) -> Training:
        """The current or last training; RuntimeError before the first."""
        if self._training is None:
            raise RuntimeError("nothing has been trained yet: call start")
        return self._training

    def summary(self) -> None:
        """Log the method, its hyper-parameters, the seed, and how many clients take part."""
        self._wrapped = self._num_rounds is None  # another strategy's start calls no `prepare`
        o = self.options
        half = f", wire_dtype {o.wire_dtype}" * bool(o.wire_dtype)
        log(INFO, "%r, weighting %s, downlink %s%s", self, o.weighting, o.downlink, half)
        in_round = []
        for verb in ("train", "evaluate"):
            part, least = float(getattr(o, f"fraction_{verb}")), getattr(o, f"min_{verb}_nodes")
            some = f"{part:.0%} of the clients {verb} (at least {least})"
            in_round.append(some if part else f"no client {verb}s")
        begins = f"training begins with {o.min_available_nodes} clients or more"
        log(INFO, "in each round %s and %s; %s", *in_round, begins)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | Mapping[str, Any],
        num_rounds: int = 3,
        timeout: float | None = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
        resume_from: str | PathLike[str] | None = None,
    ) -> TrainingResult:
        """Run `num_rounds` rounds; see Flower's ``Strategy.start`` for the parameters.

        `initial_arrays` may also be a ``model.state_dict()``.

        With `resume_from`, a folder of checkpoints or one of them, training goes on from there.
        `num_rounds` is the total; `initial_arrays` are only compared with the checkpoint's. An
        `evaluate_fn` that is an object with ``snapshot()`` and ``restore(state)`` goes on with its state.

        `train_config` takes ``"lr"`` and one of ``"local-epochs"`` and ``"local-steps"``; and, for the
        package's clients, ``"optimizer"`` (a class of torch.optim, default ``"SGD"``), ``"momentum"``,
        ``"weight-decay"`` and ``"clip-norm"``. A method of the server alone needs none of these if the
        clients are not this package's.

        Raises
        ------
        ValueError
            An unknown, missing or wrong config key, or a model that the method cannot train, before any
            client is contacted.
        CheckpointError
            There is nothing to resume from, it is of another training, or `checkpoint_dir` cannot take this
            run's checkpoints; before any client is contacted.
        RoundFailed
            A round had fewer than `min_replies` usable replies.
        """
        COUNT.check("start", "num_rounds", num_rounds)
        if not isinstance(grid, Grid):
            grids = "one of Flower's grids, InProcessGrid(clients) or StackedGrid(clients)"
            raise TypeError(f"grid must be {grids}, not {type(grid).__name__}")
        if not (evaluate_fn is None or callable(evaluate_fn)):
            given_fn = f"not {evaluate_fn!r:.80}"
            raise TypeError(f"evaluate_fn must be a function of a round and its arrays, {given_fn}")
        initial_arrays = record_of_state(initial_arrays)
        model = Training.begin(self.options, views_of(initial_arrays)).model
        if isinstance(grid, InProcessGrid):
            evaluates, fewest = self.options.fraction_evaluate > 0, self.options.min_available_nodes
            # a subclass's own configure_train may add keys
            trains = self.options.fraction_train > 0 and self._is_ours("configure_train")
            config = train_config or ConfigRecord()
            grid.check(evaluates, views_of(initial_arrays), fewest, config if trains else None)
        result = TrainingResult()
        given = self.options, grid, result, resume_from, evaluate_fn
        with Checkpoints(*given).guarded() as saved:
            if saved.resumed is not None and not self._seeded:
                self.seed = saved.resumed.state["fingerprint"]["setting"]["seed"]
            self.summary()
            train, evaluate = self.prepare(num_rounds, timeout, train_config, evaluate_config)
            self._saved, saved.configs = saved, (train, evaluate)
            try:
                # without what torch.compile adds to names
                arrays = to_record(views_of(initial_arrays))
                same = fingerprint(self.method_name, self.options, model, train)
                saved.check(same, num_rounds)
                self._begin(arrays, train)  # here: a user's configure_train may skip round 1
                if saved.resumed is not None:
                    saved.restore(self.training)
                    arrays = self.arrays
                self._released = arrays
                test = evaluate_fn or (lambda number, arrays: None)
                loop = Loop(self, grid, train, evaluate, test, num_rounds, result, saved)
                return loop.run(arrays)
            finally:
                self._saved = None

    def check_model(self, initial_arrays: ArrayRecord) -> None:
        """Raise ValueError for initial arrays that this strategy cannot train, and say why.

        `start` checks this first. Call it yourself if other work comes before.
        """
        Training.begin(self.options, views_of(initial_arrays))

    def prepare(
        self,
        num_rounds: int,
        timeout: float | None = 3600.0,
        train_config: Mapping[str, Any] | None = None,
        evaluate_config: Mapping[str, Any] | None = None,
    ) -> tuple[ConfigRecord, ConfigRecord]:
        """Check the configs of a training; return (train config, evaluate config) for its rounds.

        `start` calls this. If you call ``configure_train`` and the others yourself, you may call it first:
        then the rounds are known, and you may hand back another model than you were given.
        Raises ValueError for an unknown, missing or wrong key, or a wrong `timeout`.
        """
        POSITIVE.check("start", "timeout", timeout, optional=True)
        self._check_train(train_config or {})
        evaluate = {**(evaluate_config or {})}
        check_evaluate_config(evaluate)
        personalising = self.term.personalising
        if personalising and "personalise" in evaluate:
            why = f"{personalising} gives each client a model of its own"
            raise ValueError(f"leave 'personalise' out of the evaluate_config: {why}")
        self._num_rounds, self._timeout, self._wrapped = num_rounds, timeout, False
        return ConfigRecord({**(train_config or {})}), ConfigRecord(evaluate)

    def initialize_parameters(self, client_manager: Any) -> None:
        """Refuse Flower's older server, which calls this first."""
        who = f"{type(self).__name__} is a strategy of the Message API, not for ServerAppComponents"
        raise TypeError(f"{who}: use @app.main and strategy.start (docs/migration.md)")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round: draw its cohort and return the messages. The first also begins the training.

        `arrays` is the last round's model, or another one to continue from. The server computes with this
        `config`: what a subclass changes in the messages reaches the clients alone. They share their
        ArrayRecords: to change the arrays of one client, give its message a record of its own.
        Raises ValueError for an unknown, missing or wrong key of the `config`.
        """
        self._serve(grid)
        if self._training is not None:  # `start` has checked the one that it was given
            self._check_train(config)
        self._trained = self._round(server_round, arrays, config, GridNetwork(grid, self._timeout))
        return self._trained.messages

    def _round(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, network: Network
    ) -> Paused[Round]:
        """Begin a round on a network, if anybody trains."""
        if self._training is None or (server_round == 1 and self._saved is None):  # without `start`
            self._begin(arrays, config)
        elif arrays is not self._released:
            changed = self.training.adopt(views_of(arrays))
            if changed and self.training.num_rounds is None:  # nobody called `prepare`
                raise ValueError(WRAPPED)
        if self.options.fraction_train == 0.0:
            return Paused()
        if self._trained:
            log(WARNING, "the round before round %d was never aggregated", server_round)
            self._trained = None  # it leaves the training as it was, before the next one begins
        return Paused(self.training.round(server_round, config, network))

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End the round; return (the new global model, the clients' mean metrics).

        Raises
        ------
        RoundFailed
            Fewer than `min_replies` usable replies. Model and server state stay as they were.
        """
        paused, self._trained = self._trained or Paused(), None
        return self._ended(paused.answered(replies))

    def _ended(self, this_round: Round | None) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return (the new global model, the clients' mean metrics); None if nobody trained."""
        if this_round is None:
            return None, None
        self._released = self.arrays
        return self._released, MetricRecord({**(this_round.train_metrics or {})})

    def follow(self, server_round: int, arrays: ArrayRecord) -> None:
        """Go on from the model that a user's `aggregate_train` has returned; checkpoints hold it."""
        if self._training is not None and not self._is_ours("aggregate_train"):
            with self._taking_back(server_round):
                self._training.adopt(views_of(arrays), "the arrays that aggregate_train returned")
            self._released = arrays

    @contextmanager
    def _taking_back(self, server_round: int) -> Iterator[None]:
        """Let a training round that has ended fail if the block raises, as a user's code may."""
        try:
            yield
        except BaseException as error:
            if self._training is not None:
                self._training.take_back(server_round, error)
            raise

    def run_round(
        self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Any:
        """Run a round ("train") or an evaluation ("evaluate") on the clients.

        Returns and raises what ``aggregate_train`` and ``aggregate_evaluate`` do; TypeError if those of a
        subclass return something else.
        """
        if (network := self._network(grid)) is None:
            messages = getattr(self, f"configure_{kind}")(server_round, arrays, config, grid)
            if not isinstance(messages, Iterable):
                raise TypeError(f"configure_{kind} must return messages, not {messages!r:.80}")
            messages = list(messages)
            if begun := self._trained if kind == "train" else self._evaluated:
                begun.note_sent(messages)
                self._compare_rates(begun)
            replies = GridNetwork(grid, self._timeout).exchange(messages, self.options.deadline)
            with self._taking_back(server_round if kind == "train" else 0):  # no round is 0
                returned = getattr(self, f"aggregate_{kind}")(server_round, replies)
                match kind, returned:
                    case ("train", (None | ArrayRecord() as model, None | Mapping() as metrics)):
                        return model, metric_record("aggregate_train", metrics)
                    case ("evaluate", None | Mapping() as metrics):
                        return metric_record("aggregate_evaluate", metrics)
                must = f"aggregate_{kind} must return {RETURNS[kind]}"
                raise TypeError(f"{must}, not {returned!r:.80}")
        trains, given = kind == "train", (server_round, arrays, config, network)
        paused: Paused[Any] = self._round(*given) if trains else self._evaluation(*given)
        result = paused.over(network, self.options.deadline)
        return self._ended(result) if trains else _as_record(result)

    def _compare_rates(self, begun: Paused[Any]) -> None:
        """Warn, once in a training, of messages with another learning rate than the server's."""
        parcels = [p for r in begun.requests if r.kind == "train" for p in r.parcels.values()]
        given = {str(parcel.config.get("lr")) for parcel in parcels}
        configs = [m.content.get(keys.CONFIG) for m in begun.messages]
        sent = {str(c["lr"]) for c in configs if isinstance(c, ConfigRecord) and "lr" in c}
        others = sent - given
        readers = [t.name for t in self.term.terms if t.reads_lr and _has_server_hook(t)]
        if parcels and others and readers and not self._named_rates:
            self._named_rates = True
            log(WARNING, OTHER_RATES, ", ".join(sorted(others)), readers, *given)

    def _network(self, grid: Grid) -> Network | None:
        """Return a network without messages; None where a grid or this strategy needs messages."""
        self._serve(grid)
        hooks = ("configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate")
        ours = all(map(self._is_ours, hooks))
        return grid.network() if ours and isinstance(grid, InProcessGrid) else None

    def _is_ours(self, hook: str) -> bool:
        """Whether neither a subclass nor this object has a method of its own in place of ours."""
        return getattr(getattr(self, hook), "__func__", None) is getattr(RegStrategy, hook)

    def _serve(self, grid: Grid) -> None:
        """Let a grid whose clients are data have clients of this method."""
        if isinstance(grid, InProcessGrid):
            grid.serve(self.method_name, [type(t) for t in self.term.terms])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the clients that evaluate `arrays` and return their messages."""
        self._serve(grid)
        network = GridNetwork(grid, self._timeout)
        self._evaluated = self._evaluation(server_round, arrays, config, network)
        return self._evaluated.messages

    def _evaluation(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, network: Network
    ) -> Paused[Mapping[str, Any] | None]:
        """Begin an evaluation on a network, if anybody evaluates."""
        if self.options.fraction_evaluate == 0.0:
            return Paused()
        model = self.training.model.model if arrays is self._released else views_of(arrays)
        return Paused(evaluation(self.training, server_round, model, config, network))

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the clients' mean metrics; each client's own are in the history.

        Raises
        ------
        RoundFailed
            No usable reply, and none in any round before: an evaluation that never works is a mistake.
            A later failure is logged and kept in the history, and training goes on.
        """
        paused, self._evaluated = self._evaluated or Paused(), None
        return _as_record(paused.answered(replies))

    def _check_train(self, config: Mapping[str, Any]) -> None:
        """Raise ValueError for a train config that is wrong, or whose optimiser the method cannot adapt."""
        self.options.check_train_config(config)
        self.term.restrict(config)
        if any(isinstance(t, Steers) for t in self.term.terms) and {*config} & {*OPTIMIZER_KEYS}:
            from flwr_regs.client.train.optimizer import optimizer_of  # loads torch

            self.term.client_optimizer(optimizer_of(config))

    def _begin(self, arrays: ArrayRecord, config: ConfigRecord) -> None:
        """Begin a training; raise ValueError if a wrapper runs this strategy."""
        dp = self.options.privacy
        if self._wrapped:
            raise ValueError(WRAPPED)
        if self.options.checkpoint_dir is not None and self._saved is None:
            raise ValueError("checkpoint_dir needs the strategy's own start: leave it out here")
        self._check_train(config)
        budget = AccountedBudget(dp) if dp is not None and dp.accountant is not None else None
        given = views_of(arrays), self._num_rounds, self._mean_of_metrics, budget
        self._training = self.training_kind(self.options, self.method_name, *given)
        if self._saved is not None:
            self._saved.watch(self._training)
        self._num_rounds, self._named_rates = None, False
        self.history = self._training.history
        self._trained = self._evaluated = self._released = None
        if private := len(arrays) - len(self._training.model.model):
            log(INFO, "%d of %d arrays stay with the clients", private, len(arrays))

    def _mean_of_metrics(
        self, kind: str, metrics: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        mean = getattr(self.options, f"{kind}_metrics_aggr_fn")
        if mean is None:
            return weighted_mean(metrics, self.options.weighted_by_key)
        records = [RecordDict({keys.METRICS: MetricRecord({**m})}) for m in metrics]
        averaged = mean(records, self.options.weighted_by_key)
        if not isinstance(averaged, Mapping):
            given = type(averaged).__name__
            raise TypeError(f"{kind}_metrics_aggr_fn must return a MetricRecord, not a {given}")
        return metric_record(f"{kind}_metrics_aggr_fn", averaged) or {}


def _has_server_hook(term: Term) -> bool:
    """Return whether a term has a hook that sees a round's learning rate on the server."""
    hooks = map(term.acts, ("broadcast", "update", "release"))
    return isinstance(term, Addresses | Folds | Weighs) or any(hooks)


def _as_record(metrics: Mapping[str, Any] | None) -> MetricRecord | None:
    return None if metrics is None else MetricRecord({**metrics})
