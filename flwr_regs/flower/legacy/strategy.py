"""`LegacyStrategy`: the package's strategies in an older project with ``ServerAppComponents``.

Flower's older server has no queries, and sends only scalars and arrays without names, which cannot hold
a term's records. So `configure_fit` returns placeholders. Our own proxies send the strategy's messages
through the server's grid: clients get exactly what ``strategy.start`` sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from logging import INFO
from typing import Any

from flwr.app import Array, ArrayRecord, Message
from flwr.common import EvaluateIns, FitIns, NDArrays, Parameters, Scalar, parameters_to_ndarrays
from flwr.common.logger import log
from flwr.server.client_manager import ClientManager
from flwr.server.client_proxy import ClientProxy
from flwr.server.strategy import Strategy
from flwr.serverapp import Grid

from flwr_regs.flower.legacy.exchange import UNSEEN, Exchange, grid_of
from flwr_regs.flower.loop import OF_START
from flwr_regs.flower.strategy import RegStrategy
from flwr_regs.server.options import Options
from flwr_regs.wire.arrays import plain_name

EvaluateFn = Callable[[int, NDArrays, dict[str, Scalar]], tuple[float, Mapping[str, Scalar]] | None]


class LegacyStrategy(Strategy):
    """Any strategy of this package as a ``flwr.server.strategy.Strategy``.

    For ``ServerAppComponents(strategy=LegacyStrategy(...), config=ServerConfig(num_rounds=...))``; the
    clients' app must be ``flwr_regs.client_app(client_fn)``. Weights, history and errors are those of
    ``strategy.start``. See docs/migration.md.

    Parameters
    ----------
    strategy : RegStrategy
        Holds the ``history`` and, at any time, the global model ``arrays``.
    initial_arrays : ArrayRecord or mapping
        The initial model by name: an ArrayRecord, or a ``state_dict`` (tensors or numpy arrays).
    num_rounds : int
        The same as ServerConfig's, which a strategy cannot read. `overlap` and `drop_inactive` use it. A
        server that goes on for longer is refused.
    train_config, evaluate_config : mapping, optional
        As for ``strategy.start``.
    evaluate_fn : callable, optional
        Central evaluation: ``evaluate_fn(server_round, ndarrays, config) -> (loss, metrics) or None``.
        `ndarrays` are in the order of `initial_arrays`, `config` is empty, round 0 is the initial model.
    timeout : float
        Seconds to wait for the replies of an exchange. ServerConfig's ``round_timeout``, if set, replaces
        it for training and evaluation.

    Raises
    ------
    TypeError
        `strategy` is not one of this package, or `initial_arrays` has no names.
    ValueError
        A config key is unknown, missing or wrong; the strategy cannot train the model, or has a setting
        that only `start` follows (retries, deadline, stop_when, …); the server goes on after `num_rounds`.
    RoundFailed
        From ``aggregate_fit`` and ``aggregate_evaluate``: see :class:`RegStrategy`.

    Notes
    -----
    Returned ``Parameters`` hold every array of `initial_arrays` in its order; private ones (FedBN) keep
    their initial values. A subclass may read results, failures and parameters, or leave results out. It may
    not change them, since the strategy would not see the change.
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
                f"Flower's arrays cannot hold bfloat16, but initial_arrays has it in {half}; pass "
                "flwr_regs.float32_arrays(model), and wire_dtype='bfloat16' to the strategy"
            )
        default = {f.name: f.default for f in fields(Options)}
        if given := [n for n in OF_START if getattr(strategy.options, n) != default[n]]:
            raise ValueError(
                f"Flower's older server runs the rounds itself: {given} need strategy.start; leave them out"
            )
        if num_rounds < 1:
            raise ValueError(f"num_rounds must be at least 1, not {num_rounds}")
        self.strategy = strategy
        self.num_rounds = num_rounds
        self._initial = ArrayRecord(
            {
                plain_name(k): a if isinstance(a, Array) else Array(a)
                for k, a in initial_arrays.items()
            }
        )
        strategy.check_model(self._initial)
        self._given = num_rounds, timeout, train_config, evaluate_config
        self._evaluate_fn = evaluate_fn
        self._timeout = timeout
        self._begin()

    def _begin(self) -> None:
        self._train, self._evaluate = self.strategy.prepare(*self._given)
        self._arrays = self._initial
        self._exchange: Exchange | None = None

    def initialize_parameters(self, client_manager: ClientManager) -> Parameters:
        """Return the initial model; a training begins."""
        log(INFO, "Starting %s strategy:", type(self.strategy).__name__)
        self.strategy.summary()
        self._begin()
        return self._parameters()

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[Any]:
        """Draw the cohort; its messages go out when the server calls the first client."""
        if server_round > self.num_rounds:
            raise ValueError(
                f"the server goes on to round {server_round}, but LegacyStrategy was built with "
                f"num_rounds={self.num_rounds}; give ServerConfig the same number"
            )
        grid = self._grid(parameters, client_manager, f"configure_fit in round {server_round}")
        messages = self.strategy.configure_train(server_round, self._arrays, self._train, grid)
        self._exchange = Exchange(server_round, messages, grid, self._timeout)
        if not (instructions := self._exchange.instructions(FitIns)):
            # The server would skip the round silently; the strategy raises if that is wrong.
            self.strategy.aggregate_train(server_round, [])
        return instructions

    def aggregate_fit(
        self, server_round: int, results: list[Any], failures: list[Any]
    ) -> tuple[Parameters | None, dict[str, Scalar]]:
        """Use the replies to move the global model; return it with the clients' mean metrics.

        Raises RoundFailed for too few usable replies, RuntimeError if the proxies were not called, and
        ValueError if the results were changed.
        """
        replies = self._replies(server_round, "aggregate_fit", results)
        arrays, metrics = self.strategy.aggregate_train(server_round, replies)
        if arrays is not None:
            self._arrays = arrays
        return self._parameters(), {**(metrics or {})}  # type: ignore[dict-item]

    def configure_evaluate(
        self, server_round: int, parameters: Parameters, client_manager: ClientManager
    ) -> list[Any]:
        """Draw the clients that evaluate; their messages go out when the server calls the first."""
        grid = self._grid(parameters, client_manager, f"configure_evaluate in round {server_round}")
        config = self._evaluate
        messages = self.strategy.configure_evaluate(server_round, self._arrays, config, grid)
        self._exchange = Exchange(server_round, messages, grid, self._timeout)
        if not (instructions := self._exchange.instructions(EvaluateIns)):
            self.strategy.aggregate_evaluate(server_round, [])
        return instructions

    def aggregate_evaluate(
        self, server_round: int, results: list[Any], failures: list[Any]
    ) -> tuple[float | None, dict[str, Scalar]]:
        """Return (mean loss, mean metrics) of the clients; (None, {}) if none could evaluate this time.

        The loss is NaN if no client reports one. Raises what :meth:`aggregate_fit` raises.
        """
        replies = self._replies(server_round, "aggregate_evaluate", results)
        record = self.strategy.aggregate_evaluate(server_round, replies)
        if record is None:
            return None, {}
        metrics: dict[str, Any] = dict(record)
        return float(metrics.pop("loss", float("nan"))), metrics

    def evaluate(
        self, server_round: int, parameters: Parameters
    ) -> tuple[float, dict[str, Scalar]] | None:
        """Return the result of `evaluate_fn`, or None without one."""
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
        """Return the global model without names, with all arrays of `initial_arrays`."""
        now = {**self._initial, **self._arrays}
        self._tensors = [now[name].data for name in self._initial]
        return Parameters(list(self._tensors), "numpy.ndarray")

    def _grid(self, parameters: Parameters, manager: ClientManager, where: str) -> Grid:
        """Return the grid; ValueError if `parameters` were changed."""
        if parameters.tensors != self._tensors:
            raise ValueError(
                f"{where}: these are not the parameters that LegacyStrategy last returned; {UNSEEN}"
            )
        return grid_of(manager)

    def _replies(
        self, server_round: int, where: str, results: Iterable[tuple[ClientProxy, Any]]
    ) -> list[Message]:
        exchange = self._exchange
        if exchange is None or exchange.server_round != server_round:
            raise RuntimeError(f"{where} of round {server_round} came without its configure_*")
        self._exchange = None
        return exchange.close(where, results)
