"""Recall of ranked lists, in both questions.

all: Recall@k(u) is the share of u's positives p with fewer than k rivals, the other pins of the index that score at
least as high as p. Ties count against p. A positive that is in no list, or whose pin is not in the index, is a miss.

discovery: the same, after the pins that u has seen before the cut were dropped from the list; only positives on pins
that are new to u count. It is NaN for a user without such positives. (A pin that is not in the index is new to all.)

cold: hits among the positives on cold pins, which nobody acted on before the cut, in the question `all`, divided by the
number of these positives, over all users together: few users have any.

A list may end after LIST_LENGTH pins more than the user has seen. The result is still exact: a positive beyond the end,
or tied with the last pin, has at least 50 rivals within it.

Suffixes: U test users, P positives, R rows of the lists, K results of a user.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypedDict

import numpy as np

from pf_core.benchmark.log import BenchmarkLog, RankedLists, seen_pins
from pf_core.evaluation.manifest import QuestionName
from pf_core.metrics.bootstrap import bootstrap_interval, mean


@dataclass(frozen=True, kw_only=True, eq=False)
class ListScores:
    """What a contender's lists are worth to each test user; NaN where the user has no such positive."""

    recall_at_10_U: np.ndarray
    recall_at_50_U: np.ndarray
    askable_recall_at_10_U: np.ndarray
    """Recall without the positives whose pin is not in the index."""
    askable_recall_at_50_U: np.ndarray
    discovery_at_10_U: np.ndarray
    discovery_at_50_U: np.ndarray
    cold_hits_at_10_U: np.ndarray
    """Number of found positives on cold pins."""
    num_cold_U: np.ndarray
    """Number of positives on cold pins."""
    top_10_UK: np.ndarray
    """First ten pins of each list, -1 where it is shorter."""
    num_pins: int
    """Pins of the index."""


class ScoreSummary(TypedDict):
    """The means over the test users, with 95 % bootstrap intervals over users; NaN where nobody has such positives."""

    num_users: int
    recall_at_10: float
    recall_at_10_interval: list[float]
    recall_at_50: float
    recall_at_50_interval: list[float]
    askable_recall_at_10: float
    askable_recall_at_50: float
    discovery_at_10: float
    discovery_at_10_interval: list[float]
    discovery_at_50: float
    discovery_at_50_interval: list[float]
    num_discovery_users: int
    """Users with a positive on a pin that is new to them."""
    cold_at_10: float
    num_cold: int
    """Positives on cold pins."""
    p90_coverage_at_10: float
    num_empty_lists: int


class Difference(NamedTuple):
    """Ours minus theirs at recall@k, over the users who have a value."""

    mean: float
    interval: tuple[float, float]
    """The 95 % bootstrap interval, paired by user."""


def score(log: BenchmarkLog, lists: RankedLists) -> ListScores:
    """Score the lists of all test users."""
    num_users, num_pins = len(log.test_user_ids), len(log.pin_ids)
    assert len(lists.offsets_U) == num_users + 1, "one list for each test user"
    user_R = np.repeat(np.arange(num_users), np.diff(lists.offsets_U))
    key_R = user_R * num_pins + lists.pin
    key_P = log.positive_user_P.astype(np.int64) * num_pins + log.positive_pin_P
    seen = seen_pins(log)
    seen_keys = seen.user.astype(np.int64) * num_pins + seen.pin
    rivals_P = _rivals(key_R, user_R, lists.score, key_P)
    is_new_R, is_new_P = ~_is_in(key_R, seen_keys), ~_is_in(key_P, seen_keys)
    new_rivals_P = _rivals(key_R[is_new_R], user_R[is_new_R], lists.score[is_new_R], key_P[is_new_P])
    user_P, new_user_P = log.positive_user_P, log.positive_user_P[is_new_P]

    def share(users: np.ndarray, rivals: np.ndarray, k: int, num_missed_U: np.ndarray | int) -> np.ndarray:
        num_U = np.bincount(users, minlength=num_users) + num_missed_U
        hits_U = np.bincount(users[rivals < k], minlength=num_users)
        return np.divide(hits_U, num_U, out=np.full(num_users, np.nan), where=num_U > 0)

    is_cold_P = log.is_cold_pin[log.positive_pin_P]
    return ListScores(
        recall_at_10_U=share(user_P, rivals_P, 10, log.num_unaskable_U),
        recall_at_50_U=share(user_P, rivals_P, 50, log.num_unaskable_U),
        askable_recall_at_10_U=share(user_P, rivals_P, 10, 0),
        askable_recall_at_50_U=share(user_P, rivals_P, 50, 0),
        discovery_at_10_U=share(new_user_P, new_rivals_P, 10, log.num_unaskable_U),
        discovery_at_50_U=share(new_user_P, new_rivals_P, 50, log.num_unaskable_U),
        cold_hits_at_10_U=np.bincount(user_P[is_cold_P & (rivals_P < 10)], minlength=num_users),
        num_cold_U=np.bincount(user_P[is_cold_P], minlength=num_users),
        top_10_UK=_first_pins(lists, 10),
        num_pins=num_pins,
    )


