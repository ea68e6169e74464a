"""Kinds of batches, outputs and models: each row of docs/models.md equals plain batches, or is refused."""

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any, ClassVar
from unittest.mock import call, patch

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

import flwr_regs as fr
from flwr_regs.abilities import Personalises
from flwr_regs.testing.problem import Batch, app_of
from flwr_regs.wire.arrays import ProtocolError
from tests.conftest import close, make_clients, make_model, run, start
from tests.flower.clients.test_own_loop import plain_loop
from tests.sampling import sampled

Data = list[Any]


@dataclass
class Classified:
    """An output like those of Hugging Face: optional fields, the loss first."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None


class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """An output whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class Predicted:
    """An output of another name."""

    scores: torch.Tensor


class Wrapped(nn.Sequential):
    """The perceptron of the laws, with another signature; its names stay."""

    def __init__(self) -> None:
        super().__init__(*make_model())

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Halves(Wrapped):
    """Takes its inputs in two parts."""

    def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return self.logits(torch.cat([left, right], dim=1))


def returns(make: Callable[[torch.Tensor], Any]) -> Callable[[], nn.Module]:
    class Returns(Wrapped):
        def forward(self, x: torch.Tensor) -> Any:
            return make(self.logits(x))

    return Returns


class Judges(Wrapped):
    """Returns its own loss if it gets the targets."""

    def forward(self, x: torch.Tensor, labels: Any = None, label: Any = None) -> Any:
        logits = self.logits(x)
        targets = label if labels is None else labels
        loss = None if targets is None else cross_entropy(logits, targets)
        return Classified(loss=loss, logits=logits)


class JudgesHalves(Wrapped):
    """That, with two inputs, in Hugging Face's way."""

    def forward(self, left: Any, right: Any, labels: Any = None) -> Any:
        logits = self.logits(torch.cat([left, right], dim=1))
        own = {} if labels is None else {"loss": cross_entropy(logits, labels)}
        return ModelOutput(own, logits=logits)


class Silent(JudgesHalves):
    """That, but it never returns its loss."""

    def forward(self, left: Any, right: Any, labels: Any = None) -> Any:
        return super().forward(left, right)


