"""The (position, target) pairs that a timeline yields: the objectives of section 3.4, the parameters of section 3.5.

- A *target* is a positive action of an allowed type. A position is *usable* if it has a target: its next action
  (next_action, sasrec), or any later action within K days (all others). A sequence may end at any usable position T.
  sasrec, dense_all_action and summed take more positions from inside the sequence. A position's targets are
  always after it, so that causal attention hides them, even if they belong to the sequence.
- Later means a greater index: actions at the same microsecond keep the order of the timeline. K days is inclusive.
- A timeline ends at the training cut, and so do all windows.
- All timelines of a batch are processed at once. Laid end to end on one time axis, with gaps wider than K days, they
  form one long timeline: one binary search finds a window, which never reaches into the next user's timeline.
- A random number is a hash of (seed, epoch, user, purpose, counter). It does not depend on the other users of the
  batch, therefore not on the number of ranks or workers, and no user needs a generator of their own.

Suffixes: U users, A actions of all their timelines, R sequences, P pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pf_core.config.training import SamplingConfig
from pf_core.days import DAY_US
from pf_core.errors import PipelineError
from pf_core.hashing import Ints, Keys, below, mixed, uniform
from pf_core.timelines.arrays import ragged

FOR_END, FOR_SEQUENCE, FOR_POSITION, FOR_TARGET = range(4)
"""Purposes of random numbers; part of the hash."""


@dataclass(frozen=True, kw_only=True)
class TimelineBlock:
    """The timelines of some users, end to end; an action is identified by its number in the block."""

    offsets: Ints
    """Start of each timeline, and end of the last one."""
    axis_A: Ints
    """Microseconds on the common axis."""
    targets: Ints
    """Actions that can be targets, ascending."""
    targets_until_A: Ints
    """Number of targets up to and including an action."""
    usable: Ints
    """Positions that have a target, ascending."""
    window_us: int
    """K days, or the longest timeline if that is shorter."""


class DrawnPairs(NamedTuple):
    """Pairs of sequences; position and target are actions of the block, weights are relative within one user."""

    row_P: Ints
    position_P: Ints
    target_P: Ints
    weight_P: NDArray[np.float64]


def is_allowed(field: str, chosen: Sequence[str] | None, action_types: Sequence[str]) -> NDArray[np.bool_] | None:
    """Return, for each action type code, whether a field of the configuration names it; None if all are allowed."""
    if chosen is None:
        return None
    unknown = sorted(set(chosen) - set(action_types))
    if unknown:
        raise PipelineError(
            f"{field}: {', '.join(map(repr, unknown))} does not occur in the training set",
            f"choose from {', '.join(map(repr, action_types))}",
        )
    return np.isin(action_types, chosen)


def lay_out(offsets: Ints, ts_A: Ints, is_positive_A: NDArray[np.bool_], config: SamplingConfig) -> TimelineBlock:
    """Lay timelines end to end. `ts_A` ascends within each; `is_positive_A` is False for types that are not allowed."""
    lengths = np.diff(offsets)
    present = lengths > 0
    first_us, last_us = (np.zeros(len(lengths), np.int64) for _ in range(2))
    first_us[present], last_us[present] = ts_A[offsets[:-1][present]], ts_A[offsets[1:][present] - 1]
    span_us = last_us - first_us
    window_us = min(round(config.window_days * DAY_US), int(span_us.max(initial=0)))
    place_us = np.cumsum(span_us + window_us + 1) - (span_us + window_us + 1)
    axis_A = ts_A + np.repeat(place_us - first_us, lengths)

    is_target = is_positive_A.copy()
    is_target[offsets[:-1][present]] = False  # nothing precedes a first action
    targets = np.flatnonzero(is_target)
    targets_until_A = np.cumsum(is_target, dtype=np.int64)
    if config.objective in ("next_action", "sasrec"):
        usable = targets - 1
    else:
        next_target_us = np.append(axis_A[targets], np.iinfo(np.int64).max)[targets_until_A]
        usable = np.flatnonzero(next_target_us - axis_A <= window_us)
    return TimelineBlock(
        offsets=offsets,
        axis_A=axis_A,
        targets=targets,
        targets_until_A=targets_until_A,
        usable=usable,
        window_us=window_us,
    )


def sample_sequences(
    block: TimelineBlock, key_U: Keys, config: SamplingConfig, sequence_length: int
) -> tuple[Ints, Ints, Ints]:
    """Draw sequences as (user, first action, last action T): the newest `sequence_length` actions up to T.

    Among a user's possible ends, a share of `sequence_fraction`, at least one and at most `max_sequences_per_user`, is
    drawn without replacement as a systematic sample: evenly spaced ends from one random number. Each end is equally
    likely, a user's sequences overlap little, and the timeline's length alone nearly determines where they end
    (`expected_length`).
    """
    first_U = np.searchsorted(block.usable, block.offsets)
    possible_U = np.diff(first_U)
    wanted_U = np.maximum(np.rint(config.sequence_fraction * possible_U).astype(np.int64), 1)
    count_U = np.minimum(np.minimum(wanted_U, config.max_sequences_per_user), possible_U)
    user_R, number_R = ragged(count_U)
    point_U = below(possible_U, mixed(key_U, FOR_END))
    chosen_R = (point_U[user_R] + number_R * possible_U[user_R]) // count_U[user_R]
    end_R = block.usable[first_U[user_R] + chosen_R]
    return user_R, np.maximum(block.offsets[user_R], end_R - sequence_length + 1), end_R


def expected_length(timeline_length_U: Ints, key_U: Keys, config: SamplingConfig, sequence_length: int) -> Ints:
    """Estimate the length of the longest sequence that `sample_sequences` draws, from the timeline's length alone."""
    most = config.max_sequences_per_user
    share_U = (uniform(mixed(key_U, FOR_END)) + most - 1) / most
    return np.minimum(np.ceil(share_U * timeline_length_U).astype(np.int64), sequence_length)


