"""Means over users and their bootstrap intervals, without torch."""

import numpy as np

NUM_BOOTSTRAPS = 2000


def mean(values: np.ndarray) -> float:
    """Return the mean, NaN left out; NaN if there is nothing else."""
    values = values[~np.isnan(values)]
    return float(values.mean()) if len(values) else float("nan")


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean, NaN left out; the draws are the same at every call.

    Without any value it is (NaN, NaN).
    """
    rng, values = np.random.default_rng(0), values[~np.isnan(values)]
    if len(values) == 0:
        return float("nan"), float("nan")
    means = [rng.choice(values, len(values)).mean() for _ in range(NUM_BOOTSTRAPS)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
