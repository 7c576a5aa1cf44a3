from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pf_core.config.training import Objective, SamplingConfig
from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.hashing import mixed, permuted
from pf_core.training.objectives import (
    DrawnPairs,
    TimelineBlock,
    draw_distinct,
    expected_length,
    is_allowed,
    lay_out,
    sample_pairs,
    sample_sequences,
)

# A drawn timeline; + is a positive action.
#         0  1  2  3  4  5  6  7  8
MARKS = " +  .  +  .  +  .  +  +  +".split()
DAYS: list[float] = [0, 1, 1, 2, 4, 4, 6, 9, 20]

NEXT_IS_POSITIVE = [1, 3, 5, 6, 7]
WITHIN_3_DAYS = {0: [2], 1: [2, 4], 2: [4], 3: [4], 4: [6], 5: [6], 6: [7]}
"""1 sees 2, which comes at the same time but later, and 4, which comes exactly 3 days on; 8 is too far from 7."""
WITHIN_6_DAYS = {0: [2, 4, 6], 1: [2, 4, 6], 2: [4, 6], 3: [4, 6], 4: [6, 7], 5: [6, 7], 6: [7]}

NUM_DRAWS = 20_000


def sampling(objective: Objective, **changes: Any) -> SamplingConfig:
    return SamplingConfig.model_validate({"objective": objective, "window_days": 3, **changes})


def block_of(config: SamplingConfig, *timelines: tuple[list[float], list[str]]) -> TimelineBlock:
    offsets = np.cumsum([0, *(len(days) for days, _ in timelines)])
    ts = np.array([round(day * DAY_US) for days, _ in timelines for day in days], np.int64)
    is_positive = np.array([mark == "+" for _, marks in timelines for mark in marks], bool)
    return lay_out(offsets, ts, is_positive, config)


def keys(num: int, seed: int = 0) -> np.ndarray:
    return mixed(seed, np.arange(num))


def pairs_of(config: SamplingConfig, start: int, end: int, *, num: int = 1) -> DrawnPairs:
    """The pairs of the drawn timeline's sequence [start, end], drawn `num` times with different keys."""
    block = block_of(config, (DAYS, MARKS))
    return sample_pairs(block, keys(num), np.full(num, start), np.full(num, end), config)


# The drawn timeline


@pytest.mark.parametrize("objective", ["next_action", "sasrec"])
def test_sequences_end_before_a_positive_action(objective: Objective) -> None:
    assert block_of(sampling(objective), (DAYS, MARKS)).usable.tolist() == NEXT_IS_POSITIVE


@pytest.mark.parametrize("objective", ["all_action", "dense_all_action"])
@pytest.mark.parametrize(("window_days", "window"), [(3, WITHIN_3_DAYS), (6, WITHIN_6_DAYS)])
def test_sequences_end_where_a_positive_lies_in_the_window(
    objective: Objective, window_days: int, window: dict[int, list[int]]
) -> None:
    config = sampling(objective, window_days=window_days)
    assert block_of(config, (DAYS, MARKS)).usable.tolist() == list(window)


def test_next_action_pairs_the_end_with_its_next_action() -> None:
    pairs = pairs_of(sampling("next_action"), 1, 5)
    assert (pairs.position_P.tolist(), pairs.target_P.tolist(), pairs.weight_P.tolist()) == ([5], [6], [1])


def test_sasrec_pairs_every_position_with_its_next_action_if_that_is_positive() -> None:
    pairs = pairs_of(sampling("sasrec", equal_e1_weight=False, max_positives_per_sequence=1), 2, 7)
    assert pairs.position_P.tolist() == [3, 5, 6, 7]
    assert pairs.target_P.tolist() == [4, 6, 7, 8]
    assert pairs.weight_P.tolist() == [1, 1, 1, 1]


def test_sasrec_gives_the_newest_embedding_the_weight_of_all_others() -> None:
    assert pairs_of(sampling("sasrec"), 2, 7).weight_P.tolist() == [1, 1, 1, 3]
    assert pairs_of(sampling("sasrec"), 4, 5).weight_P.tolist() == [1]


