"""A round's messages under Flower's older server: its first call of a client sends all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, NoReturn

from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.common import Code, DisconnectRes, EvaluateRes, FitRes, Parameters, Status
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.serverapp import Grid

from flwr_regs.flower.network import GridNetwork, reason_of
from flwr_regs.wire import keys

INSTEAD = (
    "return ServerAppComponents(strategy=...) from a ServerApp(server_fn=...), or, where you have the "
    "grid, call the strategy's own start(grid=grid, ...)"
)
UNSEEN = (
    "the strategy does not see what a wrapper or a subclass changes. Flower's privacy wrappers are not "
    "supported: use privacy=CentralDP(...) on the strategy"
)


class Exchange:
    """One exchange of messages with the clients.

    The server calls its clients one by one, a few at a time. The first call sends everything, in the
    strategy's order, also models sent ahead, which the server does not know of.
    """

    def __init__(
        self, server_round: int, messages: Iterable[Message], grid: Grid, timeout: float
    ) -> None:
        self.server_round = server_round
        self._messages = list(messages)
        self._grid = grid
        self._timeout = timeout
        self._lock = Lock()
        self._replies: list[Message] | None = None
        self._error: Exception | None = None
        self._shown: list[tuple[Any, dict[str, Any]]] = []  # instructions, and their config
        self._results: dict[int, tuple[Parameters, list[bytes]]] = {}  # as the server got them

    def instructions(self, kind: Callable[..., Any]) -> list[Any]:
        """Return (proxy, FitIns or EvaluateIns) for each client that the server calls.

        The instruction only shows the round's config; the client gets the strategy's message.
        """
        couriers = []
        for message in self._messages:
            if message.metadata.message_type != keys.PREFETCH:
                config = message.content.config_records[keys.CONFIG].items()
                shown = {k: v for k, v in config if not k.startswith("regs.")}
                self._shown.append((kind(Parameters([], "numpy.ndarray"), shown), dict(shown)))
                couriers.append(Courier(message.metadata.dst_node_id, self))
        return [(courier, ins) for courier, (ins, _) in zip(couriers, self._shown, strict=True)]

    def reply_of(self, node_id: int, timeout: float | None) -> Message:
        """Return a client's reply; the first call sends all messages.

        Raises RuntimeError if there is none, which the server counts as a failure.
        """
        with self._lock:
            if self._replies is None and self._error is None:
                try:
                    self._send(self._timeout if timeout is None else timeout)
                except Exception as error:  # raised by `close`; the server only counts failures
                    self._error = error
        if self._error is not None:
            raise RuntimeError("the round's messages could not be sent") from self._error
        for reply in self._replies or ():
            if reply.metadata.src_node_id == node_id:
                if reply.has_error():
                    raise RuntimeError(f"node {node_id}: {reason_of(reply)}")
                return reply
        raise RuntimeError(f"node {node_id}: no reply")

    def hand_over(self, node_id: int, parameters: Parameters) -> Parameters:
        """Return the parameters that the server gets from a client, and note them."""
        self._results[node_id] = (parameters, list(parameters.tensors))
        return parameters

    def close(self, where: str, results: Iterable[tuple[ClientProxy, Any]]) -> list[Message]:
        """Return the replies; one that is missing from the server's `results` becomes an error."""
        if self._error is not None:
            raise self._error
        if self._replies is None:
            raise RuntimeError(
                f"{where}: the instructions were not sent by their proxies, but by other code (as "
                f"flwr.server.workflow.DefaultWorkflow does); {INSTEAD}"
            )
        kept = {proxy.node_id: result for proxy, result in results}
        if strangers := sorted(set(kept) - set(self._results)):
            raise ValueError(f"{where}: results of nodes {strangers}, which returned none")
        for node_id, result in kept.items():
            given, tensors = self._results[node_id]
            now = getattr(result, "parameters", given)
            if now is not given or now.tensors != tensors:
                raise ValueError(
                    f"{where}: the parameters of node {node_id} were changed after it answered; {UNSEEN}"
                )
        left_out = set(self._results) - set(kept)
        error = Error(0, f"left out of the results that {where} was given")
        refused = [m for m in self._messages if m.metadata.dst_node_id in left_out]
        replies = [r for r in self._replies if r.metadata.src_node_id not in left_out]
        return replies + [Message(error, reply_to=m) for m in refused]

    def _send(self, timeout: float) -> None:
        if any(ins.config != config or ins.parameters.tensors for ins, config in self._shown):
            raise ValueError(
                f"an instruction was changed after LegacyStrategy made it; {UNSEEN}. Clients get "
                "train_config, evaluate_config and the strategy's own"
            )
        self._replies = GridNetwork(self._grid, timeout).exchange(self._messages)


