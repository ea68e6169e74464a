"""The documents' comparisons are fair, and their tables are those of the records."""

from __future__ import annotations

from benchmarks import comparisons
from flwr_regs.experiments.cards import card_files


def test_studies_are_fair() -> None:
    """As many trials for each method, tuned apart from the test, and five seeds."""
    for name in comparisons.studies():
        folder = comparisons.unpacked(name)
        study, found = card_files.of_folder(folder)[0], comparisons.results(name)
        assert len(study.seeds) >= 5
        assert not {*study.seeds} & {*study.tuning_seeds}
        assert [(r.label, r.seed) for r in found.runs] == [
            (row, s) for row in comparisons.labels(study) for s in study.seeds
        ]
        assert {len(study.points_of(row)) for row in study.rows} == {study.trials}


def test_the_tables_arithmetic_is_that_of_the_records() -> None:
    """One cell by hand: the mean of the last five rounds over the seeds, of the first study."""
    name = comparisons.studies()[0]
    found = comparisons.results(name)
    label = found.runs[0].label
    runs = [r for r in found.runs if r.label == label and not r.error]
    mean = sum(sum(p["accuracy"] for p in r.test[-5:]) / 5 for r in runs) / len(runs)
    (line,) = (x for x in comparisons.table(name, label).splitlines() if x.startswith("| `"))
    assert line.split("|")[2].split("±")[0].strip() == f"{100 * mean:.2f}"