def test_all_action_pairs_the_end_with_its_whole_window() -> None:
    pairs = pairs_of(sampling("all_action", window_days=6), 0, 1)
    assert pairs.position_P.tolist() == [1, 1, 1]
    assert sorted(pairs.target_P) == WITHIN_6_DAYS[1]


def test_all_action_takes_each_subset_of_the_window_equally_often() -> None:
    pairs = pairs_of(sampling("all_action", window_days=6, max_positives_per_sequence=2), 0, 1, num=NUM_DRAWS)
    subsets = Counter(tuple(sorted(pair)) for pair in pairs.target_P.reshape(-1, 2).tolist())
    assert_even(subsets, list(combinations(WITHIN_6_DAYS[1], 2)))


def test_dense_all_action_pairs_positions_with_one_target_of_their_own_window() -> None:
    pairs = pairs_of(sampling("dense_all_action", max_positives_per_sequence=7), 2, 6)
    assert dict(sorted(zip(pairs.position_P.tolist(), pairs.target_P.tolist(), strict=True))) == {
        **{2: 4, 3: 4},  # inside the sequence, hidden by causal attention
        **{4: 6, 5: 6},
        6: 7,
    }


def test_dense_all_action_draws_positions_and_targets_evenly() -> None:
    config = sampling("dense_all_action", window_days=6, max_positives_per_sequence=2)
    pairs = pairs_of(config, 1, 4, num=NUM_DRAWS)
    subsets = Counter(tuple(sorted(pair)) for pair in pairs.position_P.reshape(-1, 2).tolist())
    assert_even(subsets, list(combinations([1, 2, 3, 4], 2)))
    for position in (1, 2, 3, 4):
        assert_even(Counter(pairs.target_P[pairs.position_P == position].tolist()), WITHIN_6_DAYS[position])


def test_dense_all_action_draws_each_target_for_itself() -> None:
    pairs = pairs_of(sampling("dense_all_action", window_days=6), 2, 3, num=NUM_DRAWS)
    order = np.lexsort((pairs.position_P, pairs.row_P))
    of_2_and_3 = Counter(map(tuple, pairs.target_P[order].reshape(-1, 2).tolist()))
    assert_even(of_2_and_3, [(4, 4), (4, 6), (6, 4), (6, 6)])


def test_dense_all_action_skips_positions_without_a_target() -> None:
    pairs = pairs_of(sampling("dense_all_action", window_days=1.5), 0, 5)
    assert dict(zip(pairs.position_P.tolist(), pairs.target_P.tolist(), strict=True)) == {0: 2, 1: 2}


def test_a_timeline_does_not_see_the_next_one() -> None:
    quiet: tuple[list[float], list[str]] = ([0, 1], ["+", "."])
    busy: tuple[list[float], list[str]] = ([1, 1, 2], ["+", ".", "+"])
    for objective, usable in (("next_action", [3]), ("all_action", [2, 3])):
        config = sampling(objective, window_days=10_000)  # type: ignore[arg-type]
        assert block_of(config, quiet, busy).usable.tolist() == usable
        assert block_of(config, busy, quiet).usable.tolist() == [position - 2 for position in usable]


def assert_even(counts: Counter[Any], cells: list[Any]) -> None:
    """Five standard deviations."""
    assert set(counts) == set(cells)
    total, share = counts.total(), 1 / len(cells)
    bound = 5 * (total * share * (1 - share)) ** 0.5
    assert all(abs(count - total * share) <= bound for count in counts.values()), counts


# Properties, against the definition in plain Python


@st.composite
def timelines(draw: st.DrawFn) -> list[tuple[list[float], list[str]]]:
    gap = st.sampled_from([0, 0, 0.5, 1, 2, 3, 3.00001, 40])
    action = st.tuples(gap, st.sampled_from("+."))
    drawn = draw(st.lists(st.lists(action, max_size=12), min_size=1, max_size=4))
    return [(np.cumsum([gap for gap, _ in rows]).tolist(), [mark for _, mark in rows]) for rows in drawn]


