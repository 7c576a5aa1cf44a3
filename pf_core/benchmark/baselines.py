"""Baselines that learn nothing, and the way from dense scores to lists.

- popularity: the number of positive actions of the training users on a pin, in the last days or ever. All users get the
  same order; equal counts are ties.
- own frequency: the number of the user's own actions on a pin, whatever their type, each weighted by
  exp(-age / 120 days) in the decayed one. A pin that the user has not seen is in no list.
- mean of recent: cosine of a pin's vector and the mean of the unit vectors of the user's newest actions.

Suffixes: U test users, C users of a chunk, N pins of the index, D dimensions of a vector, L length of a list.
"""

from collections.abc import Callable

import numpy as np

from pf_core.benchmark.log import Actions, BenchmarkLog, RankedLists, list_lengths
from pf_core.errors import PipelineError

DECAY_DAYS = 120.0

POPULAR_DAYS, NUM_POPULAR = 7, 1000
"""Days that decide the popular list of a release, and its largest length, as in pf_core/serving/popular.py."""

SCORES_AT_ONCE = 1 << 24
"""Scores (users times pins) that are in memory at a time: 128 MB as float64."""


# From scores to lists


def lists_from_scores(log: BenchmarkLog, score_block: Callable[[np.ndarray], np.ndarray]) -> RankedLists:
    """Return the lists of all test users from dense scores.

    `score_block` gets rows of test users and returns their scores of all pins (C, N), -inf for a pin that cannot be
    scored. Among equal scores the lower pin row comes first.
    """
    length_U, num_pins = list_lengths(log), len(log.pin_ids)
    by_length = np.argsort(length_U, kind="stable")  # a chunk is sorted to its longest list
    users_at_once = max(1, SCORES_AT_ONCE // max(1, num_pins))
    users, pins, scores = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)], [np.zeros(0)]
    for first in range(0, len(by_length), users_at_once):
        chunk_C = np.sort(by_length[first : first + users_at_once])
        score_CN = np.asarray(score_block(chunk_C))
        assert score_CN.shape == (len(chunk_C), num_pins)
        if np.isnan(score_CN).any() or np.isposinf(score_CN).any():
            raise PipelineError("a contender's score of a pin is NaN or infinite")
        row, pin = _best(score_CN, length_U[chunk_C])
        users.append(chunk_C[row])
        pins.append(pin.astype(np.int32))
        scores.append(score_CN[row, pin])
    user, pin, score = (np.concatenate(parts) for parts in (users, pins, scores))
    order = np.argsort(user, kind="stable")
    num_U = np.bincount(user, minlength=len(log.test_user_ids))
    return RankedLists(offsets_U=_offsets(num_U), pin=pin[order], score=score[order])


def _best(score_CN: np.ndarray, length_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and columns of each row's best scores, best first; row c has at most length_C[c]."""
    num_columns, length = score_CN.shape[1], int(length_C.max())
    is_chosen_CN = np.isfinite(score_CN)
    if length < num_columns:
        limit_C1 = np.partition(score_CN, num_columns - length, axis=1)[:, num_columns - length, None]
        is_chosen_CN &= score_CN >= limit_C1
        num_excess_C = is_chosen_CN.sum(1) - length
        for each in np.flatnonzero(num_excess_C > 0).tolist():  # ties with the last: the first columns stay
            ties = np.flatnonzero(score_CN[each] == limit_C1[each])
            is_chosen_CN[each, ties[-num_excess_C[each] :]] = False
    row, column = np.nonzero(is_chosen_CN)
    order = np.lexsort((column, -score_CN[row, column], row))
    row, column = row[order], column[order]
    is_kept = np.arange(len(row)) - np.searchsorted(row, row) < length_C[row]
    return row[is_kept], column[is_kept]


def _offsets(num_U: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(num_U)]).astype(np.int64)


# Popularity


def popularity(log: BenchmarkLog, *, last_days: int | None) -> RankedLists:
    """Rank all pins by the number of the training users' positive actions in the last days before the cut, or ever."""
    is_counted = log.train.is_positive
    if last_days is not None:
        is_counted = is_counted & (log.train.day >= -last_days)
    count_N = np.bincount(log.train.pin[is_counted], minlength=len(log.pin_ids))
    order_N = np.argsort(-count_N, kind="stable")
    offsets_U = _offsets(list_lengths(log))
    place = np.arange(offsets_U[-1]) - np.repeat(offsets_U[:-1], np.diff(offsets_U))
    pin = order_N[place].astype(np.int32)
    return RankedLists(offsets_U=offsets_U, pin=pin, score=count_N[pin].astype(np.float64))


