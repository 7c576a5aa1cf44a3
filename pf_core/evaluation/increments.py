"""Vectors of queries, and increments of the scores of a few pins.

Suffixes: Q queries, V vectors of queries, I increments, D embedding.
"""

from typing import NamedTuple

import numpy as np
from torch import Tensor


class Increments(NamedTuple):
    """What is added to the scores of a few pins of each query, ascending by query and pin."""

    query_I: np.ndarray
    pin_I: np.ndarray
    """Pin rows, distinct within a query; they need not be in the index."""
    value_I: np.ndarray
    is_all: bool = False
    """Whether only these pins are ranked: any other pin is neither a result nor found."""


class QueryVectors(NamedTuple):
    """The vectors of query q are rows offsets_Q[q] to offsets_Q[q + 1] of vector_VD."""

    offsets_Q: np.ndarray
    """First vector of each query, and the end of the last one's."""
    vector_VD: Tensor
    increments: Increments | None = None
    """Increments of the scores of all vectors of a query."""
