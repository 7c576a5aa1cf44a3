"""Pins: their sub-topic, popularity and traits, and the content vector that a model sees.

A pin's index is its order of arrival, so that the new pins of a day are a range. Vectors are not kept: they are
recomputed by block, so that a pin takes about 100 bytes of memory, whatever the dimension.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pf_core.world.column_tables import Bools, Doubles, Floats, Ints
from pf_core.world.config import WorldConfig
from pf_core.world.streams import Stream, open_stream
from pf_core.world.taxonomy import Taxonomy

TRAITS = ("appeal", "link_richness", "saveability", "gaze")

POPULARITY_TAIL = 0.8
"""Pareto exponent of popularity within a sub-topic; with the demand for sub-topics, popularity is Zipf-like overall."""

MAX_LOG_POPULARITY = 7.0

BLOCK = 4096

DAY_S = 86_400


@dataclass(frozen=True, kw_only=True)
class Pins:
    """All pins of a world, one row each."""

    subtopic: Ints
    created_s: Doubles  # epoch seconds, ascending
    visible_day: Ints  # the first day on which a surface may show the pin; 0 for pins that exist at the start
    is_candidate: Bools  # may be surfaced on Homefeed
    rotation: Ints  # see pin_sampler.py
    popularity: Floats
    traits: Floats  # [pin, TRAITS], about zero mean and unit variance
    style: Floats  # [pin, num_styles], standard normal

    def __len__(self) -> int:
        return len(self.subtopic)


def build_pins(config: WorldConfig, taxonomy: Taxonomy) -> Pins:
    rng = open_stream(config.seed, Stream.PINS)
    num_pins, num_initial = config.num_pins, config.num_initial_pins

    supply = taxonomy.demand**0.75
    subtopic = rng.choice(config.num_subtopics, num_pins, p=supply / supply.sum())
    rotation = rng.integers(0, config.num_rotations, num_pins)
    is_candidate = rng.random(num_pins) < config.candidate_share
    reserved = rng.choice(num_initial, config.num_subtopics, replace=False)  # so that no sub-topic is ever empty
    subtopic[reserved] = np.arange(config.num_subtopics)
    is_candidate[reserved] = True

    age_days = np.sort(rng.exponential(200.0, num_initial))[::-1]
    arrival_days = np.sort(rng.uniform(0, config.num_days, num_pins - num_initial))
    created_days = np.concatenate((-age_days, arrival_days))
    log_popularity = np.minimum(rng.exponential(1 / POPULARITY_TAIL, num_pins), MAX_LOG_POPULARITY)
    return Pins(
        subtopic=subtopic,
        created_s=config.start_s + created_days * DAY_S,
        visible_day=np.maximum(np.floor(created_days).astype(np.int64) + 1, 0),
        is_candidate=is_candidate,
        rotation=rotation,
        popularity=np.exp(log_popularity).astype(np.float32),
        traits=_draw_traits(log_popularity, taxonomy, subtopic, rng),
        style=rng.standard_normal((num_pins, config.content.num_styles), dtype=np.float32),
    )


def _draw_traits(log_popularity: Doubles, taxonomy: Taxonomy, subtopic: Ints, rng: np.random.Generator) -> Floats:
    """Draw traits, of which one half depends on the topic and the other on the pin.

    Links are of two kinds: shops and blogs (rich), and plain images.
    """
    topic = taxonomy.topic_of[subtopic]
    num_topics, num_pins = len(taxonomy.topic_names), len(subtopic)
    appeal = log_popularity * POPULARITY_TAIL - 1
    rich_share = rng.beta(1.2, 2.4, num_topics)[topic]
    link = np.where(rng.random(num_pins) < rich_share, 1.3, -0.65) + rng.normal(0, 0.4, num_pins)
    of_topic = rng.normal(0, 0.7, (num_topics, 2))[topic]
    save_and_gaze = of_topic + rng.normal(0, 0.7, (num_pins, 2))
    return np.column_stack((appeal, link, save_and_gaze)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class ContentSpace:
    """Directions of the content vector. Styles, traits and nuisances are orthogonal to one another."""

    categories: Floats
    topics: Floats
    subtopics: Floats
    styles: Floats
    traits: Floats
    nuisances: Floats


def build_content_space(config: WorldConfig) -> ContentSpace:
    rng = open_stream(config.seed, Stream.CONTENT_DIRECTIONS)
    content = config.content

    def directions(count: int, norm: float) -> Floats:
        drawn = rng.standard_normal((count, content.dim))
        return (norm * drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)

    basis = np.linalg.qr(rng.standard_normal((content.dim, content.dim)))[0].T.astype(np.float32)
    styles, traits, nuisances = content.num_styles, len(TRAITS), content.num_nuisances
    return ContentSpace(
        categories=directions(config.num_categories, content.category),
        topics=directions(config.num_topics, content.topic),
        subtopics=directions(config.num_subtopics, content.subtopic),
        styles=basis[:styles] * np.float32(content.style / styles**0.5),
        traits=basis[styles : styles + traits] * np.float32(content.traits / traits**0.5),
        nuisances=basis[-nuisances:] * np.float32(content.nuisance / nuisances**0.5),
    )


def content_vectors(
    config: WorldConfig, taxonomy: Taxonomy, pins: Pins, space: ContentSpace, start: int, stop: int
) -> Iterator[Floats]:
    """Yield the unit vectors of pins [start, stop), block by block."""
    for block in range(start // BLOCK, -(-stop // BLOCK)):
        rng = open_stream(config.seed, Stream.CONTENT_NOISE, block)
        nuisance = rng.standard_normal((BLOCK, config.content.num_nuisances), dtype=np.float32)
        noise = rng.standard_normal((BLOCK, config.content.dim), dtype=np.float32)
        low, high = max(start, block * BLOCK), min(stop, (block + 1) * BLOCK)
        inside = slice(low - block * BLOCK, high - block * BLOCK)
        subtopic = pins.subtopic[low:high]
        vectors = (
            space.categories[taxonomy.category_of[subtopic]]
            + space.topics[taxonomy.topic_of[subtopic]]
            + space.subtopics[subtopic]
            + pins.style[low:high] @ space.styles
            + pins.traits[low:high] @ space.traits
            + nuisance[inside] @ space.nuisances
            + noise[inside] * np.float32(config.content.noise / config.content.dim**0.5)
        )
        yield vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
