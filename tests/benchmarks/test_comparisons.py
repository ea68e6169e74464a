"""The documents' comparisons are fair, and their tables are those of the records."""

from __future__ import annotations

import json

from benchmarks import comparisons
from flwr_regs.experiments.run.tuning import Bench


def test_studies_are_fair() -> None:
    """As many trials for each method, tuned apart from the test, and five seeds."""
    for name in comparisons.studies():
        folder = comparisons.unpacked(name)
        bench, found = Bench.load(folder), comparisons.results(name)
        assert len(bench.seeds) >= 5
        assert not {*bench.seeds} & {*bench.tuning_seeds}
        assert [(r.label, r.seed) for r in found.runs] == [
            (row, s) for row in bench.labels for s in bench.seeds
        ]
        settings = json.loads((folder / "settings.json").read_text())
        assert {*settings["trials"].values()} == {bench.trials}


def test_the_tables_arithmetic_is_that_of_the_records() -> None:
    """One cell by hand: the mean of the last five rounds over the seeds, of the first study."""
    name = comparisons.studies()[0]
    found = comparisons.results(name)
    label = found.runs[0].label
    runs = [r for r in found.runs if r.label == label and not r.error]
    mean = sum(sum(p["accuracy"] for p in r.test[-5:]) / 5 for r in runs) / len(runs)
    (line,) = (x for x in comparisons.table(name, label).splitlines() if x.startswith("| `"))
    assert line.split("|")[2].split("±")[0].strip() == f"{100 * mean:.2f}"
