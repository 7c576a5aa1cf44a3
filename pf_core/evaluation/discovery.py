"""Positives that only an understanding of content can find: on pins that the user has never acted on before the cut.

A vector that is one of the user's own pins, as PinnerSage's are, finds that pin again whatever its content vector is.
"""

from dataclasses import replace

import numpy as np

from pf_core.evaluation.question import Question


def on_new_pins(question: Question) -> Question:
    """Return the question with only the positives on pins that are new to their user."""
    timelines = question.timelines
    user_A = np.repeat(np.arange(question.num_users), np.diff(timelines.offsets))
    key_A = user_A * (int(timelines.pin.max(initial=0)) + 1) + timelines.pin
    is_known_P = np.isin(key_A[question.positive_A], key_A[timelines.ts < question.data.cut_us])
    return replace(question, positive_A=question.positive_A[~is_known_P])
