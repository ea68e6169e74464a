"""The documents' comparisons are fair, and the papers' claims that a page judges name what there is."""

import hashlib

from benchmarks import comparisons, results
from flwr_regs.experiments import commands
from flwr_regs.experiments.cards import card_files


def test_studies_are_fair() -> None:
    """As many trials for each method, tuned apart from the test, and five seeds."""
    for name in comparisons.studies():
        folder = comparisons.unpacked(name)
        study, found = card_files.of_folder(folder)[0], comparisons.results(name)
        assert len(study.seeds) >= 5
        runs = study.tests(*study.panels, commands.chosen_of(study, folder))
        assert commands.check_records(runs, folder) == []  # else `check` trains nothing
        assert not {*study.seeds} & {*study.tuning_seeds}
        assert [(r.label, r.seed) for r in found.runs] == [
            (row, s) for row in comparisons.labels(study) for s in study.seeds
        ]
        assert {len(study.points_of(row)) for row in study.rows} == {study.trials}


def test_a_page_has_the_hash_of_its_raw_runs() -> None:
    for archive in (comparisons.ROOT / "docs/results").glob("*.tar.xz"):
        page = archive.with_name(archive.name.replace(".tar.xz", ".md")).read_text()
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()[: results.HASH]
        assert f"({archive.name}), sha256 `{digest}…`" in page, archive.name


def test_each_claim_names_rows_that_its_card_has() -> None:
    for claim in results.claims():
        card = card_files.load(claim["card"])
        panel = card_files.panel_of(card, claim["panel"])
        rows = [row.name for row in card.rows_of(panel).values()]
        assert {claim["method"], claim["against"]} <= {*rows}
        assert claim["metric"] in card.metrics
