"""What is checked without torch is what the classes take and refuse."""

import inspect
from inspect import Parameter
from typing import Any

import pytest

import flwr_regs as fr
from flwr_regs.experiments.calls import Call, catalogue, parse_methods
from flwr_regs.experiments.strategies import build, light
from flwr_regs.methods.registry import METHODS


@pytest.mark.parametrize("name", catalogue())
def test_a_light_class_takes_and_refuses_what_the_real_one_does(name: str) -> None:
    slight, real = light(name), getattr(fr, name)
    assert [*map(plain, signature(slight))] == [*map(plain, signature(real))]
    assert inspect.getdoc(slight) == inspect.getdoc(real)
    usual = {p.name: 0.5 for p in signature(real) if p.default is Parameter.empty}
    if name in METHODS:
        ((call,),) = parse_methods(METHODS[name].example).values()
        usual = dict(zip((p.name for p in signature(real)), call.args, strict=False)) | call.kwargs
    for parameter in signature(real):
        for value in (-1, 2, 1.5, "x", None, [], True):
            given = {**usual, parameter.name: value}
            call = Call(name, (), given, called=True)
            early, late = refusal(call, only_check=True), refusal(call)
            takes_torch = name in ("FedOpt", "FedAvgM", "TorchServerOptimizer")
            assert early == late or (early == NEEDS_TORCH and (takes_torch or not late))


NEEDS_TORCH = "NameError: name 'torch' is not defined"


def refusal(*calls: Call, **more: Any) -> str:
    try:
        build(calls, **more)
    except (ValueError, TypeError, NameError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def signature(kind: Any) -> list[Parameter]:
    parameters = inspect.signature(kind).parameters.values()
    return [p for p in parameters if p.kind is not Parameter.VAR_KEYWORD]


def plain(parameter: Parameter) -> tuple[object, ...]:
    return parameter.name, parameter.kind, parameter.default


REFUSED = [
    *("FedFOR(alfa=1)", "FedFOR(1, 2, 3)", "FedProx", "FedAvg(aggregator=Krum(x=1))"),
    *("FedAvg(aggregator=Target(1))", "FedAvg(fraction_fit=0.1)", "FedAvg(overlap=True)"),
    *("FedAvg(privacy=CentralDP(1.0, 1.0))", "FedFOR+FedFOR", "FedPer('a')+LocalBatchNorm+FedBN"),
    *("FedSAM(0.1)+FedLESAM(0.1)", "FedAvg(seed=1)+FedFOR(seed=2)", "EFL(0.5)+SparseTernary(0.1)"),
]
TAKEN = ["FedADC(beta_local=None)", "Proximal(1, seed=3)", "FedAvg(seed=None)", "FedBN+FedFOR"]


@pytest.mark.parametrize("text", [*REFUSED, *TAKEN])
def test_a_method_is_refused_early_as_it_is_late(text: str) -> None:
    (calls,) = parse_methods(text).values()
    early = refusal(*calls, only_check=True)
    assert early == refusal(*calls)
    assert bool(early) == (text in REFUSED)
