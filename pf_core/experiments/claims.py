"""What a claim is: a sentence, and the statistics that decide whether it holds; `bootstrap.assess_claim` decides.

The lists are in `paper_claims` and `ablation_claims`. A claim names the recipes that it needs; `Results` holds the
scores of the recipes that were run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import yaml

from pf_core.errors import PipelineError
from pf_core.evaluation.scores import Scores
from pf_core.experiments.quantities import Quantity
from pf_core.experiments.recipe import Set

Kind = Literal["greater", "alike", "no_better"]

SASREC_LOSSES = ("sasrec_bce", "sasrec_unweighted", "sasrec")

LONGER_RECIPES = ("longer_sasrec", "longer_pinnerformer")

FEATURES = {
    "no_pin_feature": "PinSage",
    "no_timestamp": "Timestamp",
    "no_surface": "Surface",
    "no_action_type": "Action Type",
    "no_duration": "Duration",
    "no_position": "Positional Encoding",
}

COLLAPSE = 10.0
"""Results have collapsed if their coverage is less than one in this of the reference's."""

COMPARABLE = 0.8
"""Coverage is comparable if it is at least this share of the reference's."""


@dataclass(frozen=True, eq=False)
class Results:
    """The scores of each seed, by recipe: tables, figures and verdicts are computed from these alone."""

    outcomes: Mapping[str, Sequence[Scores]]

    def __post_init__(self) -> None:
        questions = {scores.question for seeds in self.outcomes.values() for scores in seeds}
        if not questions:
            raise PipelineError("no recipe has been run: there is nothing to report", "run some: pf ablations")
        if len(questions) > 1:
            raise PipelineError(
                f"results of {len(questions)} evaluation questions ({', '.join(sorted(questions))}): only recipes that "
                "were judged on the same users, positives and index can be compared"
            )

    @property
    def any_scores(self) -> Scores:
        return next(seeds[0] for seeds in self.outcomes.values() if seeds)

    @property
    def tasks(self) -> list[str]:
        """Action types of the question's positives."""
        return list(next(iter(self.any_scores.frequencies.values())).recall_at_10_by_type)


@dataclass(frozen=True, eq=False)
class Part:
    """One statistic of a claim. greater: it is above 0; alike: within the margin; no_better: below the margin."""

    kind: Kind
    quantity: Quantity
    reference: Quantity | None
    """The statistic and the margin are shares of this quantity; None if the statistic is a share already."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    id: str
    section: Set
    where: str
    says: str
    parts: tuple[Part, ...]
    """All of them must hold."""
    is_ours: bool = False

    @property
    def recipes(self) -> set[str]:
        return {metric.recipe for part in self.parts for metric in part.quantity.metrics}


def greater(high: Quantity, low: Quantity) -> Part:
    return Part("greater", high - low, low)


def alike(one: Quantity, other: Quantity) -> Part:
    return Part("alike", one - other, other)


def no_better(one: Quantity, other: Quantity) -> Part:
    return Part("no_better", one - other, other)


def rising(*quantities: Quantity) -> tuple[Part, ...]:
    return tuple(greater(high, low) for low, high in pairwise(quantities))


def best(one: Quantity, others: Iterable[Quantity]) -> tuple[Part, ...]:
    return tuple(greater(one, other) for other in others)


def read_explanations(path: Path, claims: Sequence[Claim]) -> dict[str, str]:
    """Read from a YAML file why claims do not hold, by claim id; empty if there is no such file."""
    texts = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    unknown = sorted(set(texts) - {claim.id for claim in claims})
    if unknown:
        raise PipelineError(
            f"{path} explains claims that do not exist: {', '.join(unknown)}", "remove them or correct their ids"
        )
    return {name: " ".join(str(text).split()) for name, text in texts.items()}
