"""What some seeds, and some panels, decide about methods. A table's rows are labels, its columns seeds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import optimize, stats

LEVEL = 0.05
"""A difference is decided if Holm's adjusted p-value is below this. An interval that holds 0 never is."""
POWER = 0.8
FEWEST = 3
"""Pairs of a test: two differences say too little of how far they spread."""
ROUNDING = 1e-9
"""A spread of accuracies that is none."""


def half_interval(values: pd.DataFrame) -> pd.Series:
    """Return half the width of each row's 95 % interval of the mean (Student's t); NaN for one value."""
    return stats.t.ppf(1 - LEVEL / 2, values.count(axis=1) - 1) * values.sem(axis=1)


def differences(values: pd.DataFrame, baseline: str, untested: Collection[str]) -> pd.DataFrame:
    """Return what each label's values say beside the baseline's of the same seeds.

    Parameters
    ----------
    values : DataFrame
        NaN where a seed has not ended; such a seed counts for no pair.
    baseline : str
        A label; it has no row in what is returned.
    untested : collection of str
        Labels that are no methods: they have a difference, and no test.

    Returns
    -------
    DataFrame
        ``pairs``, how many there are; ``difference``, the mean over them, and ``difference_interval``, half
        its 95 % interval; ``p`` of the paired t test, and ``p_holm``, adjusted over the rows; ``decided``,
        whether that is below 0.05; ``detectable``, see :func:`detectable`. NaN, and not decided, where a
        test would say nothing: for fewer than `FEWEST` pairs, and for differences that are all the same, as
        those of accuracies on few examples may be by chance.
    """
    gaps = values[values.index != baseline] - values.loc[baseline]
    mean, pairs = gaps.mean(axis=1), gaps.count(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # of equal gaps
        p = pd.Series(2 * stats.t.sf((mean / gaps.sem(axis=1)).abs(), pairs - 1), gaps.index)
    silent = (pairs < FEWEST) | (gaps.std(axis=1) < ROUNDING)
    p[silent | p.index.isin([*untested])] = np.nan
    table = pd.DataFrame({"pairs": pairs.astype("Int64"), "difference": mean, "p": p})
    table["difference_interval"] = half_interval(gaps)
    table["p_holm"] = holm(p)
    table["decided"] = table["p_holm"] < LEVEL
    table["detectable"] = [*map(detectable, gaps.std(axis=1), pairs)]
    return table


def holm(p: pd.Series) -> pd.Series:
    """Return Holm's adjusted p-values (1979); NaN is no test, and stays."""
    ordered = p.dropna().sort_values()
    factors = np.arange(len(ordered), 0, -1)
    return (ordered * factors).cummax().clip(upper=1).reindex(p.index)


def detectable(deviation: float, pairs: int) -> float:
    """Return the smallest difference that a paired t test at 5 % shows with 80 % power, before Holm.

    `deviation` is the pairs' sample standard deviation; NaN for fewer than two pairs.
    """
    if pairs < 2:
        return np.nan
    bound = stats.t.ppf(1 - LEVEL / 2, pairs - 1)
    # the noncentrality at which Student's t passes its two-sided bound on the right side
    root = optimize.brentq(lambda c: stats.nct.sf(bound, pairs - 1, c) - POWER, 0, 3 * bound)
    return float(deviation * root / np.sqrt(pairs))


@dataclass(frozen=True)
class Ranks:
    """Methods ranked in each of some blocks, such as panels (Demsar 2006).

    Attributes
    ----------
    mean : Series
        Label -> its mean rank, the best first; 1 is the best rank, ties share theirs.
    blocks : int
    statistic, p : float
        Friedman's test that all methods are equal.
    critical : float
        Nemenyi's critical difference at 5 %: mean ranks that differ by less are not told apart.
    """

    mean: pd.Series
    blocks: int
    statistic: float
    p: float
    critical: float

    def alike(self) -> list[tuple[int, int]]:
        """Return the largest groups that are not told apart: (first, last) positions in `mean`."""
        means = self.mean.to_numpy()
        lasts = np.searchsorted(means, means + self.critical, side="right") - 1
        ends, firsts = np.unique(lasts, return_index=True)
        return [(int(a), int(b)) for a, b in zip(firsts, ends, strict=True) if b > a]


def ranks(scores: pd.DataFrame) -> Ranks:
    """Rank methods, the columns, by their scores in each row; higher is better.

    Raises ValueError for fewer than three methods or two rows: Friedman's test has nothing to say.
    """
    blocks, methods = scores.shape
    if methods < 3 or blocks < 2:
        raise ValueError(f"ranks need three methods and two panels, not {methods} and {blocks}")
    scores = scores.round(9)  # a mean's last digits are those of its order
    mean = scores.rank(axis=1, ascending=False).mean().sort_values(kind="stable")
    friedman = stats.friedmanchisquare(*scores.to_numpy().T)
    quantile = stats.studentized_range.ppf(1 - LEVEL, methods, np.inf) / np.sqrt(2)
    critical = quantile * np.sqrt(methods * (methods + 1) / (6 * blocks))
    return Ranks(mean, blocks, float(friedman.statistic), float(friedman.pvalue), float(critical))
