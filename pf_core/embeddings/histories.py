"""The timelines that a day's records are computed from, and the pins that users have seen.

A timeline is read only as far back as the model and the seen pins need: the newest actions of everyone first, the whole
timeline of the few users for whom they do not decide.
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.hashing import combined, hash_slices
from pf_core.schemas import TIMELINE_LISTS
from pf_core.timelines.build import StoredTimelines


@dataclass(frozen=True, kw_only=True)
class BucketOfTimelines:
    """Where the timelines of a bucket are, and whose are read."""

    stored: StoredTimelines
    user_ids: pa.Array | None
    """Users to read; None for everyone."""
    forgotten: pa.Array
    """Users who are left out."""

    def read_newest(self, num_actions: int | None) -> "Histories":
        """Read the newest actions of each user, or with None all of them."""
        timelines = self.stored.read(user_ids=self.user_ids, newest=num_actions)
        timelines = timelines.filter(pc.invert(pc.is_in(timelines["user_id"], self.forgotten)))
        return Histories(source=self, timelines=timelines, num_read=num_actions)

    def read_whole(self, user_ids: pa.Array, columns: Sequence[str] = TIMELINE_LISTS) -> pa.Table:
        """Read all actions of these users."""
        return self.stored.read(columns, user_ids=user_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Histories:
    """Timelines that were read, each with at most `num_read` of its newest actions."""

    source: BucketOfTimelines
    timelines: pa.Table
    num_read: int | None
    """None if all actions were read."""

    @property
    def lengths(self) -> np.ndarray:
        """Number of actions read of each user."""
        return np.asarray(pc.list_value_length(self.timelines["ts"]).to_numpy())

    @property
    def is_whole(self) -> np.ndarray:
        """Whether all actions of each user were read."""
        return np.ones(len(self.timelines), bool) if self.num_read is None else self.lengths < self.num_read

    def newest(self, num_actions: int) -> pa.Table:
        """Return at most this many of the newest actions of each user."""
        lengths = self.lengths
        if (lengths <= num_actions).all():
            return self.timelines
        kept = np.minimum(lengths, num_actions)
        ends = np.cumsum(lengths)
        chosen = pa.array(np.repeat(ends - np.cumsum(kept), kept) + np.arange(kept.sum()))
        offsets = pa.array(np.concatenate([[0], np.cumsum(kept)]), pa.int32())
        columns = {
            name: pa.ListArray.from_arrays(offsets, combined(pc.list_flatten(self.timelines[name])).take(chosen))
            for name in TIMELINE_LISTS
        }
        return pa.table({"user_id": self.timelines["user_id"], **columns})

    def whole(self, chosen: np.ndarray) -> pa.Table:
        """Return all actions of the users that the mask selects; reads those that are not in memory."""
        known, unknown = (self.timelines.filter(pa.array(chosen & mask)) for mask in (self.is_whole, ~self.is_whole))
        if not len(unknown):
            return known
        read = self.source.read_whole(combined(unknown["user_id"]))
        return pa.concat_tables([known, read]) if len(known) else read


# Seen pins


@dataclass(frozen=True, kw_only=True, eq=False)
class SeenPins:
    """The newest distinct pins of each user, newest first, whether the model can read their actions or not."""

    pin_ids: pa.ListArray
    is_complete: np.ndarray
    """Whether the list has every pin of the user's timeline."""

    def take(self, rows: np.ndarray) -> "SeenPins":
        return SeenPins(pin_ids=self.pin_ids.take(pa.array(rows)), is_complete=self.is_complete[rows])

    def hashes(self) -> np.ndarray:
        """Return a hash of each user's list, and of whether it is complete."""
        numbers = np.ascontiguousarray(numbers_of(self.pin_ids.flatten()))
        offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(self.pin_ids).to_numpy())])
        of_list = hash_slices(numbers, offsets * numbers.itemsize)
        return combined_hash(of_list, self.is_complete.astype(np.int64))


def find_seen(histories: Histories, size: int) -> SeenPins:
    """Return the seen pins of each user of the histories, at most `size`, in the order of their rows.

    Where the actions that were read have no more than `size` distinct pins, the whole timeline is read.
    """
    pin_ids, num_distinct = _newest_distinct(histories.timelines, size)
    undecided = np.flatnonzero(~histories.is_whole & (num_distinct <= size))
    if len(undecided):
        user_ids = combined(histories.timelines["user_id"])
        whole = histories.source.read_whole(user_ids.take(pa.array(undecided)), ["pin_id"])
        whole_ids, num_distinct_whole = _newest_distinct(whole, size)
        read = pc.index_in(user_ids.take(pa.array(undecided)), combined(whole["user_id"])).to_numpy()
        row = np.arange(len(pin_ids))
        row[undecided] = len(pin_ids) + read
        pin_ids = pa.concat_arrays([pin_ids, whole_ids]).take(pa.array(row))
        num_distinct[undecided] = num_distinct_whole[read]
    return SeenPins(pin_ids=pin_ids, is_complete=num_distinct <= size)


def _newest_distinct(timelines: pa.Table, size: int) -> tuple[pa.ListArray, np.ndarray]:
    """Return at most `size` distinct pins of each user, newest first, and the number of all distinct pins."""
    values = combined(pc.list_flatten(timelines["pin_id"]))
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(timelines["pin_id"]).to_numpy())]).tolist()
    is_integer = pa.types.is_integer(values.type)
    encoded = None if is_integer else values.dictionary_encode()
    codes = (values if encoded is None else encoded.indices).to_numpy().tolist()
    distinct = [list(dict.fromkeys(codes[start:end][::-1])) for start, end in itertools.pairwise(offsets)]
    num_distinct = np.array([len(pins) for pins in distinct], np.int64)
    kept = pa.array(list(itertools.chain.from_iterable(pins[:size] for pins in distinct)), pa.int64())
    ends = np.concatenate([[0], np.cumsum(np.minimum(num_distinct, size))])
    ids = kept if encoded is None else encoded.dictionary.take(kept)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), ids), num_distinct


# Hashes


def combined_hash(*parts: np.ndarray) -> np.ndarray:
    """Return one hash for each row of these columns of int64."""
    columns = np.stack([part.astype(np.int64) for part in parts], axis=1)
    return hash_slices(columns, np.arange(len(columns) + 1) * columns.shape[1] * columns.itemsize)


def numbers_of(ids: pa.Array) -> np.ndarray:
    """Return a number for each id: an integer itself, 8 bytes of BLAKE2b of a string."""
    if pa.types.is_integer(ids.type):
        return np.asarray(ids.to_numpy())
    encoded = ids.dictionary_encode()
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in encoded.dictionary.to_pylist()]
    return np.frombuffer(b"".join(digests), "<i8")[encoded.indices.to_numpy()]
