"""Rows and tables from runs, against plain arithmetic."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flwr_regs.experiments.report import metrics
from flwr_regs.experiments.report.results import Results, number
from flwr_regs.experiments.report.run_records import RunRecord
from flwr_regs.experiments.settings import DEFAULTS

NAN = "RoundFailed: round 3 of X diverged: array 'w' holds NaN or infinity"
GOOD = [0.5, 0.8, 0.9, 0.86, 0.88, 0.92, 0.94]


def run(label: str, accuracy: list[float], seed: int = 1, **more: Any) -> RunRecord:
    """A run with an untrained accuracy of 10 % and 1 MB down, 0.5 MB up for each of two clients a round."""
    job = {**DEFAULTS, "target-accuracy": 0.85, "seed": seed}
    record = RunRecord(label, label, seed, job, 4, {}, ended=True)
    for t, a in enumerate([0.1, *accuracy]):
        record.test.append({"round": t, "loss": 1.0, "accuracy": a})
        sent = {"bytes_down": dict.fromkeys((0, 1), 10**6), "bytes_up": {0: 500_000, 1: 500_000}}
        spent = {"seconds": {"clients": 2.0, "aggregate": 0.5}, "cohort": [0, 1]}
        record.rounds.append({"round": t, **sent, **spent, "failures": {}})
    del record.rounds[0]
    vars(record).update(seconds=3.0, processor_seconds=2.0)
    vars(record).update(more)
    return record


def test_a_row_has_means_and_sample_deviations_over_seeds() -> None:
    other = [0.4, 0.6, 0.7, 0.7, 0.7, 0.7, 0.8]
    clients = {"clients": [0.7, 0.9], "mean": 0.8, "std": 0.1, "worst": 0.7}
    (row,) = metrics.rows([run("A", GOOD, 1, per_client=clients), run("A", other, 2)])
    fives = [sum(GOOD[2:]) / 5, sum(other[2:]) / 5]
    counts = [row[name] for name in ("n", "diverged", "collapsed", "failures", "reached")]
    assert counts == [2, 0, 0, 0, 1]
    assert row["last5"] == pytest.approx(sum(fives) / 2)
    assert row["last5_std"] == pytest.approx(abs(fives[0] - fives[1]) / math.sqrt(2))  # n - 1
    assert row["final_std"] == pytest.approx(0.14 / math.sqrt(2))
    assert row["final_interval"] == pytest.approx(12.7062 * 0.07, rel=1e-5)  # t(0.975, 1)
    assert (row["best"], row["worst_client"]) == (pytest.approx(0.87), 0.7)
    # three megabytes a round over four clients, seven rounds
    megabytes = [row[name] for name in ("mb", "mb_to_target", "mb_down_turn", "mb_up_turn")]
    assert megabytes == pytest.approx([5.25, 2.25, 1.0, 0.5])
    assert (row["rounds_to_target"], row["seconds"], row["processor_seconds"]) == (3, 3.0, 2.0)


def test_a_seed_that_diverged_counts_as_untrained_in_table_and_picture() -> None:
    both = [run("A", GOOD, 1), run("A", [0.9, 0.9], 2, error=NAN, diverged=True)]
    (row,) = metrics.rows(both)
    assert (row["n"], row["diverged"], row["reached"]) == (2, 1, 2)
    assert row["last5"] == pytest.approx((0.9 + 0.1) / 2)
    assert row["last5_std"] == pytest.approx(0.8 / math.sqrt(2))
    assert row["final"] == pytest.approx((0.94 + 0.1) / 2)
    assert row["mb"] == pytest.approx(5.25)  # of the run that ended
    each = metrics.of_runs(both)
    assert each["final"].tolist() == pytest.approx([0.94, 0.1])
    assert each["seconds-round"].count() == 1
    (said,) = metrics.warnings(both)
    assert said.endswith("as untrained, 10.0%); seed 2: diverged in round 3")
    points = Results(both)._points()
    filled = points[points["part"] == "filled"]
    assert filled["accuracy"].tolist() == pytest.approx([10, 90, 90, *[10] * 28])
    assert filled["megabytes"].tolist() == pytest.approx([0, 0.75, *[1.5] * 29])
    assert points[points["part"] == "stopped"]["round"].tolist() == [0, 1, 2]
    every = [*both, *(run("B", [v], seed) for seed, v in enumerate(GOOD[:2], start=1))]
    paired = metrics.rows(every, "B")[0]
    assert paired["difference"] == pytest.approx((0.9 + 0.1 - 0.5 - 0.8) / 2)


def test_seconds_are_the_clocks_in_all_rows_where_a_resumed_run_has_no_others() -> None:
    both = [run("A", GOOD), run("B", GOOD)]
    assert "CPU s" in (text := Results(both).text())
    assert "clock" not in text
    for record in both:
        record.spent = [0.25 * t for t in range(8)]
    (curve, *_) = Results(both).plot("seconds").axes[0].lines
    assert curve.get_xdata()[-1] == 1.75
    last = Results(both).rounds().iloc[-1]
    columns = ["method", "round", "accuracy", "megabytes", "seconds", "processor_seconds"]
    assert last[columns].tolist() == ["B", 7, GOOD[-1], 5.25, 17.5, 1.75]
    both[1].processor_seconds, both[1].spent = None, []
    (curve, *_) = Results(both).plot("seconds").axes[0].lines
    assert curve.get_xdata()[-1] == 17.5  # of the clock
    text = " ".join(Results(both).text().split())
    assert "CPU s" not in text
    assert "3.00 B" in text  # the end of row A
    assert "s: by the clock, as a run was resumed or in Ray" in text


def test_what_only_some_rows_have_is_said_of_them() -> None:
    both = [run("A", GOOD), run("B", GOOD), run("C", GOOD)]
    text = " ".join(Results(both).text().split())
    assert "; accuracy in % on the server's test set; n = 1" in text
    both[0].job |= {"target-accuracy": 0.3, "held-out-clients": 2, "personalise": "plain"}
    both[0].rounds[-1]["evaluate"] = {"clients": {}}  # not what the table has
    for results in (Results(both), Results(both[::-1])):
        text = " ".join(results.text().split())
        assert "to target: rounds to it, each row's own target-accuracy; worst" in text
        lines = [line.get_gid() for line in results.plot().axes[0].lines]
        assert "target" not in lines
    assert "on the server's test set, but on the held-out clients' data in A; n = 1" in text


def test_a_failed_run_has_its_whole_cause_in_the_table() -> None:
    cause = " ".join(f"word{n}" for n in range(80))
    failed = run("A", [0.5], error=cause, ended=False)
    assert cause in " ".join(Results([failed]).text().split())


def test_a_seed_that_is_not_finished_is_counted_and_in_no_mean() -> None:
    both = [run("A", GOOD, 1), run("A", [0.2, 0.3], 2, ended=False)]
    (row,) = metrics.rows(both)
    assert (row["n"], row["unfinished"], row["reached"], row["last5_std"]) == (2, 1, 1, None)
    assert (row["last5"], row["mb"]) == (pytest.approx(0.9), pytest.approx(5.25))
    said = "A: 1 of 2 seeds unfinished, and left out of the means; seed 2: it has 2 of 30 rounds"
    assert metrics.warnings(both) == [said]
    parts = Results(both)._points().groupby(["seed", "part"]).size()
    assert parts.to_dict() == {(1, "whole"): 8, (2, "unfinished"): 3}
    assert metrics.rows([run("A", [], ended=False)])[0]["last5"] is None


def test_the_table_says_what_is_decided_and_what_these_seeds_could_show() -> None:
    ends = {"Base": (0.5, 0.6, 0.7), "Far": (0.9, 1.0, 0.99), "Near": (0.52, 0.63, 0.71)}
    every = [run(label, [v], seed) for label, of in ends.items() for seed, v in enumerate(of)]
    text = " ".join(Results(every, baseline="Base").text().split())
    # Far: p = 0.008, twice; Near: p = 0.074
    assert "adjusted p < 0.05 over 2 comparisons" in text
    assert "Far. Not decided: Near." in text
    tex = Results(every, baseline="Base").latex()
    assert ("textbf" in tex.split("Far &")[1], tex.count("textbf")) == (True, 1)
    # 5.6535 / sqrt(3) deviations, which are 0.01 and 0.0635
    assert "12.00 points for the median method (3.26 to 20.73)" in text
    assert "80 % power" not in Results(every[::3], baseline="Base").text()  # one seed
    interim = Results(every, baseline="Base", lacking=["A, seed 3", "A, seed 4", "B, seed 4"])
    assert "Interim: 3 of 12 runs have not ended (first A, seed 3); " in interim.text()
    assert "ecided" not in interim.text()
    assert "textbf" not in interim.latex()
    with pytest.raises(ValueError, match="all runs have ended"):
        interim.plot("differences")


def test_a_difference_that_no_test_can_judge_is_named_with_its_pairs() -> None:
    ends = {"Base": (0.5, 0.6, 0.7, 0.8), "A": (0.5, 0.6, 0.7, 0.8), "B": (0.9, 0.7, 0.8, 0.9)}
    every = [run(label, [v], seed) for label, of in ends.items() for seed, v in enumerate(of)]
    for failed in every[6:10]:  # two seeds of A, two of B
        vars(failed).update(error="OSError: disk", ended=False)
    every[1].error, every[1].ended = "OSError: disk", False
    results = Results(every, baseline="Base")
    text = " ".join(results.text().split())
    assert "Not tested: A (pairs: 1), B (pairs: 2); a test needs three pairs" in text
    assert "A: 2 of 4 seeds failed" in results.latex()
    assert "same in every round" not in text
    assert "n = 2 seeds" in "".join(t.get_text() for t in results.plot("differences").texts)


def test_a_collapse_rejected_replies_and_clients_that_were_missing_are_said() -> None:
    fallen = run("A", [0.5, 0.8, 0.85, 0.86, 0.85, 0.84, 0.3, 0.1, 0.1, 0.1, 0.1, 0.1])
    fallen.rounds[9]["failures"] = {"41": "array 'w' holds NaN or infinity"}
    assert metrics.collapsed(fallen)
    assert not metrics.collapsed(run("A", GOOD))
    assert not metrics.collapsed(run("A", [0.5, *[0.9] * 7, 0.6]))  # one unlucky round
    fallen.rounds[2]["missing"] = "partitions [4, 5]"
    collapse, rejected, lacked = metrics.warnings([fallen])
    assert collapse.endswith("seed 1 ends at 10.0%, its best was 86.0% in round 4")
    assert "replies rejected: 1, the first in round 10 of seed 1: client 41: array" in rejected
    assert "that lacked clients: 1, first round 3 of seed 1: partitions [4, 5]" in lacked


def test_a_test_loss_far_above_the_untrained_models_is_said() -> None:
    lost = run("A", [0.09, 0.09])
    lost.test[-1]["loss"] = 70.2
    (said,) = metrics.warnings([lost])
    assert "1 of 1 seed exploded; the test loss of seed 1 ends at 70.2, and was 1 before" in said
    (row,) = metrics.rows([lost])
    assert row["collapsed"] == 1
    for loss, before in ((math.nan, 1.0), (None, None), (10.1, 1.0)):
        lost.test[-1]["loss"], lost.test[0]["loss"] = loss, before
        assert "ends at" in metrics.warnings([lost])[0]
    lost.test[0]["loss"], lost.test[-1]["loss"] = 0.02, 0.25  # of a model that had learned before
    assert not metrics.exploded(lost)
    lost.test[-1]["loss"] = 11.0
    del lost.test[0]  # nobody tested the untrained model
    assert not metrics.exploded(lost)


@pytest.mark.parametrize(("seeds", "baseline"), [(1, "FedAvg"), (3, ""), (3, "FedAvg")])
def test_the_table_fits_80_columns(
    seeds: int, baseline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook: colours would be in the files
    long = "FedADC(beta=0.7, downlink='delta')+SparseTernary(density_up=0.01, density_down=0.01)"
    every = [run(label, GOOD, s) for label in ("FedAvg", long) for s in range(seeds)]
    every[-1].rounds[0]["bytes_down"][0] = 10**14
    note = "a note that is so long that it must be broken " * 3
    results = Results(every, [note], baseline=baseline)
    text, tex = results.text(), results.latex()
    assert max(map(len, text.splitlines())) <= 80
    assert seeds > 1 or "density_up=0.01," in text  # folded between arguments, where there is room
    assert "\x1b" not in text
    assert text == "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    assert ("n = 3 (seeds 0, 1, 2)" if seeds == 3 else "n = 1 (seed 0)") in text
    assert ("95 % interval" in text) == (seeds > 1)
    columns = tex.split("{tabular}{")[1].split("}")[0]
    body = [line.count(" & ") + 1 for line in tex.splitlines() if line.endswith(r"\\")]
    assert body == [len(columns)] * 3


CELLS = [
    (number, (None,), "–"),
    (number, (0.0123456,), "0.0123"),
    (number, (1.5,), "1.50"),
    (number, (99.96,), "100"),
    (metrics.shown, ("final", 0.5, 0.0123), "50.00 ± 1.23"),
    (metrics.per_cent, (-1e-17, 0.0359), "0.00 ± 3.59"),  # zero has no sign
    (metrics.shown, ("bytes-down", 19948.0), "19,948"),
    (metrics.shown, ("training-loss", 0.1234), "0.123"),
    (metrics.shown, ("rounds-to", None), "–"),
]


def test_cells_have_three_digits_and_accuracies_are_in_per_cent() -> None:
    for cell, arguments, text in CELLS:
        assert cell(*arguments) == text


def test_a_label_is_shown_as_it_is_written(tmp_path: Path) -> None:
    labels = ["FedAvg [lr=0.1]", "[red]x :car:", r"50% $x_1^2$ {\a}~&#"]
    made = Results([run(label, GOOD) for label in labels])
    assert all(label in made.text() for label in labels)
    escaped = r"50\% \$x\_1\textasciicircum 2\$ \{\textbackslash a\}\textasciitilde \&\#"
    assert escaped in made.latex()
    made.save_tables(tmp_path)
    summary = pd.read_csv(tmp_path / "summary.csv", index_col="method")
    assert [*summary.index] == labels
    assert summary["final"].tolist() == [GOOD[-1]] * 3
    assert (tmp_path / "table.tex").read_text() == made.latex()


def test_results_are_saved_where_no_client_has_an_accuracy(tmp_path: Path) -> None:
    """No label of theirs is in the test data, as of held-out clients."""
    Results([run("A", GOOD, per_client={"clients": [None, None]})]).save(tmp_path)
    assert (tmp_path / "seconds.png").is_file()
    assert not (tmp_path / "clients.png").exists()


def test_a_round_without_a_test_moves_no_point() -> None:
    """Where clients test, none of them may be able to once."""
    gap = run("A", [0.5, 0.6, 0.9])
    del gap.test[2]
    points = Results([gap])._points()
    assert points["megabytes"].tolist() == [0.0, 0.75, 2.25]
    assert points["seconds"].tolist() == [0.0, 2.5, 7.5]
    (row,) = metrics.rows([gap])
    assert (row["rounds_to_target"], row["mb_to_target"]) == (3, 2.25)
