"""The output layer that a method reads: said once, in the history, and refused if it is not one."""

from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord
from torch import nn

import flwr_regs as fr
from flwr_regs.client.measure.classifier import makes
from flwr_regs.server.exchange.replies import output_layer
from flwr_regs.testing.problem import app_of
from flwr_regs.wire import keys
from flwr_regs.wire.parcel import Parcel
from tests.conftest import make_clients, make_model, start

READERS = {
    "RFedAvg": (lambda: fr.RFedAvg(lam=0.3), fr.RFedAvgClient, {}),
    "RFedAvgPlus": (lambda: fr.RFedAvgPlus(lam=0.3), fr.RFedAvgPlusClient, {}),
    "calibration": (fr.FedAvg, fr.FedAvgClient, {"personalise": "plain", "personal-lr": 0.1}),
}


class Net(nn.Module):
    """Logits from `head`; `last` is registered after it."""

    def __init__(self, use: str = "head") -> None:
        super().__init__()
        self.body = nn.Linear(4, 6, dtype=torch.float64)
        self.head = nn.Linear(6, 3, dtype=torch.float64)
        self.last = nn.Linear(6, 6, dtype=torch.float64)
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.body(x).tanh()
        if self.use == "last before head":
            hidden = self.last(hidden)
        return self.head(hidden)  # type: ignore[no-any-return]


def train(reader: str, model: Any = make_model, **settings: Any) -> Any:
    strategy, client, evaluate = READERS[reader]
    made = strategy()
    grid = fr.InProcessGrid(app_of(client, make_clients(), model, **settings), 4)
    start(made, grid, model=model, evaluate_config=ConfigRecord(evaluate))
    return made


def test_clients_with_other_layers_are_named_one_by_one() -> None:
    def reply(name: Any) -> Parcel:
        return Parcel({}, {} if name is None else {keys.LAYER_KEY: name})

    assert output_layer({2: reply("a"), 1: reply("a"), 3: reply(None)}) == "a"
    assert output_layer({2: reply("a"), 1: reply("b")}) == {1: "b", 2: "a"}
    assert output_layer({2: reply(7)}) is None


@pytest.mark.parametrize("reader", READERS)
def test_the_history_names_the_output_layer(reader: str) -> None:
    assert [entry["output_layer"] for entry in train(reader).history] == ["2", "2"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize(
    ("use", "why"),
    [
        ("head", r"does not use its output layer 'last', its last nn.Linear; .*classifier="),
        ("last before head", r"is not that of its output layer 'last', .*classifier="),
    ],
)
def test_a_last_layer_that_makes_no_logits_is_an_error(reader: str, use: str, why: str) -> None:
    with pytest.raises(fr.RoundFailed, match=why):
        train(reader, lambda: Net(use))


FOLLOW = [nn.LogSoftmax(1), nn.Flatten(0), nn.Hardtanh(inplace=True)]


@pytest.mark.parametrize("after", [*FOLLOW, nn.Linear(3, 3), nn.BatchNorm1d(3), nn.PReLU(3)])
def test_layers_with_parameters_may_not(after: nn.Module) -> None:
    produced = make_model()(make_clients()[0][0][0])
    assert makes(after.double()(produced), produced) == (after in FOLLOW)


def test_another_path_beside_the_layer_is_seen() -> None:
    model, x = make_model(), make_clients()[0][0][0]
    produced = model(x)
    assert not makes(produced + model[0](x)[:, :3], produced)
    assert not makes(model(x), produced)  # of another pass
    assert not makes([produced], produced)
    assert makes(produced / torch.tensor(2.0, requires_grad=True), produced)  # a temperature
    assert makes(produced + x.new_ones(3), produced)  # a constant is no path
    other = torch.ones(1, requires_grad=True)
    for _ in range(50):
        other = other + other.tanh()
    assert not makes(other, produced)  # 2^50 paths
