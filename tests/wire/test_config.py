"""The nearest name: what a user may have meant."""

from __future__ import annotations

import pytest

from flwr_regs.wire.config import nearest

SETTINGS = ["lr", "batch-size", "local-epochs", "dirichlet-alpha", "num-clients", "seed"]
NAMES = ["FedAvg", "FedAvgM", "FedFOR", "FedADC", "FedADCPlus", "SparseTernary"]


@pytest.mark.parametrize(
    ("name", "known", "meant"),
    [
        ("fedavg", NAMES, "FedAvg"),
        ("ternary", NAMES, "SparseTernary"),
        ("bs", SETTINGS, "batch-size"),
        ("alpha", SETTINGS, "dirichlet-alpha"),
        ("sede", SETTINGS, "seed"),
    ],
)
def test_a_similar_name_is_suggested(name: str, known: list[str], meant: str) -> None:
    assert nearest(name, known) == f"; did you mean '{meant}'?"
    assert nearest(name, reversed(known)) == f"; did you mean '{meant}'?"


@pytest.mark.parametrize("name", ["xyz", "", "-", "colour"])
def test_a_name_like_none_gets_no_suggestion(name: str) -> None:
    assert nearest(name, SETTINGS) == ""
    assert nearest(name, []) == ""
