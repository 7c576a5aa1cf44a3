"""The engagement model: what a user does with a pin that is shown in a session, and for how long.

A multinomial logit over (nothing, *ACTION_TYPES), where nothing has utility 0 and action a has

    base[a] + surface[s, a] + propensity[u, a] + traits(p) · trait[:, a]
        + match(p, intent) · match[a] + sqrt(affinity(p, u, t)) · affinity[a] + taste(u) · style(p) · taste[a]

match is 1 within the sub-topic of the session's intent, less within its topic and category; affinity is the
expected match over all current interests of the user. Durations are log-normal with a mean that rises with the
match, the taste and the trait that matters for the action. The tables below are the whole model: simulation
and `World.engagement` use the same ones.
"""

import math
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from pf_core.world.column_tables import Doubles, Floats, Ints
from pf_core.world.taxonomy import LEVEL_BITS

ActionType = Literal["repin", "closeup", "click", "short_click", "hide", "reaction", "comment"]

Surface = Literal["homefeed", "search", "related_pins"]

ACTION_TYPES: Final = ("repin", "closeup", "click", "short_click", "hide", "reaction", "comment")

SURFACES: Final = ("homefeed", "search", "related_pins")

REPIN, CLOSEUP, CLICK, SHORT_CLICK, HIDE, REACTION, COMMENT = range(len(ACTION_TYPES))

HOMEFEED, SEARCH, RELATED_PINS = range(len(SURFACES))

SAME_TOPIC_MATCH = 0.55

SAME_CATEGORY_MATCH = 0.15

LONG_S = 10.0
"""A closeup or click that lasts longer counts as positive in the paper."""

MIN_DURATION_S, MAX_DURATION_S = 0.3, 300.0


def _table(rows: list[list[float]]) -> Floats:
    return np.array(rows, dtype=np.float32)


#                     repin  closeup  click  short_click  hide  reaction  comment
_BASE = _table([[-5.00, -3.90, -5.50, -5.35, -4.55, -7.05, -8.45]])

_SURFACE = _table(
    [
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # homefeed
        [-0.1, 0.1, 0.5, 0.4, -2.0, -0.4, -0.5],  # search
        [0.2, 0.2, 0.2, 0.1, -1.5, -0.2, 0.0],  # related pins
    ]
)

_TRAIT = _table(
    [
        [0.48, 0.45, 0.40, 0.20, -0.20, 0.55, 0.55],  # appeal
        [-0.10, -0.30, 1.20, 0.95, 0.10, -0.10, 0.00],  # link richness
        [0.60, 0.05, 0.00, 0.00, 0.00, 0.20, 0.00],  # saveability
        [0.05, 0.55, 0.00, 0.00, 0.00, 0.25, 0.30],  # gaze
    ]
)

_MATCH = _table([[1.45, 1.30, 1.20, 0.80, -0.70, 1.20, 1.10]])

_AFFINITY = _table([[1.30, 1.00, 0.90, 0.50, -1.00, 1.00, 0.80]])

_TASTE = _table([[0.70, 0.60, 0.40, 0.10, -0.30, 0.70, 0.50]])

#                            repin  closeup  click  short_click  hide  reaction  comment
_LOG_DURATION = _table([[1.10, 1.65, 2.25, 1.10, 0.20, 0.70, 2.80]])[0]

_LOG_DURATION_MATCH = _table([[0.20, 0.50, 0.40, 0.10, 0.00, 0.10, 0.20]])[0]

_LOG_DURATION_TASTE = _table([[0.10, 0.25, 0.15, 0.00, 0.00, 0.00, 0.10]])[0]

_LOG_DURATION_TRAIT = _table(
    [
        [0.00, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00],  # appeal
        [0.00, 0.00, 0.20, 0.10, 0.00, 0.00, 0.00],  # link richness
        [0.10, 0.00, 0.00, 0.00, 0.00, 0.00, 0.00],  # saveability
        [0.00, 0.25, 0.00, 0.00, 0.00, 0.00, 0.10],  # gaze
    ]
)

