"""`LegacyStrategy`: the package's strategies in an older project, one of ``ServerAppComponents``.

Flower's older server sends each client arrays without names and a dict of scalars, and has no queries: a
term's arrays, coded steps or a second exchange do not fit. So what `configure_fit` returns only stands
for the strategy's own messages. It is addressed to proxies of ours which, when the server calls the
first of them, send all of the round's messages through the grid that the server's own proxies hold.
Clients thus get exactly what ``strategy.start`` would send them, and one ``client_app`` serves both.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from logging import INFO
from threading import Lock
from typing import Any, NoReturn

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common import (
    Code,
    DisconnectRes,
    EvaluateIns,
    EvaluateRes,
    FitIns,
    FitRes,
    GetParametersIns,
    GetParametersRes,
    GetPropertiesIns,
    GetPropertiesRes,
    NDArrays,
    Parameters,
    Scalar,
    Status,
    parameters_to_ndarrays,
)
from flwr.common.logger import log
from flwr.server import Server
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.wire import keys

EvaluateFn = Callable[[int, NDArrays, dict[str, Scalar]], tuple[float, Mapping[str, Scalar]] | None]
_INSTEAD = (
    "return ServerAppComponents(strategy=...) from a ServerApp(server_fn=...), or, where you have the "
    "grid, call the strategy's own start(grid=grid, ...)"
)


class LegacyStrategy(Strategy):
    """Any strategy of this package as a ``flwr.server.strategy.Strategy``.

    For ``ServerAppComponents(strategy=LegacyStrategy(...), config=ServerConfig(num_rounds=...))``. Weights,
    cohorts, bytes and history are those of ``strategy.start``, and so are its errors: they end the run.
    The clients' app must be ``flwr_regs.client_app(client_fn)``; see docs/migration.md.

    Parameters
    ----------
    strategy : RegStrategy
        The strategy; also the place of its ``history`` and, at any time, of the global model ``arrays``.
    initial_arrays : ArrayRecord or mapping
        The initial model by name: an ArrayRecord, or a ``state_dict`` (tensors or numpy arrays).
    num_rounds : int
        Rounds of the training, the same as ServerConfig's: methods and options count with it.
    train_config, evaluate_config : mapping, optional
        What every client is told, as for ``strategy.start``: ``"lr"`` and one of ``"local-epochs"`` and
        ``"local-steps"``; the ``"personalise"`` keys.
    evaluate_fn : callable, optional
        Central evaluation as older projects have it: ``evaluate_fn(server_round, ndarrays, config) ->
        (loss, metrics) or None``, `ndarrays` in the order of `initial_arrays` and `config` empty; not
        the two arguments of ``strategy.start``'s. Round 0 is the initial model.
    timeout : float
        Seconds to wait for the answers of an exchange, as for ``strategy.start``. ServerConfig's
        ``round_timeout``, where one is given, counts instead for the training and the evaluation
        itself, not for rFedAvg+'s first exchange nor for a client that must be served once more.

    Raises
    ------
    TypeError
        `strategy` is not one of this package, or `initial_arrays` has no names.
    ValueError
        A config key is unknown, missing or wrong; the strategy cannot train the model; `num_rounds` is
        not that of the server.
    RoundFailed
        From ``aggregate_fit`` and ``aggregate_evaluate``: see :class:`RegStrategy`.

    Notes
    -----
    ``Parameters`` that leave here hold every array of `initial_arrays` in its order; what a method keeps on
    the clients (FedBN) is there as it was given. A subclass may read results, failures and parameters, or
    leave results out; changing what travels is refused, since nobody would see it (this goes for
    Flower's older privacy wrappers too: use those of ``flwr.serverapp.strategy``).
    """

    def __init__(
        self,
        strategy: RegStrategy,
        initial_arrays: ArrayRecord | Mapping[str, Any],
        *,
        num_rounds: int,
        train_config: Mapping[str, Any],
        evaluate_config: Mapping[str, Any] | None = None,
        evaluate_fn: EvaluateFn | None = None,
        timeout: float = 3600.0,
    ) -> None:
        if not isinstance(strategy, RegStrategy):
            raise TypeError(
                f"LegacyStrategy needs a strategy of flwr_regs, not {type(strategy).__name__}"
            )
        if not isinstance(initial_arrays, Mapping):
            raise TypeError(
                "initial_arrays must have names: pass model.state_dict() or an ArrayRecord, not "
                f"{type(initial_arrays).__name__}"
            )
        if half := [k for k, a in initial_arrays.items() if str(a.dtype) == "torch.bfloat16"]:
            raise ValueError(
                f"initial_arrays hold bfloat16 in {half}, which Flower's arrays cannot; pass "
                "flwr_regs.float32_arrays(model), and wire_dtype='bfloat16' to the strategy"
            )
        if num_rounds < 1:
            raise ValueError(f"num_rounds must be at least 1, not {num_rounds}")
        self.strategy = strategy
        self.num_rounds = num_rounds
        self._initial = ArrayRecord(
            {k: a if isinstance(a, Array) else Array(a) for k, a in initial_arrays.items()}
        )
        strategy.check_model(self._initial)
        self._given = num_rounds, timeout, train_config, evaluate_config
        self._evaluate_fn = evaluate_fn
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._train, self._evaluate = self.strategy._prepare(*self._given)
        self._arrays = self._initial
        self._exchange: _Exchange | None = None

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Return the initial model; a training begins."""
        asked = _rounds_of_the_server()
        if asked is not None and asked != self.num_rounds:
            raise ValueError(
                f"ServerConfig says num_rounds={asked}, LegacyStrategy num_rounds={self.num_rounds}; "
                "give both the same number"
            )
        self._begin()
        log(INFO, "Starting %s strategy:", type(self.strategy).__name__)
        self.strategy.summary()
        return self._parameters()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, FitIns]]:
        """Draw the cohort; return who is in it. Their messages go out when the server calls them."""
        if server_round > self.num_rounds:
            raise ValueError(
                f"the server goes on to round {server_round}, but LegacyStrategy was told "
                f"num_rounds={self.num_rounds}; give ServerConfig the same number"
            )
        self._check_unchanged(parameters, f"configure_fit in round {server_round}")
        grid = _ManagedGrid(client_manager)
        messages = list(
            self.strategy.configure_train(server_round, self._arrays, self._train, grid)
        )
        if all(m.metadata.message_type == keys.PREFETCH for m in messages):
            # The server would skip the round without a word; the strategy knows whether that is right.
            self.strategy.aggregate_train(server_round, [])
            return []
        self._exchange = _Exchange(server_round, messages, grid, self._timeout)
        return self._exchange.instructions(FitIns)

    def aggregate_fit(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, FitRes]],
        failures: list[tuple[ClientProxy, FitRes] | BaseException],
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Average the replies and move the global model; return it with the clients' mean metrics.

        Raises
        ------
        RoundFailed
            Too few usable replies. Flower's server would go on with the old model.
        RuntimeError
            The server sent the instructions by itself, so that the strategy's messages never left.
        ValueError
            Something changed the results on their way here.
        """
        replies = self._replies(server_round, "aggregate_fit", results)
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        if arrays is not None:
            self._arrays = arrays
        return self._parameters(), _plain(metrics)

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[tuple[ClientProxy, EvaluateIns]]:
        """Draw the clients that evaluate; their messages go out when the server calls them."""
        self._check_unchanged(parameters, f"configure_evaluate in round {server_round}")
        grid = _ManagedGrid(client_manager)
        messages = list(
            self.strategy.configure_evaluate(server_round, self._arrays, self._evaluate, grid)
        )
        if not messages:
            self.strategy.aggregate_evaluate(server_round, [])
            return []
        self._exchange = _Exchange(server_round, messages, grid, self._timeout)
        return self._exchange.instructions(EvaluateIns)

    def aggregate_evaluate(
        self,
        server_round: int,
        results: list[tuple[ClientProxy, EvaluateRes]],
        failures: list[tuple[ClientProxy, EvaluateRes] | BaseException],
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Return (mean loss, mean metrics) of the clients; (None, {}) if none could evaluate this time.

        The loss is NaN where the clients, or an `evaluate_metrics_aggr_fn`, report none. Raises what
        :meth:`aggregate_fit` raises; RoundFailed if no client ever could evaluate.
        """
        replies = self._replies(server_round, "aggregate_evaluate", results)
        record = self.strategy.aggregate_evaluate(server_round, replies)
        if record is None:
            return None, {}
        metrics = _plain(record)
        return float(metrics.pop("loss", float("nan"))), metrics

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Return what `evaluate_fn` says of the model, or None without one."""
        if self._evaluate_fn is None:
            return None
        result = self._evaluate_fn(server_round, parameters_to_ndarrays(parameters), {})
        if result is None:
            return None
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"evaluate_fn must return (loss, metrics) or None, not {type(result).__name__}"
            )
        loss, metrics = result
        return float(loss), dict(metrics)

    def _parameters(self) -> Parameters:
        """Return the global model without its names, always as many arrays as there were at first."""
        now = {**self._initial, **self._arrays}
        self._tensors = [now[name].data for name in self._initial]
        return Parameters(list(self._tensors), "numpy.ndarray")

    def _check_unchanged(self, parameters: Parameters, where: str) -> None:
        if parameters.tensors != self._tensors:
            raise ValueError(
                f"{where}: these are not the parameters that LegacyStrategy last returned. A wrapper "
                "or a subclass changes the global model, which would pass the strategy by; Flower's "
                "privacy wrappers for the Message API work, see docs/migration.md"
            )

    def _replies(
        self, server_round: int, where: str, results: Iterable[tuple[ClientProxy, Any]]
    ) -> list[Message]:
        exchange = self._exchange
        if exchange is None or exchange.server_round != server_round:
            raise RuntimeError(f"{where} of round {server_round} came without its configure_*")
        self._exchange = None
        return exchange.close(where, results)


class _Exchange:
    """A round's messages: they go out together, once, when the server first asks for an answer.

    Together, since the server's pool of threads would serve few clients at a time; the order of the
    messages is then the strategy's own, as are models sent ahead, of which the server knows nothing.
    """

    def __init__(
        self, server_round: int, messages: list[Message], grid: Grid, timeout: float
    ) -> None:
        self.server_round = server_round
        self._messages = messages
        self._grid = grid
        self._timeout = timeout
        self._lock = Lock()
        self._replies: list[Message] | None = None
        self._error: Exception | None = None
        self._shown: list[tuple[Any, dict[str, Scalar]]] = []  # instructions, and their config
        self._results: dict[int, tuple[Parameters, list[bytes]] | None] = {}

    def instructions(self, kind: Callable[..., Any]) -> list[Any]:
        """Return (proxy, FitIns or EvaluateIns) for each client that is asked.

        The instruction shows the round's config to whoever looks; what travels is the message.
        """
        pairs = []
        for message in self._messages:
            if message.metadata.message_type != keys.PREFETCH:
                told = message.content.config_records[keys.CONFIG]
                config: Any = {k: v for k, v in told.items() if not k.startswith("regs.")}
                shown = kind(Parameters([], "numpy.ndarray"), config)
                self._shown.append((shown, dict(config)))
                pairs.append((_Courier(message.metadata.dst_node_id, self), shown))
        return pairs

    def answer(self, node_id: int, timeout: float | None) -> Message:
        """Return the answer of a client; the first call sends everyone's message.

        Raises RuntimeError if there is none: that is how the server counts a failure.
        """
        with self._lock:
            if self._replies is None and self._error is None:
                try:
                    self._send(self._timeout if timeout is None else timeout)
                except Exception as error:  # shown to the server now, raised by `close`
                    self._error = error
        if self._error is not None:
            raise RuntimeError("the round's messages could not be sent") from self._error
        for reply in self._replies or ():
            if reply.metadata.src_node_id == node_id:
                if reply.has_error():
                    why = f"error code {reply.error.code}: {reply.error.reason}"
                    raise RuntimeError(f"node {node_id}: {why}")
                return reply
        raise RuntimeError(f"node {node_id}: no reply")

    def keep(self, node_id: int, parameters: Parameters | None) -> None:
        """Note what the server is handed as a client's result."""
        self._results[node_id] = (parameters, list(parameters.tensors)) if parameters else None

    def close(self, where: str, results: Iterable[tuple[ClientProxy, Any]]) -> list[Message]:
        """Return the replies, once the server is through with them.

        A reply that is not among the `results` any more becomes an error.
        """
        if self._error is not None:
            raise self._error
        if self._replies is None:
            raise RuntimeError(
                f"{where}: whoever drives the rounds sent the instructions itself (as "
                f"flwr.server.workflow.DefaultWorkflow does), not by their proxies; {_INSTEAD}"
            )
        kept = set()
        for proxy, result in results:
            if proxy.node_id not in self._results:
                raise ValueError(f"{where}: a result of node {proxy.node_id}, which gave none")
            sent = self._results[proxy.node_id]
            if sent and (sent[0] is not result.parameters or sent[1] != result.parameters.tensors):
                raise ValueError(
                    f"{where}: the parameters of node {proxy.node_id} were changed after it answered, "
                    "by a wrapper around LegacyStrategy or by a subclass; that would pass the strategy "
                    "by. Flower's privacy wrappers for the Message API work, see docs/migration.md"
                )
            kept.add(proxy.node_id)
        for asked in self._messages:
            node_id = asked.metadata.dst_node_id
            if node_id in self._results and node_id not in kept:
                left_out = Error(0, f"left out of the results that {where} was given")
                others = [r for r in self._replies if r.metadata.src_node_id != node_id]
                self._replies = [*others, Message(left_out, reply_to=asked)]
        return self._replies

    def _send(self, timeout: float) -> None:
        if any(ins.config != config or ins.parameters.tensors for ins, config in self._shown):
            raise ValueError(
                "an instruction was changed after LegacyStrategy made it, by a wrapper or a subclass; "
                "the change would not travel. What clients are told is train_config, evaluate_config "
                "and the strategy's own"
            )
        self._replies = list(self._grid.send_and_receive(self._messages, timeout=timeout))


