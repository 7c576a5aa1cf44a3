"""The hierarchy of interests, the pins, their vectors, and the sampler that draws from them."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pf_core.world.behaviour import SAME_CATEGORY_MATCH, SAME_TOPIC_MATCH, match
from pf_core.world.column_tables import Ints
from pf_core.world.config import tiny
from pf_core.world.pin_sampler import PinSampler
from pf_core.world.pins import TRAITS
from pf_core.world.world import World


@cache
def world() -> World:
    return World(tiny())


def test_levels_are_contiguous_and_complete() -> None:
    taxonomy = world().taxonomy
    assert (np.diff(taxonomy.topic_of) >= 0).all()
    assert (np.diff(taxonomy.category_of) >= 0).all()
    assert len(set(taxonomy.topic_names)) == world().config.num_topics
    assert taxonomy.demand.sum() == pytest.approx(1)
    for topic in range(world().config.num_topics):
        first, stop = taxonomy.first_subtopic[topic : topic + 2]
        assert stop > first
        assert (taxonomy.topic_of[first:stop] == topic).all()


def test_match_counts_shared_levels() -> None:
    taxonomy = world().taxonomy
    all_pairs = match(taxonomy.lineage[:, None], taxonomy.lineage[None, :])
    for left in range(0, 60, 7):
        for right in range(60):
            expected = 0.0
            if taxonomy.category_of[left] == taxonomy.category_of[right]:
                expected = SAME_CATEGORY_MATCH
            if taxonomy.topic_of[left] == taxonomy.topic_of[right]:
                expected = SAME_TOPIC_MATCH
            if left == right:
                expected = 1.0
            assert all_pairs[left, right] == pytest.approx(expected)


def test_every_subtopic_has_a_candidate_from_the_start() -> None:
    pins = world().pins
    usable = pins.is_candidate & (pins.visible_day == 0)
    assert len(np.unique(pins.subtopic[usable])) == world().config.num_subtopics


def test_pins_arrive_daily_and_each_on_one_day() -> None:
    pins, config = world().pins, world().config
    ranges = [world().created_on(day) for day in range(config.num_days)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == len(pins)
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    for day, (start, stop) in enumerate(ranges[1:], 1):
        created = (pins.created_s[start:stop] - config.start_s) / 86_400
        assert ((created >= day) & (created < day + 1)).all()
        assert (pins.visible_day[start:stop] == day + 1).all()
    newcomers = [stop - start for start, stop in ranges[1:]]
    assert sum(newcomers) == pytest.approx(0.4 * len(pins), rel=0.15)


def test_popularity_and_demand_are_heavy_tailed() -> None:
    popularity = np.sort(world().pins.popularity)[::-1]
    assert popularity[:20].sum() > 0.1 * popularity.sum()  # one percent of 2,000 pins
    assert popularity[1000:].sum() < 0.2 * popularity.sum()
    demand = np.sort(np.bincount(world().taxonomy.topic_of, world().taxonomy.demand))[::-1]
    assert demand[0] > 5 * demand[-1]


def test_vectors_are_unit_norm_and_blockwise() -> None:
    vectors = world().vectors()
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1, abs=1e-5)
    assert world().vectors(700, 900) == pytest.approx(vectors[700:900], abs=1e-6)
    assert world().vectors(5, 5).shape == (0, 32)


def test_vectors_follow_the_hierarchy() -> None:
    vectors, subtopic, taxonomy = world().vectors(), world().pins.subtopic, world().taxonomy
    cosine = vectors @ vectors.T
    np.fill_diagonal(cosine, np.nan)
    same_subtopic = subtopic[:, None] == subtopic
    same_topic = taxonomy.topic_of[subtopic][:, None] == taxonomy.topic_of[subtopic]
    same_category = taxonomy.category_of[subtopic][:, None] == taxonomy.category_of[subtopic]
    levels = [same_subtopic, same_topic & ~same_subtopic, same_category & ~same_topic, ~same_category]
    means = [float(np.nanmean(cosine[level])) for level in levels]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[1] + 0.05


def test_traits_can_be_predicted_from_vectors() -> None:
    """PinSage aggregates engagement: a linear probe finds each trait, though not exactly."""
    vectors, traits = world().vectors().astype(np.float64), world().pins.traits.astype(np.float64)
    train, held_out = np.arange(0, 2000, 2), np.arange(1, 2000, 2)
    design = np.column_stack((vectors, np.ones(len(vectors))))
    weights = np.linalg.lstsq(design[train], traits[train], rcond=None)[0]
    predicted = design[held_out] @ weights
    for trait in range(len(TRAITS)):
        assert 0.5 < np.corrcoef(predicted[:, trait], traits[held_out, trait])[0, 1] < 0.99


def make_sampler(num_rotations: int) -> PinSampler:
    config, pins = world().config, world().pins
    return PinSampler(
        pins,
        mask=pins.is_candidate,
        num_subtopics=config.num_subtopics,
        num_rotations=num_rotations,
        num_days=config.num_days,
        fresh_days=7,
    )


def draw(
    sampler: PinSampler, day: int, rotation: Any, subtopic: Ints, rng: np.random.Generator, *, is_fresh: bool = False
) -> Ints:
    """Draw one pin for each sub-topic, each in a session of its own."""
    num = len(subtopic)
    days, rotations = np.full(num, day), np.asarray(rotation, dtype=np.int64)
    return sampler.pick(days, rotations, np.arange(num), subtopic, rng.random(num), np.full(num, is_fresh))


def test_the_sampler_draws_by_popularity_among_existing_pins() -> None:
    pins, num, day = world().pins, 60_000, 10
    rng = np.random.default_rng(0)
    subtopic = int(np.argmax(np.bincount(pins.subtopic)))
    picked = draw(make_sampler(1), day, np.zeros(num), np.full(num, subtopic), rng)
    exists = (pins.subtopic == subtopic) & pins.is_candidate & (pins.visible_day <= day)
    share = np.where(exists, pins.popularity, 0) / pins.popularity[exists].sum()
    counts = np.bincount(picked, minlength=len(pins))
    assert counts[~exists].sum() == 0
    error = (counts - num * share)[exists] / np.sqrt(num * share * (1 - share))[exists]
    assert np.abs(error).max() < 5


def test_fresh_draws_are_fresh_where_a_group_has_fresh_pins() -> None:
    pins, day = world().pins, 15
    rng = np.random.default_rng(1)
    num = 20_000
    subtopic = rng.integers(0, world().config.num_subtopics, num)
    picked = draw(make_sampler(1), day, np.zeros(num), subtopic, rng, is_fresh=True)
    is_fresh = pins.is_candidate & (pins.visible_day > day - 7) & (pins.visible_day <= day)
    has_fresh = np.isin(subtopic, pins.subtopic[is_fresh])
    assert has_fresh.any()
    assert is_fresh[picked[has_fresh]].all()
    assert (pins.subtopic[picked] == subtopic).all()


def test_rotations_show_disjoint_sets_unless_one_is_empty() -> None:
    pins, num = world().pins, 30_000
    rng = np.random.default_rng(2)
    subtopic = rng.integers(0, world().config.num_subtopics, num)
    rotation = rng.integers(0, 9, num)
    picked = draw(make_sampler(3), 0, rotation, subtopic, rng)
    usable = pins.is_candidate & (pins.visible_day == 0)
    occupied = np.zeros((world().config.num_subtopics, 3), dtype=bool)
    occupied[pins.subtopic[usable], pins.rotation[usable]] = True
    has_set = occupied[subtopic, rotation % 3]
    assert (pins.rotation[picked[has_set]] == rotation[has_set] % 3).all()
    assert (pins.subtopic[picked] == subtopic).all()


def test_popular_subtopics_are_drawn_by_mass() -> None:
    pins, num = world().pins, 60_000
    rng = np.random.default_rng(3)
    sessions = np.zeros(num, dtype=np.int64)
    picked = make_sampler(1).pick_popular_subtopic(np.array([5]), np.array([0]), sessions, rng.random(num))
    usable = pins.is_candidate & (pins.visible_day <= 5)
    mass = np.bincount(pins.subtopic[usable], pins.popularity[usable])
    share = mass / mass.sum()
    error = (np.bincount(picked, minlength=len(share)) - num * share) / np.sqrt(num * share * (1 - share))
    assert np.abs(error).max() < 5


def test_another_seed_is_another_site() -> None:
    other = World(replace(tiny(), seed=1))
    assert (other.pins.subtopic != world().pins.subtopic).mean() > 0.5
    assert other.pin_id([7]) != world().pin_id([7])
