"""A claim is a sentence and the statistics that it stands or falls with; `verdicts` finds out whether it does.

The lists are in `paper_claims` and `ablation_claims`. A claim says what it needs in terms of recipes; `Results` is what
there is of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import yaml

from pf_core.config.training import ModelConfig
from pf_core.errors import PipelineError
from pf_core.evaluation.scores import Scores
from pf_core.experiments.quantities import Quantity
from pf_core.experiments.recipe import BASE, Set

Kind = Literal["greater", "alike", "no_better"]

LENGTHS = (4, 8, 16, 32, 128)

DIMS = (8, 16, 32, 128)

HEADS = (2, 4)

LAYERS = (1, 2, 4)

HIDDEN_DIMS = (32, 64, 128)

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

COMPARABLE = 0.8


@dataclass(frozen=True, eq=False)
class Results:
    """By recipe, the scores of each seed: everything that the report knows of the models."""

    outcomes: Mapping[str, Sequence[Scores]]

    def __post_init__(self) -> None:
        questions = {scores.question for seeds in self.outcomes.values() for scores in seeds}
        if not questions:
            raise PipelineError("no recipe has been run: there is nothing to report. Run some: pf ablations")
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
        """The positive action types, as the question has them."""
        return list(next(iter(self.any_scores.frequencies.values())).recall_at_10_by_type)


@dataclass(frozen=True, eq=False)
class Part:
    """One statistic. greater: it is above 0; alike: it is within the margin; no_better: it is below the margin."""

    kind: Kind
    quantity: Quantity
    reference: Quantity | None
    """What the statistic and the margin are a share of; None if it is a share already."""


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


def of_length(base: ModelConfig) -> dict[int, str]:
    """The recipes by their sequence length, shortest first, the base among them."""
    return dict(sorted({**{length: f"length_{length}" for length in LENGTHS}, base.sequence_length: BASE}.items()))


def of_dim(base: ModelConfig) -> dict[int, str]:
    return dict(sorted({**{dim: f"dim_{dim}" for dim in DIMS}, base.embedding_dim: BASE}.items()))


def of_heads(base: ModelConfig) -> dict[int, str]:
    return dict(sorted({**{heads: f"heads_{heads}" for heads in HEADS}, base.num_heads: BASE}.items()))


def of_capacity(base: ModelConfig, layers: int, hidden: int) -> str:
    is_base = (layers, hidden) == (base.num_layers, base.hidden_dim)
    return BASE if is_base else f"layers_{layers}_hidden_{hidden}"


def read_explanations(path: Path, claims: Sequence[Claim]) -> dict[str, str]:
    """Why claims do not hold here, by claim id, from a YAML file; nothing if there is none."""
    texts = (yaml.safe_load(path.read_text()) or {}) if path.exists() else {}
    unknown = sorted(set(texts) - {claim.id for claim in claims})
    if unknown:
        raise PipelineError(f"{path} explains claims that do not exist: {', '.join(unknown)}")
    return {name: " ".join(str(text).split()) for name, text in texts.items()}
