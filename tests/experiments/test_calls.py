"""Methods as calls: what is parsed, and what is built; commands.txt has what is refused."""

from typing import Any

import pytest

import flwr_regs as fr
from flwr_regs.experiments import calls, strategies
from flwr_regs.experiments.calls import Call, parse_methods, text_of
from flwr_regs.flower.client import client_class
from tests.experiments.runs import runs_of, strategy_of

B = Call("B", (), {}, called=True)
C = Call("C", (1,), {"y": "d,e"}, called=True)
FILE = "~/x y/a-b.c/mine.py:C.make"
PARSED: list[tuple[str, list[list[Any]]]] = [
    # text, and its methods: each a list of parts (target, args, kwargs)
    (" A ; B( x = 5e-1 ) ;", [[("A", (), {})], [("B", (), {"x": 0.5})]]),
    ("A,B(0.1)+C(\n  x=+1,\n)", [[("A", (), {})], [("B", (0.1,), {}), ("C", (), {"x": 1})]]),
    ("A(x=-1, y=None, z=True)", [[("A", (), {"x": -1, "y": None, "z": True})]]),
    ("A((1, 2), [3], {'a': (4,)})", [[("A", ((1, 2), [3], {"a": (4,)}), {})]]),
    ("A('a,b;c+d:e(f', \"it's\")", [[("A", ("a,b;c+d:e(f", "it's"), {})]]),
    (r"A('it\'s, so')", [[("A", ("it's, so",), {})]]),
    ("a.b.mine:C.make()+D", [[("a.b.mine:C.make", (), {}), ("D", (), {})]]),
    (r"A+C:\x y\mine.py:T(1)", [[("A", (), {}), (r"C:\x y\mine.py:T", (1,), {})]]),
    ("A(B(), x=C(1, y='d,e'))", [[("A", (B,), {"x": C})]]),
    (
        f"A, {FILE}(x=1)+B; {FILE}",
        [[("A", (), {})], [(FILE, (), {"x": 1}), ("B", (), {})], [(FILE, (), {})]],
    ),
]


@pytest.mark.parametrize(("text", "expected"), PARSED, ids=[t for t, _ in PARSED])
def test_a_text_is_methods_parts_and_literals(text: str, expected: Any) -> None:
    methods = parse_methods(text)
    assert [[(c.target, c.args, c.kwargs) for c in m] for m in methods.values()] == expected
    again = parse_methods("; ".join(methods))  # a label means the same, and is its own label
    assert list(again.items()) == list(methods.items())


def test_a_label_has_one_form() -> None:
    labels = ["FedFOR(alpha=0.5)", "FedAvg", "A('x')"]
    assert list(parse_methods('FedFOR( alpha=0.50 ), FedAvg(), A("x")')) == labels


BUILT: list[tuple[str, dict[str, Any]]] = [
    # a call, and what its strategy has: the call's settings win over the common ones
    ("FedADC(downlink='delta', seed=3)", {"downlink": "delta", "seed": 3, "weighting": "uniform"}),
    ("FedAvg('uniform')", {"weighting": "uniform", "seed": 5}),
    ("FedAvg(stop_when=Target(0.9))", {"stop_when": fr.Target(0.9), "weighting": "num-examples"}),
    ("FedBN+FedFOR(downlink='delta')", {"downlink": "delta", "weighting": "num-examples"}),
    ("SparseTernary(0.1, seed=9)+FedCurv(0.5)+FedADC", {"seed": 9, "weighting": "uniform"}),
    ("SparseTernary(0.1)+FedCurv(0.5)+FedADC", {"method_name": "fedadc+fedcurv+ternary"}),
    ("SCAFFOLD(weighting='num-examples')+FedADC", {"weighting": "num-examples"}),
    ("EFL(0.5)+FedBN", {"incomplete": "scale"}),
    ("FedBN+EFL(0.5)", {"incomplete": "scale"}),
]


@pytest.mark.parametrize(("text", "attributes"), BUILT, ids=[text for text, _ in BUILT])
def test_a_call_or_a_composition_has_its_settings(text: str, attributes: dict[str, Any]) -> None:
    strategy = strategy_of(text, seed=5)
    assert {name: getattr(strategy, name) for name in attributes} == attributes


def test_a_schedule_reaches_the_server_optimisers_alone() -> None:
    half = {"server_lr_schedule": lambda t: 0.5}
    for text in ("FedAvgM", "FedYogi", "FedOpt('SGD', lr=0.1)", "FedBN+FedAdam"):
        schedules = [getattr(t, "schedule", None) for t in strategy_of(text, **half).term.terms]
        assert half["server_lr_schedule"] in schedules, text
    strategy_of("FedADC", **half)


def test_a_composition_gets_a_client_of_its_terms() -> None:
    client = client_class(strategy_of("FedAdam+FedBN+FedFOR"))
    assert client.method is None
    assert list(client.terms) == [fr.LocalBatchNorm, fr.FirstOrder]


class Shifted(fr.FedFOR):
    """A user's strategy: its name is inherited, and its terms are its own."""

    def __init__(self, mu: float = 0.1, **settings: Any) -> None:
        fr.RegStrategy.__init__(self, [fr.FirstOrder(1.0), fr.Proximal(mu)], **settings)


def test_two_methods_that_clients_would_mix_up_are_refused() -> None:
    own = f"{__name__}:Shifted"
    assert list(client_class(strategy_of(own)).terms) == [fr.FirstOrder, fr.Proximal]
    with pytest.raises(ValueError, match=r"'FedFOR' and .*Shifted' are both named 'FedFOR', but"):
        runs_of(methods=f"FedFOR, {own}")
    assert len(runs_of(methods="FedFOR(alpha=1.0), FedFOR(alpha=2.0)")) == 2


REPLACED = [
    ("FedFOR(0.5, seed=1)", "FedFOR.alpha", "FedFOR(9, seed=1)"),
    ("FedFOR(alpha=0.5)+FedBN", "FedFOR.alpha", "FedFOR(alpha=9)+FedBN"),
    ("EFL(density_up=0.1)", "EFL.lam", "EFL(density_up=0.1, lam=9)"),
    ("flwr_regs:FedProx", "flwr_regs:FedProx.mu", "flwr_regs:FedProx(mu=9)"),
    ("gone.py:Clip(norm=1)", "gone.py:Clip.norm", "gone.py:Clip(norm=9)"),
]


def test_an_argument_is_replaced_or_added() -> None:
    for method, key, expected in REPLACED:
        (parts,) = parse_methods(method).values()
        assert text_of(strategies.with_argument(parts, key, 9)) == expected


def test_values_and_words_are_split_outside_brackets_and_quotes() -> None:
    assert calls.values("A(x=1, y=2), B; (1, 2),'a,b'") == ["A(x=1, y=2)", "B", "(1, 2)", "'a,b'"]
    line = "methods=A(v='x y', w=1)+B(t=\"z\") out='/my folder' lr=0.1 methods=\"A(v='x')\""
    words = ["methods=A(v='x y', w=1)+B(t=\"z\")", "out=/my folder", "lr=0.1", "methods=A(v='x')"]
    assert calls.words(line) == words