def _rivals(key_R: np.ndarray, user_R: np.ndarray, score_R: np.ndarray, key_P: np.ndarray) -> np.ndarray:
    """Return the number of pins in the user's list that score at least as high as each positive, without itself.

    It is the largest integer for a positive that is in no list.
    """
    rivals_P = np.full(len(key_P), np.iinfo(np.int64).max)
    if len(key_R) == 0 or len(key_P) == 0:
        return rivals_P
    is_last_of_tie = np.append((user_R[1:] != user_R[:-1]) | (score_R[1:] != score_R[:-1]), True)
    ends = np.flatnonzero(is_last_of_tie)
    order = np.argsort(key_R)
    place_P = np.minimum(np.searchsorted(key_R, key_P, sorter=order), len(key_R) - 1)
    row_P = order[place_P]
    is_listed = key_R[row_P] == key_P
    row = row_P[is_listed]
    rivals_P[is_listed] = ends[np.searchsorted(ends, row)] - np.searchsorted(user_R, user_R[row])
    return rivals_P


def _is_in(keys: np.ndarray, ascending: np.ndarray) -> np.ndarray:
    """Return which keys are in an ascending array."""
    if len(ascending) == 0:
        return np.zeros(len(keys), bool)
    place = np.minimum(np.searchsorted(ascending, keys), len(ascending) - 1)
    return np.asarray(ascending[place] == keys)


def _first_pins(lists: RankedLists, k: int) -> np.ndarray:
    row_UK = lists.offsets_U[:-1, None] + np.arange(k)
    is_row_UK = row_UK < lists.offsets_U[1:, None]
    first_UK = np.full(row_UK.shape, -1, np.int64)
    first_UK[is_row_UK] = lists.pin[row_UK[is_row_UK]]
    return first_UK


def summarize(scores: ListScores) -> ScoreSummary:
    """Return the means over users and their intervals."""
    num_cold = int(scores.num_cold_U.sum())
    return {
        "num_users": len(scores.recall_at_10_U),
        "recall_at_10": mean(scores.recall_at_10_U),
        "recall_at_10_interval": list(bootstrap_interval(scores.recall_at_10_U)),
        "recall_at_50": mean(scores.recall_at_50_U),
        "recall_at_50_interval": list(bootstrap_interval(scores.recall_at_50_U)),
        "askable_recall_at_10": mean(scores.askable_recall_at_10_U),
        "askable_recall_at_50": mean(scores.askable_recall_at_50_U),
        "discovery_at_10": mean(scores.discovery_at_10_U),
        "discovery_at_10_interval": list(bootstrap_interval(scores.discovery_at_10_U)),
        "discovery_at_50": mean(scores.discovery_at_50_U),
        "discovery_at_50_interval": list(bootstrap_interval(scores.discovery_at_50_U)),
        "num_discovery_users": int((~np.isnan(scores.discovery_at_10_U)).sum()),
        "cold_at_10": int(scores.cold_hits_at_10_U.sum()) / num_cold if num_cold else float("nan"),
        "num_cold": num_cold,
        "p90_coverage_at_10": _coverage(scores),
        "num_empty_lists": int((scores.top_10_UK[:, 0] < 0).sum()),
    }


def _coverage(scores: ListScores) -> float:
    import torch  # only here: the rest of the benchmark's arithmetic needs numpy alone

    from pf_core.metrics.diversity import p90_coverage

    return p90_coverage(torch.from_numpy(scores.top_10_UK), index_size=scores.num_pins)


def compare(ours: ListScores, theirs: ListScores, *, k: Literal[10, 50] = 10) -> dict[QuestionName, Difference]:
    """Return the difference at recall@k in both questions; the scores are of the same test users."""
    assert len(ours.recall_at_10_U) == len(theirs.recall_at_10_U), "the same test users"
    differences: dict[QuestionName, np.ndarray] = {
        "all": ours.recall_at_10_U - theirs.recall_at_10_U,
        "discovery": ours.discovery_at_10_U - theirs.discovery_at_10_U,
    }
    if k == 50:
        differences = {
            "all": ours.recall_at_50_U - theirs.recall_at_50_U,
            "discovery": ours.discovery_at_50_U - theirs.discovery_at_50_U,
        }
    return {
        question: Difference(mean(values_U), bootstrap_interval(values_U)) for question, values_U in differences.items()
    }
