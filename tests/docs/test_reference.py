"""The reference pages lack no key, and the guide says of no method what its registry row denies."""

from __future__ import annotations

import re

import pytest

from flwr_regs.experiments.methods_table import properties_of
from flwr_regs.methods.registry import METHODS
from flwr_regs.server.round import Round
from flwr_regs.wire import config, keys
from tests.conftest import ROOT

DOCS = ROOT / "docs"


def first_cells(text: str) -> list[str]:
    """What stands in code in the first cell of each row of the tables."""
    rows = re.findall(r"^\| (`.*?) \|", text, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_the_history_page_has_each_key_of_an_entry() -> None:
    full = Round(1, lr=0.1, probe_down={}, probe_up={}, bytes_ahead={}, metrics={}, late=[0])
    files = [
        f for folder in ("server", "flower") for f in (ROOT / "flwr_regs" / folder).glob("*.py")
    ]
    code = "".join(f.read_text() for f in files)
    events = re.findall(r"(?:\.events|entry|history\[-1\])(?:\.setdefault\(|\[)\"(\w+)\"", code)
    assert len(events) > 10
    page = (DOCS / "reference/history.md").read_text().split("## The results folder")[0]
    assert sorted(first_cells(page)) == sorted({*full.entry(), *events})


def test_the_protocol_page_has_each_name_of_the_protocol() -> None:
    page = (DOCS / "protocol.md").read_text()
    named = [v for k, v in vars(keys).items() if k.isupper() and isinstance(v, str)]
    given = [*config.TRAIN_KEYS, *config.EVALUATE_KEYS, *config.FLOWER_KEYS]
    cells = first_cells(page)
    for name in {*named, *given}:
        assert name in cells, name
    ours = {c for c in cells if c.startswith("regs.")}
    assert ours <= {*named}
    assert f"The version is **{keys.PROTOCOL}**" in page


@pytest.mark.parametrize(
    ("setting", "fits"),
    [
        ("cross-device", lambda m: not m.state and m.setting != "silo"),
        ("central differential privacy", lambda m: properties_of(m).central_dp),
        ("secure aggregation", lambda m: properties_of(m).secure_aggregation),
    ],
)
def test_the_guide_agrees_with_the_registry(setting: str, fits: object) -> None:
    text = (DOCS / "which-method.md").read_text()
    _, _, candidates, others, _ = next(
        line.split("|") for line in text.splitlines() if line.startswith(f"| [{setting}]")
    )
    yes, no = (re.findall(r"`(\w+)`", cell) for cell in (candidates, others))
    assert len(yes) > 5
    assert len(no) > 3
    assert [n for n in yes if not fits(METHODS[n])] == []  # type: ignore[operator]
    assert [n for n in no if fits(METHODS[n])] == []  # type: ignore[operator]
