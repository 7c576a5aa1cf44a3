"""Sequences of pins for the transformers: training users' whole timelines in segments, test users' newest actions."""

import numpy as np
from exchange import Actions


def segment_ids(actions: Actions, length: int) -> np.ndarray:
    """Number the segments of at most `length` actions that timelines are divided into, counted from their ends.

    A trainer that reads the newest `length` actions of a user would otherwise never see the older ones.
    """
    num_actions = len(actions.user)
    if num_actions == 0:
        return np.empty(0, np.int64)
    is_last = np.append(actions.user[1:] != actions.user[:-1], True)
    ends = np.flatnonzero(is_last)
    from_end = ends[np.searchsorted(ends, np.arange(num_actions))] - np.arange(num_actions)
    is_first = np.append(True, actions.user[1:] != actions.user[:-1])
    is_start = is_first | (from_end % length == length - 1)
    return np.cumsum(is_start) - 1


def newest(actions: Actions, num_users: int, length: int, code_of_pin: np.ndarray) -> np.ndarray:
    """Users x length: codes of the newest actions, left-padded with 0; pins with code 0 are skipped."""
    codes = code_of_pin[actions.pin]
    users, codes = actions.user[codes > 0], codes[codes > 0]
    ends = np.searchsorted(users, np.arange(num_users), side="right")
    from_end = ends[users] - 1 - np.arange(len(users))
    padded = np.zeros((num_users, length), np.int64)
    kept = from_end < length
    padded[users[kept], length - 1 - from_end[kept]] = codes[kept]
    return padded
