"""Every two methods of the registry, joined by ``+``: they train together, or are refused with a reason."""

import itertools
import re

import pytest

import flwr_regs as fr
from flwr_regs.abilities import Compresses
from flwr_regs.experiments.calls import parse_methods
from flwr_regs.experiments.strategies import build
from flwr_regs.wire.keys import INCOMPLETE_KEY

CALLS = {row.name: row.example for row in fr.METHODS.values()} | {
    "FedPer": "FedPer('3.*')",
    "SparseTernary": "SparseTernary(density_up=0.3)",
}
PAIRS = list(itertools.combinations(CALLS, 2))


def composed(pair: tuple[str, str]) -> fr.RegStrategy:
    (calls,) = parse_methods("+".join(CALLS[name] for name in pair)).values()
    strategy = build(calls, seed=4, fraction_train=0.8, fraction_evaluate=0.2)
    strategy.term.restrict(
        {INCOMPLETE_KEY: strategy.incomplete}
    )  # else refused when round 1 begins
    return strategy


def refusal(pair: tuple[str, str]) -> str:
    try:
        composed(pair)
    except ValueError as error:
        return str(error)
    return ""


REFUSED = {pair: why for pair in PAIRS if (why := refusal(pair))}


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_says_what_to_do(name: str) -> None:
    for pair, why in REFUSED.items():
        if name == pair[0]:
            assert re.search(r"\b(keep|leave|put|choose|give|use)\b", why), (pair, why)


def test_a_code_stands_last_whatever_comes_first() -> None:
    for pair in PAIRS:
        if pair not in REFUSED:
            *others, last = composed(pair).term.terms
            assert not any(isinstance(t, Compresses) for t in others), pair
            if "SparseTernary" in pair:
                assert isinstance(last, Compresses), pair
