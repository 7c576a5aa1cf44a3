"""Named random streams, thanks to which the world needs no state from one day to the next.

Every random draw comes from a generator that is keyed by (seed, stream, *keys), where the keys are a day, a
user chunk or a pin block. Two draws that share no key share no stream, so that any part of the world can be
generated alone, in any order and in any process, with the same result.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """The number is part of the key: changing one changes every world."""

    TAXONOMY = 1
    PINS = 2
    CONTENT_DIRECTIONS = 3
    CONTENT_NOISE = 4
    USERS = 5
    SESSIONS = 6
    ACTIONS = 7
    DEFECTS = 8


def open_stream(seed: int, stream: Stream, *keys: int) -> np.random.Generator:
    """Return the generator of a stream at its beginning."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, int(stream), *keys])))
