"""PinnerSage on planted clusters, and its two rules by hand."""

import math

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from torch import Tensor

from pf_core.days import DAY_US
from pf_core.evaluation.pinnersage import (
    Clusters,
    PinnerSage,
    _cut_tree,
    _to_unit,
    ask_oracle,
    cluster_users,
    round_robin,
)
from pf_core.metrics.exact_search import search
from pf_core.timelines.arrays import Timelines

AT_US = 1_000 * DAY_US


def timeline(*users: list[tuple[int, float]]) -> Timelines:
    """Each user's actions as (pin, days before AT_US), the oldest first."""
    actions = [action for user in users for action in user]
    nothing = np.zeros(len(actions), np.int16)
    return Timelines(
        offsets=np.concatenate([[0], np.cumsum([len(user) for user in users])]),
        pin=np.array([pin for pin, _ in actions], np.int32),
        ts=np.array([AT_US - round(days * DAY_US) for _, days in actions], np.int64),
        action_type=nothing,
        surface=nothing,
        duration=nothing.astype(np.float32),
        is_positive=nothing.astype(bool),
    )


def cluster(timelines: Timelines, feature: np.ndarray, config: PinnerSage | None = None) -> list[list[int]]:
    """Return the pins of the medoids of whole timelines, by user."""
    clusters = cluster_users(
        timelines, feature, timelines.offsets[:-1], timelines.offsets[1:] - 1, AT_US, config or PinnerSage()
    )
    return [part.tolist() for part in np.split(clusters.pin_C, clusters.offsets_U[1:-1])]


def around(*degrees: float) -> np.ndarray:
    """Content vectors in the plane, of any length: only directions count."""
    angle = np.radians(degrees)
    return (2 + np.arange(len(degrees))[:, None]) * np.stack([np.cos(angle), np.sin(angle)], 1)


AXES = np.eye(4)


def test_the_medoid_is_the_pin_in_the_middle() -> None:
    """Pins at 0, 9, 10, 11 and 20 degrees are one cluster, whose middle is at 10; pins at 180 and beside it another."""
    feature = around(0, 9, 10, 11, 20, 180, 181, 182)
    actions = [(pin, 10.0 - pin) for pin in range(8)]
    assert cluster(timeline(actions), feature) == [[2, 6]]


def test_clusters_are_ordered_by_importance() -> None:
    """Three actions 60 days ago weigh 3 exp(-.6) = 1.65, two of yesterday 2 exp(-.01) = 1.98, one of now 1."""
    assert 3 * math.exp(-0.6) < 2 * math.exp(-0.01)
    old = [(0, 60.0)] * 3
    assert cluster(timeline([*old, (1, 1.0), (1, 1.0), (2, 0.0001)]), AXES) == [[1, 0, 2]]
    slow = PinnerSage(decay_per_day=0.001)
    assert cluster(timeline([*old, (1, 1.0), (1, 1.0), (2, 0.0001)]), AXES, slow) == [[0, 1, 2]]


def test_of_equally_important_clusters_the_newest_comes_first() -> None:
    config = PinnerSage(decay_per_day=0)
    assert cluster(timeline([(3, 9.0), (0, 5.0), (2, 3.0), (1, 2.0), (2, 1.5), (1, 1.0)]), AXES, config) == [
        [1, 2, 0, 3]
    ]


def test_of_two_members_the_newer_one_is_the_medoid() -> None:
    feature = around(0, 10)
    assert cluster(timeline([(0, 2.0), (1, 1.0)], [(1, 2.0), (0, 1.0)]), feature) == [[1], [0]]


@pytest.mark.parametrize("num_actions", [1, 2, 3, 50])
def test_identical_pins_are_one_cluster(num_actions: int) -> None:
    feature = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    assert cluster(timeline([(2, 1.0)] * num_actions), feature, PinnerSage(max_distance=1e-6)) == [[2]]


def test_the_cut_decides_what_is_joined() -> None:
    """Pins 60 degrees apart are sqrt(2 - 2 cos 60°) = 1 apart."""
    pair = timeline([(0, 2.0), (1, 1.0)])
    assert cluster(pair, around(0, 60), PinnerSage(max_distance=1.0001)) == [[1]]
    assert cluster(pair, around(0, 60), PinnerSage(max_distance=0.9999)) == [[1, 0]]


