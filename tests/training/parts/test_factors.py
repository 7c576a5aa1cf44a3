"""Factors as of a day: what they read, and what turning them keeps."""

from math import e, log

import numpy as np
import pytest

from pf_core.days import DAY_US
from pf_core.timelines.arrays import Timelines
from pf_core.training.parts import factors as module
from pf_core.training.parts.factors import Factors, fit_factors, turned
from tests.support.parts import FIRST_DAY, Action, random_timelines, timelines_of

DIM = 5


def fit(timelines: Timelines, day: int, *, num_pins: int = 30, max_pairs: int = 10**6, dim: int = DIM) -> Factors:
    return fit_factors(timelines, day, num_pins=num_pins, dim=dim, max_pairs=max_pairs)


def assert_equal(one: Factors, other: Factors) -> None:
    for name, values in one._asdict().items():
        np.testing.assert_array_equal(values, getattr(other, name), err_msg=name)


def until(timelines: Timelines, day: int) -> Timelines:
    """The same users without the actions of `day` or later."""
    is_kept = timelines.ts < day * DAY_US
    names = ("pin", "ts", "action_type", "surface", "duration", "is_positive")
    before = np.concatenate([[0], np.cumsum(is_kept)])
    return Timelines(offsets=before[timelines.offsets], **{name: getattr(timelines, name)[is_kept] for name in names})


@pytest.mark.parametrize("max_pairs", [10**6, 500])
def test_nothing_of_the_day_or_later_enters(max_pairs: int) -> None:
    """Also where the users are sampled: how many depends on the actions before the day."""
    timelines, day = random_timelines([30] * 60, num_pins=30), FIRST_DAY + 20
    expected = fit(until(timelines, day), day, max_pairs=max_pairs)
    assert_equal(fit(timelines, day, max_pairs=max_pairs), expected)
    assert not np.array_equal(fit(timelines, day + 1, max_pairs=max_pairs).factor_ND, expected.factor_ND)


def test_factors_have_unit_norm_and_pins_without_actions_have_none() -> None:
    timelines = random_timelines([30] * 40, num_pins=25)
    found = fit(timelines, FIRST_DAY + 20)
    used = np.unique(until(timelines, FIRST_DAY + 20).pin)
    is_used = np.isin(np.arange(30), used)
    np.testing.assert_allclose(np.linalg.norm(found.factor_ND, axis=1), is_used, rtol=1e-5)
    assert not is_used[25:].any()
    assert not found.trust_N[~is_used].any()
    assert (found.trust_N[is_used] > 0).all()
    assert not found.log_repeat_N[~is_used].any()
    assert found.factor_ND.dtype == found.trust_N.dtype == found.log_repeat_N.dtype == np.float32


def test_trust_and_repeats_by_hand() -> None:
    """Pin 0: users a (days 1, 3) and b (day 1, twice). Pin 1: user b on day 2. Day 5 is not read."""
    a: list[Action] = [(1.0, 0, 0, True), (3.0, 0, 0, False), (5.0, 1, 0, True)]
    b: list[Action] = [(1.1, 0, 0, True), (1.2, 0, 0, True), (2.0, 1, 0, True), (5.0, 0, 0, True)]
    found = fit(timelines_of(a, b), 5, num_pins=3)
    assert found.trust_N.tolist() == pytest.approx([2.5 / (2.5 + e**2), 1.5 / (1.5 + e**2), 0])
    assert found.log_repeat_N.tolist() == pytest.approx([log((3 + 0.5) / (2 + 0.5)), log(1.5 / 1.5), 0])


def test_factors_are_those_of_a_full_decomposition() -> None:
    """All products of pins, which do not depend on signs or turns, against numpy's SVD of the dense matrix."""
    timelines, day = random_timelines([25] * 30, num_pins=12), FIRST_DAY + 30
    days = np.zeros((30, 12))
    for user in range(30):
        mine = slice(*timelines.offsets[user : user + 2].tolist())
        day_A = timelines.ts[mine] // DAY_US
        for pin, used in set(zip(timelines.pin[mine].tolist(), day_A.tolist(), strict=True)):
            days[user, pin] += used < day
    matrix = np.log1p(days) / np.sqrt((days > 0).sum(axis=0) + 5)
    _, _, right = np.linalg.svd(matrix)
    rows = right[:DIM].T
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    factor = fit(timelines, day, num_pins=12).factor_ND
    np.testing.assert_allclose(factor @ factor.T, rows @ rows.T, atol=5e-3)


def test_turning_keeps_products_and_comes_close() -> None:
    timelines = random_timelines([30] * 60, num_pins=30)
    first, plain = fit(timelines, FIRST_DAY + 20).factor_ND, fit(timelines, FIRST_DAY + 22).factor_ND
    onto = fit_factors(timelines, FIRST_DAY + 22, num_pins=30, dim=DIM, max_pairs=10**6, onto=first).factor_ND
    np.testing.assert_allclose(onto @ onto.T, plain @ plain.T, atol=1e-5)
    assert np.linalg.norm(onto - first) <= np.linalg.norm(plain - first) + 1e-5
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(DIM, DIM)))[0]
    np.testing.assert_allclose(turned((first @ rotation).astype(np.float32), first), first, atol=1e-5)


@pytest.mark.parametrize(
    "users",
    [[[]], [[(1.0, 0, 0, True)]], [[(1.0, 0, 0, True)], [(1.0, 1, 0, True)]], [[(9.0, 0, 0, True)]] * 3],
    ids=["no action", "one pair", "two apart", "all later"],
)
def test_logs_with_nothing_to_decompose(users: list[list[Action]]) -> None:
    found = fit(timelines_of(*users), 5, num_pins=2, dim=4)
    assert found.factor_ND.shape == (2, 4)
    assert all(np.isfinite(values).all() for values in found)


def test_few_pins_have_fewer_dimensions() -> None:
    timelines = random_timelines([10] * 20, num_pins=4)
    factor = fit(timelines, FIRST_DAY + 40, num_pins=4, dim=8).factor_ND
    assert factor.shape == (4, 8)
    assert not factor[:, 3:].any()


def test_a_log_of_separate_parts_has_the_same_factors_every_time() -> None:
    """ARPACK restarts from random vectors here: the users of pin 7 share nothing with the others."""
    first, second = [(1, 1), (2, 10), (5, 2), (7, 1), (10, 10), (12, 0)], [(3, 10), (8, 4)]
    users = [first, second, [(10, 7)], [(5, 7)], [(9, 7)]]
    apart: list[list[Action]] = [[(float(day), pin, 0, True) for day, pin in user] for user in users]
    expected = fit(timelines_of(*apart), 13, num_pins=12, dim=4)
    for _ in range(5):
        assert_equal(fit(timelines_of(*apart), 13, num_pins=12, dim=4), expected)


def test_chunks_of_users_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    timelines = random_timelines([30] * 60, num_pins=30)
    expected = fit(timelines, FIRST_DAY + 30)
    monkeypatch.setattr(module, "USERS_AT_ONCE", 7)
    assert_equal(fit(timelines, FIRST_DAY + 30), expected)