class Spare(Wrapped):
    """Has a layer that no forward pass uses; it is registered last."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(6, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[2](self[1](self[0](x)))  # type: ignore[no-any-return]


def compiled_in_place() -> nn.Module:
    model = make_model()
    model.compile(backend="eager")
    return model


def partly_compiled() -> nn.Module:
    model = make_model()
    model[0] = torch.compile(model[0], backend="eager")
    return model


def as_dicts(*names: str, **more: Any) -> Callable[[Sequence[Batch]], Data]:
    """Return a change of pairs to mappings: one or two inputs, and the targets under the last name."""
    *inputs, target = names

    def change(pairs: Sequence[Batch]) -> Data:
        return [
            {**dict(zip(inputs, x.chunk(len(inputs), dim=1), strict=True)), target: y, **more}
            for x, y in pairs
        ]

    return change


@dataclass(frozen=True)
class Kind:
    """A row of docs/models.md: `row` is how its first cell begins."""

    row: str
    data: Callable[[Sequence[Batch]], Data] = list
    model: Callable[[], nn.Module] = make_model
    settings: dict[str, Any] = field(default_factory=dict)
    refused: str = ""
    method: str = "FedAvg"  # that refuses it


COARSE = {"coarse_label": torch.zeros(5, dtype=torch.long)}
KINDS = [
    Kind("a pair"),
    Kind("a mapping with one input", as_dicts("img", "label")),
    Kind("a mapping with several inputs", as_dicts("left", "right", "labels"), Halves),
    Kind("a mapping with the targets under another key", as_dicts("img", "digit"),
         settings={"target_key": "digit"}),
    Kind("a mapping with several usual keys", as_dicts("img", "fine_label", **COARSE),
         refused=r"'fine_label', 'coarse_label'\].*target_key="),
    Kind("the same with `target_key=`", as_dicts("img", "fine_label", **COARSE),
         settings={"target_key": "fine_label"}),
    Kind("a mapping without targets", as_dicts("img", "digit"),
         refused=r"\['img', 'digit'\] has no entry for its targets.*target_key="),
    Kind("a triple, or a bare tensor", lambda pairs: [(x, y, y) for x, y in pairs],
         refused=r"not a tuple of 3 entries"),
    Kind("a triple, or a bare tensor", lambda pairs: [x[:2] for x, _ in pairs],
         refused=r"train_data is a list of arrays: expected batches of \(inputs, targets\)"),
    Kind("a tensor", model=make_model),
    Kind("a tuple or list", model=returns(lambda logits: (logits, logits.sum()))),
    Kind("a dataclass", model=returns(lambda logits: Classified(logits=logits))),
    Kind("a dataclass", model=returns(Predicted)),
    Kind("Hugging Face's `ModelOutput`",
         model=returns(lambda logits: ModelOutput(loss=None, logits=logits))),
    Kind("a dict with `logits`", model=returns(lambda logits: {"aux": logits, "logits": logits})),
    Kind("any other output", model=returns(lambda logits: {"scores": logits, "aux": logits}),
         refused=r"a dict with the entries \['scores', 'aux'\], has no logits.*output_fn="),
    Kind("the same with `output_fn=`", model=returns(lambda logits: {"scores": logits}),
         settings={"output_fn": lambda output: output["scores"]}),
    Kind("its own loss, on pairs", model=Judges, settings={"loss_fn": None}),
    Kind("its own loss, on mappings", as_dicts("x", "label"), Judges, {"loss_fn": None}),
    Kind("its own loss, on mappings", as_dicts("left", "right", "labels"), JudgesHalves,
         {"loss_fn": None}),
    Kind("no loss, with `loss_fn=None`", as_dicts("left", "right", "labels"),
         Silent, {"loss_fn": None}, refused="has .loss when .*: pass loss_fn="),
    Kind("`torch.compile(model)`", model=lambda: torch.compile(make_model(), backend="eager")),
    Kind("`model.compile()`, or layers with it", model=compiled_in_place),
    Kind("a model with `torch.compile(layer)` in it", model=partly_compiled,
         refused=r"the layers \['0'\] are torch.compile\(layer\).*layer.compile\(\)"),
    Kind("a model with a layer that no forward pass uses", model=Spare,
         settings={"classifier": "2"}),
    Kind("the same, without `classifier=`", model=Spare,
         refused=r"does not use its output layer 'spare'.*classifier=", method="RFedAvgPlus")
]  # fmt: skip


METHODS = {  # every way to read data and outputs
    "FedAvg": (lambda **kw: fr.FedAvg(**kw), fr.FedAvgClient),
    "FedADCPlus": (lambda **kw: fr.FedADCPlus(**kw), fr.FedADCPlusClient),
    "EFL": (lambda **kw: fr.EFL(lam=0.3, **kw), fr.EFLClient),
    "RFedAvgPlus": (lambda **kw: fr.RFedAvgPlus(lam=0.3, **kw), fr.RFedAvgPlusClient),
    "classes": (lambda **kw: fr.FedAvg(cohorts="class-covering", **kw), fr.FedAvgClient),
}


def train(kind: Kind, method: str) -> tuple[dict[str, np.ndarray], list[Any]]:
    """Return (the model, what the history says of losses, accuracy and examples)."""
    make, client = METHODS[method]
    strategy = make(seed=1)
    shared = {"share_label_counts": True} if method == "classes" else {}
    personal = {"personalise": "both", "personal-lr": 0.1}
    data = [kind.data(d) for d in make_clients()]
    grid = fr.InProcessGrid(app_of(client, data, kind.model, **shared, **kind.settings), 4)
    config = {"lr": 0.2, "local-epochs": 2}
    result = start(strategy, grid, 2, kind.model, config, evaluate_config=ConfigRecord(personal))
    evaluated = [
        {k: v for k, v in e["evaluate"].items() if "bytes" not in k and "seconds" not in k}
        for e in strategy.history
    ]
    heard = [(e["train_metrics"], v) for e, v in zip(strategy.history, evaluated, strict=True)]
    assert not any(e["failures"] or e["evaluate"]["failures"] for e in strategy.history)
    return {n: a.numpy() for n, a in result.arrays.items()}, heard


@cache
def plain(method: str) -> tuple[dict[str, np.ndarray], list[Any]]:
    return train(KINDS[0], method)


@sampled(
    "kind,method",
    list(product([k for k in KINDS if not k.refused], METHODS)),
    2,
    lambda value: value if isinstance(value, str) else value.row,
)
def test_a_kind_that_works_equals_pairs_and_tensors_to_the_bit(kind: Kind, method: str) -> None:
    (got, heard), (want, wanted) = train(kind, method), plain(method)
    close({n: got[n] for n in want}, want, 0.0)
    assert heard == wanted


@pytest.mark.parametrize("kind", [k for k in KINDS if k.refused], ids=lambda k: k.row)
def test_a_kind_that_does_not_work_is_refused_with_a_sentence(kind: Kind) -> None:
    with pytest.raises((fr.RoundFailed, ValueError), match=re.compile(kind.refused, re.DOTALL)):
        train(kind, kind.method)


class OneStep(fr.Term, Personalises):
    """Each client evaluates the global model after one full-batch step on its own data."""

    name: ClassVar[str] = "one-step"

    def personal(self, params: Any, ctx: Any) -> Any:
        grads = ctx.mean_gradient(params)
        return {n: p - ctx.lr * grads[n] for n, p in params.items()}


def test_a_personal_model_is_loaded_with_the_same_arguments() -> None:
    data, app = make_clients(), fr.RegClientApp()
    equal: list[bool] = []

    @app.train()
    def fit(message: Message, context: Any) -> Message:
        batches = data[context.node_config["partition-id"]]
        loop = fr.ClientRound(message, [OneStep], model := make_model(), batches, device="cpu")
        plain_loop(loop, model, torch.optim.SGD)
        return loop.reply()

    @app.evaluate()
    def evaluate(message: Message, context: Any) -> Message:
        batches = data[context.node_config["partition-id"]]
        named: dict[str, Any] = {"personal": True, "device": "cpu"}
        plain, other = make_model(), returns(lambda logits: {"scores": logits})()
        with patch.object(plain, "to", wraps=plain.to) as placed:
            fr.load_model(message, [OneStep], plain, train_data=batches, **named)
        assert placed.call_args == call(torch.device("cpu"))  # back from where it was made
        assert placed.call_count == 2
        named |= {"train_data": as_dicts("img", "digit")(batches)}
        named |= {"output_fn": lambda output: output["scores"]}
        fr.load_model(message, [OneStep], other, target_key="digit", **named)
        own, shared = plain.state_dict(), make_model()
        fr.load_model(message, [OneStep], shared, personal=False)
        for name, array in other.state_dict().items():
            equal.append(torch.equal(own[name], array))
            equal.append(not torch.equal(own[name], shared.state_dict()[name]))
        with pytest.raises(ValueError, match="digit"):
            fr.load_model(message, [OneStep], other, **named)
        with pytest.raises(ProtocolError, match="of FedAvg, but the strategy runs 'one-step'"):
            fr.load_model(message, fr.FedAvgClient, shared, personal=True)
        metrics = MetricRecord({"num-examples": 1, "loss": 0.0})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    strategy = fr.RegStrategy([OneStep()], seed=1)
    run(strategy, fr.RegClient, rounds=1, grid=fr.InProcessGrid(app, 4))
    assert equal == [True] * 2 * 4 * 4
    assert not strategy.history[0]["evaluate"]["failures"]
