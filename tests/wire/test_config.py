"""The nearest name: what a user may have meant."""

from flwr_regs.wire.config import nearest

SETTINGS = ["lr", "batch-size", "local-epochs", "dirichlet-alpha", "num-clients", "seed"]
NAMES = ["FedAvg", "FedAvgM", "FedFOR", "FedADC", "FedADCPlus", "SparseTernary"]


def test_a_similar_name_is_suggested_and_none_for_a_name_like_no_other() -> None:
    for name, known, meant in (
        ("fedavg", NAMES, "FedAvg"),
        ("ternary", NAMES, "SparseTernary"),
        ("bs", SETTINGS, "batch-size"),
        ("alpha", SETTINGS, "dirichlet-alpha"),
        ("sede", SETTINGS, "seed"),
    ):
        assert nearest(name, known) == f"; did you mean '{meant}'?"
        assert nearest(name, reversed(known)) == f"; did you mean '{meant}'?"
    for name in ("xyz", "", "-", "colour"):
        assert nearest(name, SETTINGS) == nearest(name, []) == ""
