"""Timelines in memory as flat arrays with offsets: what training, evaluation and inference share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.hashing import Ints
from pf_core.storage.arrays import read_arrow


@dataclass(frozen=True, kw_only=True, eq=False)
class Timelines:
    """A split: the actions of user row r are offsets[r] to offsets[r + 1] of the other arrays, ascending in time."""

    offsets: np.ndarray
    pin: np.ndarray
    """Pin rows."""
    ts: np.ndarray
    """UTC microseconds."""
    action_type: np.ndarray
    surface: np.ndarray
    duration: np.ndarray
    """Seconds."""
    is_positive: np.ndarray
    path: Path | None = None
    """Where the files lie; None for arrays in memory."""

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    def user_ids(self) -> pa.Array:
        """By user row."""
        assert self.path is not None
        return read_arrow(self.path / "user_id.arrow")["user_id"].combine_chunks()


def encode_words(words: pa.ChunkedArray, vocabulary: Sequence[str], *, of: Sequence[str] | None = None) -> np.ndarray:
    """The position of each word, -1 if the vocabulary, or the part of it that is asked for, does not have it."""
    encoded = words.unify_dictionaries().combine_chunks()
    code = recode(encoded.dictionary.to_pylist(), vocabulary, of=of)
    return code[encoded.indices.to_numpy()]


def recode(words: Sequence[str], vocabulary: Sequence[str], *, of: Sequence[str] | None = None) -> np.ndarray:
    """By word, its position in the vocabulary; -1 if that, or the part of it that is asked for, does not have it."""
    codes = {word: code for code, word in enumerate(vocabulary) if of is None or word in of}
    return np.array([codes.get(word, -1) for word in words], np.int16)


def ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """Rows of these lengths, flattened: each element's row and its number within the row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
