"""Is one encoder better than another? Paired bootstrap over examples and seeds (Efron & Tibshirani, 1993)."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

Headline = Callable[[np.ndarray, np.ndarray], float]  # (predictions, rows) -> metric


class Difference(NamedTuple):
    """Score of the second encoder less that of the first, with the 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws: np.ndarray) -> "Difference":
        low, high = np.nanquantile(draws, (0.025, 0.975))
        return cls(value, float(low), float(high))


def paired_bootstrap(
    headline: Headline,
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    resamples: int = 1000,
    seed: int = 0,
) -> tuple[float, np.ndarray]:
    """(difference, draws [resamples]) of the mean over seeds of a metric, second less first.

    first, second: predictions [n, ...] of each seed for the same rows. Each draw takes rows and seeds with replacement,
    the same ones for both. A draw in which the metric is not defined (one class alone) is NaN.
    """
    rng = np.random.default_rng(seed)
    n, seeds = len(first[0]), len(first)

    def difference(rows: np.ndarray, chosen: np.ndarray) -> float:
        each, counts = np.unique(chosen, return_counts=True)
        found = [headline(second[s], rows) - headline(first[s], rows) for s in each]
        return float(np.average(found, weights=counts))

    value = difference(np.arange(n), np.arange(seeds))
    draws = [difference(rng.integers(n, size=n), rng.integers(seeds, size=seeds)) for _ in range(resamples)]
    return value, np.array(draws)
