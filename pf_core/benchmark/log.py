"""A log as the benchmark sees it: arrays of actions, cut in time and divided by users.

A contender may learn from `train`, the training users' actions before the cut, and from nothing else. `past` has the
test users' actions before the cut: a user's own past makes that user's list, and no other number. The positives are
the test users' distinct pins in the days after the cut.

The index is the catalogue: every pin that anybody acted on before the cut, and every catalogue pin known then. A
positive on any other pin cannot be asked: it is a miss, and is counted.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa


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
