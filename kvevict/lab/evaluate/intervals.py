"""Computes 95 % intervals of means over independent cases, with scipy."""

import math
from collections.abc import Hashable, Sequence
from statistics import NormalDist

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


def standard_error(values: Sequence[float]) -> float:
    """Compute the standard error of the mean; infinite for a single value."""
    from scipy import stats

    return float(stats.sem(values)) if len(values) > 1 else math.inf


def student(values: Sequence[float]) -> float:
    """Compute half the width of Student's 95 % interval for the mean; infinite for a single value."""
    return clustered(values, range(len(values)))


def clustered(values: Sequence[float], groups: Sequence[Hashable]) -> float:
    """Compute half the width of Student's 95 % interval for a mean of values in groups: values of the same group may be
    correlated, others are independent. groups[i] is the group of values[i]. The standard error is Liang and Zeger's
    (1986); the degrees of freedom are the number of groups minus one. Infinite for a single group."""
    from scipy import stats

    mean, sums = sum(values) / len(values), {}
    for value, group in zip(values, groups, strict=True):
        sums[group] = sums.get(group, 0.0) + value - mean
    n = len(sums)
    if n == 1:
        return math.inf
    error = math.sqrt(n / (n - 1) * sum(each**2 for each in sums.values())) / len(values)
    return float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error


def of_scores(scores: Sequence[float]) -> tuple[float, float, float]:
    """Compute (mean, low, high) of scores in [0, 1], with Wilson's interval if all scores are 0 or 1, else with a
    normal interval that is cut to [0, 1]."""
    from scipy import stats

    n, mean = len(scores), sum(scores) / len(scores)
    if all(score in (0, 1) for score in scores):
        found = stats.binomtest(int(sum(scores)), n).proportion_ci(LEVEL, method="wilson")
        return mean, float(found.low), float(found.high)
    half = Z * standard_error(scores)
    return mean, max(0.0, mean - half), min(1.0, mean + half)
