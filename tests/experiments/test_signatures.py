"""What the package's methods take, read from their source, is what their classes take."""

from __future__ import annotations

import inspect

import pytest

import flwr_regs as fr
from flwr_regs.experiments import signatures
from flwr_regs.experiments.calls import catalogue, parse_methods
from flwr_regs.experiments.strategies import build


@pytest.mark.parametrize("name", catalogue())
def test_the_source_says_what_a_class_takes(name: str) -> None:
    read, made = signatures.signature(name), inspect.signature(getattr(fr, name))
    assert [*map(plain, read.parameters.values())] == [*map(plain, made.parameters.values())]
    assert signatures.document(name) == inspect.getdoc(getattr(fr, name))


def plain(parameter: inspect.Parameter) -> tuple[object, ...]:
    return parameter.name, parameter.kind, parameter.default


WRONG = [
    *("FedFOR(alfa=1)", "FedFOR(alpha=-1)", "FedFOR(alpha='x')", "FedFOR(1, 2, 3)", "FedProx"),
    *("Proximal(nu=1)", "Proximal(mu=1, implicit=3)", "FedADC(beta_local=2)", "EFL(lam=None)"),
    *("FedAdam(beta_1=1.5)", "Ditto(personal_lr=0)", "Mime(beta=1)", "SlowMo(0.5, alpha=0)"),
    *("FedAvg(downlink='x')", "FedAvg(aggregator=Krum(x=1))", "FedAvg(aggregator=Target(1))"),
    *("FedAvg(fraction_fit=0.1)", "FedAvg(privacy=Target(1.0))", "SparseTernary(0)"),
    *("FedAvg(retries=-1)", "FedBN(x=1)", "CloudModel(sigma=0)"),
]
"""Calls that are refused. More are: these need no class."""


@pytest.mark.parametrize("text", WRONG)
def test_what_the_source_refuses_is_what_the_class_refuses(text: str) -> None:
    (calls,) = parse_methods(text).values()
    with pytest.raises(ValueError, match="'") as early:
        signatures.check(*calls)
    with pytest.raises(ValueError, match="'") as late:
        build(calls)
    assert str(early.value) == str(late.value)


@pytest.mark.parametrize(
    "text",
    ["FedADC(beta_local=None)", "FedOpt('SGD', lr=1)", "Proximal(1, seed=3)", "FedAvg(seed=None)"],
)
def test_what_a_class_takes_is_not_refused(text: str) -> None:
    (calls,) = parse_methods(text).values()
    signatures.check(*calls)
    build(calls)
