"""The papers' claims that a page of results judges."""

from benchmarks import results
from flwr_regs.experiments.cards import card_files


def test_each_claim_names_rows_that_its_card_has() -> None:
    for claim in results.claims():
        card = card_files.load(claim["card"])
        panel = card_files.panel_of(card, claim["panel"])
        rows = [row.name for row in card.rows_of(panel).values()]
        assert {claim["method"], claim["against"]} <= {*rows}
        assert claim["metric"] in card.metrics
