"""Every two methods of the registry, joined by ``+``: they train together, or are refused with a reason."""

from __future__ import annotations

import itertools
import re
from functools import partial

import numpy as np
import pytest
import torch

import flwr_regs as fr
from flwr_regs.abilities import Compresses
from flwr_regs.experiments.settings.build import build, client_class
from flwr_regs.experiments.settings.calls import parse_methods
from flwr_regs.wire.keys import INCOMPLETE_KEY
from tests.conftest import make_clients, make_model, run
from tests.sampling import sampled

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


@sampled("pair", [p for p in PAIRS if p not in REFUSED], 6)
def test_two_methods_train_together(pair: tuple[str, str]) -> None:
    """Three rounds of four of five clients, in float32; no reply is lost, and the model moves."""
    strategy = composed(pair)
    model = partial(make_model, torch.float32, batch_norm=True)
    before = {n: a.numpy().copy() for n, a in model().state_dict().items()}
    got = run(
        strategy,
        client_class(strategy),
        rounds=3,
        clients=make_clients(5, torch.float32),
        model=model,
        train={"local-steps": 2, "lr": 0.02},
    )
    for entry in strategy.history:
        assert entry["failures"] == {}
        assert len(entry["replies"]) == 4
    assert all(np.isfinite(a).all() for a in got.values())
    assert any((a != before[n]).any() for n, a in got.items())


def test_a_code_stands_last_whatever_comes_first() -> None:
    for pair in PAIRS:
        if pair not in REFUSED:
            *others, last = composed(pair).term.terms
            assert not any(isinstance(t, Compresses) for t in others), pair
            if "SparseTernary" in pair:
                assert isinstance(last, Compresses), pair
