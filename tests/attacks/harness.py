"""Some of ten clients lie: a training in one process, and its accuracy beside the honest one's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, Message, MetricRecord, RecordDict
from torch import nn

from flwr_regs import InProcessGrid, StackedGrid
from flwr_regs.flower.client import client_class
from flwr_regs.methods.registry import METHODS
from flwr_regs.server.exchange.network import Replies, Request
from flwr_regs.testing.problem import Batch, app_of
from flwr_regs.wire import keys
from flwr_regs.wire.records import parcel_of, reply_of
from tests.conftest import Tampered, drawn, start
from tests.experiments.runs import strategy_of

CLIENTS, LIAR, ROUNDS = 10, 3, 6
CLASSES, INPUTS, BATCH, BATCHES = 10, 16, 16, 6
LENGTH: dict[str, Any] = {"lr": 0.3, "local-steps": 9}
HUGE = 1e14
LIED = ("train", keys.PROBE)
"""The kinds of messages whose replies may be lies."""
SETTINGS: dict[str, str] = {
    # strengths that train well here, in place of the registry's examples
    "EFL": "EFL(lam=0.01, fisher_samples=30)",
    "FedCurv": "FedCurv(lam=0.01, fisher_samples=30)",
    "FedADC": "FedADC(beta=0.6)",
    "FedADCPlus": "FedADCPlus(beta=0.6, lam=0.35)",
    "SlowMo": "SlowMo(beta=0.5)",
}


def make_model(batch_norm: bool = False) -> nn.Sequential:
    """A perceptron with 24 hidden units; always the same weights."""
    with drawn():
        norm = [nn.BatchNorm1d(24)] if batch_norm else []
        return nn.Sequential(nn.Linear(INPUTS, 24), *norm, nn.ReLU(), nn.Linear(24, CLASSES))


@cache
def examples() -> list[Batch]:
    """The examples of each client, and last those of the test: ten clouds."""
    rng = np.random.default_rng(5)
    centres = rng.normal(size=(CLASSES, INPUTS))
    out = []
    for k in range(CLIENTS + 1):
        size = BATCH * BATCHES if k < CLIENTS else 600
        share = rng.dirichlet(np.full(CLASSES, 2.0 if k < CLIENTS else 1e6))
        y = rng.choice(CLASSES, size, p=share)
        x = centres[y] + 0.75 * rng.normal(size=(size, INPUTS))
        out.append((torch.tensor(x, dtype=torch.float32), torch.tensor(y)))
    return out


def batches(k: int, flipped: bool) -> list[Batch]:
    x, y = examples()[k]
    y = CLASSES - 1 - y if flipped else y
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


@dataclass
class Reply:
    """A reply of the liar, which a lie changes in place.

    Attributes
    ----------
    pid, kind, number : int, str, int
        Who replies, to which message type, and the round.
    content : RecordDict
        The honest reply.
    """

    pid: int
    kind: str
    number: int
    content: RecordDict

    def change(self, record: str, name: str, function: Callable[[np.ndarray], Any]) -> None:
        """Put ``function(array)`` in place of the arrays of `record` whose name ends with `name`."""
        arrays = self.content.array_records.get(record)
        for key, array in (arrays or {}).items():
            a = array.numpy()
            if key.endswith(name) and a.dtype.kind == "f":
                arrays[key] = Array(np.asarray(function(a), a.dtype).reshape(a.shape))  # type: ignore[index]

    def say(self, **metrics: Any) -> None:
        """Claim these metrics; the underscores of a name stand for hyphens."""
        if "metrics" in self.content:
            said = {name.replace("_", "-"): value for name, value in metrics.items()}
            self.content["metrics"] = MetricRecord({**self.content["metrics"], **said})


Lie = Callable[[Reply], None]


def lying(app: Any, lie: Lie, clients: int, liars: Sequence[int]) -> InProcessGrid:
    """A grid on which some clients' replies, Flower's messages, are changed on their way."""

    def change(kind: str, pid: int, message: Message, reply: Message) -> Message:
        if pid in liars and kind in LIED and not reply.has_error():
            number = int(message.content["config"]["server-round"])
            lie(Reply(pid, kind, number, reply.content))
        return reply

    return Tampered(app, clients, change)


class LyingStack(StackedGrid):
    """The same without messages: of clients that train as one."""

    def __init__(self, app: Any, lie: Lie, clients: int, liars: Sequence[int]) -> None:
        super().__init__(app, clients)
        self.lie, self.liars = lie, liars

    def network(self) -> Any:
        network: Any = super().network()
        honest = network.ask

        def ask(request: Request, timeout: float | None = None) -> Replies:
            replies = honest(request, timeout)
            liars = [pid for pid in self.liars if pid in replies.came and request.kind in LIED]
            for pid in liars:
                content = reply_of(replies.came[pid])
                number = int(request.parcels[pid].config["server-round"])
                self.lie(Reply(pid, request.kind, number, content))
                replies.came[pid] = parcel_of(content)
            return replies

        network.ask = ask
        return network


def nothing(reply: Reply) -> None:
    """An honest reply."""


@dataclass
class Outcome:
    """What came of a training: the model's accuracy on the test, and the strategy."""

    accuracy: float
    strategy: Any

    @property
    def history(self) -> list[dict[str, Any]]:
        return list(self.strategy.history)

    def named(self, pid: int) -> list[int]:
        """The rounds in which a client has no usable reply."""
        return [e["round"] for e in self.history if pid in e["failures"]]

    def events(self, key: str = "divergence") -> dict[int, Any]:
        """An event of the history by round."""
        return {e["round"]: e[key] for e in self.history if key in e}


def play(
    method: str,
    lie: Lie = nothing,
    *,
    flipped: bool = False,
    batch_norm: bool = False,
    clients: int = CLIENTS,
    rounds: int = ROUNDS,
    length: Mapping[str, Any] = LENGTH,
    resume: Path | None = None,
    liars: Sequence[int] = (LIAR,),
    stacked: bool = False,
    **settings: Any,
) -> Outcome:
    """Train a method of the registry, or a call of one; the liars' labels may be flipped."""
    torch.manual_seed(0)
    liars = [k % clients for k in liars]
    call = SETTINGS.get(method) or (METHODS[method].example if method in METHODS else method)
    strategy: Any = strategy_of(call, **{"seed": 2, "fraction_evaluate": 0.0, **settings})
    data = [batches(k, flipped and k in liars) for k in range(clients)]
    model = make_model(batch_norm)
    app = app_of(client_class(strategy), data, lambda: make_model(batch_norm))
    grid = (LyingStack if stacked else lying)(app, lie, clients, liars)
    start(strategy, grid, rounds, lambda: model, length, resume_from=resume)
    model.load_state_dict(strategy.arrays.to_torch_state_dict())
    model.eval()
    x, y = examples()[-1]
    with torch.no_grad():
        right = model(x).argmax(1) == y
    return Outcome(float(right.float().mean()), strategy)


HONEST: dict[str, float] = {}


def honest(method: str, **settings: Any) -> float:
    """The accuracy without a lie; each training is played once."""
    key = repr((method, sorted(settings.items())))
    if key not in HONEST:
        HONEST[key] = play(method, **settings).accuracy
    return HONEST[key]
