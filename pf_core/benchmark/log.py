"""A log as the benchmark sees it: arrays of actions, cut in time and divided by users.

A contender may learn from `train`, the training users' actions before the cut, and from nothing else. `past` has the
test users' actions before the cut: a user's own past makes that user's list, and no other number. The positives are
the test users' distinct pins in the days after the cut.

The index is the catalogue: every pin that anybody acted on before the cut, and every catalogue pin known then. A
positive on any other pin cannot be asked: it is a miss, and is counted.

`reading.read_log` makes one from a site's raw_actions. `tuning_log` makes a smaller one of the training users alone,
on which contenders choose their settings; nothing in it depends on a test user or a day after the cut.

Suffixes: U test users, P positives, N pins of the index.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.days import shift_ds
from pf_core.errors import PipelineError
from pf_core.hashing import hashed_uniform


@dataclass(frozen=True, kw_only=True, eq=False)
class Actions:
    """Actions in the order of (user, time). Users and pins are rows of BenchmarkLog."""

    user: np.ndarray
    """int32."""
    pin: np.ndarray
    """int32."""
    day: np.ndarray
    """Days from the cut (int32): -1 is the last day before it."""
    is_positive: np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class BenchmarkLog:
    name: str
    cut_ds: str
    """Last day that contenders see."""
    num_days: int
    """Days after the cut that the positives are from."""
    pin_ids: pa.Array
    """The index, ascending: pin row -> pin id."""
    is_cold_pin: np.ndarray
    """Whether a pin of the index has no action before the cut."""
    train_user_ids: pa.Array
    train: Actions
    test_user_ids: pa.Array
    """Test users with at least one positive, on whatever pin."""
    past: Actions
    """`user` is a row of test_user_ids."""
    positive_user_P: np.ndarray
    """Distinct (user, pin) pairs, ascending; rows of test_user_ids."""
    positive_pin_P: np.ndarray
    """Rows of the index."""
    num_unaskable_U: np.ndarray
    """Number of each test user's distinct positive pins that are not in the index."""
    notes: tuple[str, ...] = ()
    """Sentences that the table shows below it, such as how users were sampled."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RankedLists:
    """A contender's answer: for each test user the best pins, best first; lists may differ in length.

    A list needs `LIST_LENGTH` pins more than the user has seen, so that every recall up to 50 is exact in both
    questions. Pins that the contender cannot score are in no list.
    """

    offsets_U: np.ndarray
    """User u has rows offsets_U[u] to offsets_U[u + 1]."""
    pin: np.ndarray
    score: np.ndarray
    """Descending within a user; equal scores are ties, which count against a positive."""


LIST_LENGTH = 51
"""One more than the largest k: a positive that ties with the last pin of a list has at least 50 rivals in it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Seen:
    """The distinct pins that each test user acted on before the cut."""

    user: np.ndarray
    """Ascending; with `pin` a distinct pair."""
    pin: np.ndarray
    num_U: np.ndarray
    """Number of distinct pins of each test user."""


def seen_pins(log: BenchmarkLog) -> Seen:
    """Return the distinct (user, pin) pairs of the test users' past, ascending."""
    user, pin = distinct_pairs(log.past.user, log.past.pin, num_pins=len(log.pin_ids))
    return Seen(user=user, pin=pin, num_U=np.bincount(user, minlength=len(log.test_user_ids)))


def list_lengths(log: BenchmarkLog) -> np.ndarray:
    """Return the length that each test user's list needs; a contender that can score fewer pins lists those."""
    return np.minimum(LIST_LENGTH + seen_pins(log).num_U, len(log.pin_ids))


