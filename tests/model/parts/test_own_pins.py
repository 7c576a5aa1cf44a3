"""Own pins against hand-worked values."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pf_core.model.parts.own_pins import FEATURES, own_pins
from pf_core.timelines.arrays import Timelines
from tests.support.parts import Action, timelines_of

USER: list[Action] = [
    (10.1, 5, 0, True),
    (10.5, 5, 1, False),
    (12.3, 7, 2, True),
    (15.2, 5, 2, True),
    (15.9, 3, 0, False),
]
"""Active on the days 10, 12 and 15: ages count from day 16."""


def features_of(timelines: Timelines, user: int) -> dict[int, dict[str, float]]:
    """Features of a user's own pins, by pin and name."""
    own = own_pins(timelines, timelines.offsets[user : user + 1], timelines.offsets[user + 1 : user + 2])
    return {
        pin: dict(zip(FEATURES, row, strict=True))
        for pin, row in zip(own.pin_P.tolist(), own.features_PX.tolist(), strict=True)
    }


def test_a_pin_that_was_repeated() -> None:
    """Pin 5: three actions on two days, 10 and 15."""
    assert features_of(timelines_of(USER), 0)[5] == pytest.approx(
        {
            "log days": log(2),
            "log age of the last day": log(16 - 15),
            "log decayed days, 7": log(exp(-1 / 7) + exp(-6 / 7)),
            "log decayed days, 30": log(exp(-1 / 30) + exp(-6 / 30)),
            "log decayed days, 120": log(exp(-1 / 120) + exp(-6 / 120)),
            "log age of the first day": log(16 - 10),
            "has repeated": 1,
            "log age over the mean gap": log((1 + 1) / (5 + 1)),
            "log rank": log(1),
            "log active days since the last": log(1 + 0),
            "log days over active days": log((2 + 0.3) / (3 + 0.6)),
            "log actions per day": log(3 / 2),
            "share of positive actions": 2 / 3,
        },
        abs=1e-6,
    )


def test_pins_of_one_action() -> None:
    found = features_of(timelines_of(USER), 0)
    assert list(found) == [3, 5, 7]
    assert found[7] == pytest.approx(
        {
            "log days": 0,
            "log age of the last day": log(16 - 12),
            "log decayed days, 7": -4 / 7,
            "log decayed days, 30": -4 / 30,
            "log decayed days, 120": -4 / 120,
            "log age of the first day": log(16 - 12),
            "has repeated": 0,
            "log age over the mean gap": 0,
            "log rank": log(3),  # decayed days: pin 5, pin 3, pin 7
            "log active days since the last": log(1 + 1),  # day 15
            "log days over active days": log((1 + 0.3) / (2 + 0.6)),
            "log actions per day": 0,
            "share of positive actions": 1,
        },
        abs=1e-6,
    )
    assert found[3]["log rank"] == pytest.approx(log(2))
    assert found[3]["log age of the last day"] == 0
    assert found[3]["log days over active days"] == pytest.approx(log(1.3 / 1.6))
    assert found[3]["share of positive actions"] == 0


def test_the_newest_action_of_a_pin() -> None:
    own = own_pins(timelines_of(USER), np.array([0]), np.array([len(USER)]))
    assert own.action_type_P.tolist() == [0, 2, 2]
    assert own.last_ts_P.tolist() == timelines_of(USER).ts[[4, 3, 2]].tolist()


def test_a_second_action_on_a_day_is_no_second_day() -> None:
    once = features_of(timelines_of([(3.0, 1, 0, True)]), 0)[1]
    twice = features_of(timelines_of([(3.0, 1, 0, True), (3.9, 1, 0, True)]), 0)[1]
    assert twice.pop("log actions per day") == pytest.approx(log(2))
    assert once.pop("log actions per day") == 0
    assert once == twice


def test_midnight_divides_days() -> None:
    own = features_of(timelines_of([(3.9999, 1, 0, True), (4.0, 1, 0, True)]), 0)[1]
    assert own["log days"] == pytest.approx(log(2))
    assert own["log age of the last day"] == 0


def test_a_prefix_of_a_timeline_knows_nothing_of_the_rest() -> None:
    timelines = timelines_of(USER)
    before = own_pins(timelines, np.array([0]), np.array([3]))  # days 10 and 12: ages count from day 13
    alone = own_pins(timelines_of(USER[:3]), np.array([0]), np.array([3]))
    assert before.pin_P.tolist() == [5, 7]
    np.testing.assert_array_equal(before.features_PX, alone.features_PX)
    assert before.features_PX[0, FEATURES.index("log age of the last day")] == pytest.approx(log(13 - 10))


def test_users_without_actions_have_no_own_pins() -> None:
    timelines = timelines_of([], USER, [], [(2.0, 9, 1, False)], [])
    own = own_pins(timelines, timelines.offsets[:-1], timelines.offsets[1:])
    assert own.row_P.tolist() == [1, 1, 1, 3]
    assert own.pin_P.tolist() == [3, 5, 7, 9]


@pytest.mark.parametrize("num_users", [0, 1, 3])
def test_nobody_has_any_action(num_users: int) -> None:
    nowhere = np.zeros(num_users, np.int64)
    own = own_pins(timelines_of(USER), nowhere, nowhere)
    assert len(own.row_P) == len(own.pin_P) == len(own.action_type_P) == len(own.last_ts_P) == 0
    assert own.features_PX.shape == (0, len(FEATURES))


ACTIONS = st.lists(st.tuples(st.floats(0, 60), st.integers(0, 5), st.integers(0, 2), st.booleans()), max_size=12).map(
    sorted
)


@given(users=st.lists(ACTIONS, min_size=1, max_size=5))
def test_who_else_is_read_changes_nothing(users: list[list[Action]]) -> None:
    together = timelines_of(*users)
    own = own_pins(together, together.offsets[:-1], together.offsets[1:])
    for number, user in enumerate(users):
        alone = own_pins(timelines_of(user), np.array([0]), np.array([len(user)]))
        mine = own.row_P == number
        for name in ("pin_P", "features_PX", "action_type_P", "last_ts_P"):
            np.testing.assert_array_equal(getattr(own, name)[mine], getattr(alone, name))


@given(user=ACTIONS.filter(bool))
def test_features_are_finite_and_ranks_are_a_permutation(user: list[Action]) -> None:
    own = own_pins(timelines_of(user), np.array([0]), np.array([len(user)]))
    assert np.isfinite(own.features_PX).all()
    rank = np.exp(own.features_PX[:, FEATURES.index("log rank")].astype(np.float64))
    assert sorted(rank.round().tolist()) == list(range(1, 1 + len(rank)))
