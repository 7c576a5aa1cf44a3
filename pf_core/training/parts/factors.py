"""Factors of pins as of a point in time: what the days before it tell about which pins belong together.

The factors of a fit are the unit rows of V in the truncated SVD of log1p(days of the pair) / sqrt(n_i + 5), where a
pair is a user and a pin, and n_i the number of users of pin i. All directions count alike: weighted by singular values,
the few that everybody shares would hide what tells pins apart. Factors fitted on all days would contain the targets of
the rows that they train on: a row reads the newest fit that ends before its day. Each fit is turned onto the one before
it (orthogonal Procrustes), so that matrices learned on one fit apply to the next; products of factors do not change by
that.

Memory: the pairs of at most `max_pairs` pairs, by a sample of the users where there are more.
"""

from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_array
from sklearn.utils.extmath import randomized_svd

from pf_core.days import DAY_US
from pf_core.hashing import mixed, uniform
from pf_core.timelines.arrays import Timelines

NUM_ITERATIONS = 3
"""Power iterations of the randomized SVD: a fifth of the time of ARPACK on 700,000 pairs, and as good in the model."""

USERS_AT_ONCE = 1 << 16

ACTIONS_AT_ONCE = 1 << 22

MIN_SINGULAR = 1e-4
"""A direction with a smaller singular value, as a share of the largest, is a rounding error."""

MIN_NORM = 1e-6
"""A shorter row of the SVD is noise: the pin has no factor."""


class Factors(NamedTuple):
    """A fit, and what its actions tell about the pins."""

    factor_ND: np.ndarray
    """Unit rows, float32; zeros for a pin without actions before the day."""
    trust_N: np.ndarray
    """About n / (n + 7), n users of the pin."""
    log_repeat_N: np.ndarray
    """Logarithm of the days of a user on the pin, averaged over its users; 0 for an unknown pin."""


class _Pairs(NamedTuple):
    user: np.ndarray
    pin: np.ndarray
    num_days: np.ndarray


def fit_factors(
    timelines: Timelines, day: int, *, num_pins: int, dim: int, max_pairs: int, onto: np.ndarray | None = None
) -> Factors:
    """Fit factors on the actions before `day` (days since 1970), and turn them onto the factors `onto`."""
    share = min(1.0, max_pairs / max(1, _num_actions_before(timelines, day)))
    pairs = _pairs_before(timelines, day, num_pins, share)
    num_users_N = np.bincount(pairs.pin, minlength=num_pins)
    days_N = np.bincount(pairs.pin, pairs.num_days, minlength=num_pins)
    factor_ND = _decompose(pairs, num_users_N, dim=dim)
    if onto is not None:
        factor_ND = turned(factor_ND, onto)
    num_users = num_users_N / share
    return Factors(
        factor_ND=factor_ND,
        trust_N=np.where(num_users_N > 0, (num_users + 0.5) / (num_users + 0.5 + np.exp(2)), 0).astype(np.float32),
        log_repeat_N=np.log((days_N + 0.5) / (num_users_N + 0.5)).astype(np.float32),
    )


def turned(factor_ND: np.ndarray, onto_ND: np.ndarray) -> np.ndarray:
    """Return the factors times the orthogonal matrix that brings them closest to `onto` (Procrustes)."""
    left, _, right = np.linalg.svd(factor_ND.T.astype(np.float64) @ onto_ND.astype(np.float64))
    return (factor_ND @ (left @ right)).astype(np.float32)


def _num_actions_before(timelines: Timelines, day: int) -> int:
    """Return the number of actions before a day; later ones must not decide which users are sampled."""
    starts = range(0, len(timelines.ts), ACTIONS_AT_ONCE)
    return sum(int((timelines.ts[start : start + ACTIONS_AT_ONCE] < day * DAY_US).sum()) for start in starts)


def _pairs_before(timelines: Timelines, day: int, num_pins: int, share: float) -> _Pairs:
    """Return the pairs of a share of the users before a day, and on how many days each pair was active."""
    parts: list[_Pairs] = []
    for start in range(0, timelines.num_users, USERS_AT_ONCE):
        end = min(start + USERS_AT_ONCE, timelines.num_users)
        rows = slice(int(timelines.offsets[start]), int(timelines.offsets[end]))
        user = np.repeat(np.arange(start, end), np.diff(timelines.offsets[start : end + 1]))
        action_day = timelines.ts[rows] // DAY_US
        is_read = action_day < day
        if share < 1:
            is_read &= uniform(mixed(0xFAC7, user)) < share
        user, pin, action_day = user[is_read], timelines.pin[rows][is_read].astype(np.int64), action_day[is_read]
        order = np.lexsort((action_day, pin, user))
        user, pin, action_day = user[order], pin[order], action_day[order]
        is_pair = np.ones(len(user), bool)
        is_pair[1:] = (user[1:] != user[:-1]) | (pin[1:] != pin[:-1])
        is_day = is_pair.copy()
        is_day[1:] |= action_day[1:] != action_day[:-1]
        num_days = np.bincount((np.cumsum(is_pair) - 1)[is_day])
        parts.append(_Pairs(user[is_pair], pin[is_pair], num_days))
    return _Pairs(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _decompose(pairs: _Pairs, num_users_N: np.ndarray, *, dim: int) -> np.ndarray:
    """Return the unit rows of V, dim numbers each; missing dimensions are zeros."""
    factor_ND = np.zeros((len(num_users_N), dim), np.float32)
    used, pin = np.unique(pairs.pin, return_inverse=True)
    seen, user = np.unique(pairs.user, return_inverse=True)
    rank = min(dim, len(used) - 1, len(seen) - 1)
    if rank < 1:
        return factor_ND
    value = np.log1p(pairs.num_days) / np.sqrt(num_users_N[pairs.pin] + 5)
    matrix = csr_array((value, (user, pin)), shape=(len(seen), len(used)))
    _, singular, right_DN = randomized_svd(matrix, rank, n_iter=NUM_ITERATIONS, random_state=0)
    rows = right_DN.T * (singular > MIN_SINGULAR * singular[0])
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    factor_ND[used, :rank] = np.where(norm > MIN_NORM, rows / np.maximum(norm, MIN_NORM), 0)
    return factor_ND
