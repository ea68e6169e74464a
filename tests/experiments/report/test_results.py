"""Rows and tables from runs, against plain arithmetic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from flwr_regs.experiments.report import rows
from flwr_regs.experiments.report.results import Results, number
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.settings import DEFAULTS

NAN = "RoundFailed: round 3 of X diverged: array 'w' holds NaN or infinity"


def run(label: str, accuracy: list[float], seed: int = 1, **more: Any) -> RunRecord:
    """A run with an untrained accuracy of 10 % and 1 MB down, 0.5 MB up for each of two clients a round."""
    rounds = [
        {
            "round": t,
            "bytes_down": {0: 1_000_000, 1: 1_000_000},
            "bytes_up": {0: 500_000, 1: 500_000},
            "failures": {},
            "seconds": {"clients": 2.0, "aggregate": 0.5},
        }
        for t in range(1, len(accuracy) + 1)
    ]
    test = [{"round": t, "loss": 1.0, "accuracy": a} for t, a in enumerate([0.1, *accuracy])]
    made = RunRecord(
        label,
        label,
        seed,
        {**DEFAULTS, "target-accuracy": 0.85, "seed": seed},
        4,
        {},
        test,
        rounds,
        ended=True,
    )
    vars(made).update(seconds=3.0, processor_seconds=2.0)
    vars(made).update(more)
    return made


GOOD = [0.5, 0.8, 0.9, 0.86, 0.88, 0.92, 0.94]


def test_a_row_has_means_and_sample_deviations_over_seeds() -> None:
    other = [0.4, 0.6, 0.7, 0.7, 0.7, 0.7, 0.8]
    clients = {"clients": [0.7, 0.9], "mean": 0.8, "std": 0.1, "worst": 0.7}
    (row,) = rows.rows([run("A", GOOD, 1, per_client=clients), run("A", other, 2)])
    assert (row["n"], row["diverged"], row["collapsed"], row["failures"]) == (2, 0, 0, 0)
    fives = [sum(GOOD[2:]) / 5, sum(other[2:]) / 5]
    assert row["last5"] == pytest.approx(sum(fives) / 2)
    assert row["last5_std"] == pytest.approx(abs(fives[0] - fives[1]) / math.sqrt(2))  # n - 1
    assert row["final_std"] == pytest.approx(0.14 / math.sqrt(2))
    assert (row["best"], row["worst_client"]) == (pytest.approx(0.87), 0.7)
    assert (row["rounds_to_target"], row["reached"]) == (3, 1)
    # three megabytes a round over four clients, seven rounds
    assert row["mb"] == pytest.approx(5.25)
    assert row["mb_to_target"] == pytest.approx(2.25)
    assert (row["mb_down"], row["mb_up"]) == (1.0, 0.5)
    assert (row["seconds"], row["processor_seconds"]) == (3.0, 2.0)


def test_the_interval_is_students_and_the_difference_is_paired() -> None:
    a = [run("A", [v], seed) for seed, v in enumerate((0.5, 0.6, 0.7))]
    b = [run("B", [v], seed) for seed, v in enumerate((0.52, 0.63, 0.71))]
    first, second = rows.rows([*a, *b], "A")
    # t(0.975, 2) = 4.302653; the deviation of 0.5, 0.6, 0.7 is 0.1
    assert first["last5_interval"] == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert first["difference"] is None
    gaps = np.array([0.02, 0.03, 0.01])
    assert second["difference"] == pytest.approx(0.02)
    expected = 4.302653 * gaps.std(ddof=1) / math.sqrt(3)
    assert second["difference_interval"] == pytest.approx(expected, rel=1e-6)
    # a seed that one of the two lost is left out of the difference
    b[2].error = "RoundFailed: diverged"
    assert rows.rows([*a, *b], "A")[1]["difference"] == pytest.approx(0.025)


def test_a_diverged_seed_is_counted_and_voids_nothing() -> None:
    bad = run("A", [0.9, 0.9], 2, error=NAN, diverged=True)
    (row,) = rows.rows([run("A", GOOD, 1), bad])
    assert (row["n"], row["diverged"], row["last5_std"]) == (2, 1, None)
    assert row["last5"] == pytest.approx(0.9)
    assert row["reached"] == 2  # it was there before it diverged
    (said,) = rows.warnings([run("A", GOOD, 1), bad])
    assert said.startswith("A: 1 of 2 seeds diverged; seed 2: diverged in round 3")
    text = Results([run("A", GOOD, 1), bad]).text()
    assert "(2 of 2)" in text
    assert "1 of 2 seeds diverged" in text
    points = Results([run("A", GOOD, 1), bad])._points()
    counts = points.groupby("seed")["stopped"].agg(["sum", "size"])
    assert counts.to_numpy().tolist() == [[0, 8], [3, 3]]


def test_a_collapse_and_rejected_replies_are_said() -> None:
    fallen = run("A", [0.5, 0.8, 0.85, 0.86, 0.85, 0.84, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1])
    fallen.rounds[9]["failures"] = {"41": "array 'w' holds NaN or infinity"}
    assert rows.collapsed(fallen)
    assert not rows.collapsed(run("A", GOOD))
    assert not rows.collapsed(run("A", [0.9, 0.1, 0.9, 0.9, 0.9]))  # one unlucky round
    collapse, rejected = rows.warnings([fallen])
    assert collapse == (
        "A: 1 of 1 seed collapsed; seed 1 ends at 10.0%, its best was 86.0% in round 4"
    )
    assert rejected == (
        "A: 1 replies were rejected, the first in round 10 of seed 1: client 41: array 'w' holds NaN or "
        "infinity"
    )


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("baseline", ["", "FedAvg"])
def test_the_table_fits_80_columns(seeds: int, baseline: str) -> None:
    long = "FedADC(beta=0.7, downlink='delta')+SparseTernary(density_up=0.01, density_down=0.01)"
    every = [run(label, GOOD, s) for label in ("FedAvg", long) for s in range(seeds)]
    every[-1].rounds[0]["bytes_down"][0] = 10**14
    text = Results(
        every, ["a note that is so long that it must be broken " * 3], baseline=baseline
    ).text()
    assert max(map(len, text.splitlines())) <= 80
    assert text == "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    assert "n = 3 (seeds 0, 1, 2)" in text or "n = 1 (seed 0)" in text
    assert ("95 % interval" in text) == (baseline != "" and seeds > 1)
    tex = Results(every, baseline=baseline).latex()
    columns = tex.split("{tabular}{")[1].split("}")[0]
    body = [line for line in tex.splitlines() if line.endswith(r"\\")]
    assert len(body) == 3
    assert all(line.count(" & ") == len(columns) - 1 for line in body)
    assert "_" not in tex.replace(r"\_", "")


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (0.0123456, "0.0123"), (1.5, "1.50"), (99.96, "100"), (1234.5, "1234")],
)
def test_numbers_have_three_digits(value: float | None, text: str) -> None:
    assert number(value) == text


def test_an_unfinished_run_is_in_no_mean_and_is_said() -> None:
    """As `plot` finds it after a kill: no end in its record."""
    half = run("A", [0.2, 0.3], 2, ended=False)
    (row,) = rows.rows([run("A", GOOD, 1), half], "A")
    assert (row["n"], row["unfinished"], row["last5_std"]) == (2, 1, None)
    assert (row["last5"], row["mb"]) == (pytest.approx(0.9), pytest.approx(5.25))
    (said,) = rows.warnings([run("A", GOOD, 1), half])
    assert said == ("A: 1 of 2 seeds unfinished, in no mean; seed 2: it has 2 of 30 rounds")
    nothing = run("A", [], ended=False)
    assert rows.rows([nothing], "A")[0]["last5"] is None


def test_a_label_is_shown_as_it_is_written(tmp_path: Path) -> None:
    labels = ["FedAvg [lr=0.1]", "[red]x :car:", r"50% $x_1^2$ {\a}~&#"]
    made = Results([run(label, GOOD) for label in labels])
    assert all(label in made.text() for label in labels)
    assert (
        r"50\% \$x\_1\textasciicircum 2\$ \{\textbackslash a\}\textasciitilde \&\#" in made.latex()
    )
    made.save_tables(tmp_path)
    summary = pd.read_csv(tmp_path / "summary.csv", index_col="method")
    assert [*summary.index] == labels
    assert summary["final"].tolist() == [GOOD[-1]] * 3
    assert (tmp_path / "table.tex").read_text() == made.latex()


def test_a_round_without_a_test_moves_no_point() -> None:
    """Where clients test, none of them may be able to once."""
    gap = run("A", [0.5, 0.6, 0.9])
    del gap.test[2]
    points = Results([gap])._points()
    assert points["megabytes"].tolist() == [0.0, 0.75, 2.25]
    assert points["seconds"].tolist() == [0.0, 2.5, 7.5]
    (row,) = rows.rows([gap])
    assert (row["rounds_to_target"], row["mb_to_target"]) == (3, 2.25)
