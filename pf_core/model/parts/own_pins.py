"""What is known of a user's own pins: how often, since when, how regularly. A function of that user's actions alone.

Days are calendar days in UTC. Several actions on one pin on one day count once. All ages count from the day after the
user's last active day, so that they do not change while a user is idle, and training reads what serving will read.
"""

from typing import NamedTuple

import numpy as np

from pf_core.days import DAY_US
from pf_core.timelines.arrays import Timelines, ragged

DECAYS_DAYS = (7.0, 30.0, 120.0)

FEATURES = (
    "log days",
    "log age of the last day",
    "log decayed days, 7",
    "log decayed days, 30",
    "log decayed days, 120",
    "log age of the first day",
    "has repeated",
    "log age over the mean gap",
    "log rank",
    "log active days since the last",
    "log days over active days",
    "log actions per day",
    "share of positive actions",
)
"""The columns of features_PX."""

LOG_DAYS, LOG_AGE, LOG_DECAYED = (FEATURES.index(name) for name in FEATURES[:2] + FEATURES[4:5])

MAX_DAYS = 1 << 20
"""Above every day number (days since 1970): a user and a day are searched as one integer."""


class OwnPinArrays(NamedTuple):
    """Own pins of B users, ascending by user and pin."""

    row_P: np.ndarray
    pin_P: np.ndarray
    """Pins, as the timelines number them."""
    features_PX: np.ndarray
    action_type_P: np.ndarray
    last_ts_P: np.ndarray
    """Time of the user's newest action on the pin."""


def own_pins(timelines: Timelines, start_B: np.ndarray, end_B: np.ndarray) -> OwnPinArrays:
    """Return the own pins of users whose actions are `start` to `end` of the timelines; a user may have none."""
    row_A, number_A = ragged(end_B - start_B)
    at_A = start_B[row_A] + number_A
    pin_A, ts_A = timelines.pin[at_A].astype(np.int64), timelines.ts[at_A]
    order = np.lexsort((pin_A, row_A))  # stable: the actions of a pair stay in the order of time
    row_A, pin_A, at_A, ts_A = row_A[order], pin_A[order], at_A[order], ts_A[order]
    day_A = ts_A // DAY_US
    is_first_A = _is_new(row_A, pin_A)
    is_day_A = is_first_A | _is_new(day_A)  # the first action of a pair on a day
    begin_P = np.flatnonzero(is_first_A)
    pair_A = np.cumsum(is_first_A) - 1
    end_P = np.append(begin_P, len(row_A))[1:]
    row_P, num_pairs = row_A[begin_P], len(begin_P)

    today_B = np.zeros(len(start_B), np.int64)
    has_any_B = end_B > start_B
    today_B[has_any_B] = timelines.ts[end_B[has_any_B] - 1] // DAY_US + 1
    today_P, first_P, last_P = today_B[row_P], day_A[begin_P], day_A[end_P - 1]
    num_days_P = np.bincount(pair_A[is_day_A], minlength=num_pairs)
    age_E = today_B[row_A[is_day_A]] - day_A[is_day_A]
    decayed = [
        np.bincount(pair_A[is_day_A], np.exp(-age_E / decay_days), minlength=num_pairs) for decay_days in DECAYS_DAYS
    ]
    age_P, age_first_P = today_P - last_P, today_P - first_P
    mean_gap_P = (last_P - first_P) / np.maximum(num_days_P - 1, 1)
    active = np.unique(row_A * MAX_DAYS + day_A)  # the active days of all users
    now_P = np.searchsorted(active, row_P * MAX_DAYS + today_P)
    since_last_P = now_P - np.searchsorted(active, row_P * MAX_DAYS + last_P) - 1
    since_first_P = now_P - np.searchsorted(active, row_P * MAX_DAYS + first_P)
    num_actions_P = end_P - begin_P
    has_repeated_P = num_days_P > 1
    features = (
        np.log(num_days_P),
        np.log(age_P),
        *(np.log(np.maximum(each, 1e-4)) for each in decayed),
        np.log(age_first_P),
        has_repeated_P,
        np.where(has_repeated_P, np.log((age_P + 1) / (mean_gap_P + 1)), 0),
        np.log(1 + _rank_in_row(row_P, decayed[2])),
        np.log1p(since_last_P),
        np.log((num_days_P + 0.3) / (since_first_P + 0.6)),
        np.log(num_actions_P / num_days_P),
        np.bincount(pair_A, timelines.is_positive[at_A], minlength=num_pairs) / num_actions_P,
    )
    return OwnPinArrays(
        row_P=row_P,
        pin_P=pin_A[begin_P],
        features_PX=np.stack(features, axis=1).astype(np.float32),
        action_type_P=timelines.action_type[at_A[end_P - 1]].astype(np.int64),
        last_ts_P=ts_A[end_P - 1],
    )


def _is_new(*columns: np.ndarray) -> np.ndarray:
    """Return for each element whether it differs from the one before it in any column."""
    result = np.ones(len(columns[0]), bool)
    result[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return result


def _rank_in_row(row_P: np.ndarray, value_P: np.ndarray) -> np.ndarray:
    """Return the place of each value among those of its row, the largest first; ties in the given order."""
    order = np.lexsort((-value_P, row_P))
    rank_P = np.empty(len(row_P), np.int64)
    rank_P[order] = np.arange(len(row_P)) - np.searchsorted(row_P, row_P)[order]
    return rank_P