class _Courier(ClientProxy):
    """A client that is asked in one exchange; the message it was given goes out, not the instruction."""

    def __init__(self, node_id: int, exchange: _Exchange) -> None:
        super().__init__(str(node_id))
        self.node_id = node_id
        self._exchange = exchange

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Return the client's reply to the strategy's message, as far as a FitRes can show it."""
        content = self._exchange.answer(self.node_id, timeout).content
        arrays = content.array_records.get(keys.ARRAYS, ArrayRecord())
        parameters = Parameters([a.data for a in arrays.values()], "numpy.ndarray")
        self._exchange.keep(self.node_id, parameters)
        return FitRes(Status(Code.OK, ""), parameters, *_counted(content))

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        """Return the client's reply to the strategy's message, as far as an EvaluateRes can show it."""
        content = self._exchange.answer(self.node_id, timeout).content
        self._exchange.keep(self.node_id, None)
        count, metrics = _counted(content)
        loss: Any = metrics.pop("loss", float("nan"))
        return EvaluateRes(Status(Code.OK, ""), loss, count, metrics)

    def get_properties(
        self, ins: GetPropertiesIns, timeout: float | None, group_id: int | None
    ) -> GetPropertiesRes:
        """Refuse: a client of ``client_app`` answers the strategy's own questions alone."""
        self._refuse("get_properties")

    def get_parameters(
        self, ins: GetParametersIns, timeout: float | None, group_id: int | None
    ) -> GetParametersRes:
        """Refuse: the initial model is LegacyStrategy's."""
        self._refuse("get_parameters")

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Do nothing, like Flower's own proxy."""
        return DisconnectRes(reason="")

    def _refuse(self, what: str) -> NoReturn:
        raise NotImplementedError(
            f"{what} is not asked of a client of flwr_regs.client_app; it knows train and evaluate"
        )


