"""Simulation of sessions: the site's recommenders show pins, users react, and some reactions open Related Pins.

The recommenders are those of a site that already works, not an oracle. Homefeed mixes the session's intent,
the user's other current interests, siblings of both, and what is popular everywhere; it shows candidates only,
and a rough ranker drops most of what it rates low. Search answers the intent. A closeup or repin often opens
Related Pins, which continue the sub-topic of the pin. No surface repeats a pin within a session. Only
engagement is logged, impressions are not.
"""

from dataclasses import dataclass, replace

import numpy as np

from pf_core.world import behaviour
from pf_core.world.behaviour import CLOSEUP, HOMEFEED, RELATED_PINS, REPIN, SEARCH
from pf_core.world.column_tables import Doubles, Floats, Ints, concat, positions_within, take
from pf_core.world.pin_sampler import PinSampler
from pf_core.world.pins import DAY_S, Pins
from pf_core.world.sessions import Sessions
from pf_core.world.taxonomy import Taxonomy
from pf_core.world.users import Users

# Homefeed's mixture: shares drawn from the session's intent and from the user's other interests; the rest is popular.
FROM_INTENT, FROM_MIND = 0.45, 0.35

HOMEFEED_NEIGHBOURS = 0.4  # share of these that is drawn from a sibling sub-topic

# Homefeed's ranker: the logit of showing a pin that was drawn. It knows appeal and taste only roughly.
RANKER_BASE, RANKER_APPEAL, RANKER_TASTE = -0.5, 0.9, 0.9

NOT_SHOWN = -1

SEARCH_NEIGHBOURS = 0.1

RELATED_NEIGHBOURS = 0.2

FRESH_SHARE = 0.2

OPENS_RELATED = {CLOSEUP: 0.22, REPIN: 0.10}

RELATED_CONTINUES = 0.85  # the length of a visit to Related Pins is geometric


@dataclass(frozen=True, kw_only=True)
class Site:
    """The pins and recommenders, which all users share."""

    taxonomy: Taxonomy
    pins: Pins
    pin_utility: Floats
    appeal: Floats
    homefeed: PinSampler
    everything: PinSampler


@dataclass(frozen=True, kw_only=True)
class Impressions:
    """Pins that were shown, with the users' reactions."""

    session: Ints
    position: Ints  # within the session
    surface: Ints
    pin: Ints
    action: Ints  # index into ACTION_TYPES, -1 for none
    match: Floats
    taste: Floats


@dataclass(frozen=True, kw_only=True)
class Actions:
    """True actions, in ascending order of time; users and pins are indices."""

    user: Ints
    pin: Ints
    action: Ints
    surface: Ints
    ts_s: Doubles
    duration_s: Doubles

    def __len__(self) -> int:
        return len(self.user)


def simulate_impressions(site: Site, users: Users, sessions: Sessions, rng: np.random.Generator) -> Impressions:
    """Return every pin that was shown, with the user's reaction, in no particular order."""
    session = np.repeat(np.arange(len(sessions)), sessions.num_slots)
    slot = positions_within(sessions.num_slots)
    is_search = (slot >= sessions.search_from[session]) & (slot < sessions.search_to[session])
    on_homefeed, on_search = np.flatnonzero(~is_search), np.flatnonzero(is_search)
    pin = np.empty(len(session), dtype=np.int64)
    pin[on_homefeed] = _fill_homefeed(site, users, sessions, session[on_homefeed], rng)
    pin[on_search] = _answer_search(site, sessions, session[on_search], rng)
    shown = np.flatnonzero(pin != NOT_SHOWN)
    surface = np.where(is_search[shown], SEARCH, HOMEFEED)
    direct = _engage(site, users, sessions, session[shown], surface, pin[shown], rng)

    num_related = np.zeros(len(direct.action), dtype=np.int64)
    for action, share in OPENS_RELATED.items():
        opened = np.flatnonzero(direct.action == action)
        opened = opened[rng.random(len(opened)) < share]
        num_related[opened] = rng.geometric(1 - RELATED_CONTINUES, len(opened))
    seed = np.repeat(np.arange(len(num_related)), num_related)
    related = _continue_related(site, users, sessions, direct, seed, rng)

    # Related pins move what follows them in the session to later positions.
    per_session = np.bincount(direct.session, minlength=len(sessions))
    before = np.concatenate(([0], np.cumsum(num_related)))
    pushed = before[:-1] - before[np.cumsum(per_session) - per_session][direct.session]
    position = positions_within(per_session) + pushed
    related_position = (position[seed] + 1 + positions_within(num_related))[related.position]
    both = concat([direct, related])
    return replace(both, position=np.concatenate((position, related_position)))


