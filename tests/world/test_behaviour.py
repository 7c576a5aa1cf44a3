"""The simulated frequencies agree with the probabilities of `World.engagement`."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from pf_core.world.behaviour import ACTION_TYPES, CLICK, CLOSEUP, HIDE, HOMEFEED, REPIN, SHORT_CLICK, SURFACES, Surface
from pf_core.world.column_tables import Doubles, Ints
from pf_core.world.config import tiny
from pf_core.world.pins import TRAITS
from pf_core.world.world import World


class Shown(NamedTuple):
    """One row per impression; `user` is the index."""

    user: Ints
    start_s: Doubles
    intent: Ints
    surface: Ints
    pin: Ints
    action: Ints


@cache
def world() -> World:
    return World(replace(tiny(), num_users=1_500, users_per_chunk=1_500, sessions_per_day=0.8))


@cache
def shown() -> Shown:
    """The impressions of six days."""
    days = []
    for day in range(6, 12):
        sessions, impressions = world().impressions(day, 0)
        of_session = (sessions.user_row, sessions.start_s, sessions.intent)
        columns = [column[impressions.session] for column in of_session]
        days.append((*columns, impressions.surface, impressions.pin, impressions.action))
    return Shown(*(np.concatenate(column) for column in zip(*days, strict=True)))


def z_score(observed: float, probabilities: np.ndarray) -> float:
    return float((observed - probabilities.sum()) / np.sqrt((probabilities * (1 - probabilities)).sum()))


@pytest.mark.parametrize("surface", SURFACES)
def test_frequencies_agree_with_the_model(surface: Surface) -> None:
    rows = np.flatnonzero(shown().surface == SURFACES.index(surface))
    user, start_s, intent, _, pin, action = (column[rows] for column in shown())
    would = world().engagement(user, pin, start_s, surface, intent=intent)
    assert would.none + would.actions.sum(axis=1) == pytest.approx(1)
    assert len(rows) > 10_000
    for code in range(len(ACTION_TYPES)):
        assert abs(z_score((action == code).sum(), would.actions[:, code])) < 4.5, ACTION_TYPES[code]
    # Calibrated, and not only on average: within each tenth of the predicted engagement.
    tenth = np.argsort(np.argsort(would.none)) * 10 // len(rows)
    for part in range(10):
        inside = tenth == part
        assert abs(z_score((action[inside] >= 0).sum(), 1 - would.none[inside])) < 4.5
    assert would.none[tenth == 9].mean() - would.none[tenth == 0].mean() > 0.3


@pytest.mark.parametrize(("code", "name"), [(CLOSEUP, "long_closeup"), (CLICK, "long_click")])
def test_long_durations_agree_with_the_model(code: int, name: str) -> None:
    rows = np.flatnonzero((shown().action == code) & (shown().surface == HOMEFEED))
    user, start_s, intent, _, pin, _ = (column[rows] for column in shown())
    would = world().engagement(user, pin, start_s, intent=intent)
    num_long = 0
    for day in range(6, 12):
        actions = world().actions(day, 0)
        num_long += ((actions.action == code) & (actions.surface == HOMEFEED) & (actions.duration_s > 10)).sum()
    assert abs(z_score(num_long, getattr(would, name))) < 4.5


def test_intents_follow_the_interests_of_the_moment() -> None:
    """Uses one session for each user and day, because the sessions of a day share their intent."""
    observed, expected = 0, []
    for day in range(6):
        sessions = world().sessions(day, 0)
        first = np.unique(sessions.user_row, return_index=True)[1]
        interest, share = world().interests(sessions.user_row[first], sessions.start_s[first])
        assert share.sum(axis=1) == pytest.approx(1, abs=1e-5)
        # A sub-topic can be in two slots: as a lasting interest and as a project.
        strongest = np.take_along_axis(interest, share.argmax(axis=1)[:, None], axis=1)
        expected.append(np.where(interest == strongest, share, 0).sum(axis=1))
        observed += (sessions.intent[first] == strongest[:, 0]).sum()
    assert abs(z_score(observed, np.concatenate(expected))) < 4.5


def test_sessions_of_a_day_share_their_intent() -> None:
    same, independent = [], []
    for day in range(6):
        sessions = world().sessions(day, 0)
        order = np.argsort(sessions.user_row, kind="stable")
        user, intent = sessions.user_row[order], sessions.intent[order]
        pairs = np.flatnonzero(user[1:] == user[:-1])
        same.append(intent[pairs] == intent[pairs + 1])
        share = sessions.share[order][pairs]
        independent.append((share**2).sum(axis=1))
    assert np.concatenate(same).mean() > np.concatenate(independent).mean() + 0.1


def test_without_an_intent_the_probabilities_are_averaged() -> None:
    user, pin, ts_s = 17, np.arange(40), world().config.start_s + 5 * 86_400
    interest, share = world().interests(user, ts_s)
    given = [world().engagement(user, pin, ts_s, "search", intent=subtopic) for subtopic in interest[0]]
    average = world().engagement(user, pin, ts_s, "search")
    mixed = sum(weight * one.actions for weight, one in zip(share[0], given, strict=True))
    assert average.actions == pytest.approx(mixed, rel=1e-5)
    positive = sum(weight * one.positive for weight, one in zip(share[0], given, strict=True))
    assert average.positive == pytest.approx(positive, rel=1e-5)


def test_a_pin_that_matches_the_intent_gets_more_engagement() -> None:
    """Planted: two pins that differ in nothing but their sub-topic."""
    subtopic = int(world().pins.subtopic[0])
    elsewhere = int(np.flatnonzero(world().taxonomy.category_of != world().taxonomy.category_of[subtopic])[0])
    ts_s = world().config.start_s
    matched = world().engagement(3, 0, ts_s, intent=subtopic)
    strange = world().engagement(3, 0, ts_s, intent=elsewhere)
    for code in (REPIN, CLOSEUP, CLICK):
        assert matched.actions[0, code] > 1.5 * strange.actions[0, code]
    assert matched.actions[0, HIDE] < strange.actions[0, HIDE]
    assert matched.long_closeup[0] > strange.long_closeup[0]


def test_link_rich_pins_get_more_clicks() -> None:
    link = world().pins.traits[shown().pin, TRAITS.index("link_richness")]
    rich, bare = shown().action[link > 1.0], shown().action[link < -0.5]
    assert (rich == CLICK).mean() > 4 * (bare == CLICK).mean()
    assert (rich == SHORT_CLICK).mean() > 2 * (bare == SHORT_CLICK).mean()
    assert (rich == CLOSEUP).mean() < (bare == CLOSEUP).mean()


def test_users_differ_in_what_they_do() -> None:
    """There are savers and clickers: the rates of a user in two halves of the days correlate."""
    user, action = shown().user, shown().action
    half = np.arange(len(user)) < len(user) // 2
    for code in (REPIN, CLICK):
        rates = []
        for part in (half, ~half):
            num = np.bincount(user[part], minlength=1_500)
            rates.append((np.bincount(user[part], action[part] == code, minlength=1_500), num))
        busy = (rates[0][1] > 80) & (rates[1][1] > 80)
        first, second = (hits[busy] / num[busy] for hits, num in rates)
        assert np.corrcoef(first, second)[0, 1] > 0.4


def test_a_short_click_is_short() -> None:
    actions = world().actions(3, 0)
    assert actions.duration_s[actions.action == SHORT_CLICK].max() < 10
    assert (actions.duration_s > 0).all()
