"""The documents' comparisons: tables and commands are those of the kept results."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import comparisons
from flwr_regs.experiments.run.tuning import Bench
from tests.conftest import ROOT

STUDIES = sorted(path.parent.name for path in comparisons.STUDIES.glob("*/bench.json"))


@pytest.mark.parametrize("page", comparisons.PAGES, ids=lambda page: page.stem)
def test_a_page_shows_the_results_as_they_are(page: object) -> None:
    text = page.read_text()  # type: ignore[attr-defined]
    assert comparisons.filled(text) == text


def test_every_study_is_shown_and_every_picture_is_used() -> None:
    pages = "".join(page.read_text() for page in comparisons.PAGES)
    assert {m[3] for m in comparisons.MARK.finditer(pages) if m[2] == "study"} == {*STUDIES}
    assert {m[3] for m in comparisons.MARK.finditer(pages) if m[2] == "command"} <= {*STUDIES}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_is_fair(name: str) -> None:
    """As many trials for each method, tuned apart from the test, five seeds, and no path of a machine."""
    bench = Bench.load(comparisons.STUDIES / name)
    found = comparisons.results(name)
    assert len(bench.seeds) >= 5
    assert not {*bench.seeds} & {*bench.tuning_seeds}
    assert [(r.label, r.seed) for r in found.runs] == [
        (row, s) for row in bench.labels for s in bench.seeds
    ]
    settings = json.loads((comparisons.STUDIES / name / "settings.json").read_text())
    assert {*settings["trials"].values()} == {bench.trials}
    assert all(r.job["held-out-share"] == r.job["held-out-clients"] == 0 for r in found.runs)
    files = (comparisons.STUDIES / name).rglob("*.json*")
    assert not [f for f in files if re.search(r"\"(/|~|C:)[\w/]{3}", f.read_text())]


def test_the_tables_arithmetic_is_that_of_the_records() -> None:
    """One cell by hand: the mean of the last five rounds over the seeds, of the first study."""
    found = comparisons.results(STUDIES[0])
    label = found.runs[0].label
    mine = [r for r in found.runs if r.label == label and not r.error]
    mean = sum(sum(p["accuracy"] for p in r.test[-5:]) / 5 for r in mine) / len(mine)
    (line,) = (x for x in comparisons.table(STUDIES[0], label).splitlines() if x.startswith("| `"))
    assert line.split("|")[2].split("±")[0].strip() == f"{100 * mean:.2f}"
    assert (ROOT / "docs" / "comparisons.md").is_file()
