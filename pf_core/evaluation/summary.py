"""The metrics of an embedder over all evaluated users, recall with its bootstrap interval."""

from typing import cast

import numpy as np
import torch

from pf_core.evaluation.manifest import BY_TYPE, MetricSummary, Summaries
from pf_core.evaluation.scores import Scores, UserScores
from pf_core.metrics.diversity import p90_coverage

NUM_BOOTSTRAPS = 2000


def summarize(scores: Scores) -> Summaries:
    """Return the metrics at each frequency, recall with its 95 % interval."""
    return {frequency: _summary(each, scores.index_size) for frequency, each in scores.frequencies.items()}


def _summary(scores: UserScores, index_size: int) -> MetricSummary:
    top_UK = scores.top_10[scores.top_10[:, 0] >= 0]
    summary = {
        "recall_at_10": float(np.nanmean(scores.recall_at_10)),
        "recall_at_10_interval": list(bootstrap_interval(scores.recall_at_10)),
        "p90_coverage_at_10": p90_coverage(
            torch.from_numpy(top_UK[top_UK >= 0].astype(np.int64)), index_size=index_size
        ),
        "interest_entropy_at_50": float(np.nanmean(scores.interest_entropy_at_50)) if len(top_UK) else float("nan"),
        "users_without_embedding": int(len(scores.top_10) - len(top_UK)),
        **{BY_TYPE + word: float(np.nanmean(each)) for word, each in scores.recall_at_10_by_type.items()},
    }
    return cast("MetricSummary", summary)  # keys that depend on the site's action types have no place in a TypedDict


def bootstrap_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean, NaN left out; the draws are the same at every call."""
    rng, values = np.random.default_rng(0), values[~np.isnan(values)]
    means = [rng.choice(values, len(values)).mean() for _ in range(NUM_BOOTSTRAPS)]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)