def collect_actions(
    site: Site,
    users: Users,
    sessions: Sessions,
    impressions: Impressions,
    *,
    start_s: int,
    rng: np.random.Generator,
) -> Actions:
    """Return the actions of the impressions, with durations and times.

    The time in a session is scrolling time plus the durations so far. A session that would run past UTC midnight is
    moved to end before it, so that a day's actions depend on no other day.
    """
    shown = take(impressions, np.flatnonzero(impressions.action >= 0))
    shown = take(shown, np.lexsort((shown.position, shown.session)))
    mean_log = behaviour.log_duration(shown.action, site.pins.traits[shown.pin], shown.match, shown.taste)
    duration_s = behaviour.draw_durations(shown.action, mean_log, rng.standard_normal(len(mean_log)))
    duration_s = np.round(duration_s, 3)

    spent_s = np.cumsum(duration_s)
    before_s = spent_s - duration_s
    first_row = np.searchsorted(shown.session, np.arange(len(sessions)))
    stop_row = np.searchsorted(shown.session, np.arange(len(sessions)), side="right")
    offset_s = before_s - before_s[first_row[shown.session]] + shown.position * sessions.pace_s[shown.session]
    length_s = np.zeros(len(sessions))
    has_actions = stop_row > first_row
    last = stop_row[has_actions] - 1
    length_s[has_actions] = offset_s[last] + duration_s[last]
    midnight_s = start_s + (sessions.day + 1) * DAY_S
    session_start_s = np.minimum(sessions.start_s, midnight_s - length_s - 1)

    actions = Actions(
        user=users.index[sessions.user_row[shown.session]],
        pin=shown.pin,
        action=shown.action,
        surface=shown.surface,
        ts_s=np.round(session_start_s[shown.session] + offset_s, 3),
        duration_s=duration_s,
    )
    return take(actions, np.argsort(actions.ts_s, kind="stable"))


def _fill_homefeed(site: Site, users: Users, sessions: Sessions, session: Ints, rng: np.random.Generator) -> Ints:
    """Return a pin for each Homefeed slot of the sessions, or NOT_SHOWN where the ranker drops it."""
    num = len(session)
    source = rng.random(num)
    uniform = rng.random(num)
    subtopic = sessions.intent[session]

    of_mind = np.flatnonzero((source >= FROM_INTENT) & (source < FROM_INTENT + FROM_MIND))
    cumulative = np.take(np.cumsum(sessions.share, axis=1), session[of_mind], axis=0)
    picked = np.minimum((cumulative <= uniform[of_mind, None]).sum(axis=1), cumulative.shape[1] - 1)
    subtopic[of_mind] = sessions.interest[session[of_mind], picked]
    subtopic = _wander(site.taxonomy, subtopic, HOMEFEED_NEIGHBOURS, rng)

    day, rotation = sessions.day, sessions.rotation
    popular = np.flatnonzero(source >= FROM_INTENT + FROM_MIND)
    subtopic[popular] = site.homefeed.pick_popular_subtopic(day, rotation, session[popular], uniform[popular])
    pin = site.homefeed.pick(day, rotation, session, subtopic, rng.random(num), rng.random(num) < FRESH_SHARE)

    user_row = sessions.user_row[session]
    taste = behaviour.dot_rows(np.take(users.taste, user_row, axis=0), np.take(site.pins.style, pin, axis=0))
    score = RANKER_BASE + RANKER_APPEAL * site.appeal[pin] + RANKER_TASTE * taste
    return np.where(rng.random(num) * (1 + np.exp(-score)) < 1, pin, NOT_SHOWN)


