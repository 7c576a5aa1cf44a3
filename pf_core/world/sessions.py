"""Sessions: who visits when, and with which intent.

The number of a user's sessions on a day is Poisson with a gamma-distributed rate, so that visits clump.
Late sessions (a phone that was offline) are a thinned process of their own: the sessions of day d that arrive
on day d + delay come from a random stream keyed by (d, delay), so that no other day has to be simulated.

Sessions of one day tend to share their intent: with probability SHARED_SHARE, a session's intent is chosen by
the *user's* uniform number of that day instead of the session's own. Either way it follows exactly the shares
of `current_interests` at its start, so that `World.engagement` can marginalise over them.
"""

from dataclasses import dataclass

import numpy as np

from pf_core.world.column_tables import Doubles, Floats, Ints, take
from pf_core.world.config import WorldConfig
from pf_core.world.pins import DAY_S
from pf_core.world.streams import Stream, open_stream
from pf_core.world.taxonomy import Taxonomy
from pf_core.world.users import Users, current_interests

SHARED_SHARE = 0.8

CLUMPING = 0.7

SLOTS_MEDIAN, SLOTS_SIGMA, MAX_SLOTS = 55.0, 0.75, 600

SITE_BY_WEEKDAY = np.array([1.0, 0.97, 0.96, 0.95, 0.93, 1.04, 1.15])  # Monday first

PEAK_HOURS = np.array([8.0, 12.5, 16.0, 20.5, 23.0])  # one for each `day_part`


def _hours_of(peak: float) -> Doubles:
    """Return the cumulative shares of the 24 local hours: most around the peak, hardly any at 4 a.m."""
    hour = np.arange(24) + 0.5
    awake = 1 / (1 + np.exp(2.2 * np.cos((hour - 3.5) * 2 * np.pi / 24)))
    bump = 0.3 + 2.5 * np.exp(3.0 * (np.cos((hour - peak) * 2 * np.pi / 24) - 1))
    return np.asarray(np.cumsum(awake * bump) / (awake * bump).sum())


HOURS = np.stack([_hours_of(peak) for peak in PEAK_HOURS])


@dataclass(frozen=True, kw_only=True)
class Sessions:
    """Sessions of a chunk of users, one row each."""

    user_row: Ints  # row of the user in the chunk
    day: Ints
    start_s: Doubles
    intent: Ints  # sub-topic
    interest: Ints  # [session, num_current_interests]
    share: Floats
    num_slots: Ints  # number of pins drawn; those that the ranker rates low or that repeat are not shown
    rotation: Ints
    search_from: Ints  # slots in [search_from, search_to) are search results
    search_to: Ints
    pace_s: Doubles  # scrolling time per impression

    def __len__(self) -> int:
        return len(self.user_row)


def draw_sessions(
    config: WorldConfig, taxonomy: Taxonomy, users: Users, *, chunk: int, day: int, delay_days: int = 0
) -> Sessions:
    """Draw the chunk's sessions that start on `day` and whose actions arrive `delay_days` later."""
    rng = open_stream(config.seed, Stream.SESSIONS, day, chunk, delay_days)
    late = (config.dirt.late_one_day, config.dirt.late_two_days)
    arriving = 1 - sum(late) if delay_days == 0 else late[delay_days - 1]

    weekday = (config.start_s // DAY_S + day + 3) % 7
    rate = users.sessions_per_day * SITE_BY_WEEKDAY[weekday] * arriving
    if weekday >= 5:
        rate = rate * users.weekend_factor
    here = (users.join_day <= day) & (day < users.leave_day)
    counts = rng.poisson(rate * here * rng.gamma(CLUMPING, 1 / CLUMPING, len(users)))

    user_row = np.repeat(np.arange(len(users)), counts)
    num = len(user_row)
    visitors = take(users, user_row)
    hour = (HOURS[visitors.day_part] < rng.random((num, 1))).sum(axis=1) + rng.random(num)
    second_of_day = ((hour - visitors.time_zone_h) % 24) * 3600
    start_s = config.start_s + day * DAY_S + second_of_day

    interest, share = current_interests(config, taxonomy, visitors, start_s)
    of_user = rng.random(len(users))[user_row]
    uniform = np.where(rng.random(num) < SHARED_SHARE, of_user, rng.random(num))
    picked = np.minimum((np.cumsum(share, axis=1) <= uniform[:, None]).sum(axis=1), share.shape[1] - 1)

    length = SLOTS_MEDIAN * visitors.depth * np.exp(rng.normal(0, SLOTS_SIGMA, num))
    searches = rng.random(num) < visitors.search_affinity
    search_share = np.where(searches, rng.beta(1.2, 5.0, num), 0.0)
    search_from = rng.random(num) * (1 - search_share)
    num_slots = np.clip(length, 3, MAX_SLOTS).astype(np.int64)
    ticks = visitors.sessions_per_day * (day + second_of_day / DAY_S)
    return Sessions(
        user_row=user_row,
        day=np.full(num, day),
        start_s=start_s,
        intent=interest[np.arange(num), picked],
        interest=interest,
        share=share,
        num_slots=num_slots,
        rotation=visitors.rotation + np.floor(ticks).astype(np.int64),
        search_from=np.rint(search_from * num_slots).astype(np.int64),
        search_to=np.rint((search_from + search_share) * num_slots).astype(np.int64),
        pace_s=np.exp(rng.normal(0.9, 0.35, num)),
    )
