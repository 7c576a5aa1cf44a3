"""Invariants of every day's actions, and the statistics of the site's activity."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from pf_core.world.behaviour import ACTION_TYPES, HOMEFEED
from pf_core.world.column_tables import concat, take
from pf_core.world.config import DefectConfig, tiny
from pf_core.world.simulate import Actions
from pf_core.world.world import World


@cache
def world() -> World:
    defects = DefectConfig(late_one_day=0.1, late_two_days=0.05)
    return World(replace(tiny(), num_users=900, num_days=56, users_per_chunk=300, sessions_per_day=0.5, dirt=defects))


@cache
def arrivals() -> tuple[Actions, np.ndarray]:
    """Return all actions, and the day on which each arrived."""
    parts, days = [], []
    for day in range(world().config.num_days):
        for chunk in range(world().config.num_chunks):
            parts.append(world().actions(day, chunk))
            days.append(np.full(len(parts[-1]), day))
    return concat(parts), np.concatenate(days)


def day_of(actions: Actions) -> np.ndarray:
    return np.floor((actions.ts_s - world().config.start_s) / 86_400).astype(np.int64)


def test_a_day_can_be_generated_alone_and_in_any_order() -> None:
    again = World(world().config)
    for day, chunk in [(30, 2), (3, 0), (3, 1)]:
        one, other = again.actions(day, chunk), world().actions(day, chunk)
        for name in ("user", "pin", "action", "surface", "ts_s", "duration_s"):
            assert (getattr(one, name) == getattr(other, name)).all()


def test_no_pin_is_engaged_before_it_exists() -> None:
    actions, _ = arrivals()
    pins = world().pins
    assert (actions.ts_s > pins.created_s[actions.pin]).all()
    assert (pins.visible_day[actions.pin] > 0).mean() > 0.05, "new pins are found"


def test_homefeed_shows_candidates_only() -> None:
    actions, _ = arrivals()
    is_candidate = world().pins.is_candidate[actions.pin]
    assert is_candidate[actions.surface == HOMEFEED].all()
    assert 0.05 < (~is_candidate[actions.surface != HOMEFEED]).mean() < 0.3


def test_nobody_acts_before_joining_or_after_leaving() -> None:
    actions, _ = arrivals()
    users = world().users_at(np.arange(900))
    day = day_of(actions)
    assert (day >= users.join_day[actions.user]).all()
    assert (day < users.leave_day[actions.user]).all()
    assert 0.2 < (users.join_day > 0).mean() < 0.5
    assert (users.leave_day < world().config.num_days).mean() > 0.1


def test_late_actions_arrive_one_or_two_days_later() -> None:
    actions, arrived = arrivals()
    delay = arrived - day_of(actions)
    share = np.bincount(delay, minlength=3) / len(delay)
    assert len(share) == 3
    assert share[1] == pytest.approx(0.10, rel=0.2)
    assert share[2] == pytest.approx(0.05, rel=0.25)


def test_a_session_stays_within_its_day_and_its_times_ascend() -> None:
    for day in (2, 3):
        actions = world().actions(day, 0)
        assert (np.diff(actions.ts_s) >= 0).all()
        assert set(np.unique(day_of(actions))) <= {day - 2, day - 1, day}


def test_activity_is_heavy_tailed() -> None:
    actions, _ = arrivals()
    per_user = np.sort(np.bincount(actions.user, minlength=900))[::-1]
    assert per_user[:90].sum() > 0.4 * per_user.sum()
    assert per_user.mean() > 1.8 * np.median(per_user)
    per_pin = np.sort(np.bincount(actions.pin, minlength=2_000))[::-1]
    assert per_pin[:20].sum() > 0.1 * per_pin.sum()
    # Zipf-like: over the upper half of the ranks, log count falls roughly linearly in log rank.
    rank = np.arange(1, 1_001)
    assert np.corrcoef(np.log(rank[10:]), np.log(per_pin[10:1_000] + 1))[0, 1] < -0.93


def test_actions_and_surfaces_have_plausible_shares() -> None:
    actions, _ = arrivals()
    share = dict(zip(ACTION_TYPES, np.bincount(actions.action) / len(actions), strict=True))
    assert share["closeup"] > share["repin"] > share["click"] > share["short_click"]
    assert 0 < share["hide"] + share["reaction"] + share["comment"] < 0.1
    assert 0.5 < (actions.surface == HOMEFEED).mean() < 0.8


def test_days_have_a_rhythm() -> None:
    """In local time, there is hardly any activity at four in the morning."""
    actions, _ = arrivals()
    users = world().users_at(actions.user)
    hour = ((actions.ts_s / 3600 + users.time_zone_h) % 24).astype(int)
    per_hour = np.bincount(hour, minlength=24)
    assert per_hour[2:5].sum() < 0.3 * per_hour[19:22].sum()
    weekday = (day_of(actions) + 3) % 7  # 2026-01-01 is a Thursday
    per_weekday = np.bincount(weekday, minlength=7)
    assert per_weekday[6] > 1.1 * per_weekday[1]


def test_topics_have_preferred_hours() -> None:
    """Actions are nearer to the hour of their topic than the same user's actions with shuffled hours."""
    actions, _ = arrivals()
    by_user = take(actions, np.argsort(actions.user, kind="stable"))
    topic = world().taxonomy.topic_of[world().pins.subtopic[by_user.pin]]
    hour = (by_user.ts_s / 3600 + world().users_at(by_user.user).time_zone_h) % 24
    shuffled = hour[np.lexsort((np.random.default_rng(0).random(len(hour)), by_user.user))]
    peak_hour = world().taxonomy.peak_hour[topic]
    nearer = np.cos((hour - peak_hour) * 2 * np.pi / 24) - np.cos((shuffled - peak_hour) * 2 * np.pi / 24)
    num_actions = np.bincount(by_user.user, minlength=900)
    per_user = np.bincount(by_user.user, nearer, minlength=900)[num_actions > 30] / num_actions[num_actions > 30]
    assert per_user.mean() > 5 * per_user.std() / np.sqrt(len(per_user))