class _ManagedGrid(Grid):
    """The grid that a client manager's proxies hold, with the clients that the manager knows."""

    def __init__(self, manager: ClientManager) -> None:
        self._manager = manager
        self._last: Grid | None = None

    @property
    def _grid(self) -> Grid:
        if self._last is None:
            self.get_node_ids()
        if self._last is None:
            raise RuntimeError("no client is connected")
        return self._last

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids of the manager's clients."""
        proxies = list(self._manager.all().values())
        for proxy in proxies:
            grid = getattr(proxy, "grid", None)
            if not isinstance(grid, Grid):
                raise TypeError(
                    f"LegacyStrategy needs clients that are reached by Flower's grid, not by "
                    f"{type(proxy).__name__} (start_server, start_simulation); {_INSTEAD}"
                )
            self._last = grid
        return [proxy.node_id for proxy in proxies]

    def set_run(self, run: Run) -> None:
        """Set the run; Grid's interface."""
        self._grid.set_run(run)

    @property
    def run(self) -> Run:
        """The run; Grid's interface."""
        return self._grid.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Build a message; Grid's interface."""
        return self._grid.create_message(content, message_type, dst_node_id, group_id, ttl)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; Grid's interface."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Fetch replies; Grid's interface."""
        return self._grid.pull_messages(message_ids)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Send messages and wait for the replies; Grid's interface."""
        return self._grid.send_and_receive(messages, timeout=timeout)


def _plain(metrics: MetricRecord | None) -> dict[str, Any]:
    return dict(metrics or {})


def _counted(content: RecordDict) -> tuple[int, dict[str, Any]]:
    """Return (examples, metrics) as a legacy result has them; the strategy checks the reply itself."""
    found = _plain(content.metric_records.get(keys.METRICS))
    count = found.pop("num-examples", 0)
    scalars = {k: v for k, v in found.items() if not isinstance(v, list)}
    return count if isinstance(count, int) else 0, scalars


def _rounds_of_the_server() -> int | None:
    """Return the num_rounds of the ``Server.fit`` that is calling us, None under a server of one's own.

    Flower tells a strategy nowhere how many rounds there will be, and too few would pass unnoticed.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is Server.fit.__code__:
            return int(frame.f_locals["num_rounds"])
        frame = frame.f_back
    return None