def targets_of(config: SamplingConfig, days: list[float], marks: list[str], position: int) -> list[int]:
    later = [index for index in range(position + 1, len(days)) if marks[index] == "+"]
    if config.objective in ("next_action", "sasrec"):
        return [index for index in later if index == position + 1]
    window_us = config.window_days * DAY_US
    return [index for index in later if round(days[index] * DAY_US) <= round(days[position] * DAY_US) + window_us]


configs = st.builds(
    sampling,
    st.sampled_from(["next_action", "sasrec", "all_action", "dense_all_action"]),
    window_days=st.sampled_from([0.5, 1, 3, 1000]),
    sequence_fraction=st.sampled_from([0.01, 0.5, 1.0]),
    max_sequences_per_user=st.sampled_from([1, 2, 5, 100]),
    max_positives_per_sequence=st.sampled_from([1, 2, 5, 100]),
)


@given(timelines(), configs, st.integers(1, 6), st.integers(0, 2**32))
def test_samples_follow_the_definition(
    drawn: list[tuple[list[float], list[str]]], config: SamplingConfig, sequence_length: int, seed: int
) -> None:
    block = block_of(config, *drawn)
    key_U = keys(len(drawn), seed)
    user_R, start_R, end_R = sample_sequences(block, key_U, config, sequence_length)
    pairs = sample_pairs(block, mixed(key_U[user_R], end_R), start_R, end_R, config)
    for user, (days, marks) in enumerate(drawn):
        targets = [targets_of(config, days, marks, position) for position in range(len(days))]
        usable = [position for position, found in enumerate(targets) if found]
        rows = np.flatnonzero(user_R == user)
        ends = end_R[rows] - block.offsets[user]
        assert len(set(ends.tolist())) == len(rows)
        assert set(ends.tolist()) <= set(usable)
        wanted = max(round(config.sequence_fraction * len(usable)), 1)
        assert len(rows) == min(wanted, config.max_sequences_per_user, len(usable))
        for row, end in zip(rows, ends.tolist(), strict=True):
            start = int(start_R[row] - block.offsets[user])
            assert start == max(end - sequence_length + 1, 0)
            mine = pairs.row_P == row
            positions = (pairs.position_P[mine] - block.offsets[user]).tolist()
            chosen = (pairs.target_P[mine] - block.offsets[user]).tolist()
            assert all(start <= position <= end for position in positions)
            assert all(target in targets[position] for position, target in zip(positions, chosen, strict=True))
            assert len(chosen) == num_pairs(config, targets, start, end)
            if config.objective in ("next_action", "all_action"):
                assert set(positions) == {end}
                assert min(chosen) > end
                assert len(set(chosen)) == len(chosen)
            else:
                assert len(set(positions)) == len(positions)


def num_pairs(config: SamplingConfig, targets: list[list[int]], start: int, end: int) -> int:
    usable = [position for position in range(start, end + 1) if targets[position]]
    return {
        "next_action": 1,
        "sasrec": len(usable),
        "all_action": min(len(targets[end]), config.max_positives_per_sequence),
        "dense_all_action": min(len(usable), config.max_positives_per_sequence),
    }[config.objective]


@given(timelines(), timelines(), configs, st.integers(0, 2**32))
def test_a_users_sample_does_not_depend_on_the_others(
    one: list[tuple[list[float], list[str]]],
    other: list[tuple[list[float], list[str]]],
    config: SamplingConfig,
    seed: int,
) -> None:
    key_U = keys(len(one) + len(other), seed)

    def sampled(drawn: list[tuple[list[float], list[str]]], key_U: np.ndarray) -> list[tuple[int, ...]]:
        block = block_of(config, *drawn)
        user_R, start_R, end_R = sample_sequences(block, key_U, config, 4)
        pairs = sample_pairs(block, mixed(key_U[user_R], end_R - block.offsets[user_R]), start_R, end_R, config)
        user_P = user_R[pairs.row_P]
        from_start = [
            field - block.offsets[user_P] for field in (start_R[pairs.row_P], pairs.position_P, pairs.target_P)
        ]
        return list(zip(user_P.tolist(), *(field.tolist() for field in from_start), strict=True))

    together = sampled(other + one, np.roll(key_U, len(other)))
    assert [(user - len(other), *rest) for user, *rest in together if user >= len(other)] == sampled(
        one, key_U[: len(one)]
    )