def distinct_pairs(user: np.ndarray, pin: np.ndarray, *, num_pins: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct (user, pin) pairs, ascending, as int32."""
    keys = np.unique(user.astype(np.int64) * max(num_pins, 1) + pin)
    users, pins = np.divmod(keys, max(num_pins, 1))
    return users.astype(np.int32), pins.astype(np.int32)


# Tuning


def tuning_log(log: BenchmarkLog, *, share: float = 0.2, seed: int = 0) -> BenchmarkLog:
    """Return a log of the training users alone, on which contenders choose their settings.

    Its cut is `num_days` earlier. A share of the training users, by hash of the id and the seed, are its test users,
    and their positives are from the days between the two cuts. Its index is the pins that the training users acted on
    before its own cut, with rows of its own: when a pin entered the catalogue is not known, so no pin is cold.
    """
    is_before = log.train.day < -log.num_days
    what = f"the training users of {log.name} cannot be divided for tuning"
    if not is_before.any():
        raise PipelineError(f"{what}: none acted more than {log.num_days} days before the cut", "use a later cut")
    is_test_user = hashed_uniform(log.train_user_ids, seed) < share
    is_test = is_test_user[log.train.user]
    is_asked = np.zeros(len(log.train_user_ids), bool)
    is_asked[log.train.user[is_test & ~is_before & log.train.is_positive]] = True
    if not is_asked.any():
        raise PipelineError(
            f"{what}: none of the {int(is_test_user.sum()):,} users chosen by hash has a positive in the last "
            f"{log.num_days} days before the cut",
            "use a log with more users, or another cut",
        )
    pins = np.unique(log.train.pin[is_before])
    row_of_pin = np.full(len(log.pin_ids), -1, np.int32)
    row_of_pin[pins] = np.arange(len(pins))
    trains = np.zeros(len(log.train_user_ids), bool)
    trains[log.train.user[is_before & ~is_test]] = True
    train_user_ids, row_of_train = rows_of(log.train_user_ids, trains)
    test_user_ids, row_of_test = rows_of(log.train_user_ids, is_asked)
    later = _chosen(log.train, ~is_before & log.train.is_positive & is_asked[log.train.user])
    user_P, pin_P = distinct_pairs(row_of_test[later.user], later.pin, num_pins=len(log.pin_ids))
    user, pin, num_unaskable = split_askable(user_P, row_of_pin[pin_P], num_users=len(test_user_ids))
    train, past = (
        Actions(
            user=row[each.user],
            pin=row_of_pin[each.pin],
            day=each.day + log.num_days,
            is_positive=each.is_positive,
        )
        for row, each in (
            (row_of_train, _chosen(log.train, is_before & ~is_test)),
            (row_of_test, _chosen(log.train, is_before & is_asked[log.train.user])),
        )
    )
    return BenchmarkLog(
        name=f"{log.name} (tuning)",
        cut_ds=shift_ds(log.cut_ds, -log.num_days),
        num_days=log.num_days,
        pin_ids=log.pin_ids.take(pa.array(pins)),
        is_cold_pin=np.zeros(len(pins), bool),
        train_user_ids=train_user_ids,
        train=train,
        test_user_ids=test_user_ids,
        past=past,
        positive_user_P=user,
        positive_pin_P=pin,
        num_unaskable_U=num_unaskable,
    )


def _chosen(actions: Actions, is_chosen: np.ndarray) -> Actions:
    return Actions(
        user=actions.user[is_chosen],
        pin=actions.pin[is_chosen],
        day=actions.day[is_chosen],
        is_positive=actions.is_positive[is_chosen],
    )


# Users and pins


def rows_of(ids: pa.Array, is_chosen: np.ndarray) -> tuple[pa.Array, np.ndarray]:
    """Return the chosen ids, ascending, and the row of each code among them (-1: not chosen)."""
    codes = np.flatnonzero(is_chosen)
    codes = codes[pc.sort_indices(ids.take(pa.array(codes))).to_numpy()]
    row = np.full(len(ids), -1, np.int32)
    row[codes] = np.arange(len(codes))
    return ids.take(pa.array(codes)), row


def split_askable(
    user_P: np.ndarray, pin_P: np.ndarray, *, num_users: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs whose pin is in the index (row >= 0), ascending, and each user's number of other pairs."""
    is_askable = pin_P >= 0
    num_unaskable = np.bincount(user_P[~is_askable], minlength=num_users).astype(np.int32)
    user, pin = user_P[is_askable], pin_P[is_askable]
    order = np.lexsort((pin, user))
    return user[order], pin[order], num_unaskable