def popular_list(log: BenchmarkLog) -> tuple[np.ndarray, np.ndarray]:
    """Return the pins of the popular list that a release serves to unknown users, best first, and their user-days.

    A user-day is a training user with a positive action on the pin on a day; those of the last POPULAR_DAYS days before
    the cut count. Ties are in the order of pin ids. It has at most NUM_POPULAR pins, each with a user-day.
    """
    train, num_pins = log.train, max(1, len(log.pin_ids))
    is_counted = train.is_positive & (train.day >= -POPULAR_DAYS)
    user_day = train.user[is_counted].astype(np.int64) * POPULAR_DAYS + (-1 - train.day[is_counted])
    user_days_N = np.bincount(np.unique(user_day * num_pins + train.pin[is_counted]) % num_pins, minlength=num_pins)
    order_K = np.argsort(-user_days_N, kind="stable")[: min(NUM_POPULAR, int((user_days_N > 0).sum()))]
    return order_K, user_days_N[order_K]


# Own frequency


def own_frequency(log: BenchmarkLog, *, decay_days: float | None) -> RankedLists:
    """Rank the pins that the user has seen by the number of the user's actions on them, newer ones weighing more."""
    past, num_pins = log.past, max(1, len(log.pin_ids))
    # The last day before the cut has age 0: the choice of the origin changes all scores by one factor.
    weight = np.ones(len(past.day)) if decay_days is None else np.exp((past.day + 1) / decay_days)
    key, place = np.unique(past.user.astype(np.int64) * num_pins + past.pin, return_inverse=True)
    user, pin = np.divmod(key, num_pins)
    frequency = np.bincount(place, weights=weight, minlength=len(key))
    order = np.lexsort((pin, -frequency, user))
    return RankedLists(
        offsets_U=_offsets(np.bincount(user, minlength=len(log.test_user_ids))),
        pin=pin[order].astype(np.int32),
        score=frequency[order],
    )


# Content vectors


def mean_of_recent(log: BenchmarkLog, vector_by_pin: np.ndarray, num_actions: int) -> RankedLists:
    """Rank all pins with a vector by the cosine with the mean of the unit vectors of the user's newest actions.

    `vector_by_pin` has a row for each pin of the index, NaN or zeros if the pin has no vector. The newest `num_actions`
    actions on pins with a vector count; a user without any has an empty list.
    """
    length_N1 = np.linalg.norm(vector_by_pin, axis=1, keepdims=True)
    has_vector_N = np.isfinite(length_N1[:, 0]) & (length_N1[:, 0] > 0)
    unit_ND = np.divide(vector_by_pin, length_N1, out=np.zeros_like(vector_by_pin), where=has_vector_N[:, None])
    user, pin = _with_vector(log.past, has_vector_N)
    end_U = np.searchsorted(user, np.arange(len(log.test_user_ids)), side="right")
    num_U = np.minimum(np.bincount(user, minlength=len(log.test_user_ids)), num_actions)

    def score_block(users_C: np.ndarray) -> np.ndarray:
        mean_CD = np.zeros((len(users_C), unit_ND.shape[1]), unit_ND.dtype)
        for back in range(int(num_U[users_C].max(initial=0))):  # one action of each user at a time
            has_action_C = num_U[users_C] > back
            mean_CD[has_action_C] += unit_ND[pin[end_U[users_C[has_action_C]] - 1 - back]]
        length_C1 = np.linalg.norm(mean_CD, axis=1, keepdims=True)
        score_CN = np.divide(mean_CD, length_C1, out=mean_CD, where=length_C1 > 0) @ unit_ND.T
        score_CN[:, ~has_vector_N] = -np.inf
        score_CN[num_U[users_C] == 0] = -np.inf
        return score_CN

    return lists_from_scores(log, score_block)


def _with_vector(actions: Actions, has_vector_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return user and pin of the actions on pins with a vector, in the order of (user, time)."""
    is_kept = has_vector_N[actions.pin]
    return actions.user[is_kept], actions.pin[is_kept]


BASELINES: dict[str, Callable[[BenchmarkLog], RankedLists]] = {
    "popularity, 7 days": lambda log: popularity(log, last_days=7),
    "popularity, 28 days": lambda log: popularity(log, last_days=28),
    "popularity, ever": lambda log: popularity(log, last_days=None),
    "own frequency": lambda log: own_frequency(log, decay_days=None),
    "own frequency, decay 120 days": lambda log: own_frequency(log, decay_days=DECAY_DAYS),
}
"""The baselines that need nothing but the log, by the name that the table shows."""
