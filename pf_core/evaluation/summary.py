"""The metrics of an embedder over all evaluated users, recall with its bootstrap interval."""

from typing import Any, cast

import numpy as np
import torch

from pf_core.evaluation.manifest import BY_TYPE, MetricSummary, Summaries
from pf_core.evaluation.scores import Scores, UserScores
from pf_core.metrics.bootstrap import bootstrap_interval, mean
from pf_core.metrics.diversity import p90_coverage


def summarize(scores: Scores) -> Summaries:
    """Return the metrics at each frequency, recall with its 95 % interval."""
    return {frequency: _summary(each, scores.index_size) for frequency, each in scores.frequencies.items()}


def _summary(scores: UserScores, index_size: int) -> MetricSummary:
    top_UK = scores.top_10[scores.top_10[:, 0] >= 0]
    summary: dict[str, Any] = {
        "recall_at_10": mean(scores.recall_at_10),
        "recall_at_10_interval": list(bootstrap_interval(scores.recall_at_10)),
        "recall_at_50": mean(scores.recall_at_50),
        "askable_recall_at_10": mean(scores.askable_recall_at_10),
        "discovery_at_10": mean(scores.discovery_at_10),
        "discovery_at_10_interval": list(bootstrap_interval(scores.discovery_at_10)),
        "discovery_at_50": mean(scores.discovery_at_50),
        "p90_coverage_at_10": p90_coverage(
            torch.from_numpy(top_UK[top_UK >= 0].astype(np.int64)), index_size=index_size
        ),
        "users_without_embedding": int(len(scores.top_10) - len(top_UK)),
        **{BY_TYPE + word: mean(each) for word, each in scores.recall_at_10_by_type.items()},
    }
    if scores.interest_entropy_at_50 is not None:
        summary["interest_entropy_at_50"] = mean(scores.interest_entropy_at_50)
    return cast("MetricSummary", summary)  # keys that depend on the site's action types have no place in a TypedDict