_LOG_DURATION_SIGMA = _table([[0.7, 1.0, 1.0, 0.6, 0.6, 0.6, 0.8]])[0]


def match(lineage: NDArray[Any], intent: NDArray[Any]) -> Floats:
    """Return how close two sub-topics (as `Taxonomy.lineage`) are in the hierarchy, from 0 to 1."""
    differ = lineage ^ intent
    return (
        (differ < 1 << 2 * LEVEL_BITS) * np.float32(SAME_CATEGORY_MATCH)
        + (differ < 1 << LEVEL_BITS) * np.float32(SAME_TOPIC_MATCH - SAME_CATEGORY_MATCH)
        + (differ == 0) * np.float32(1 - SAME_TOPIC_MATCH)
    )


def affinity(lineage: NDArray[Any], interests: NDArray[Any], share: Floats) -> Floats:
    """Return the square root of the expected match over a user's current interests [row, k]."""
    expected = dot_rows(match(lineage[:, None], interests), share)
    return np.sqrt(np.minimum(expected, np.float32(1.0)))


def dot_rows(left: Floats, right: Floats) -> Floats:
    return np.einsum("ij,ij->i", left, right)


def pin_utilities(traits: Floats) -> Floats:
    """Return the part of the utilities [pin, action] that is the same for all users."""
    return (_BASE + traits @ _TRAIT).astype(np.float32)


def odds(
    of_pin: Floats, propensity: Floats, surface: NDArray[Any], matched: Floats, liked: Floats, taste: Floats
) -> Floats:
    """Return exp(utility) [row, action]; `odds / (1 + odds.sum())` are the probabilities."""
    utility = of_pin + propensity
    utility += np.take(_SURFACE, surface, axis=0)
    utility += matched[:, None] * _MATCH
    utility += liked[:, None] * _AFFINITY
    utility += taste[:, None] * _TASTE
    return np.exp(utility, out=utility)


def choose_actions(action_odds: Floats, uniform: Doubles) -> Ints:
    """Return an index into ACTION_TYPES for each row, or -1 for no action."""
    total = np.add.reduce(action_odds.T.copy(), axis=0)
    threshold = uniform * (1.0 + total)
    action = np.full(len(action_odds), -1, dtype=np.int64)
    engaged = np.flatnonzero(threshold < total)
    cumulative = np.cumsum(np.take(action_odds, engaged, axis=0), axis=1)
    passed = (cumulative <= threshold[engaged, None]).sum(axis=1)
    action[engaged] = np.minimum(passed, len(ACTION_TYPES) - 1)
    return action


def log_duration(action: Ints, traits: Floats, matched: Floats, taste: Floats) -> Floats:
    """Return the mean of the log of the duration in seconds."""
    return np.asarray(
        _LOG_DURATION[action]
        + _LOG_DURATION_MATCH[action] * matched
        + _LOG_DURATION_TASTE[action] * taste
        + dot_rows(traits, _LOG_DURATION_TRAIT.T[action])
    )


def draw_durations(action: Ints, mean_log: Floats, normal: Doubles) -> Doubles:
    """Return durations in seconds. A short click ends within LONG_S by definition."""
    duration = np.exp(mean_log + _LOG_DURATION_SIGMA[action] * normal)
    limit = np.where(action == SHORT_CLICK, LONG_S - 0.1, MAX_DURATION_S)
    return np.clip(duration, MIN_DURATION_S, limit)


def long_probability(action: int, mean_log: Floats) -> Doubles:
    """Return P(duration > LONG_S), for closeups and clicks."""
    z = (mean_log - math.log(LONG_S)) / float(_LOG_DURATION_SIGMA[action])
    return 0.5 * (1 + _erf(z / math.sqrt(2)))


def _erf(x: NDArray[Any]) -> Doubles:
    """Error function, by Abramowitz and Stegun 7.1.26: the absolute error is below 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    poly = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.asarray(np.sign(x) * (1 - poly * np.exp(-x * x)), dtype=np.float64)
