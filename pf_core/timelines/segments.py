"""How timelines are stored: in pieces, of which only a user's newest one grows.

A day's actions are later than all that a timeline holds. So building a day writes the newest pieces of its active users
anew, and leaves those that are full alone: what it costs does not grow with the history behind it. A piece is a row. It
says how many actions it has and when the last one was, so that whole pieces are chosen without reading their actions:
the newest few, if no more is asked for, and those that have left the window.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.engine.daily_state import ROW_ADDRESS, take_addresses
from pf_core.engine.shuffle import rank_ids
from pf_core.schemas import TIMESTAMP
from pf_core.timelines.assembly import Bounds

PIECE_COLUMNS = ("piece", "num_actions", "last_ts")
"""Beside a timeline's own: the piece's number among the user's (ascending in time), its length, its last action."""

SCAN_ABOVE_SHARE = 0.3
"""Of a bucket's rows: from here on, reading all of them is faster than picking some."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """Rows of a bucket without their actions, by user_id and piece."""

    user_id: pa.Array
    piece: np.ndarray
    num_actions: np.ndarray
    last_us: np.ndarray
    position: np.ndarray
    """In a scan of the bucket."""
    address: np.ndarray
    num_stored: int
    """Rows of the bucket."""

    def __len__(self) -> int:
        return len(self.piece)

    def where(self, chosen: np.ndarray) -> "Pieces":
        """Those of a mask."""
        return Pieces(
            user_id=self.user_id.filter(pa.array(chosen)),
            piece=self.piece[chosen],
            num_actions=self.num_actions[chosen],
            last_us=self.last_us[chosen],
            position=self.position[chosen],
            address=self.address[chosen],
            num_stored=self.num_stored,
        )

    def of(self, user_ids: pa.Array | pa.ChunkedArray) -> "Pieces":
        """Those of some users."""
        return self.where(_is_in(self.user_id, user_ids))

    @property
    def user(self) -> np.ndarray:
        """Each piece's user, counted from 0."""
        return rank_ids(self.user_id) if len(self) else np.empty(0, np.int64)

    @property
    def is_newest(self) -> np.ndarray:
        user = self.user
        return np.append(user[1:] != user[:-1], True)[: len(user)]

    @property
    def num_newer(self) -> np.ndarray:
        """How many actions the user's newer pieces have."""
        if not len(self):
            return np.empty(0, np.int64)
        until = np.cumsum(self.num_actions, dtype=np.int64)
        return until[self.is_newest][self.user] - until

    def lengths(self) -> np.ndarray:
        """Actions of each user who has a piece."""
        return np.bincount(self.user, weights=self.num_actions).astype(np.int64)


def read_pieces(dataset: lance.LanceDataset, *, of: pa.Array | pa.ChunkedArray | None = None) -> Pieces:
    """All pieces of a bucket, or those of some users."""
    stored = dataset.to_table(columns=["user_id", *PIECE_COLUMNS], with_row_address=True)
    position = np.arange(stored.num_rows)
    if of is not None:
        position = np.flatnonzero(_is_in(stored["user_id"], of))
    piece = stored["piece"].to_numpy()
    if len(position):
        user = rank_ids(stored["user_id"].take(pa.array(position)))
        position = position[np.lexsort((piece[position], user))]
    return Pieces(
        user_id=stored["user_id"].take(pa.array(position)).combine_chunks(),
        piece=piece[position],
        num_actions=stored["num_actions"].to_numpy()[position],
        last_us=stored["last_ts"].cast(pa.int64()).to_numpy()[position],
        position=position,
        address=stored[ROW_ADDRESS].to_numpy()[position],
        num_stored=stored.num_rows,
    )


def read_rows(dataset: lance.LanceDataset, pieces: Pieces, columns: Sequence[str]) -> pa.Table:
    """The rows of these pieces, in their order."""
    if len(pieces) <= SCAN_ABOVE_SHARE * pieces.num_stored:
        return take_addresses(dataset, pa.array(pieces.address), columns)
    return dataset.to_table(columns=list(columns)).take(pa.array(pieces.position))


def cut_pieces(timelines: pa.Table, *, first_piece: np.ndarray, piece_actions: int) -> pa.Table:
    """Timelines, one row a user, as rows of at most so many actions; each user's are numbered from `first_piece` on."""
    lengths = pc.list_value_length(timelines["ts"]).to_numpy()
    num_pieces = -(-lengths // piece_actions)
    user = np.repeat(np.arange(len(lengths)), num_pieces)
    number = np.arange(len(user)) - (np.cumsum(num_pieces) - num_pieces)[user]
    start = (np.cumsum(lengths) - lengths)[user] + number * piece_actions
    offsets = np.append(start, lengths.sum()).astype(np.int32)
    lists = {name: pc.list_flatten(timelines[name]).combine_chunks() for name in timelines.column_names[1:]}
    return pa.table(
        {
            "user_id": timelines["user_id"].take(pa.array(user)),
            "piece": (first_piece[user] + number).astype(np.int32),
            "num_actions": np.diff(offsets),
            "last_ts": lists["ts"].take(pa.array(offsets[1:] - 1)).cast(TIMESTAMP),
            **{name: pa.ListArray.from_arrays(pa.array(offsets), values) for name, values in lists.items()},
        }
    )


def is_outdated(pieces: Pieces, bounds: Bounds, *, num_added: np.ndarray | int = 0) -> np.ndarray:
    """Which pieces hold nothing any more that the bounds keep, after so many actions more of each piece's user."""
    return (pieces.last_us < bounds.since_us) | (pieces.num_newer + num_added >= bounds.max_actions)


def _is_in(ids: pa.Array | pa.ChunkedArray, others: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return pc.is_in(ids, others).to_numpy(zero_copy_only=False) if len(others) else np.zeros(len(ids), bool)
