"""The runs whose messages are golden: methods, and the options that change what travels.

Two rounds of two clients, if a run says nothing else. Model and data are made without random numbers, and
nothing shuffles.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message
from torch import nn

import flwr_regs as fr
from tests.conftest import composed, start
from tests.golden.messages import of_message
from tests.methods.early_stops import Forgetful


def model(frozen: bool = False) -> nn.Sequential:
    """Two inputs, two units with BatchNorm, three classes: 15 parameters, and BatchNorm's buffers."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh(), nn.Linear(2, 3))
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(torch.cos(torch.arange(p.numel()) + i).reshape(p.shape) / 2 + (i == 2))
    net[0].requires_grad_(not frozen)
    return net


def batches(pid: int) -> list[Any]:
    """One batch more for the second client, and other labels."""
    steps = torch.arange(10, dtype=torch.float32)
    x = torch.stack([torch.sin(steps + pid), torch.cos(2 * steps - pid)], 1)
    y = (steps.long() + (steps > 4)) % (2 + pid % 2)
    parts = 2 + pid % 2
    return list(zip(x.chunk(parts), y.chunk(parts), strict=True))


@dataclass(frozen=True)
class Scenario:
    """A strategy, its clients, and what is special about the run."""

    strategy: Callable[..., fr.RegStrategy]
    client: Callable[..., Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=lambda: {"local-epochs": 1})
    evaluate: Mapping[str, Any] | None = None
    frozen: bool = False
    clients: int = 2
    rounds: int = 2
    forgetful: bool = False
    """The second client loses its state after round 1."""


class Failing(fr.FedAvgClient):
    """Raises in its second round."""

    def fit(self, parameters: Any, config: Any) -> Any:
        if config["server-round"] == 2 and config["regs.partition"] == 1:
            raise RuntimeError("the disk is full")
        return super().fit(parameters, config)


SCENARIOS = {
    "fedavg": Scenario(fr.FedAvg, fr.FedAvgClient),
    "fedavg-evaluate": Scenario(fr.FedAvg, fr.FedAvgClient, evaluate={}),
    "fedavg-personalise": Scenario(
        fr.FedAvg, fr.FedAvgClient, {"lr_schedule": lambda t: 1 / t},
        {"local-steps": 2, "optimizer": "SGD", "momentum": 0.5, "user.note": "mine"},
        {"personalise": "both", "personal-lr": 0.1, "personal-epochs": 1}
    ),
    "fedavg-float16": Scenario(fr.FedAvg, fr.FedAvgClient, {"wire_dtype": "float16"}),
    "fedavg-labels": Scenario(
        fr.FedAvg, partial(fr.FedAvgClient, share_label_counts=True),
        {"cohorts": "class-covering", "fraction_train": 0.5},
        clients=3
    ),
    "fedavg-failure": Scenario(fr.FedAvg, Failing),
    "fedavg-incomplete": Scenario(
        fr.FedAvg, partial(fr.FedAvgClient, step_budget=2), {"incomplete": "scale"}
    ),
    "fedprox": Scenario(partial(fr.FedProx, 0.1), fr.FedProxClient),
    "fedfor": Scenario(partial(fr.FedFOR, 0.1), fr.FedFORClient),
    "fedfor-delta": Scenario(partial(fr.FedFOR, downlink="delta"), fr.FedFORClient),
    "fedfor-delta-lost": Scenario(
        partial(fr.FedFOR, downlink="delta"), fr.FedFORClient, forgetful=True
    ),
    "fedfor-bfloat16": Scenario(
        partial(fr.FedFOR, 0.1), fr.FedFORClient, {"wire_dtype": "bfloat16"}
    ),
    "fedfor-frozen": Scenario(partial(fr.FedFOR, 0.1), fr.FedFORClient, evaluate={}, frozen=True),
    "fedadc-overlap": Scenario(
        partial(fr.FedADC, 0.5, downlink="delta"), fr.FedADCClient,
        {"overlap": True, "fraction_train": 0.5, "min_train_nodes": 1},
        clients=3, rounds=3
    ),
    "fedadcplus": Scenario(partial(fr.FedADCPlus, 0.5), fr.FedADCPlusClient),
    "slowmo": Scenario(partial(fr.SlowMo, 0.5), fr.SlowMoClient),
    "scaffold": Scenario(fr.SCAFFOLD, fr.SCAFFOLDClient),
    "scaffold-lost": Scenario(fr.SCAFFOLD, fr.SCAFFOLDClient, forgetful=True),
    "scaffold-server": Scenario(
        partial(fr.SCAFFOLD, option=1, state="server"), fr.SCAFFOLDClient
    ),
    "rfedavg": Scenario(partial(fr.RFedAvg, 0.1), fr.RFedAvgClient),
    "rfedavgplus": Scenario(partial(fr.RFedAvgPlus, 0.1), fr.RFedAvgPlusClient),
    "efl": Scenario(partial(fr.EFL, 0.5, density_up=0.3, density_down=0.3), fr.EFLClient),
    "fedcurv": Scenario(partial(fr.FedCurv, 0.5), fr.FedCurvClient),
    "fedbabu": Scenario(fr.FedBABU, fr.FedBABUClient),
    "fedbn": Scenario(fr.FedBN, fr.FedBNClient, evaluate={}),
    "fedamp": Scenario(fr.FedAMP, fr.FedAMPClient, evaluate={}),
    "fedfor-ternary": Scenario(
        partial(fr.RegStrategy, [fr.FirstOrder(0.1), fr.SparseTernary(0.3)]),
        composed(fr.FirstOrder, fr.SparseTernary)
    )
}  # fmt: skip


class RecordingGrid(Forgetful):
    """Keeps every message, in the order in which it travels."""

    who = (1,)

    def __init__(self, app: Any, scenario: Scenario) -> None:
        super().__init__(app, scenario.clients)
        self.seen: list[dict[str, Any]] = []
        self.before = 2 if scenario.forgetful else 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Note the messages."""
        messages = list(messages)
        self.seen += [of_message(m, "to") for m in messages]
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Note the replies."""
        replies = list(super().pull_messages(message_ids))
        self.seen += [of_message(m, "from") for m in replies]
        return replies


def messages(name: str) -> list[dict[str, Any]]:
    """Run a scenario, and return all its messages."""
    s = SCENARIOS[name]

    def client_fn(context: Context) -> Any:
        mine = batches(int(context.node_config["partition-id"]))
        return s.client(model(s.frozen), mine, mine, device="cpu")

    grid = RecordingGrid(fr.client_app(client_fn), s)
    settings = {"seed": 5, "fraction_evaluate": 0.0 if s.evaluate is None else 1.0, **s.settings}
    arrays = partial(fr.trainable, model(s.frozen))
    config, evaluate = {"lr": 0.1, **s.train}, ConfigRecord({**(s.evaluate or {})})
    start(s.strategy(**settings), grid, s.rounds, arrays, config, evaluate_config=evaluate)
    return grid.seen
