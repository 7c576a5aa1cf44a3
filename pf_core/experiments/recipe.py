"""What an experiment is: a recipe, which is trained, or a baseline, which is not; and the sets that they belong to.

Each set is a table or a figure of the paper (section 4.2 and appendix A.4), or a question of ours.
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
"""Sets of experiments, the most important first; experiments run in this order."""

CORE_SETS: tuple[Set, ...] = get_args(Set)[:9]
"""Sets with the paper's main claims: their recipes are trained with two seeds."""

REFRESHED_SETS: tuple[Set, ...] = ("batch-vs-realtime", "objectives", "sasrec-losses", "training-budget")
"""Sets about stale embeddings: their recipes are evaluated at every frequency, all others once."""

BASE = "pinnerformer"

Change = Callable[[TrainConfig], TrainConfig]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    name: str
    why: str
    change: Change
    sets: tuple[Set, ...]
    content_noise: float | None = None
    """Noise added to the content vectors, as a multiple of their norm; the recipe is then also compared with baselines
    that read the same vectors."""

    @property
    def num_seeds(self) -> int:
        return 2 if set(self.sets) & set(CORE_SETS) else 1

    @property
    def frequencies(self) -> tuple[Frequency, ...]:
        return get_args(Frequency) if set(self.sets) & set(REFRESHED_SETS) else ("once",)

    def configure(self, base: TrainConfig, *, seed: int) -> TrainConfig:
        """Return the configuration of the recipe's run number `seed`, from 0; run 0 has the base's own seed."""
        return changed(self.change(base), seed=base.seed + seed)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """Evaluated as the recipes are; its name is a key of `embedders.BASELINE_EMBEDDERS`."""

    name: str
    why: str
    sets: tuple[Set, ...] = ("model-comparison",)
    num_seeds: int = 1
    frequencies: tuple[Frequency, ...] = ("once",)


Experiment = Recipe | Baseline

BASELINES = (
    Baseline(name="popularity_7d", why="The pins with the most positive actions in the week before the cut."),
    Baseline(name="popularity_ever", why="The pins with the most positive actions in all of the timelines."),
    Baseline(name="mean_of_20", why="The mean content vector of a user's 20 newest pins: what needs no training."),
    Baseline(name="mean_of_100", why="The mean content vector of a user's 100 newest pins."),
    Baseline(name="pinnersage_5", why="PinnerSage's 5 most important clusters; an oracle picks one for each positive."),
    Baseline(name="pinnersage_20", why="PinnerSage's 20 most important clusters; an oracle picks one."),
)


def changed(base: TrainConfig, **changes: Any) -> TrainConfig:
    return TrainConfig.model_validate(base.model_dump() | changes)
