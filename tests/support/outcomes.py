"""Scores with known statistics, and a store's worth of them in which the paper's tables come true."""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pyarrow as pa

from pf_core.config.serving import Frequency
from pf_core.config.training import ModelConfig
from pf_core.evaluation.scores import Scores, UserScores
from pf_core.experiments.claims import Results
from pf_core.experiments.paper_tables import paper_sections
from pf_core.experiments.quantities import ALL, Metric
from pf_core.experiments.recipe import Experiment

TASKS = ("closeup", "click", "repin")
INDEX_SIZE = 1000
NUM_DAYS = 14


def user_scores(
    recall_U: np.ndarray,
    *,
    by_type: Mapping[str, np.ndarray] | None = None,
    entropy_U: np.ndarray | None = None,
    top_UK: np.ndarray | None = None,
    hits_UA: np.ndarray | None = None,
    positives_UA: np.ndarray | None = None,
) -> UserScores:
    """What is not given says nothing: the same for every user."""
    num_users, recall_U = len(recall_U), np.asarray(recall_U, np.float64)
    nothing_UA = np.zeros((num_users, NUM_DAYS), np.int32)
    return UserScores(
        num_positives=np.ones(num_users, np.int32),
        num_unaskable=np.zeros(num_users, np.int32),
        num_new=np.ones(num_users, np.int32),
        recall_at_10=recall_U,
        recall_at_50=recall_U,
        askable_recall_at_10=recall_U,
        discovery_at_10=recall_U,
        discovery_at_50=recall_U,
        recall_at_10_by_type=by_type or {},
        interest_entropy_at_50=np.zeros(num_users) if entropy_U is None else entropy_U,
        top_10=np.tile(np.arange(10, dtype=np.int32), (num_users, 1)) if top_UK is None else top_UK,
        hits_UA=nothing_UA if hits_UA is None else hits_UA,
        positives_UA=nothing_UA if positives_UA is None else positives_UA,
    )


def scores(question: str = "q", /, **frequencies: UserScores) -> Scores:
    return scores_of({cast("Frequency", name): found for name, found in frequencies.items()}, question=question)


def scores_of(frequencies: Mapping[Frequency, UserScores], *, question: str = "q") -> Scores:
    num_users = len(next(iter(frequencies.values())).recall_at_10)
    return Scores(
        question=question,
        index_size=INDEX_SIZE,
        user_ids=pa.array(np.arange(num_users)),
        frequencies=dict(frequencies),
    )


def once(recall_U: Sequence[float] | np.ndarray) -> Scores:
    return scores(once=user_scores(np.asarray(recall_U)))


def paper_values(base: ModelConfig) -> dict[Metric, float]:
    """The paper's numbers, by the metric that stands for them."""
    return {
        row.metric(column): value
        for section in paper_sections(base, TASKS)
        for row in section.rows
        for column, value in row.paper.items()
    }


def make_store(
    experiments: Mapping[str, Experiment],
    base: ModelConfig,
    *,
    num_users: int = 150,
    tasks: Sequence[str] = TASKS,
) -> Results:
    """Every experiment, with as many seeds as it wants: recalls as in the paper, where it has one."""
    known = paper_values(base)
    rng = np.random.default_rng(5)
    user_noise_U = rng.normal(0, 0.02, num_users)
    outcomes: dict[str, list[Scores]] = {}
    for experiment in experiments.values():
        outcomes[experiment.name] = []
        for _ in range(experiment.num_seeds):
            luck = rng.normal(0, 0.001)
            parts: dict[Frequency, UserScores] = {
                frequency: _random_scores(rng, experiment.name, frequency, known, user_noise_U + luck, tasks)
                for frequency in experiment.frequencies
            }
            outcomes[experiment.name].append(scores_of(parts))
    return Results(outcomes)


def _invented(recipe: str) -> float:
    """Where the paper has no number: a recall that grows with a size ever more slowly."""
    family, _, size = recipe.rpartition("_")
    return 0.23 - 0.4 / int(size) if family in ("length", "dim") else 0.15


def _random_scores(
    rng: np.random.Generator,
    recipe: str,
    frequency: Frequency,
    known: Mapping[Metric, float],
    noise_U: np.ndarray,
    tasks: Sequence[str],
) -> UserScores:
    def recall_of(task: str) -> np.ndarray:
        level = known.get(Metric("recall", recipe, frequency, task), _invented(recipe))
        return np.clip(level + noise_U + rng.normal(0, 0.004, len(noise_U)), 0, 1)

    reach = round(20 + 4000 * known.get(Metric("coverage", recipe), 0.05))
    recall_U = recall_of(ALL)
    positives_UA = np.full((len(noise_U), NUM_DAYS), 5, np.int32)
    fade_A = 1.0 if frequency == "realtime" else 0.9 - 0.01 * np.arange(NUM_DAYS)
    return user_scores(
        recall_U,
        by_type={task: recall_of(task) for task in tasks},
        entropy_U=known.get(Metric("entropy", recipe), 1.8) + rng.normal(0, 0.1, len(noise_U)),
        top_UK=rng.integers(0, min(reach, INDEX_SIZE), (len(noise_U), 10)).astype(np.int32),
        hits_UA=rng.binomial(5, np.clip(recall_U[:, None] * fade_A, 0, 1) + np.zeros(NUM_DAYS)).astype(np.int32),
        positives_UA=positives_UA,
    )
