"""Questions made by hand: timelines drawn as lists, so that a test can say what is asked and what the answer is."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from pf_core.evaluation.question import Question
from pf_core.timelines.arrays import Timelines
from pf_core.training.training_set import TrainingSet
from tests.support.planted import DAY_US, NUM_INTERESTS, PINS_PER_INTEREST

Action = tuple[float, int, str]
"""Days after the cut (negative before it), pin row, action type; a type in capitals is a positive."""


def draw_question(data: TrainingSet, users: Sequence[Sequence[Action]], *, index_pin: np.ndarray) -> Question:
    actions = [action for timeline in users for action in timeline]
    ts = np.array([data.cut_us + round(days * DAY_US) for days, _, _ in actions], np.int64)
    is_positive = np.array([word.isupper() for _, _, word in actions], bool)
    timelines = Timelines(
        offsets=np.cumsum([0, *(len(timeline) for timeline in users)]),
        pin=np.array([pin for _, pin, _ in actions], np.int32),
        ts=ts,
        action_type=np.array([data.action_types.index(word.lower()) for _, _, word in actions], np.int16),
        surface=np.zeros(len(actions), np.int16),
        duration=np.ones(len(actions), np.float32),
        is_positive=is_positive,
    )
    return Question(
        data=data,
        user_ids=pa.array(range(len(users))),
        timelines=timelines,
        positive_A=np.flatnonzero(is_positive & (ts >= data.cut_us)),
        index_pin=index_pin,
        num_days=14,
        counts={},
    )


def planted_question(data: TrainingSet, *, num_users: int, num_pins: int = 120) -> Question:
    """Everybody's timeline in the planted set, and four positives of the planted interest in the days after the cut."""
    rng, users = np.random.default_rng(1), []
    for user in range(num_users):
        rows = range(data.held_out.offsets[user], data.held_out.offsets[user + 1])
        past = [
            ((data.held_out.ts[row] - data.cut_us) / DAY_US, int(data.held_out.pin[row]), data.action_types[code])
            for row, code in zip(rows, data.held_out.action_type[rows.start : rows.stop], strict=True)
        ]
        interest = past[0][1] % NUM_INTERESTS
        pins = interest + NUM_INTERESTS * rng.integers(PINS_PER_INTEREST, size=4)
        words = [data.action_types[code].upper() for code in rng.integers(3, size=4)]
        users.append([*past, *zip(np.sort(14 * rng.random(4)).tolist(), pins.tolist(), words, strict=True)])
    index_pin = data.sample_candidates(num_pins, np.random.default_rng(2))
    return draw_question(data, users, index_pin=index_pin)
