"""Three levels of interest: categories > topics > sub-topics, and the properties of topics.

- The sub-topics of a topic, and those of a category, have contiguous numbers: drawing a sub-topic of a topic
  or category by demand is a search in one cumulative sum.
- Demand is Zipf-like on every level.
- Topics have a preferred hour and part of the week (recipes before dinner, crafts on Saturday), so that
  timestamps carry information.
- Topics have successors (a wedding, then a honeymoon): a project often follows from the one before. A sequence
  model can learn this order, a bag of pins cannot.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pf_core.world.column_tables import Doubles, Floats, Ints
from pf_core.world.config import WorldConfig
from pf_core.world.streams import Stream, open_stream

CATEGORIES = (
    "food_and_drink home_decor womens_fashion diy_and_crafts beauty hair_and_nails weddings travel gardening "
    "art health_and_fitness quotes mens_fashion kids_and_parenting holidays education animals design "
    "entertainment photography tattoos vehicles sports technology"
).split()

NUM_SUCCESSORS = 2

LEVEL_BITS = 10


@dataclass(frozen=True, kw_only=True)
class Taxonomy:
    topic_names: tuple[str, ...]
    category_of_topic: Ints
    topic_of: Ints  # by sub-topic
    category_of: Ints  # by sub-topic
    lineage: NDArray[np.int32]  # by sub-topic: its place on the three levels, LEVEL_BITS for each level
    demand: Doubles  # by sub-topic, sums to 1
    first_subtopic: Ints  # by topic, with the total as the last entry
    first_of_category: Ints  # by category, with the total as the last entry
    successors: Ints  # [topic, NUM_SUCCESSORS]
    peak_hour: Floats  # by topic, local time
    peak_strength: Floats
    weekend_lift: Floats

    @property
    def num_categories(self) -> int:
        return len(self.first_of_category) - 1

    @property
    def num_subtopics(self) -> int:
        return len(self.topic_of)

    def draw_subtopics(self, first: NDArray[Any], stop: NDArray[Any], uniform: Doubles) -> Ints:
        """Draw one sub-topic of each range [first, stop), by demand."""
        cumulative = np.concatenate(([0.0], np.cumsum(self.demand)))
        low, high = cumulative[first], cumulative[stop]
        found = np.searchsorted(cumulative, low + uniform * (high - low), side="right") - 1
        return np.clip(found, first, stop - 1)

    def draw_in_topic(self, topic: NDArray[Any], uniform: Doubles) -> Ints:
        return self.draw_subtopics(self.first_subtopic[topic], self.first_subtopic[topic + 1], uniform)

    def log_rhythm(self, subtopic: Ints, local_hour: Doubles, is_weekend: NDArray[Any]) -> Floats:
        """Return the log of the factor by which a sub-topic is stronger at this hour and on this day of the week."""
        topic = self.topic_of[subtopic]
        angle = (local_hour - self.peak_hour[topic]) * (2 * np.pi / 24)
        lift = np.where(is_weekend, self.weekend_lift[topic], 0.0)
        return (self.peak_strength[topic] * np.cos(angle) + lift).astype(np.float32)


def build_taxonomy(config: WorldConfig) -> Taxonomy:
    rng = open_stream(config.seed, Stream.TAXONOMY)
    topics_in = _share_out(config.num_topics, _zipf(config.num_categories, 0.6), rng)
    category_of_topic = np.repeat(np.arange(config.num_categories), topics_in)
    subtopics_in = _share_out(config.num_subtopics, np.full(config.num_topics, 1 / config.num_topics), rng)
    topic_of = np.repeat(np.arange(config.num_topics), subtopics_in)
    category_of = category_of_topic[topic_of]

    topic_demand = rng.permutation(_zipf(config.num_topics, 0.8))
    within_topic = rng.gamma(1.5, size=config.num_subtopics)
    within_topic /= np.bincount(topic_of, within_topic)[topic_of]
    demand = topic_demand[topic_of] * within_topic

    category_peak = rng.uniform(7, 23, config.num_categories)
    return Taxonomy(
        topic_names=_name_topics(category_of_topic),
        category_of_topic=category_of_topic,
        topic_of=topic_of,
        category_of=category_of,
        lineage=_pack_lineage(category_of, topic_of),
        demand=demand / demand.sum(),
        first_subtopic=np.searchsorted(topic_of, np.arange(config.num_topics + 1)),
        first_of_category=np.searchsorted(category_of, np.arange(config.num_categories + 1)),
        successors=_draw_successors(category_of_topic, topic_demand, rng),
        peak_hour=(category_peak[category_of_topic] + rng.normal(0, 2, config.num_topics)).astype(np.float32),
        peak_strength=rng.uniform(0.4, 1.6, config.num_topics).astype(np.float32),
        weekend_lift=rng.normal(0, 0.5, config.num_topics).astype(np.float32),
    )


def _zipf(size: int, exponent: float) -> Doubles:
    weights = np.arange(1, size + 1) ** -exponent
    return np.asarray(weights / weights.sum())


def _share_out(total: int, shares: Doubles, rng: np.random.Generator) -> Ints:
    """Split a total by shares: at least one for each, the rest at random."""
    return np.asarray(1 + rng.multinomial(total - len(shares), shares), dtype=np.int64)


def _pack_lineage(category_of: Ints, topic_of: Ints) -> NDArray[np.int32]:
    """Pack the levels into one number: sub-topics of one topic, or category, differ in low bits only."""
    topic_rank = topic_of - topic_of[np.searchsorted(category_of, category_of)]
    subtopic_rank = np.arange(len(topic_of)) - np.searchsorted(topic_of, topic_of)
    if max(category_of.max(), topic_rank.max(), subtopic_rank.max()) >= 1 << LEVEL_BITS:
        raise ValueError(f"no level of the taxonomy may branch into more than {1 << LEVEL_BITS}")
    packed = (category_of << 2 * LEVEL_BITS) + (topic_rank << LEVEL_BITS) + subtopic_rank
    return np.asarray(packed, dtype=np.int32)


def _name_topics(category_of_topic: Ints) -> tuple[str, ...]:
    names = []
    for topic, category in enumerate(category_of_topic):
        stem = CATEGORIES[category] if category < len(CATEGORIES) else f"category_{category:02d}"
        rank = topic - int(np.searchsorted(category_of_topic, category))
        names.append(f"{stem}_{rank:02d}")
    return tuple(names)


def _draw_successors(category_of_topic: Ints, topic_demand: Doubles, rng: np.random.Generator) -> Ints:
    """Draw the successors of each topic: mostly topics of the same category, by demand."""
    num_topics = len(category_of_topic)
    successors = np.empty((num_topics, NUM_SUCCESSORS), dtype=np.int64)
    for topic in range(num_topics):
        closeness = np.where(category_of_topic == category_of_topic[topic], 20.0, 1.0)
        closeness[topic] = 0.0
        weights = topic_demand**0.5 * closeness
        if num_topics <= NUM_SUCCESSORS:
            weights = np.full(num_topics, 1.0)
        replace = num_topics <= NUM_SUCCESSORS
        successors[topic] = rng.choice(num_topics, NUM_SUCCESSORS, replace=replace, p=weights / weights.sum())
    return successors