def test_an_interest_is_strongest_at_its_hour() -> None:
    """Compares the share of a topic with a strong rhythm at its peak and twelve hours later."""
    taxonomy = world().taxonomy
    topic = int(np.argmax(taxonomy.peak_strength))
    users = world().users_at(np.arange(900))
    peak_s = world().config.start_s + 20 * 86_400 + (taxonomy.peak_hour[topic] - users.time_zone_h) * 3600
    shares = []
    for ts_s in (peak_s, peak_s + 12 * 3600):
        interest, share = world().interests(users.index, ts_s)
        shares.append(np.where(taxonomy.topic_of[interest] == topic, share, 0).sum(axis=1))
    average = (shares[0] + shares[1]) / 2
    torn = (average > 0.05) & (average < 0.8)
    assert torn.sum() > 20
    assert shares[0][torn].mean() > 1.5 * shares[1][torn].mean()


def overlap(left: np.ndarray, right: np.ndarray) -> float:
    """Return the mean over users of the common mass of two topic distributions."""
    active = (left.sum(axis=1) >= 15) & (right.sum(axis=1) >= 15)
    left = left[active] / left[active].sum(axis=1, keepdims=True)
    right = right[active] / right[active].sum(axis=1, keepdims=True)
    assert active.sum() > 40
    return float(np.minimum(left, right).sum(axis=1).mean())


def test_interests_drift() -> None:
    actions, _ = arrivals()
    topic = world().taxonomy.topic_of[world().pins.subtopic[actions.pin]]
    week = day_of(actions) // 7
    by_week = np.zeros((8, 900, world().config.num_topics))
    np.add.at(by_week, (week, actions.user, topic), 1)
    adjacent = np.mean([overlap(by_week[w], by_week[w + 1]) for w in range(7)])
    distant = np.mean([overlap(by_week[w], by_week[w + 6]) for w in range(2)])
    strangers = np.mean([overlap(by_week[w], np.roll(by_week[w], 1, axis=0)) for w in range(8)])
    assert adjacent > distant + 0.03
    assert distant > strangers + 0.05


def test_a_world_with_one_user_and_quiet_days() -> None:
    lonely = World(replace(tiny(), num_users=1, sessions_per_day=0.01))
    assert sum(len(lonely.actions(day, 0)) for day in range(21)) >= 0
    with pytest.raises(ValueError, match="no user chunk 1"):
        lonely.users(1)
    with pytest.raises(ValueError, match="user indices"):
        lonely.users_at([1])


def test_users_are_returned_in_the_order_of_their_indices() -> None:
    index = np.array([899, 0, 299, 300, 0, 601])
    assert (world().users_at(index).index == index).all()
    assert (world().user_index(world().user_id(index)) == index).all()
    assert (world().pin_index(world().pin_id(index)) == index).all()
