"""Methods as calls: what is parsed, what is refused with which sentence, and what is built."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import flwr_regs as fr
from flwr_regs.experiments import calls
from flwr_regs.experiments.calls import Call, parse_methods, text_of
from flwr_regs.experiments.strategies import build, client_class, with_argument
from tests.experiments.runs import runs_of

B = Call("B", (), {}, called=True)
C = Call("C", (1,), {"y": "d,e"}, called=True)
PARSED: list[tuple[str, list[list[tuple[str, tuple[Any, ...], dict[str, Any]]]]]] = [
    # text, and its methods: each a list of parts (target, args, kwargs)
    ("FedAvg", [[("FedAvg", (), {})]]),
    ("FedAvg,FedProx(0.1)", [[("FedAvg", (), {})], [("FedProx", (0.1,), {})]]),
    (
        " FedAvg ; FedFOR( alpha = 5e-1 ) ;",
        [[("FedAvg", (), {})], [("FedFOR", (), {"alpha": 0.5})]],
    ),
    ("A(x=-1, y=None, z=True)", [[("A", (), {"x": -1, "y": None, "z": True})]]),
    ("A((1, 2), [3], {'a': (4,)})", [[("A", ((1, 2), [3], {"a": (4,)}), {})]]),
    ("A('a,b;c+d:e(f', \"it's\")", [[("A", ("a,b;c+d:e(f", "it's"), {})]]),
    (r"A('it\'s, so')", [[("A", ("it's, so",), {})]]),
    ("A(x=+1)+B", [[("A", (), {"x": 1}), ("B", (), {})]]),
    ("FedBN+FedFOR", [[("FedBN", (), {}), ("FedFOR", (), {})]]),
    ("mine:Decay(wd=0.01)", [[("mine:Decay", (), {"wd": 0.01})]]),
    ("a.b.mine:C.make()+D", [[("a.b.mine:C.make", (), {}), ("D", (), {})]]),
    ("A(\n  x=1,\n)", [[("A", (), {"x": 1})]]),
    ("A(B(), x=C(1, y='d,e'))", [[("A", (B,), {"x": C})]]),
]


@pytest.mark.parametrize(("text", "expected"), PARSED, ids=[t for t, _ in PARSED])
def test_a_text_is_methods_parts_and_literals(text: str, expected: Any) -> None:
    methods = parse_methods(text)
    assert [[(c.target, c.args, c.kwargs) for c in m] for m in methods.values()] == expected
    again = parse_methods("; ".join(methods))  # a label means the same, and is its own label
    assert list(again.items()) == list(methods.items())


def test_a_label_has_one_form_and_stands_once() -> None:
    assert list(parse_methods('FedFOR( alpha=0.50 ), FedAvg(), A("x")')) == [
        *("FedFOR(alpha=0.5)", "FedAvg", "A('x')")
    ]
    with pytest.raises(ValueError, match="'FedAvg' stands twice in 'FedAvg, FedAvg"):
        parse_methods("FedAvg, FedAvg()")


def built(text: str, **common: Any) -> fr.RegStrategy:
    (parts,) = parse_methods(text).values()
    return build(parts, **common)


def test_a_call_takes_the_methods_parameters_and_every_strategys_settings() -> None:
    strategy = built("FedADC(0.7, downlink='delta', weighting='num-examples', seed=3)", seed=5)
    assert isinstance(strategy, fr.FedADC)
    assert strategy.term.config()["fedadc.beta_local"] == 0.7
    assert (strategy.downlink, strategy.weighting, strategy.seed) == ("delta", "num-examples", 3)


def test_an_argument_may_be_a_call_of_what_settings_take() -> None:
    strategy = built(
        "FedAvg(weighting='uniform', privacy=CentralDP(1.0, 0.5), stop_when=Target(0.9))"
    )
    assert strategy.privacy == fr.CentralDP(1.0, 0.5)
    assert strategy.stop_when == fr.Target(0.9)
    (label,) = parse_methods("FedAvg( stop_when = [1] )")
    assert label == "FedAvg(stop_when=[1])"
    with pytest.raises(
        ValueError, match=r"'FedAvg\(open\('f'\)\)': an argument may be a call of CenteredClipping"
    ):
        built("FedAvg(open('f'))")
    with pytest.raises(ValueError, match=r"'Target\(valu=1\)': there is no argument 'valu'"):
        built("FedAvg(stop_when=Target(valu=1))")


def test_what_a_call_says_wins_over_the_common_settings() -> None:
    common = {"weighting": "num-examples", "seed": 5}
    assert built("FedADC", **common).weighting == "num-examples"
    assert built("FedADC(weighting='uniform')", **common).weighting == "uniform"
    assert built("FedAvg('uniform')", **common).weighting == "uniform"
    composed = built("FedBN+FedFOR(downlink='delta', seed=1)", **common)
    assert (composed.downlink, composed.seed, composed.weighting) == ("delta", 1, "num-examples")
    assert built("FedFOR+SparseTernary(0.1, seed=9)", **common).seed == 9


def test_a_composition_orders_its_terms_and_follows_the_strategy_with_ways_of_its_own() -> None:
    strategy = built("SparseTernary(0.1)+EFL(0.5)".replace("EFL(0.5)", "FedCurv(0.5)+FedADC"))
    assert strategy.method_name == "fedadc+fedcurv+ternary"
    assert strategy.weighting == "uniform"
    assert built("FedBN+FedFOR").weighting == "num-examples"
    assert built("SCAFFOLD(weighting='num-examples')+FedADC").weighting == "num-examples"
    assert built("EFL(0.5)+FedBN").incomplete == built("FedBN+EFL(0.5)").incomplete == "scale"


def test_a_schedule_reaches_the_server_optimisers_alone() -> None:
    half = {"server_lr_schedule": lambda t: 0.5}
    for text in ("FedAvgM", "FedYogi", "FedOpt('SGD', lr=0.1)", "FedBN+FedAdam"):
        schedules = [getattr(t, "schedule", None) for t in built(text, **half).term.terms]
        assert half["server_lr_schedule"] in schedules, text
    built("FedADC", **half)


def test_every_method_of_the_registry_builds_and_has_its_client() -> None:
    for row in fr.METHODS.values():
        strategy = built(row.example)
        assert strategy.method_name == row.name
        client = client_class(strategy)
        assert (client.__name__, client.method) == (row.client, row.name)


def test_a_composition_gets_a_client_of_its_terms() -> None:
    client = client_class(built("FedAdam+FedBN+FedFOR"))
    assert client.method is None
    assert list(client.terms) == [fr.LocalBatchNorm, fr.FirstOrder]


class Shifted(fr.FedFOR):
    """A user's strategy: its name is inherited, and its terms are its own."""

    def __init__(self, mu: float = 0.1) -> None:
        fr.RegStrategy.__init__(self, [fr.FirstOrder(1.0), fr.Proximal(mu)])


