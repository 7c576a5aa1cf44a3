"""What evaluations write as JSON: metric summaries, and the manifest of `offline_evaluation`.

Without torch, so that the asset graph can read them at once.
"""

from typing import Literal, NotRequired, TypedDict, cast

from pf_core.config.serving import Frequency

BY_TYPE = "recall_at_10/"
"""Prefix of recall on the positives of one action type, in summaries and in the columns of scores."""

Promote = Literal["auto", "never", "always"]
"""What a run does with a candidate: as the rule decides, never promote it, or always promote it."""


QuestionName = Literal["all", "discovery"]
"""all: every positive, and pins that the user has seen compete. discovery: pins that the user has seen are dropped from
the candidates, and only positives on pins that are new to the user count."""


ORACLES = ("pinnersage_5", "pinnersage_20")
"""Baselines that choose their best vector for each positive, which nothing that is served can do: upper bounds."""


def vector_alone(model: str) -> str:
    """Return the name under which a model of parts is scored without its memory."""
    return f"{model} vector alone"


class MetricSummary(TypedDict):
    """Metrics of one embedder at one frequency, over all evaluated users.

    A positive that cannot be asked, because its pin is unknown at the cut, is a miss. A summary also has a key
    `recall_at_10/<action type>` for each action type of the positives: see `recall_by_type`.
    """

    recall_at_10: float
    recall_at_10_interval: list[float]
    """The two ends of the 95 % interval."""
    recall_at_50: float
    askable_recall_at_10: float
    """Recall without the positives that cannot be asked."""
    discovery_at_10: float
    """Recall@10 of the question `discovery`, over the users who have positives on new pins; NaN if nobody has."""
    discovery_at_10_interval: list[float]
    discovery_at_50: float
    p90_coverage_at_10: float
    interest_entropy_at_50: NotRequired[float]
    """Absent where pins have no interests."""
    users_without_embedding: int


Summaries = dict[Frequency, MetricSummary]


class Comparison(TypedDict):
    """A candidate against the best baseline in one question, at recall@10, embeddings made once."""

    candidate: float
    baseline: float
    best: str
    """Name of the baseline with the highest recall; ORACLES do not count."""
    difference_interval: list[float]
    """The 95 % interval of candidate minus baseline, paired by user."""


class VectorCoverage(TypedDict):
    """What the embeddings cannot see, because a pin has no vector at the cut.

    A model of parts has a vector for every pin that is known at the cut, the towers for pins with a content vector.
    """

    share_of_actions: float
    """Share of the held-out users' actions before the cut on pins without a vector."""
    share_of_positives: float
    """Share of the positives to find (distinct pins of each user) on pins without a vector."""
    remedy: str
    """Which key of the site file changes it."""


class SelectionSummary(TypedDict):
    """Recall@10 of some of the evaluated users, embedded once: those whom `training.users` selects, or the others."""

    users: int
    recall_at_10: float
    recall_at_10_interval: list[float]
    discovery_at_10: float
    discovery_at_10_interval: list[float]


class DecisionRecord(TypedDict):
    promote: bool
    reason: str
    asked_for: Promote


class EvaluationManifest(TypedDict):
    """How candidate, champion and baselines did, and what was decided."""

    layout: NotRequired[int]
    """Absent in the manifests of older versions, which are of layout 1."""
    training_set: str
    question: str
    """Fingerprint of users, positives and index."""
    cut_ds: str
    last_ds: str
    num_pins: int
    """Pins of the index."""
    counts: dict[str, int]
    summaries: dict[str, Summaries]
    """By name of the model or baseline; a candidate of parts also has a summary by its `vector_alone` name."""
    index: NotRequired[Literal["paper", "catalogue"]]
    """paper: random candidates (section 4.1). This key and the next two are not in manifests of older versions."""
    without_vector: NotRequired[VectorCoverage]
    against_baselines: NotRequired[dict[QuestionName, Comparison]]
    vector_against_baselines: NotRequired[dict[QuestionName, Comparison]]
    """The candidate without its memory; only a model of parts has one. It decides nothing."""
    by_selection: NotRequired[dict[str, SelectionSummary]]
    """The candidate for the users whom `training.users` selects (`selected`), and for the `others`; only with it."""
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
