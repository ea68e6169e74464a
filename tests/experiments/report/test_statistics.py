"""Statistics against worked examples of the literature, plain arithmetic and simulation."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flwr_regs.experiments.report import statistics

Q = {3: 2.343, 4: 2.569, 5: 2.728, 6: 2.850, 7: 2.949, 8: 3.031, 9: 3.102, 10: 3.164}
"""Demsar (2006), Table 5(a): critical values of the two-tailed Nemenyi test at 0.05, by methods."""


@pytest.mark.parametrize(
    ("p", "adjusted"),
    [
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),  # 4 x, 3 x, 2 x, then as large
        ([0.6, 0.5], [1.0, 1.0]),
        ([0.02, math.nan, 0.04], [0.04, math.nan, 0.04]),  # what is no test counts for none
        ([], []),
    ],
)
def test_holm_steps_down(p: list[float], adjusted: list[float]) -> None:
    got = statistics.holm(pd.Series(p, dtype=float))
    np.testing.assert_allclose(got, adjusted)


def test_differences_are_paired_t_tests_with_holms_correction() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(0.8, 0.05, 6)
    rows = {"base": base, "far": base + 0.1, "near": base + np.array([3, 1, 2, 0, 3, 0]) / 100}
    rows |= {"far": rows["far"] + rng.normal(0, 0.01, 6), "same": base + 0.05}
    rows["lost"] = np.where(np.arange(6) < 3, base - rng.normal(0.05, 0.1, 6), np.nan)
    table = statistics.differences(pd.DataFrame(rows).T, "base", ())
    assert [*table.index] == ["far", "near", "same", "lost"]
    p = []
    for label in ("far", "near", "lost"):
        kept = ~np.isnan(rows[label])
        test = stats.ttest_rel(rows[label][kept], base[kept])
        low, high = test.confidence_interval(0.95)
        assert table.difference[label] == pytest.approx((low + high) / 2)
        assert table.difference_interval[label] == pytest.approx((high - low) / 2)
        p.append(test.pvalue)
    assert table.p[["far", "near", "lost"]].tolist() == pytest.approx(p)
    assert table.p_holm.far == pytest.approx(3 * p[0])
    assert table.decided.to_dict() == {"far": True, "near": False, "same": False, "lost": False}
    holds_0 = table.difference.abs() <= table.difference_interval
    assert not (table.decided & holds_0).any()
    # the interval of this one excludes 0, but it is one of three that were looked at
    assert p[1] < 0.05 < table.p_holm.near
    assert np.isnan(table.p.same)  # no spread, no test
    few = statistics.differences(pd.DataFrame(rows).T[[0, 1]], "base", ())
    assert not few.decided.any()


@pytest.mark.parametrize("pairs", [2, 3, 5, 12])
def test_four_of_five_samples_show_the_detectable_difference(pairs: int) -> None:
    difference = statistics.detectable(0.7, pairs)
    samples = np.random.default_rng(pairs).normal(difference, 0.7, (20_000, pairs))
    tests = stats.ttest_1samp(samples, 0, axis=1)
    assert ((tests.pvalue < 0.05) & (tests.statistic > 0)).mean() == pytest.approx(0.8, abs=0.015)


@pytest.mark.parametrize("methods", Q)
def test_critical_differences_are_demsars(methods: int) -> None:
    blocks = 14
    scores = pd.DataFrame(np.random.default_rng(0).random((blocks, methods)))
    critical = Q[methods] * math.sqrt(methods * (methods + 1) / (6 * blocks))
    assert statistics.ranks(scores).critical == pytest.approx(critical, rel=3e-4)


def test_demsars_example() -> None:
    """Demsar (2006), Table 6 and Sec. 3.2.2: C4.5 with and without tuning, 14 data sets.

    Its Nemenyi test does not tell even the best from the worst. One tie of the printed digits, in the 13th
    row, is none in the paper's ranks.
    """
    columns = {
        "C4.5": "763 599 954 628 882 936 661 583 775 1000 940 619 972 957",
        "+m": "768 591 971 661 888 931 668 583 838 1000 962 666 981 978",
        "+cf": "771 590 968 654 886 916 609 563 866 1000 965 614 975.1 946",
        "+m+cf": "798 569 967 657 898 931 685 625 875 1000 962 669 975 970",
    }
    scores = pd.DataFrame({name: [*map(float, cells.split())] for name, cells in columns.items()})
    scores["+m"] += 1e-10  # a mean's rounding error
    found = statistics.ranks(scores)
    assert found.mean.round(3).to_dict() == {"+m+cf": 1.964, "+m": 2, "+cf": 2.893, "C4.5": 3.143}
    ties = 1 - (4**3 - 4 + 3 * (2**3 - 2)) / (14 * (4**3 - 4))  # which the paper leaves out
    assert found.statistic * ties == pytest.approx(9.28, abs=0.005)
    assert found.p == pytest.approx(stats.chi2.sf(found.statistic, 3))
    assert found.alike() == [(0, 3)]
    with pytest.raises(ValueError, match="three methods and two panels, not 2 and 14"):
        statistics.ranks(scores[["+m", "+cf"]])


def test_groups_are_the_largest_and_none_lies_in_another() -> None:
    mean = pd.Series([1.0, 1.5, 2.4, 4.0, 4.1, 6.0], [*"abcdef"])
    found = statistics.Ranks(mean, 9, 0.0, 0.0, 1.45)
    assert found.alike() == [(0, 2), (3, 4)]
    assert statistics.Ranks(mean, 9, 0.0, 0.0, 0.05).alike() == []
