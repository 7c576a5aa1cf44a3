"""The judgement of one seed of an experiment (`evaluation.json`): its metrics, and what they were measured with."""

from collections.abc import Sequence
from typing import Any, TypedDict

from pf_core.config.serving import Frequency
from pf_core.evaluation.manifest import MetricSummary

ByDensity = dict[str, MetricSummary]
"""Metrics by the number of pins in the index; JSON has the number as text."""


class Judgement(TypedDict):
    recipe: str
    seed: int
    config: dict[str, Any] | None
    """The TrainConfig; None for a baseline."""
    training_set: str
    code: str | None
    """Fingerprint of the training code; None for a baseline."""
    judged_by: str
    """Fingerprint of the evaluation code, and the limits on users and pins."""
    question: str
    counts: dict[str, int]
    metrics: dict[Frequency, MetricSummary]
    by_density: ByDensity
    """Empty unless the experiment is part of the model comparison."""
    beside_rivals: dict[str, ByDensity]
    """By model or baseline; empty unless the content vectors are noisy."""
    training: dict[str, Any] | None
    """result.json of the training; None for a baseline."""
    judging_seconds: float


def flat_metrics(judgement: Judgement) -> dict[str, float]:
    """Return `{"once": {"recall_at_10": …}}` as `{"once/recall_at_10": …}`; an interval becomes its two ends."""
    numbers: dict[str, Any] = {}
    for frequency, metrics in judgement["metrics"].items():
        for name, value in metrics.items():
            if isinstance(value, list):
                ends = zip(("low", "high"), value, strict=True)
                numbers |= {f"{frequency}/{name}_{end}": number for end, number in ends}
            else:
                numbers[f"{frequency}/{name}"] = value
    return numbers


def mean_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return the means over the seeds, without intervals."""
    seeds = [flat_metrics(judgement) for judgement in judgements]
    return {name: sum(numbers[name] for numbers in seeds) / len(seeds) for name in seeds[0] if "_interval_" not in name}