def sample_pairs(block: TimelineBlock, key_R: Keys, start_R: Ints, end_R: Ints, config: SamplingConfig) -> DrawnPairs:
    """Draw the pairs of the sequences [start, end], whose ends T are usable.

    next_action (3.4.1): (T, T + 1).
    sasrec (3.4.1, A.4.4): every position of the sequence whose next action is a target. The paper predicts at every
        step, so `max_positives_per_sequence` is no limit. With `equal_e1_weight`, T weighs as much as all others.
    all_action (3.4.2): from T, up to `max_positives_per_sequence` of the targets in its next K days.
    dense_all_action (3.4.3): up to `max_positives_per_sequence` of the sequence's usable positions, at random; for
        each, one random target of its own next K days, inside the sequence or after T.
    summed (ours): the pairs of dense_all_action and sasrec; both objectives weigh the same in a sequence.
    """
    match config.objective:
        case "next_action":
            return _pairs(np.arange(len(end_R)), end_R, end_R + 1)
        case "sasrec":
            pairs = _next_pairs(block, start_R, end_R)
            if config.equal_e1_weight:
                others_P = np.maximum(np.bincount(pairs.row_P, minlength=len(end_R)) - 1, 1)[pairs.row_P]
                pairs.weight_P[:] = np.where(pairs.position_P == end_R[pairs.row_P], others_P, 1)
            return pairs
        case "all_action":
            first_R, num_R = _window(block, end_R)
            row_P, number_P = draw_distinct(num_R, config.max_positives_per_sequence, mixed(key_R, FOR_TARGET))
            return _pairs(row_P, end_R[row_P], block.targets[first_R[row_P] + number_P])
        case "dense_all_action":
            return _dense_pairs(block, key_R, start_R, end_R, config)
        case "summed":
            parts = [_dense_pairs(block, key_R, start_R, end_R, config), _next_pairs(block, start_R, end_R)]
            for part in parts:
                part.weight_P[:] = 1 / np.bincount(part.row_P, minlength=len(end_R))[part.row_P]
            return DrawnPairs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def _next_pairs(block: TimelineBlock, start_R: Ints, end_R: Ints) -> DrawnPairs:
    """Pair every position of a sequence with its next action, if that is a target."""
    before = block.targets - 1
    first_R = np.searchsorted(before, start_R)
    row_P, number_P = ragged(np.searchsorted(before, end_R, side="right") - first_R)
    position_P = before[first_R[row_P] + number_P]
    return _pairs(row_P, position_P, position_P + 1)


def _dense_pairs(block: TimelineBlock, key_R: Keys, start_R: Ints, end_R: Ints, config: SamplingConfig) -> DrawnPairs:
    """Pair random usable positions of a sequence with one random target each."""
    first_R = np.searchsorted(block.usable, start_R)
    num_usable_R = np.searchsorted(block.usable, end_R, side="right") - first_R
    row_P, number_P = draw_distinct(num_usable_R, config.max_positives_per_sequence, mixed(key_R, FOR_POSITION))
    position_P = block.usable[first_R[row_P] + number_P]
    first_P, num_P = _window(block, position_P)
    chosen_P = below(num_P, mixed(mixed(key_R, FOR_TARGET)[row_P], number_P))
    return _pairs(row_P, position_P, block.targets[first_P + chosen_P])


def _pairs(row_P: Ints, position_P: Ints, target_P: Ints) -> DrawnPairs:
    return DrawnPairs(row_P, position_P, target_P, np.ones(len(row_P)))


def _window(block: TimelineBlock, position: Ints) -> tuple[Ints, Ints]:
    """Return each position's targets as a range of `block.targets`: its start and its length."""
    first = block.targets_until_A[position]
    window_end_us = block.axis_A[position] + block.window_us
    return first, np.searchsorted(block.axis_A[block.targets], window_end_us, side="right") - first


def draw_distinct(size_R: Ints, most: int, key_R: Keys) -> tuple[Ints, Ints]:
    """Draw up to `most` distinct numbers from each range(size), as (row, number): those with the least random bits."""
    row, number = ragged(size_R)
    bits = mixed(key_R[row], number) >> np.uint64(24)
    order = np.argsort((row.astype(np.uint64) << np.uint64(40)) | bits)
    is_drawn = number < most  # the first numbers of each row, after sorting by random bits
    return row[is_drawn], number[order[is_drawn]]
