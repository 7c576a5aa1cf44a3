"""Logs of the benchmark for tests: one of five users worked out by hand, and random ones."""

import numpy as np
import pyarrow as pa

from pf_core.benchmark.log import Actions, BenchmarkLog, RankedLists, distinct_pairs

Row = tuple[int, int, int, bool]  # user, pin, day, is_positive


def actions_of(rows: list[Row]) -> Actions:
    user, pin, day, is_positive = (np.array([row[i] for row in rows]) for i in range(4))
    return Actions(
        user=user.astype(np.int32),
        pin=pin.astype(np.int32),
        day=day.astype(np.int32),
        is_positive=is_positive.astype(bool),
    )


def make_log(
    *,
    num_pins: int,
    train: list[Row],
    past: list[Row],
    positives: list[tuple[int, int]],
    num_unaskable: list[int],
    cold: tuple[int, ...] = (),
    num_days: int = 7,
) -> BenchmarkLog:
    """A log whose ids are their rows; training users are 100 and up."""
    num_train_users = 1 + max((row[0] for row in train), default=-1)
    pairs = sorted(positives)
    return BenchmarkLog(
        name="by hand",
        cut_ds="2026-02-01",
        num_days=num_days,
        pin_ids=pa.array(range(num_pins), pa.int64()),
        is_cold_pin=np.isin(np.arange(num_pins), cold),
        train_user_ids=pa.array(range(100, 100 + num_train_users), pa.int64()),
        train=actions_of(train),
        test_user_ids=pa.array(range(len(num_unaskable)), pa.int64()),
        past=actions_of(past),
        positive_user_P=np.array([pair[0] for pair in pairs], np.int32),
        positive_pin_P=np.array([pair[1] for pair in pairs], np.int32),
        num_unaskable_U=np.array(num_unaskable, np.int32),
    )


def make_lists(*lists: list[tuple[int, float]]) -> RankedLists:
    """One list of (pin, score) for each test user."""
    rows = [row for each in lists for row in each]
    return RankedLists(
        offsets_U=np.cumsum([0, *map(len, lists)]),
        pin=np.array([row[0] for row in rows], np.int32),
        score=np.array([row[1] for row in rows], float),
    )


def random_log(seed: int, *, num_pins: int = 90, num_users: int = 12, num_cold: int = 6) -> BenchmarkLog:
    """Few distinct days and pins with a skewed popularity: many ties, many repeats."""
    rng = np.random.default_rng(seed)

    def draw(users: int, num: int) -> Actions:
        skewed = (rng.random(num) ** 2 * (num_pins - num_cold)).astype(np.int32)
        order = np.lexsort((day := -rng.integers(1, 50, num).astype(np.int32), user := rng.integers(users, size=num)))
        return Actions(user=user[order].astype(np.int32), pin=skewed, day=day[order], is_positive=rng.random(num) < 0.4)

    past = draw(num_users, 25 * num_users)
    past_user, past_pin = past.user[::5], past.pin[::5]  # some positives repeat the past
    user = np.concatenate([np.arange(num_users), rng.integers(num_users, size=4 * num_users), past_user])
    pin = np.concatenate([rng.integers(num_pins, size=5 * num_users), past_pin])
    positive_user, positive_pin = distinct_pairs(user, pin, num_pins=num_pins)
    return BenchmarkLog(
        name=f"random {seed}",
        cut_ds="2026-02-01",
        num_days=7,
        pin_ids=pa.array(range(1000, 1000 + num_pins), pa.int64()),
        is_cold_pin=np.arange(num_pins) >= num_pins - num_cold,
        train_user_ids=pa.array(range(100, 140), pa.int64()),
        train=draw(40, 700),
        test_user_ids=pa.array(range(num_users), pa.int64()),
        past=past,
        positive_user_P=positive_user,
        positive_pin_P=positive_pin,
        num_unaskable_U=rng.integers(0, 3, num_users).astype(np.int32),
    )
