"""Every two methods of the registry, joined by ``+``: they train together, or are refused with a reason."""

import itertools
import re

import flwr_regs as fr
from flwr_regs.abilities import Compresses
from flwr_regs.wire.keys import INCOMPLETE_KEY
from tests.experiments.runs import strategy_of

CALLS = {row.name: row.example for row in fr.METHODS.values()} | {
    "FedPer": "FedPer('3.*')",
    "SparseTernary": "SparseTernary(density_up=0.3)",
}


def composed(pair: tuple[str, str]) -> fr.RegStrategy:
    text = "+".join(CALLS[name] for name in pair)
    strategy = strategy_of(text, seed=4, fraction_train=0.8, fraction_evaluate=0.2)
    strategy.term.restrict({INCOMPLETE_KEY: strategy.incomplete})  # as when round 1 begins
    return strategy


def test_a_pair_is_refused_with_what_to_do_or_its_code_stands_last() -> None:
    """Whatever comes first."""
    refused = {}
    for pair in itertools.combinations(CALLS, 2):
        try:
            *others, last = composed(pair).term.terms
        except ValueError as error:
            refused[pair] = str(error)
            continue
        assert not any(isinstance(t, Compresses) for t in others), pair
        assert isinstance(last, Compresses) or "SparseTernary" not in pair, pair
    assert len(refused) > 100
    for pair, why in refused.items():
        assert re.search(r"\b(keep|leave|put|choose|give|use)\b", why), (pair, why)
