"""Scores and baselines: a log of five users worked out by hand, and independent dense computations on random logs."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest

from pf_core.benchmark.baselines import BASELINES, lists_from_scores, mean_of_recent, own_frequency, popularity
from pf_core.benchmark.log import BenchmarkLog, RankedLists, list_lengths, seen_pins
from pf_core.benchmark.scoring import compare, score, summarize
from pf_core.errors import PipelineError
from tests.support.benchmark_logs import make_lists, make_log, random_log

# Five users: two train, three are asked. Pins 12 and 13 are cold.
#
#   positives of the training users     last 7 days   last 28 days   ever
#   pin 0: days -30, -10, -28                0              2          3
#   pin 1: day -1 (and a look on day -8)     1              1          1
#   pin 2: days -7, -6                       2              2          2
#   pin 3: days -40, -29                     0              0          2
#   pin 4: a look on day -2                  0              0          0
BY_HAND = make_log(
    num_pins=14,
    cold=(12, 13),
    train=[
        (0, 3, -40, True),
        (0, 0, -30, True),
        (0, 0, -10, True),
        (0, 1, -8, False),
        (0, 2, -7, True),
        (0, 1, -1, True),
        (1, 3, -29, True),
        (1, 0, -28, True),
        (1, 2, -6, True),
        (1, 4, -2, False),
    ],
    past=[
        (0, 5, -121, False),
        (0, 5, -121, True),
        (0, 0, -2, True),
        (0, 6, -1, True),
        (0, 7, -1, False),
        (1, 2, -3, True),
        (1, 2, -2, False),
    ],
    positives=[(0, 5), (0, 6), (0, 1), (0, 12), (1, 2), (2, 0), (2, 13)],
    num_unaskable=[1, 0, 2],
)
NEW = [2 + 1, 0, 2 + 2]  # positives on new pins: of user 0 pins 1, 12 and one outside the index
nan = math.nan


def list_of(lists: RankedLists, user: int) -> list[tuple[int, float]]:
    rows = slice(lists.offsets_U[user], lists.offsets_U[user + 1])
    return list(zip(lists.pin[rows].tolist(), lists.score[rows].tolist(), strict=True))


def same(values: np.ndarray, expected: list[float]) -> None:
    np.testing.assert_allclose(values, expected, rtol=1e-12)


# By hand


@pytest.mark.parametrize(
    ("last_days", "counts"),
    [(7, {2: 2, 1: 1}), (28, {0: 2, 2: 2, 1: 1}), (None, {0: 3, 2: 2, 3: 2, 1: 1})],
)
def test_popularity_counts_the_positives_of_training_users(last_days: int | None, counts: dict[int, int]) -> None:
    lists = popularity(BY_HAND, last_days=last_days)
    rest = [(pin, 0.0) for pin in range(14) if pin not in counts]
    for user in range(3):
        assert list_of(lists, user) == [*((pin, float(count)) for pin, count in counts.items()), *rest]


def test_popularity_of_seven_days_by_hand() -> None:
    scores = score(BY_HAND, popularity(BY_HAND, last_days=7))
    # Pin 2 has no rival and pin 1 has one; the other 12 pins tie at 0, and each has 13 rivals.
    same(scores.recall_at_10_U, [1 / 5, 1 / 1, 0 / 4])
    same(scores.askable_recall_at_10_U, [1 / 4, 1 / 1, 0 / 2])
    same(scores.recall_at_50_U, [4 / 5, 1 / 1, 2 / 4])
    same(scores.askable_recall_at_50_U, [4 / 4, 1 / 1, 2 / 2])
    # Without pins 0, 5, 6 and 7, user 0 has ten pins left: pin 12 has 9 rivals. User 1 has no new positive.
    same(scores.discovery_at_10_U, [2 / NEW[0], nan, 0 / NEW[2]])
    same(scores.discovery_at_50_U, [2 / NEW[0], nan, 2 / NEW[2]])
    assert scores.cold_hits_at_10_U.tolist() == [0, 0, 0]
    assert scores.num_cold_U.tolist() == [1, 0, 1]
    summary = summarize(scores)
    assert summary["recall_at_10"] == pytest.approx((1 / 5 + 1 + 0) / 3)
    assert summary["recall_at_50"] == pytest.approx((4 / 5 + 1 + 2 / 4) / 3)
    assert summary["askable_recall_at_10"] == pytest.approx((1 / 4 + 1 + 0) / 3)
    assert summary["discovery_at_10"] == pytest.approx((2 / 3 + 0) / 2)
    assert summary["discovery_at_50"] == pytest.approx((2 / 3 + 2 / 4) / 2)
    assert (summary["cold_at_10"], summary["num_cold"]) == (0.0, 2)
    assert (summary["num_users"], summary["num_discovery_users"], summary["num_empty_lists"]) == (3, 2, 0)
    assert summary["p90_coverage_at_10"] == math.ceil(0.9 * 10) / 14  # the same ten pins for all


def test_popularity_ever_by_hand() -> None:
    scores = score(BY_HAND, popularity(BY_HAND, last_days=None))
    same(scores.recall_at_10_U, [1 / 5, 1, 1 / 4])  # pins 1, 2 and 0
    same(scores.discovery_at_10_U, [2 / 3, nan, 1 / 4])  # pin 12 has 3 + 6 rivals


def test_own_frequency_by_hand() -> None:
    lists = own_frequency(BY_HAND, decay_days=None)
    assert list_of(lists, 0) == [(5, 2.0), (0, 1.0), (6, 1.0), (7, 1.0)]
    assert list_of(lists, 1) == [(2, 2.0)]
    assert list_of(lists, 2) == []
    scores = score(BY_HAND, lists)
    same(scores.recall_at_10_U, [2 / 5, 1 / 1, 0 / 4])
    same(scores.recall_at_50_U, [2 / 5, 1 / 1, 0 / 4])
    same(scores.askable_recall_at_10_U, [2 / 4, 1 / 1, 0 / 2])
    same(scores.discovery_at_10_U, [0 / 3, nan, 0 / 4])
    assert summarize(scores)["num_empty_lists"] == 1


def test_own_frequency_with_decay_by_hand() -> None:
    lists = own_frequency(BY_HAND, decay_days=120)
    assert [pin for pin, _ in list_of(lists, 0)] == [6, 7, 0, 5]
    assert [value for _, value in list_of(lists, 0)] == pytest.approx([1, 1, math.exp(-1 / 120), 2 * math.exp(-1)])
    assert list_of(lists, 1) == [(2, pytest.approx(math.exp(-2 / 120) + math.exp(-1 / 120)))]


def test_cold_recall_is_pooled() -> None:
    first = [(12, 9.0), *((pin, 1.0) for pin in range(12))]
    scores = score(BY_HAND, make_lists(first, [], [(0, 2.0)]))
    assert scores.cold_hits_at_10_U.tolist() == [1, 0, 0]
    assert summarize(scores)["cold_at_10"] == 1 / 2


@pytest.mark.parametrize(("num_tied", "is_hit"), [(10, True), (11, False)])
def test_ties_count_against_a_positive_and_it_does_not_compete_with_itself(num_tied: int, is_hit: bool) -> None:
    log = make_log(num_pins=60, train=[(0, 0, -1, True)], past=[], positives=[(0, 0)], num_unaskable=[0])
    scores = score(log, make_lists([(pin, 1.0) for pin in range(num_tied)]))
    assert scores.recall_at_10_U.tolist() == [float(is_hit)]
    same(scores.recall_at_50_U, [1.0])


def test_compare_is_paired() -> None:
    ours, theirs = (score(BY_HAND, BASELINES[name](BY_HAND)) for name in ("own frequency", "popularity, 7 days"))
    differences = compare(ours, theirs)
    assert differences["all"].mean == pytest.approx((2 / 5 - 1 / 5 + 0 + 0) / 3)
    assert differences["discovery"].mean == pytest.approx((0 - 2 / 3 + 0) / 2)
    low, high = differences["all"].interval
    assert 0.0 <= low <= differences["all"].mean <= high <= 1 / 5 + 1e-12
    assert compare(ours, ours)["all"] == (0.0, (0.0, 0.0))


# Against a dense computation


def brute_force(log: BenchmarkLog, score_UN: np.ndarray) -> dict[str, list[float]]:
    """Full ranks from the dense scores, -inf for what a contender cannot score."""
    result = defaultdict(list)
    past = set(zip(log.past.user.tolist(), log.past.pin.tolist(), strict=True))
    for user in range(len(log.test_user_ids)):
        positives = log.positive_pin_P[log.positive_user_P == user].tolist()
        num_unaskable = int(log.num_unaskable_U[user])
        seen = {pin for each, pin in past if each == user}
        for name, dropped in (("recall", set()), ("discovery", seen)):
            left = [pin for pin in range(len(log.pin_ids)) if pin not in dropped]
            asked = [pin for pin in positives if pin not in dropped]
            rivals = [
                sum(score_UN[user, other] >= score_UN[user, pin] for other in left if other != pin)
                if score_UN[user, pin] > -np.inf
                else math.inf
                for pin in asked
            ]
            for k in (10, 50):
                hits, num = sum(each < k for each in rivals), len(asked) + num_unaskable
                result[f"{name}_at_{k}_U"].append(hits / num if num else nan)
                if name == "recall":
                    result[f"askable_recall_at_{k}_U"].append(hits / len(asked) if asked else nan)
            if name == "recall":
                cold = [log.is_cold_pin[pin] for pin in asked]
                result["num_cold_U"].append(sum(cold))
                found = [is_cold and each < 10 for is_cold, each in zip(cold, rivals, strict=True)]
                result["cold_hits_at_10_U"].append(sum(found))
    return result


def check(log: BenchmarkLog, lists: RankedLists, score_UN: np.ndarray) -> None:
    scores = score(log, lists)
    expected = brute_force(log, score_UN)
    assert len(expected) == 8
    for name, values in expected.items():
        np.testing.assert_allclose(getattr(scores, name), values, err_msg=name)


SIZES = [{}, {"num_pins": 300}, {"num_pins": 9, "num_cold": 2}, {"num_users": 1}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_levels", [3, 40, 10**6])
def test_lists_of_dense_scores_lose_nothing(
    seed: int, num_levels: int, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pf_core.benchmark.baselines.SCORES_AT_ONCE", 1000)  # several chunks
    log = random_log(seed, **sizes)
    rng = np.random.default_rng(seed)
    score_UN = rng.integers(num_levels, size=(len(log.test_user_ids), len(log.pin_ids))).astype(float)
    score_UN[rng.random(score_UN.shape) < 0.2] = -np.inf
    score_UN[0] = -np.inf
    lists = lists_from_scores(log, lambda users: score_UN[users])
    for user, length in enumerate(list_lengths(log).tolist()):
        expected = sorted((-value, pin) for pin, value in enumerate(score_UN[user].tolist()) if value > -np.inf)
        assert list_of(lists, user) == [(pin, -value) for value, pin in expected[:length]]
    check(log, lists, score_UN)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_baselines_equal_an_independent_computation(seed: int, sizes: dict[str, int]) -> None:
    log = random_log(seed, **sizes)
    num_users, num_pins = len(log.test_user_ids), len(log.pin_ids)
    train, past = (
        list(zip(each.user.tolist(), each.pin.tolist(), each.day.tolist(), each.is_positive.tolist(), strict=True))
        for each in (log.train, log.past)
    )
    for name, days in (("popularity, 7 days", 7), ("popularity, 28 days", 28), ("popularity, ever", 10**6)):
        counts = Counter(pin for _, pin, day, is_positive in train if is_positive and day >= -days)
        row_N = [float(counts[pin]) for pin in range(num_pins)]
        check(log, BASELINES[name](log), np.array([row_N] * num_users))
    for name, decay in (("own frequency", math.inf), ("own frequency, decay 120 days", 120.0)):
        score_UN = np.full((num_users, num_pins), -np.inf)
        for user, pin, day, _ in past:
            score_UN[user, pin] = max(score_UN[user, pin], 0.0) + math.exp((day + 1) / decay)
        check(log, BASELINES[name](log), score_UN)


@pytest.mark.parametrize("num_actions", [1, 4, 100])
def test_mean_of_recent_equals_an_independent_computation(num_actions: int) -> None:
    log, rng = random_log(7), np.random.default_rng(1)
    vectors = rng.normal(size=(len(log.pin_ids), 6))
    vectors[::9], vectors[4] = nan, 0.0  # no vector
    unit = vectors / np.linalg.norm(np.where(vectors == 0, 1, vectors), axis=1, keepdims=True)
    has_vector = [bool(np.isfinite(row).all() and row.any()) for row in vectors]
    score_UN = np.full((len(log.test_user_ids), len(log.pin_ids)), -np.inf)
    for user in range(len(score_UN)):
        pins = [pin for pin in log.past.pin[log.past.user == user].tolist() if has_vector[pin]][-num_actions:]
        mean = np.mean([unit[pin] for pin in pins], axis=0)
        for pin in np.flatnonzero(has_vector):
            score_UN[user, pin] = mean @ unit[pin] / np.linalg.norm(mean)
    lists = mean_of_recent(log, vectors, num_actions)
    check(log, lists, score_UN)
    user_R = np.repeat(np.arange(len(score_UN)), np.diff(lists.offsets_U))
    np.testing.assert_allclose(lists.score, score_UN[user_R, lists.pin], atol=1e-12)


def test_mean_of_recent_without_any_vector_is_empty() -> None:
    lists = mean_of_recent(BY_HAND, np.full((14, 3), nan, np.float32), 20)
    assert lists.offsets_U.tolist() == [0, 0, 0, 0]
    assert summarize(score(BY_HAND, lists))["recall_at_10"] == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(PipelineError, match="NaN or infinite"):
        lists_from_scores(BY_HAND, lambda users: np.full((len(users), 14), value))


# Who counts


@pytest.mark.parametrize("name", [name for name in BASELINES if name.startswith("popularity")])
def test_a_test_users_past_changes_no_popularity(name: str) -> None:
    log = random_log(3)
    planted = BenchmarkLog(**{**log.__dict__, "past": random_log(4).past})
    before, after = (BASELINES[name](each) for each in (log, planted))
    for user in range(len(log.test_user_ids)):  # the lists may differ in length
        pairs = zip(list_of(before, user), list_of(after, user), strict=False)
        assert all(one == other for one, other in pairs)


@pytest.mark.parametrize("name", BASELINES)
def test_a_users_own_past_makes_only_that_users_list(name: str) -> None:
    log = random_log(3)
    pin = log.past.pin.copy()
    pin[log.past.user == 5] = 17
    changed = BenchmarkLog(**{**log.__dict__, "past": type(log.past)(**{**log.past.__dict__, "pin": pin})})
    before, after = (BASELINES[name](each) for each in (log, changed))
    assert all(list_of(before, user) == list_of(after, user) for user in range(len(log.test_user_ids)) if user != 5)


@pytest.mark.parametrize("name", BASELINES)
def test_positives_change_no_list(name: str) -> None:
    log = random_log(3)
    none = np.zeros(0, np.int32)
    changed = BenchmarkLog(**{**log.__dict__, "positive_user_P": none, "positive_pin_P": none})
    before, after = (BASELINES[name](each) for each in (log, changed))
    assert before.pin.tolist() == after.pin.tolist()
    assert before.score.tolist() == after.score.tolist()


# Bad input


def test_fewer_pins_than_k() -> None:
    log = make_log(
        num_pins=3, train=[(0, 0, -1, True)], past=[(0, 1, -1, True)], positives=[(0, 1), (0, 2)], num_unaskable=[0]
    )
    scores = score(log, popularity(log, last_days=7))
    same(scores.recall_at_10_U, [1.0])
    same(scores.discovery_at_10_U, [1.0])
    assert summarize(scores)["p90_coverage_at_10"] == 1.0


def test_all_positives_are_unaskable() -> None:
    log = make_log(num_pins=3, train=[(0, 0, -1, True)], past=[(0, 0, -1, True)], positives=[], num_unaskable=[2])
    for make in BASELINES.values():
        scores = score(log, make(log))
        same(scores.recall_at_10_U, [0 / 2])
        same(scores.discovery_at_10_U, [0 / 2])
        summary = summarize(scores)
        assert math.isnan(summary["askable_recall_at_10"])
        assert math.isnan(summary["cold_at_10"])
        assert summary["num_cold"] == 0


def test_nobody_has_a_positive_on_a_new_pin() -> None:
    log = make_log(num_pins=3, train=[(0, 0, -1, True)], past=[(0, 1, -1, True)], positives=[(0, 1)], num_unaskable=[0])
    scores = score(log, own_frequency(log, decay_days=None))
    summary = summarize(scores)
    assert (summary["recall_at_10"], summary["num_discovery_users"]) == (1.0, 0)
    assert math.isnan(summary["discovery_at_10"])
    assert all(math.isnan(end) for end in summary["discovery_at_10_interval"])
    assert math.isnan(compare(scores, scores)["discovery"].mean)


@pytest.mark.parametrize("make", BASELINES.values())
def test_a_log_without_repeats_and_without_training_users(make: Callable[[BenchmarkLog], RankedLists]) -> None:
    """Every positive is new to its user: the two questions differ only in who competes."""
    log = make_log(
        num_pins=80,
        train=[],
        past=[(0, 0, -2, True), (0, 1, -1, True)],
        positives=[(0, 2)],
        num_unaskable=[0],
    )
    assert seen_pins(log).num_U.tolist() == [2]
    scores = score(log, make(log))
    same(scores.recall_at_50_U, [0.0])  # all counts are 0, so all pins tie
    same(scores.discovery_at_50_U, [0.0])
