"""The page of fidelity: each figure that can be measured here is as measured."""

import pytest

from benchmarks import fidelity
from benchmarks.conformity.behaviours import BEHAVIOURS


@pytest.mark.parametrize(
    "row", fidelity.kept()["divergences"], ids=lambda row: row["behaviours"][0]
)
def test_a_divergences_figure_is_measured(row: dict[str, str]) -> None:
    (behaviour,) = row["behaviours"]
    assert row["method"] in BEHAVIOURS[behaviour].methods
    difference = fidelity.difference(row["method"], [behaviour])
    assert difference == pytest.approx(float(row["difference"]), rel=0.06)
    assert difference > 1e-3