@pytest.mark.parametrize("max_distance", [0.0, 0.5, 1.0, 1.35, 2.0, 100.0])
def test_the_cut_is_scipys(max_distance: float) -> None:
    """The same partition of the actions as `fcluster` makes, on content that has structure at every scale."""
    rng = np.random.default_rng(5)
    vector_AD = _to_unit(np.repeat(rng.normal(size=(12, 8)), 5, axis=0) + 0.5 * rng.normal(size=(60, 8)))
    expected = fcluster(linkage(vector_AD, "ward"), max_distance, "distance")
    assert len(set(expected)) == {0.0: 60, 100.0: 1}.get(max_distance, len(set(expected)))
    got = _cut_tree(vector_AD, max_distance)
    assert len(set(zip(got.tolist(), expected.tolist(), strict=True))) == len(set(expected)) == got.max() + 1


def test_unrelated_pins_stay_apart() -> None:
    assert cluster(timeline([(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]), AXES) == [[3, 2, 1, 0]]


def test_a_pin_without_content_is_no_error() -> None:
    feature = np.concatenate([AXES, np.zeros((1, 4))])
    assert sorted(cluster(timeline([(0, 2.0), (4, 1.0)]), feature, PinnerSage(max_distance=0.5))[0]) == [0, 4]


def test_only_the_window_counts() -> None:
    """Pin 0 is 91 days old, pin 3 happens at the very moment that is asked about."""
    actions = [(0, 91.0), (1, 89.0), (2, 5.0), (3, 0.0)]
    assert cluster(timeline(actions), AXES) == [[2, 1]]
    assert cluster(timeline(actions), AXES, PinnerSage(num_days=30)) == [[2]]
    assert cluster(timeline([(0, 91.0)], [(1, 3.0)], [(3, 0.0)]), AXES) == [[], [1], []]


def test_of_too_many_actions_the_newest_count() -> None:
    actions = [(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)]
    assert cluster(timeline(actions), AXES, PinnerSage(max_actions=2)) == [[3, 2]]


def test_a_part_of_a_timeline() -> None:
    timelines = timeline([(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)])
    clusters = cluster_users(timelines, AXES, np.array([1, 0]), np.array([2, 0]), AT_US, PinnerSage())
    assert clusters.pin_C.tolist() == [2, 1, 0]
    assert clusters.offsets_U.tolist() == [0, 2, 3]


def test_each_user_may_have_her_own_moment() -> None:
    """The same timeline as of AT_US, and as of two and a half days before, when its last two actions are to come."""
    timelines = timeline([(0, 4.0), (1, 3.0), (2, 2.0), (3, 1.0)])
    moments = np.array([AT_US, AT_US - 5 * DAY_US // 2])
    clusters = cluster_users(timelines, AXES, np.array([0, 0]), np.array([3, 3]), moments, PinnerSage())
    assert (clusters.offsets_U.tolist(), clusters.pin_C.tolist()) == ([0, 4, 6], [3, 2, 1, 0, 1, 0])


def test_nobody() -> None:
    none = np.zeros(0, np.int64)
    clusters = cluster_users(timeline([(0, 1.0)]), AXES, none, none, AT_US, PinnerSage())
    assert (clusters.offsets_U.tolist(), clusters.pin_C.tolist()) == ([0], [])


def test_the_first_clusters_of_each_user() -> None:
    clusters = Clusters(np.array([0, 3, 3, 5, 6]), np.array([9, 8, 7, 6, 5, 4]))
    for num, offsets, pins in (
        (1, [0, 1, 1, 2, 3], [9, 6, 4]),
        (2, [0, 2, 2, 4, 5], [9, 8, 6, 5, 4]),
        (20, [0, 3, 3, 5, 6], [9, 8, 7, 6, 5, 4]),
    ):
        first = clusters.first(num)
        assert (first.offsets_U.tolist(), first.pin_C.tolist()) == (offsets, pins)


@pytest.mark.parametrize("wrong", [{"num_days": 0}, {"max_actions": 0}, {"decay_per_day": -1}, {"max_distance": -1}])
def test_a_config_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"PinnerSage needs|must not be negative"):
        PinnerSage(**wrong)  # type: ignore[arg-type]


# Planted interests

NUM_INTERESTS, PINS_PER_INTEREST, DIM = 12, 40, 64


def planted_pins(rng: np.random.Generator) -> np.ndarray:
    """Two pins of an interest have cosine 1 / (1 + .5) = .67, two of different ones about 0."""
    axis = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0][:NUM_INTERESTS]
    noise = rng.normal(size=(NUM_INTERESTS * PINS_PER_INTEREST, DIM)) / DIM**0.5
    return (np.repeat(axis, PINS_PER_INTEREST, axis=0) + 0.5**0.5 * noise).astype(np.float32)


def unit(vectors: np.ndarray) -> Tensor:
    return torch.nn.functional.normalize(torch.from_numpy(vectors).float(), dim=-1)


def test_planted_interests_are_found_and_the_oracle_answers_with_them() -> None:
    """Each user acts on 1 to 6 interests, on the first most recently and most often, and will act on all of them."""
    rng = np.random.default_rng(3)
    feature = planted_pins(rng)
    users, interests, future = [], [], []
    for number in range(30):
        mine = rng.permutation(NUM_INTERESTS)[: 1 + number % 6]
        actions = []
        for place, interest in enumerate(mine):
            chosen = interest * PINS_PER_INTEREST + rng.permutation(PINS_PER_INTEREST)[: 20 - 2 * place]
            actions += [(int(pin), 10.0 * place + days) for pin, days in zip(chosen[:-1], rng.random(20), strict=False)]
            future.append((number, int(chosen[-1]), int(interest)))
        users.append(sorted(actions, key=lambda action: -action[1]))
        interests.append(mine.tolist())
    medoids = cluster(timeline(*users), feature)
    assert [[pin // PINS_PER_INTEREST for pin in pins] for pins in medoids] == interests

    clusters = Clusters(np.cumsum([0, *map(len, medoids)]), np.concatenate(medoids))
    user_P, pin_P, interest_P = (torch.tensor(column) for column in zip(*future, strict=True))
    cluster_P = ask_oracle(clusters, unit(feature[clusters.pin_C]), user_P, unit(feature[pin_P]))
    assert torch.from_numpy(clusters.pin_C)[cluster_P].div(PINS_PER_INTEREST, rounding_mode="floor").equal(interest_P)

    # The index has every pin: only those of the positive's own interest, which are 39 others, may stand before it.
    found = search(
        unit(feature[clusters.pin_C]),
        unit(feature),
        index_pin_N=torch.arange(len(feature)),
        positive_query_P=cluster_P,
        positive_pin_P=pin_P,
        positive_PD=unit(feature[pin_P]),
        k=PINS_PER_INTEREST,
    )
    assert int(found.rivals_P.max()) < PINS_PER_INTEREST
    blended_UK = round_robin(found.top_QK, clusters.offsets_U, PINS_PER_INTEREST)
    for mine, results in zip(interests, blended_UK.tolist(), strict=True):
        expected = [mine[place % len(mine)] for place in range(PINS_PER_INTEREST)]
        assert [pin // PINS_PER_INTEREST for pin in results] == expected
        assert len(set(results)) == PINS_PER_INTEREST


# The oracle and the blend by hand


def test_the_oracle_takes_the_nearest_of_the_users_own() -> None:
    """User 0 has the clusters e0 and e1, user 1 none, user 2 has e1 and twice e2."""
    clusters = Clusters(np.array([0, 2, 2, 5]), np.array([0, 1, 1, 2, 2]))
    cluster_CD = torch.from_numpy(AXES[clusters.pin_C]).float()
    positives = {(0, 0): 0, (0, 1): 1, (0, 2): 0, (1, 0): -1, (2, 1): 2, (2, 2): 3, (2, 0): 2}
    answer = ask_oracle(
        clusters,
        cluster_CD,
        torch.tensor([user for user, _ in positives]),
        torch.from_numpy(AXES[[axis for _, axis in positives]]).float(),
    )
    assert answer.tolist() == list(positives.values())


def test_the_oracle_without_a_question() -> None:
    nobody = Clusters(np.array([0, 0]), np.zeros(0, np.int64))
    assert ask_oracle(nobody, torch.zeros(0, 4), torch.tensor([0]), torch.ones(1, 4)).tolist() == [-1]
    somebody = Clusters(np.array([0, 1]), np.array([0]))
    nothing = torch.zeros(0, dtype=torch.int64)
    assert ask_oracle(somebody, torch.ones(1, 4), nothing, torch.zeros(0, 4)).tolist() == []


def test_results_are_taken_in_turns() -> None:
    """The second cluster's 10 is taken already, so it gives 21; the third's turn then finds both 10 and 21 taken."""
    top_CK = torch.tensor([[10, 11, 12, 13], [10, 21, 22, 23], [21, 10, 11, 33]])
    offsets = np.array([0, 3])
    assert round_robin(top_CK, offsets, 9).tolist() == [[10, 21, 11, 12, 22, 33, 13, 23, -1]]
    assert round_robin(top_CK, offsets, 4).tolist() == [[10, 21, 11, 12]]


def test_one_cluster_and_none() -> None:
    top_CK = torch.tensor([[5, 4, 3], [1, 2, 3]])
    assert round_robin(top_CK, np.array([0, 1, 1, 2]), 2).tolist() == [[5, 4], [-1, -1], [1, 2]]
    assert round_robin(top_CK[:1], np.array([0, 1]), 5).tolist() == [[5, 4, 3, -1, -1]]
