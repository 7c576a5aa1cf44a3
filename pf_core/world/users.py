"""Users, in chunks, and their interests at any time.

Interests drift in closed form. A user has a few lasting interests, whose strength oscillates over months and
which may begin or end, and a chain of projects: each starts at full strength, fades over days to weeks
(heavy-tailed), and often leads to a project on a succeeding topic. All of it is drawn in advance, so that the
interests of a user at time t are a formula, not a history.
"""

from dataclasses import dataclass

import numpy as np

from pf_core.world.behaviour import ACTION_TYPES
from pf_core.world.column_tables import Doubles, Floats, Ints
from pf_core.world.config import WorldConfig
from pf_core.world.pins import DAY_S
from pf_core.world.streams import Stream, open_stream
from pf_core.world.taxonomy import NUM_SUCCESSORS, Taxonomy

FAVOURITE_CATEGORIES = 3

FAVOURITE_SHARE = 0.8

SUCCESSION_SHARE = 0.5

PROJECT_TAIL = 1.3

PROJECT_MIN_DAYS = 4.0

PROJECT_MAX_DAYS = 120.0

BURN_IN_DAYS = 90.0
"""Projects begin before the first day, so that the first day is like the others."""

MAX_SESSIONS_PER_DAY = 6.0

TIME_ZONES_H = np.array([-8, -7, -6, -5, -3, 0, 1, 2, 5.5, 8, 9])

TIME_ZONE_SHARES = np.array([0.14, 0.07, 0.16, 0.22, 0.09, 0.08, 0.12, 0.04, 0.04, 0.02, 0.02])


@dataclass(frozen=True, kw_only=True)
class Users:
    """A chunk of users, one row each."""

    index: Ints
    join_day: Ints  # the first day with sessions; 0 for users who are there at the start
    leave_day: Ints  # the first day without sessions
    sessions_per_day: Doubles
    weekend_factor: Doubles
    time_zone_h: Doubles
    day_part: Ints  # preferred time of the day, an index into sessions.PEAK_HOURS
    depth: Doubles  # number of pins that the user scrolls past in a session, relative to other users
    search_affinity: Doubles
    rotation: Ints
    propensity: Floats  # [user, ACTION_TYPES]: savers, clickers, gazers
    taste: Floats  # [user, num_styles]
    interest: Ints  # [user, slot]: sub-topics, lasting ones first, then projects by onset
    weight: Floats
    onset_day: Floats
    duration_days: Floats  # a project fades until its end; a lasting interest ends without fading
    swing: Floats  # 0 for projects
    swing_days: Floats
    swing_phase: Floats
    is_project: Floats

    def __len__(self) -> int:
        return len(self.index)


def build_users(config: WorldConfig, taxonomy: Taxonomy, chunk: int) -> Users:
    rng = open_stream(config.seed, Stream.USERS, chunk)
    first = chunk * config.users_per_chunk
    num = min(config.users_per_chunk, config.num_users - first)

    # Users who are there at the start have been there for a while, and stay longer than new ones.
    is_initial = rng.random(num) < config.initial_user_share
    join_day = np.where(is_initial, 0, rng.integers(0, config.num_days, num))
    lifetime_days = np.where(is_initial, 220.0, 25.0) * rng.pareto(1.1, num) + rng.exponential(3.0, num)
    leave_day = join_day + 1 + np.minimum(lifetime_days, 100_000).astype(np.int64)

    sessions_per_day = config.sessions_per_day * np.exp(rng.normal(0, config.sessions_sigma, num))
    lasting = _draw_lasting(config, taxonomy, num, rng)
    projects = _draw_projects(config, taxonomy, num, rng)
    slots = {name: np.concatenate((lasting[name], projects[name]), axis=1) for name in lasting}
    return Users(
        index=np.arange(first, first + num),
        join_day=join_day,
        leave_day=leave_day,
        sessions_per_day=np.minimum(sessions_per_day, MAX_SESSIONS_PER_DAY),
        weekend_factor=np.exp(rng.normal(0.15, 0.35, num)),
        time_zone_h=rng.choice(TIME_ZONES_H, num, p=TIME_ZONE_SHARES),
        day_part=rng.integers(0, 5, num),
        depth=np.exp(rng.normal(0, 0.4, num)),
        search_affinity=rng.beta(1.2, 2.4, num),
        rotation=rng.integers(0, config.num_rotations, num),
        propensity=_draw_propensity(num, rng),
        taste=_draw_taste(config, num, rng),
        interest=slots["interest"].astype(np.int64),
        **{name: slots[name].astype(np.float32) for name in slots if name != "interest"},
    )


def _draw_propensity(num: int, rng: np.random.Generator) -> Floats:
    """Draw each user's readiness to engage, plus an inclination for each type of action."""
    readiness = rng.normal(0, 0.3, (num, 1))
    inclination = rng.normal(0, 0.6, (num, len(ACTION_TYPES)))
    return (readiness + inclination).astype(np.float32)


def _draw_taste(config: WorldConfig, num: int, rng: np.random.Generator) -> Floats:
    """Draw a direction in style space: taste · style has unit variance over pins, for every user."""
    drawn = rng.standard_normal((num, config.content.num_styles))
    return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)).astype(np.float32)