def _answer_search(site: Site, sessions: Sessions, session: Ints, rng: np.random.Generator) -> Ints:
    """Return a pin for each search result of the sessions."""
    subtopic = _wander(site.taxonomy, sessions.intent[session], SEARCH_NEIGHBOURS, rng)
    return _pick_anywhere(site, sessions, session, subtopic, rng)


def _continue_related(
    site: Site, users: Users, sessions: Sessions, direct: Impressions, seed: Ints, rng: np.random.Generator
) -> Impressions:
    """Show pins related to the seed rows of `direct`, but not the seed's pin itself; position is the row of `seed`."""
    session, seed_pin = direct.session[seed], direct.pin[seed]
    subtopic = _wander(site.taxonomy, site.pins.subtopic[seed_pin], RELATED_NEIGHBOURS, rng)
    pin = _pick_anywhere(site, sessions, session, subtopic, rng)
    kept = np.flatnonzero(pin != seed_pin)
    related = _engage(site, users, sessions, session[kept], np.full(len(kept), RELATED_PINS), pin[kept], rng)
    return replace(related, position=kept[related.position])


def _wander(taxonomy: Taxonomy, subtopic: Ints, share: float, rng: np.random.Generator) -> Ints:
    """Replace a share of the sub-topics by a sibling within the topic, drawn by demand."""
    rows = np.flatnonzero(rng.random(len(subtopic)) < share)
    wandered = subtopic.copy()
    wandered[rows] = taxonomy.draw_in_topic(taxonomy.topic_of[subtopic[rows]], rng.random(len(rows)))
    return wandered


def _pick_anywhere(site: Site, sessions: Sessions, session: Ints, subtopic: Ints, rng: np.random.Generator) -> Ints:
    num, no_rotation = len(subtopic), np.zeros(len(sessions), dtype=np.int64)
    uniform, is_fresh = rng.random(num), rng.random(num) < FRESH_SHARE
    return site.everything.pick(sessions.day, no_rotation, session, subtopic, uniform, is_fresh)


def _engage(
    site: Site,
    users: Users,
    sessions: Sessions,
    session: Ints,
    surface: Ints,
    pin: Ints,
    rng: np.random.Generator,
) -> Impressions:
    """Draw the reaction to each pin shown, once per session and pin; position is the row of the arguments."""
    first = np.sort(np.unique(session * len(site.pins) + pin, return_index=True)[1])
    session, surface, pin = session[first], surface[first], pin[first]
    user_row = sessions.user_row[session]
    lineage = site.taxonomy.lineage
    of_pin = lineage[site.pins.subtopic[pin]]
    on_mind = np.take(lineage[sessions.interest], session, axis=0)
    matched = behaviour.match(of_pin, lineage[sessions.intent][session])
    liked = behaviour.affinity(of_pin, on_mind, np.take(sessions.share, session, axis=0))
    taste = behaviour.dot_rows(np.take(users.taste, user_row, axis=0), np.take(site.pins.style, pin, axis=0))
    action_odds = behaviour.odds(
        np.take(site.pin_utility, pin, axis=0),
        np.take(users.propensity, user_row, axis=0),
        surface,
        matched,
        liked,
        taste,
    )
    action = behaviour.choose_actions(action_odds, rng.random(len(pin)))
    return Impressions(
        session=session, position=first, surface=surface, pin=pin, action=action, match=matched, taste=taste
    )
