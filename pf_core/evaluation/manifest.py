"""What evaluations write as JSON: metric summaries, and the manifest of `offline_evaluation`.

Without torch, so that the asset graph can read them at once.
"""

from typing import Literal, TypedDict, cast

from pf_core.config.serving import Frequency

BY_TYPE = "recall_at_10/"
"""Prefix of recall on the positives of one action type, in summaries and in the columns of scores."""

Promote = Literal["auto", "never", "always"]
"""What a run does with a candidate: as the rule decides, never promote it, or always promote it."""


class MetricSummary(TypedDict):
    """Metrics of one embedder at one frequency, over all evaluated users.

    A summary also has a key `recall_at_10/<action type>` for each action type of the positives: see `recall_by_type`.
    """

    recall_at_10: float
    recall_at_10_interval: list[float]
    """The two ends of the 95 % interval."""
    p90_coverage_at_10: float
    interest_entropy_at_50: float
    users_without_embedding: int


Summaries = dict[Frequency, MetricSummary]


class DecisionRecord(TypedDict):
    promote: bool
    reason: str
    asked_for: Promote


class EvaluationManifest(TypedDict):
    """How candidate, champion and baselines did, and what was decided."""

    training_set: str
    question: str
    """Fingerprint of users, positives and index."""
    cut_ds: str
    last_ds: str
    num_pins: int
    """Pins of the index."""
    counts: dict[str, int]
    summaries: dict[str, Summaries]
    """By name of the model or baseline."""
    by_day: dict[str, dict[Frequency, list[float]]]
    """By name of the model, the share of each day's positives that was found."""
    candidate: str
    champion: str | None
    """The champion before this evaluation."""
    candidate_is_champion: bool
    """Whether the candidate is champion after this evaluation."""
    decision: DecisionRecord
    seconds: float


def recall_by_type(summary: MetricSummary) -> dict[str, float]:
    """Return recall@10 by action type of the positives."""
    return {
        key.removeprefix(BY_TYPE): cast("float", value) for key, value in summary.items() if key.startswith(BY_TYPE)
    }
