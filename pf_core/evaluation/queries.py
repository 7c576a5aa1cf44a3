"""How often embeddings are computed (paper, section 4.2.2): a frequency turns the question into queries.

A query is one embedding of a user, computed from the user's actions before some moment:
- once: all actions until the cut;
- daily: for a positive on the day [x, x + 1 d), all actions until x - 1 d, because logs take a day to arrive; the first
  day is therefore searched with an embedding that is older than the cut;
- realtime: all actions before the positive itself. Each positive then needs an embedding of its own, so that at most
  REALTIME_POSITIVES of each user are drawn at random; the paper takes all.

Suffixes: U users, A actions, Q queries, P positives.
"""

from dataclasses import dataclass

import numpy as np

from pf_core.config.serving import Frequency
from pf_core.days import DAY_US
from pf_core.evaluation.question import SEED, Question, is_first
from pf_core.hashing import mixed
from pf_core.timelines.arrays import Timelines
from pf_core.training.objectives import draw_distinct

REALTIME_POSITIVES = 10
"""Positives of each user that are searched for in realtime."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """A question at some frequency. Queries are sorted by user, and the queries of a user by time."""

    user_Q: np.ndarray
    end_Q: np.ndarray
    """First action of the user's timeline that the embedding does not read."""
    shown_U: np.ndarray
    """One query of each user, drawn at random, that counts for diversity: more embeddings would look more diverse."""
    positive_A: np.ndarray
    """Rows of the positives in the question's timelines, in the order of their queries; -1 for those that cannot be
    asked."""
    query_P: np.ndarray
    """Query that searches for each positive."""
    pin_P: np.ndarray
    """Pin row of each positive; a negative number for an unknown pin, which cannot be asked."""
    action_type_P: np.ndarray
    ts_P: np.ndarray
    is_counted_P: np.ndarray
    """Whether a positive is the first of its query on its pin: recall counts distinct pins."""
    is_counted_by_type_P: np.ndarray
    """Whether a positive is the first of its query on its pin with its action type."""
    is_new_P: np.ndarray
    """Whether the user had not acted on the pin before the query's moment."""


def ask(question: Question, frequency: Frequency) -> Queries:
    """Return the embeddings that a frequency needs, and the positives that each of them searches for."""
    timelines, cut_us = question.timelines, question.data.cut_us
    found = _positives(question)
    if frequency == "realtime":
        num_U = np.bincount(found["user"], minlength=question.num_users)
        user_P, number_P = draw_distinct(num_U, REALTIME_POSITIVES, mixed(SEED, np.arange(question.num_users)))
        drawn = np.sort((np.cumsum(num_U) - num_U)[user_P] + number_P)
        found = {name: values[drawn] for name, values in found.items()}
    row_P, user_P, ts_P = found["row"], found["user"], found["ts"]
    match frequency:
        case "once":
            moment_P = np.full(len(ts_P), cut_us)
        case "daily":
            moment_P = cut_us + ((ts_P - cut_us) // DAY_US - 1) * DAY_US
        case "realtime":
            moment_P = ts_P
    end_P = _actions_before(timelines, user_P, moment_P)
    if frequency == "realtime":
        end_P = np.where(row_P >= 0, row_P, end_P)  # actions of the same moment are in order
    is_new_P = np.where(row_P >= 0, found["first_row"] >= end_P, found["first_ts"] >= moment_P)
    queries, query_P = np.unique(np.stack([user_P, end_P]), axis=1, return_inverse=True)
    query_P = query_P.ravel()
    order = np.argsort(query_P, kind="stable")
    query_P, pin_P, type_P = query_P[order], found["pin"][order], found["action_type"][order]
    return Queries(
        user_Q=queries[0],
        end_Q=queries[1],
        shown_U=_one_each(queries[0]),
        positive_A=row_P[order],
        query_P=query_P,
        pin_P=pin_P,
        action_type_P=type_P,
        ts_P=ts_P[order],
        is_counted_P=is_first(query_P, pin_P),
        is_counted_by_type_P=is_first(query_P, pin_P, type_P),
        is_new_P=is_new_P[order],
    )


def _positives(question: Question) -> dict[str, np.ndarray]:
    """Return the columns of all positives, sorted by user and time; `row` is -1 for those that cannot be asked.

    `first_row` is the user's first action on the pin; for unknown pins, `first_ts` is its time.
    """
    timelines, row_P, unaskable = question.timelines, question.positive_A, question.unaskable
    nothing_P = np.full(len(unaskable.user_P), -1)
    columns = {
        "row": (row_P, nothing_P),
        "user": (np.searchsorted(timelines.offsets, row_P, side="right") - 1, unaskable.user_P),
        "ts": (timelines.ts[row_P], unaskable.ts_P),
        "pin": (timelines.pin[row_P], unaskable.pin_P),
        "action_type": (timelines.action_type[row_P], unaskable.action_type_P),
        "first_row": (question.first_on_pin[row_P], nothing_P),
        "first_ts": (timelines.ts[row_P], unaskable.first_ts_P),
    }
    joined = {name: np.concatenate(parts).astype(np.int64) for name, parts in columns.items()}
    order = np.lexsort((joined["ts"], joined["user"]))
    return {name: values[order] for name, values in joined.items()}


def _actions_before(timelines: Timelines, user_P: np.ndarray, moment_us_P: np.ndarray) -> np.ndarray:
    """Return the row of the user's first action at or after a moment, or the end of the user's timeline."""
    pairs, inverse = np.unique(np.stack([user_P, moment_us_P]), axis=1, return_inverse=True)
    offsets = timelines.offsets
    ends = [
        offsets[user] + np.searchsorted(timelines.ts[offsets[user] : offsets[user + 1]], moment)
        for user, moment in pairs.T
    ]
    return np.array(ends, np.int64)[inverse.ravel()]


def _one_each(user_Q: np.ndarray) -> np.ndarray:
    """Return one query of each user, all equally likely; the same at every call."""
    first_U, count_U = np.unique(user_Q, return_index=True, return_counts=True)[1:]
    return first_U + (np.random.default_rng([SEED, 0xD1]).random(len(first_U)) * count_U).astype(np.int64)