def test_two_methods_that_clients_would_mix_up_are_refused() -> None:
    own = f"{__name__}:Shifted"
    assert list(client_class(built(own)).terms) == [fr.FirstOrder, fr.Proximal]
    with pytest.raises(
        ValueError, match=r"'FedFOR' and .*Shifted' are both named 'FedFOR', but their"
    ):
        runs_of(methods=f"FedFOR, {own}")
    assert len(runs_of(methods="FedFOR(alpha=1.0), FedFOR(alpha=2.0)")) == 2


def test_fedopt_takes_torchs_names_and_arguments() -> None:
    strategy = fr.FedOpt("SGD", lr=0.7, momentum=0.5, nesterov=True, seed=3)
    (term,) = strategy.term.terms
    assert isinstance(term, fr.TorchServerOptimizer)
    made = term.make([torch.zeros(1, requires_grad=True)])
    assert type(made) is torch.optim.SGD
    group = made.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.7, 0.5, True)
    assert strategy.seed == 3
    assert isinstance(built("FedOpt(server_optimizer='Adam')"), fr.FedOpt)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("Sgd", {}, "torch.optim has no class 'Sgd'; did you mean 'SGD'?"),
        ("Optimizer", {}, "torch.optim has no class 'Optimizer'"),
        ("SGD", {"momentun": 1}, "neither torch's SGD nor a strategy takes 'momentun'; did you mean 'mom"),
        ("SGD", {"params": 1}, "takes 'params'"),
        ("SGD", {"momentum": 0.0, "nesterov": True}, "Nesterov momentum requires a momentum"),
    ],
)  # fmt: skip
def test_fedopt_refuses_what_torch_does_not_have(name: str, kwargs: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        fr.FedOpt(name, **kwargs)


@pytest.mark.parametrize(
    ("method", "target", "name", "expected"),
    [
        ("FedFOR(0.5, seed=1)", "FedFOR", "alpha", "FedFOR(9, seed=1)"),
        ("FedFOR(alpha=0.5)+FedBN", "FedFOR", "alpha", "FedFOR(alpha=9)+FedBN"),
        ("EFL(density_up=0.1)", "EFL", "lam", "EFL(density_up=0.1, lam=9)"),
        ("flwr_regs:FedProx", "flwr_regs:FedProx", "mu", "flwr_regs:FedProx(mu=9)"),
    ],
)
def test_an_argument_is_replaced_or_added(
    method: str, target: str, name: str, expected: str
) -> None:
    (parts,) = parse_methods(method).values()
    assert text_of(with_argument(parts, target, name, 9)) == expected


def test_values_and_words_are_split_outside_brackets_and_quotes() -> None:
    assert calls.values("A(x=1, y=2), B; (1, 2),'a,b'") == ["A(x=1, y=2)", "B", "(1, 2)", "'a,b'"]
    line = "methods=A(v='x y', w=1)+B(t=\"z\") out='/my folder' lr=0.1 methods=\"A(v='x')\""
    assert calls.words(line) == [
        "methods=A(v='x y', w=1)+B(t=\"z\")",
        "out=/my folder",
        "lr=0.1",
        "methods=A(v='x')",
    ]
    for wrong in ("heavy", "f(x)", "1 2", ""):
        with pytest.raises(ValueError, match="must be a literal"):
            calls.literal(wrong)
    with pytest.raises(ValueError, match="--values holds no value"):
        calls.values(" ,")