class Courier(ClientProxy):
    """A client in one exchange: it gets the strategy's message, not the server's instruction."""

    def __init__(self, node_id: int, exchange: Exchange) -> None:
        super().__init__(str(node_id))
        self.node_id = node_id
        self._exchange = exchange

    def fit(self, ins: Any, timeout: float | None, group_id: int | None) -> FitRes:
        """Return the client's reply, as far as a FitRes can hold it."""
        content = self._exchange.reply_of(self.node_id, timeout).content
        arrays = content.array_records.get(keys.ARRAYS, ArrayRecord())
        parameters = Parameters([a.data for a in arrays.values()], "numpy.ndarray")
        parameters = self._exchange.hand_over(self.node_id, parameters)
        return FitRes(Status(Code.OK, ""), parameters, *_counted(content))

    def evaluate(self, ins: Any, timeout: float | None, group_id: int | None) -> EvaluateRes:
        """Return the client's reply, as far as an EvaluateRes can hold it."""
        content = self._exchange.reply_of(self.node_id, timeout).content
        self._exchange.hand_over(self.node_id, Parameters([], ""))
        count, metrics = _counted(content)
        loss = metrics.pop("loss", float("nan"))
        return EvaluateRes(Status(Code.OK, ""), loss, count, metrics)

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> NoReturn:
        """Refuse: a client of ``client_app`` can only train and evaluate."""
        raise NotImplementedError("a client of flwr_regs.client_app can only train and evaluate")

    get_parameters = get_properties

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Do nothing, like Flower's own proxy."""
        return DisconnectRes(reason="")


def grid_of(manager: ClientManager) -> Grid:
    """Return the grid of a client manager's proxies, with the clients that the manager knows."""
    return _ManagedGrid(manager)  # type: ignore[return-value]  # only the methods in use


class _ManagedGrid:
    def __init__(self, manager: ClientManager) -> None:
        self._manager = manager
        self._grid: Grid | None = None

    def get_node_ids(self) -> list[int]:
        proxies = list(self._manager.all().values())  # Flower adds and removes them meanwhile
        for proxy in proxies:
            self._grid = getattr(proxy, "grid", None)
            if not isinstance(self._grid, Grid):
                raise TypeError(
                    f"LegacyStrategy needs clients on Flower's grid, not by {type(proxy).__name__} "
                    f"(start_server, start_simulation); {INSTEAD}"
                )
        return [proxy.node_id for proxy in proxies]

    def __getattr__(self, name: str) -> Any:
        if self._grid is None and not self.get_node_ids():
            raise RuntimeError("no client is connected")
        return getattr(self._grid, name)


def _counted(content: RecordDict) -> tuple[int, dict[str, Any]]:
    """Return (examples, metrics) of an older result; the strategy checks the reply itself."""
    found: Any = content.metric_records.get(keys.METRICS) or {}
    scalars: dict[str, Any] = {k: v for k, v in found.items() if not isinstance(v, list)}
    count = scalars.pop("num-examples", 0)
    return count if isinstance(count, int) else 0, scalars