# The draws


def test_every_end_is_equally_likely() -> None:
    days, marks = [day / 10 for day in range(12)], list("..+.+++.+.++")
    usable = [1, 3, 4, 5, 7, 9, 10]
    for most in (1, 3, 7):
        config = sampling("next_action", max_sequences_per_user=most)
        block = block_of(config, *[(days, marks)] * 7000)
        user_R, _, end_R = sample_sequences(block, keys(7000), config, 4)
        counts = Counter((end_R - block.offsets[user_R]).tolist())
        assert_even(counts, usable)
        assert counts.total() == 7000 * most


def test_the_expected_length_is_the_length_where_every_position_is_usable() -> None:
    config = sampling("dense_all_action", window_days=1000)
    lengths = np.arange(2, 200)
    block = block_of(config, *[([day / 10 for day in range(length)], ["+"] * length) for length in lengths.tolist()])
    _, start_R, end_R = sample_sequences(block, keys(len(lengths)), config, 64)
    expected = expected_length(lengths, keys(len(lengths)), config, 64)
    assert np.abs(end_R - start_R + 1 - expected).max() <= 1
    assert (expected == 64).sum() > 50


def test_distinct_draws_take_each_subset_equally_often() -> None:
    row, number = draw_distinct(np.full(NUM_DRAWS, 5), 3, keys(NUM_DRAWS))
    assert row.tolist() == np.repeat(np.arange(NUM_DRAWS), 3).tolist()
    assert_even(
        Counter(tuple(sorted(drawn)) for drawn in number.reshape(-1, 3).tolist()), list(combinations(range(5), 3))
    )


@given(st.integers(1, 300), st.integers(0, 2**32))
def test_an_order_has_everyone_once(size: int, seed: int) -> None:
    assert sorted(permuted(np.arange(size), size, seed).tolist()) == list(range(size))


def test_an_order_needs_memory_for_the_requested_places_only() -> None:
    size = 500_000_000
    order = permuted(np.arange(400_000_000, 400_020_000), size, 1)
    assert len(set(order.tolist())) == 20_000
    assert order.min() >= 0
    assert order.max() < size
    assert_even(Counter((order * 10 // size).tolist()), list(range(10)))
    assert_even(Counter((np.diff(order) > 0).tolist()), [False, True])


def test_orders_of_different_keys_have_nothing_in_common() -> None:
    one, other = (permuted(np.arange(10_000), 10_000, seed) for seed in (1, 2))
    assert (one == other).sum() < 10


def test_summed_objectives_weigh_the_same_in_a_sequence() -> None:
    pairs = pairs_of(sampling("summed", max_positives_per_sequence=2), 1, 6)
    assert list(zip(pairs.position_P[2:].tolist(), pairs.target_P[2:].tolist(), strict=True)) == [
        (position, position + 1) for position in NEXT_IS_POSITIVE if 1 <= position <= 6
    ]
    assert pairs.weight_P.tolist() == [1 / 2] * 2 + [1 / 4] * 4
    for position, target in zip(pairs.position_P[:2].tolist(), pairs.target_P[:2].tolist(), strict=True):
        assert target in WITHIN_3_DAYS[position]
    dense = pairs_of(sampling("dense_all_action", max_positives_per_sequence=2), 1, 6)
    assert dense.position_P.tolist() == pairs.position_P[:2].tolist()


# Allowed types


def test_positive_types_choose_among_the_vocabulary() -> None:
    types = ["click", "closeup", "repin"]
    assert is_allowed("positive_types", None, types) is None
    allowed = is_allowed("positive_types", ["repin", "click"], types)
    assert allowed is not None
    assert allowed.tolist() == [True, False, True]


def test_an_unknown_positive_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PipelineError, match=r"positive_types: 'save' does not occur .*; choose from 'click', 'repin'"):
        is_allowed("positive_types", ["repin", "save"], ["click", "repin"])
