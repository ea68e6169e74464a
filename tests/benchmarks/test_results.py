"""Pages of results are made of kept runs: what is decided there, and the papers' claims."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from benchmarks import comparisons, results
from flwr_regs.experiments import commands
from flwr_regs.experiments.cards import card_files
from flwr_regs.experiments.report import run_records as records
from flwr_regs.experiments.report.run_records import Recorder, RunRecord
from tests.experiments.report.test_results import run

CARD = """
title = "Three methods"
source = "Us"
where = "Table 1"
setting = "reduced"
metrics = ["last5"]
seeds = [1, 2, 3]
[settings]
rounds = 1
[methods]
FedAvg = "FedAvg"
Far = "FedProx(mu=0.1)"
Near = "FedFOR"
[[panels]]
name = "one"
[[panels]]
name = "two"
settings = {partition = "iid"}
"""
ENDS = {"FedAvg": (0.5, 0.6, 0.7), "Far": (0.9, 0.99, 1.09), "Near": (0.52, 0.63, 0.71)}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page's folder with one archive, of hand-made runs."""
    experiment, folder = card_files.read(CARD, "mine"), tmp_path / "bench"
    folder.mkdir()
    made = {"command": ["flwr-regs", "bench", "mine", "out=/here"], "versions": {"torch": "2"}}
    commands.save(experiment, folder, {**made, "commit": "abc", "platform": "a machine"})
    for panel, place in commands.places(experiment, folder):
        names = {label: row.name for label, row in experiment.rows_of(panel).items()}
        for test in experiment.tests(panel):
            record: RunRecord = run(test.label, [ENDS[names[test.label]][test.seed - 1]], test.seed)
            record.job = test.settings.config
            Recorder(place, record).end(record)
    pages = tmp_path / "pages"
    pages.mkdir()
    monkeypatch.setattr(results, "PAGES", pages)
    monkeypatch.setattr(results, "PICTURES", tmp_path / "pictures")
    comparisons.keep(folder, pages / "mine.tar.xz")
    shutil.rmtree(folder)
    comparisons.unpacked.cache_clear()
    return pages


def test_a_page_says_what_is_decided_in_each_panel(kept: Path) -> None:
    assert results.main(["report"]) == 0
    page = (kept / "mine.md").read_text()
    assert "Decided better than `FedAvg`: `FedProx(mu=0.1)` (all)." in page
    assert "No method is decided worse than `FedAvg` in any panel." in page
    assert "| `FedProx(mu=0.1)` | **+39.33** | **+39.33** |" in page
    assert "| `FedFOR` | +2.00 ? | +2.00 ? |" in page
    assert page.count("### ") == 2
    assert "/here" not in page
    assert (kept.parent / "pictures" / "mine-ranks.png").is_file()
    folder = comparisons.unpacked("mine", kept)
    assert len([*folder.glob("*/runs/*.jsonl")]) == 18
    assert all(records.read(path).ended for path in folder.glob("*/runs/*.jsonl"))


@pytest.mark.parametrize(
    ("method", "against", "verdict"),
    [
        ("Far", "FedAvg", "holds"),
        ("FedAvg", "Far", "does not hold"),
        ("Near", "FedAvg", "not decided here"),
    ],
)
def test_claims_are_judged_by_the_kept_runs(
    kept: Path, method: str, against: str, verdict: str
) -> None:
    claim: dict[str, Any] = {"card": "mine", "panel": "one", "metric": "final"}
    claim |= {"method": method, "against": against}
    ((said, where), (other, _)) = results.verdicts([claim, {**claim, "card": "no-run"}])
    assert said == verdict
    assert "[mine](mine.md), reduced: ahead by" in where
    assert other == "not run"


def test_each_claim_names_rows_that_its_card_has() -> None:
    for claim in results.claims():
        card = card_files.load(claim["card"])
        panel = card_files.panel_of(card, claim["panel"])
        rows = [row.name for row in card.rows_of(panel).values()]
        assert {claim["method"], claim["against"]} <= {*rows}
        assert claim["metric"] in card.metrics
