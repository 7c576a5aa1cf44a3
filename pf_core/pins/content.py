"""Which content vectors are usable: finite, and of a length that the models can work with.

The models divide vectors by their norm, or by the spread of all vectors, in float32. One vector that is too long would
give a pin no embedding, and then the day no release.
"""

import numpy as np

MAX_NORM = 65_504.0
"""Largest norm of a content vector: the largest float16, far above that of any embedding of text or images."""

BLOCK_ROWS = 8192

NOT_FINITE = "feature: a value is missing or not finite"

TOO_LONG = f"feature: its norm is above {MAX_NORM:,.0f}"

ZERO = "feature: all zeros, or too small to have a direction"


def vector_reasons(vector_ND: np.ndarray) -> np.ndarray:
    """Return why each vector is not usable; an empty text for one that is. Memory is that of a block."""
    reasons = np.full(len(vector_ND), "", object)
    for start in range(0, len(vector_ND), BLOCK_ROWS):
        block_BD = vector_ND[start : start + BLOCK_ROWS]
        found = reasons[start : start + BLOCK_ROWS]
        norm_B = norms(block_BD)
        found[norm_B > MAX_NORM] = TOO_LONG
        found[norm_B == 0] = ZERO
        found[~np.isfinite(block_BD).all(axis=1)] = NOT_FINITE
    return reasons


def norms(vector_ND: np.ndarray) -> np.ndarray:
    """Return the norms as float32 computes them: infinite or zero where the squares are."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.linalg.norm(vector_ND.astype(np.float32, copy=False), axis=1)
