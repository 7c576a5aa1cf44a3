"""What an experiment is: a recipe, which is trained, or a baseline, which is not; and the sets that they stand in.

Each set is a table or a figure of the paper (section 4.2 and appendix), or a question of ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pf_core.config.serving import Frequency
from pf_core.config.training import TrainConfig

Set = Literal[
    "model-comparison",
    "batch-vs-realtime",
    "objectives",
    "negatives",
    "multi-task",
    "features",
    "sasrec-losses",
    "masking",
    "training-budget",
    "sequence-length",
    "embedding-dimension",
    "capacity",
    "sequence-selection",
    "heads",
    "content-noise",
    "ours",
]
"""In the order in which they are worth running."""

CORE_SETS: tuple[Set, ...] = get_args(Set)[:9]
"""Those whose claims carry the paper: their recipes are trained with two seeds."""

REFRESHED_SETS: tuple[Set, ...] = ("batch-vs-realtime", "objectives", "sasrec-losses", "training-budget")
"""Those about stale embeddings: their recipes are judged at every frequency, all others once."""

BASE = "pinnerformer"

Change = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    why: str
    change: Change
    sets: tuple[Set, ...]
    content_noise: float | None = None
    """Trained with content vectors to which noise of so many times their norm was added, and judged beside baselines
    that have the same vectors."""

    @property
    def num_seeds(self) -> int:
        return 2 if set(self.sets) & set(CORE_SETS) else 1

    @property
    def frequencies(self) -> tuple[Frequency, ...]:
        return get_args(Frequency) if set(self.sets) & set(REFRESHED_SETS) else ("once",)

    def configure(self, base: TrainConfig, *, seed: int) -> TrainConfig:
        """The run with this number, from 0; the base's own seed is the first."""
        return changed(self.change(base), seed=base.seed + seed)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Judged as the recipes are; `protocol` knows it by its name."""

    name: str
    why: str
    sets: tuple[Set, ...] = ("model-comparison",)
    num_seeds: int = 1
    frequencies: tuple[Frequency, ...] = ("once",)


Experiment = Recipe | Baseline

BASELINES = (
    Baseline(name="popularity_7d", why="The pins with the most positive actions in the week before the cut."),
    Baseline(name="popularity_365d", why="The pins with the most positive actions in all of the timelines."),
    Baseline(name="mean_of_20", why="The mean content vector of a user's 20 newest pins: what needs no training."),
    Baseline(name="mean_of_100", why="The mean content vector of a user's 100 newest pins."),
    Baseline(name="pinnersage_5", why="PinnerSage's 5 most important clusters; an oracle picks one for each positive."),
    Baseline(name="pinnersage_20", why="PinnerSage's 20 most important clusters; an oracle picks one."),
)


def changed(base: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(base.model_dump() | changes)
