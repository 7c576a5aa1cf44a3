"""How timelines are stored: in segments, of which only a user's newest one grows.

A day's actions are later than all that a timeline holds. So building a day rewrites the newest segment of each active
user and leaves full segments alone: its cost does not grow with the length of the history. A segment is a row that
also stores its number of actions and the time of its last one, so that whole segments are selected without reading
their actions: the newest few of a user, and those that have left the window.
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

NUMBER = "piece"
"""Stored column with a segment's number. Segments were called pieces once; stored data keeps the name."""

SEGMENT_COLUMNS = (NUMBER, "num_actions", "last_ts")
"""Columns stored beside those of a timeline: the segment's number among the user's segments (ascending in time), its
number of actions, and the time of its last action."""

SCAN_ABOVE_SHARE = 0.3
"""When more than this share of a bucket's rows is needed, reading all of them is faster than picking some."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Segments:
    """Segments of a bucket without their actions, in the order of user_id and number."""

    user_id: pa.Array
    number: np.ndarray
    num_actions: np.ndarray
    last_us: np.ndarray
    """Time of the segment's last action, UTC microseconds."""
    position: np.ndarray
    """Position of the segment's row in a scan of the bucket."""
    address: np.ndarray
    """Lance row address of the segment."""
    num_stored: int
    """Number of rows of the bucket."""

    def __len__(self) -> int:
        return len(self.number)

    def where(self, chosen: np.ndarray) -> "Segments":
        """Return the segments that the boolean mask selects."""
        return Segments(
            user_id=self.user_id.filter(pa.array(chosen)),
            number=self.number[chosen],
            num_actions=self.num_actions[chosen],
            last_us=self.last_us[chosen],
            position=self.position[chosen],
            address=self.address[chosen],
            num_stored=self.num_stored,
        )

    def of(self, user_ids: pa.Array | pa.ChunkedArray) -> "Segments":
        """Return the segments of these users."""
        return self.where(_is_in(self.user_id, user_ids))

    @property
    def user(self) -> np.ndarray:
        """The user of each segment, numbered from 0."""
        return rank_ids(self.user_id) if len(self) else np.empty(0, np.int64)

    @property
    def is_newest(self) -> np.ndarray:
        """Whether each segment is its user's newest one."""
        user = self.user
        return np.append(user[1:] != user[:-1], True)[: len(user)]

    @property
    def num_newer(self) -> np.ndarray:
        """Number of actions in the newer segments of the same user, for each segment."""
        if not len(self):
            return np.empty(0, np.int64)
        until = np.cumsum(self.num_actions, dtype=np.int64)
        return until[self.is_newest][self.user] - until

    def lengths(self) -> np.ndarray:
        """Number of actions of each user who has a segment."""
        return np.bincount(self.user, weights=self.num_actions).astype(np.int64)


def read_segments(dataset: lance.LanceDataset, *, of: pa.Array | pa.ChunkedArray | None = None) -> Segments:
    """Read all segments of a bucket, or only those of the users `of`."""
    stored = dataset.to_table(columns=["user_id", *SEGMENT_COLUMNS], with_row_address=True)
    position = np.arange(stored.num_rows)
    if of is not None:
        position = np.flatnonzero(_is_in(stored["user_id"], of))
    number = stored[NUMBER].to_numpy()
    if len(position):
        user = rank_ids(stored["user_id"].take(pa.array(position)))
        position = position[np.lexsort((number[position], user))]
    return Segments(
        user_id=stored["user_id"].take(pa.array(position)).combine_chunks(),
        number=number[position],
        num_actions=stored["num_actions"].to_numpy()[position],
        last_us=stored["last_ts"].cast(pa.int64()).to_numpy()[position],
        position=position,
        address=stored[ROW_ADDRESS].to_numpy()[position],
        num_stored=stored.num_rows,
    )


def read_rows(dataset: lance.LanceDataset, segments: Segments, columns: Sequence[str]) -> pa.Table:
    """Read the rows of these segments, in the same order."""
    if len(segments) <= SCAN_ABOVE_SHARE * segments.num_stored:
        return take_addresses(dataset, pa.array(segments.address), columns)
    return dataset.to_table(columns=list(columns)).take(pa.array(segments.position))


def cut_segments(timelines: pa.Table, *, first_number: np.ndarray, segment_actions: int) -> pa.Table:
    """Cut timelines (one row per user) into rows of at most `segment_actions` actions.

    The segments of each user are numbered from the user's `first_number` on.
    """
    lengths = pc.list_value_length(timelines["ts"]).to_numpy()
    num_segments = -(-lengths // segment_actions)
    user = np.repeat(np.arange(len(lengths)), num_segments)
    index = np.arange(len(user)) - (np.cumsum(num_segments) - num_segments)[user]
    start = (np.cumsum(lengths) - lengths)[user] + index * segment_actions
    offsets = np.append(start, lengths.sum()).astype(np.int32)
    lists = {name: pc.list_flatten(timelines[name]).combine_chunks() for name in timelines.column_names[1:]}
    return pa.table(
        {
            "user_id": timelines["user_id"].take(pa.array(user)),
            NUMBER: (first_number[user] + index).astype(np.int32),
            "num_actions": np.diff(offsets),
            "last_ts": lists["ts"].take(pa.array(offsets[1:] - 1)).cast(TIMESTAMP),
            **{name: pa.ListArray.from_arrays(pa.array(offsets), values) for name, values in lists.items()},
        }
    )


def is_outdated(segments: Segments, bounds: Bounds, *, num_added: np.ndarray | int = 0) -> np.ndarray:
    """Return which segments hold no action that the bounds keep.

    `num_added` is the number of actions that are added to the user of each segment.
    """
    return (segments.last_us < bounds.since_us) | (segments.num_newer + num_added >= bounds.max_actions)


def _is_in(ids: pa.Array | pa.ChunkedArray, others: pa.Array | pa.ChunkedArray) -> np.ndarray:
    return pc.is_in(ids, others).to_numpy(zero_copy_only=False) if len(others) else np.zeros(len(ids), bool)
