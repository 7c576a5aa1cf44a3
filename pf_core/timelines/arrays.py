"""Timelines in memory as flat arrays with offsets: the form that training, evaluation and inference share."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from pf_core.hashing import Ints
from pf_core.storage.arrays import read_arrow


@dataclass(frozen=True, kw_only=True, eq=False)
class Timelines:
    """Encoded actions of many users, ascending in time for each user.

    The actions of user row r are the elements offsets[r] to offsets[r + 1] of every other array.
    """

    offsets: np.ndarray
    pin: np.ndarray
    """Row of the pin in the packed pins."""
    ts: np.ndarray
    """UTC microseconds."""
    action_type: np.ndarray
    """Position of the action type in the vocabulary of the training set or the model."""
    surface: np.ndarray
    """Position of the surface in the vocabulary of the training set or the model."""
    duration: np.ndarray
    """Seconds."""
    is_positive: np.ndarray
    """Whether the action may be a target; empty where only sequences are read."""
    path: Path | None = None
    """Folder with the files of the arrays; None for arrays in memory."""

    @property
    def num_users(self) -> int:
        return len(self.offsets) - 1

    def user_ids(self) -> pa.Array:
        """Read the id of each user row from the folder."""
        assert self.path is not None
        return read_arrow(self.path / "user_id.arrow")["user_id"].combine_chunks()


def encode_words(words: pa.ChunkedArray, vocabulary: Sequence[str], *, of: Sequence[str] | None = None) -> np.ndarray:
    """Return each word's position in the vocabulary, -1 for unknown words; see `recode` for `of`."""
    encoded = words.unify_dictionaries().combine_chunks()
    code = recode(encoded.dictionary.to_pylist(), vocabulary, of=of)
    return code[encoded.indices.to_numpy()]


def recode(words: Sequence[str], vocabulary: Sequence[str], *, of: Sequence[str] | None = None) -> np.ndarray:
    """Return the position of each distinct word in the vocabulary, -1 for unknown words.

    With `of`, a subset of the vocabulary, words outside that subset count as unknown.
    """
    codes = {word: code for code, word in enumerate(vocabulary) if of is None or word in of}
    return np.array([codes.get(word, -1) for word in words], np.int16)


def ragged(lengths: Ints) -> tuple[Ints, Ints]:
    """Flatten rows of these lengths: return the row of each element and its index within the row."""
    row = np.repeat(np.arange(len(lengths)), lengths)
    return row, np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