def _draw_lasting(config: WorldConfig, taxonomy: Taxonomy, num: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw sub-topics of a few favourite categories, with sparse weights; the first interest never ends."""
    shape = (num, config.max_lasting_interests)
    count = np.minimum(1 + rng.poisson(rng.gamma(2.0, 1.5, num)), config.max_lasting_interests)
    any_subtopic = _draw_anywhere(taxonomy, rng.random((num, FAVOURITE_CATEGORIES)))
    favourites = taxonomy.category_of[any_subtopic]
    chosen = np.take_along_axis(favourites, rng.integers(0, FAVOURITE_CATEGORIES, shape), axis=1)
    in_favourite = taxonomy.draw_subtopics(
        taxonomy.first_of_category[chosen], taxonomy.first_of_category[chosen + 1], rng.random(shape)
    )
    anywhere = _draw_anywhere(taxonomy, rng.random(shape))
    interest = np.where(rng.random(shape) < FAVOURITE_SHARE, in_favourite, anywhere)

    weight = rng.gamma(0.8, size=shape) + 0.02
    weight[np.arange(shape[1]) >= count[:, None]] = 0.0
    weight /= weight.sum(axis=1, keepdims=True)

    begins_later = rng.random(shape) < 0.3
    onset = np.where(begins_later, rng.uniform(-30, config.num_days, shape), -1e6)
    duration = np.where(begins_later, rng.exponential(200.0, shape), 1e6 + rng.exponential(250.0, shape))
    onset[:, 0], duration[:, 0] = -1e6, 1e9
    return {
        "interest": interest,
        "weight": weight,
        "onset_day": onset,
        "duration_days": duration,
        "swing": rng.uniform(0.2, 1.0, shape),
        "swing_days": rng.uniform(40, 160, shape),
        "swing_phase": rng.uniform(0, 1, shape),
        "is_project": np.zeros(shape),
    }


def _draw_projects(
    config: WorldConfig, taxonomy: Taxonomy, num: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Draw projects: their onsets are a renewal process, their topics a Markov chain."""
    expected = (config.num_days + BURN_IN_DAYS) / config.project_gap_days
    shape = (num, int(np.ceil(expected + 3 * expected**0.5)))
    onset = np.cumsum(rng.exponential(config.project_gap_days, shape), axis=1) - BURN_IN_DAYS
    duration = PROJECT_MIN_DAYS * (1 + rng.pareto(PROJECT_TAIL, shape))
    interest = _draw_anywhere(taxonomy, rng.random(shape))
    follows = rng.random(shape) < SUCCESSION_SHARE
    which = rng.integers(0, NUM_SUCCESSORS, shape)
    uniform = rng.random(shape)
    for slot in range(1, shape[1]):
        successor = taxonomy.successors[taxonomy.topic_of[interest[:, slot - 1]], which[:, slot]]
        in_successor = taxonomy.draw_in_topic(successor, uniform[:, slot])
        interest[:, slot] = np.where(follows[:, slot], in_successor, interest[:, slot])
    return {
        "interest": interest,
        "weight": np.exp(rng.normal(0.2, 0.7, shape)),
        "onset_day": onset,
        "duration_days": np.minimum(duration, PROJECT_MAX_DAYS),
        "swing": np.zeros(shape),
        "swing_days": np.ones(shape),
        "swing_phase": np.zeros(shape),
        "is_project": np.ones(shape),
    }


def _draw_anywhere(taxonomy: Taxonomy, uniform: Doubles) -> Ints:
    first = np.zeros(uniform.shape, dtype=np.int64)
    return taxonomy.draw_subtopics(first, first + taxonomy.num_subtopics, uniform)


def current_interests(config: WorldConfig, taxonomy: Taxonomy, users: Users, ts_s: Doubles) -> tuple[Ints, Floats]:
    """Return the sub-topics [row, num_current_interests] that interest each user at the given time, and their shares.

    The shares sum to 1 and are the distribution of the intent of a session that starts at that time. Only the
    strongest `num_current_interests` count; slots without weight have share 0.
    """
    day = ((ts_s - config.start_s) / DAY_S)[:, None]
    elapsed = day.astype(np.float32) - users.onset_day
    active = (elapsed >= 0) & (elapsed < users.duration_days)
    fading = 1 - users.is_project * elapsed / users.duration_days
    turn = day.astype(np.float32) / users.swing_days + users.swing_phase
    strength = users.weight * np.exp(users.swing * np.sin(2 * np.pi * turn)) * fading * active

    local_hour, is_weekend = local_time(ts_s, users.time_zone_h)
    strength *= np.exp(taxonomy.log_rhythm(users.interest, local_hour[:, None], is_weekend[:, None]))

    kept = min(config.num_current_interests, strength.shape[1])
    # In slot order, not by strength: one uniform number then means the same interest at different hours.
    strongest = np.sort(np.argsort(-strength, axis=1, kind="stable")[:, :kept], axis=1)
    share = np.take_along_axis(strength, strongest, axis=1)
    share /= share.sum(axis=1, keepdims=True)
    return np.take_along_axis(users.interest, strongest, axis=1), share


def local_time(ts_s: Doubles, time_zone_h: Doubles) -> tuple[Doubles, np.ndarray]:
    """Return the hour of the day in [0, 24), and whether it is Saturday or Sunday, in the user's time zone."""
    local_s = ts_s + time_zone_h * 3600
    weekday = (np.floor(local_s / DAY_S).astype(np.int64) + 3) % 7  # 1970-01-01 was a Thursday
    return (local_s % DAY_S) / 3600, weekday >= 5
