"""A user's record as the bytes of a value in the store, and back; equal to the snapshot's, bit for bit.

A value is little-endian:

    uint8       layout of the value (layouts.py)
    uint8       flags: 1 seen_is_complete, 2 pin ids are strings
    uint16      number of dimensions of the vector
    uint16      number of pins in memory, M
    uint16      number of seen pins, S
    int32       day on which the record was computed, days since 1970
    float16     vector
    float32     increments of the M pins
    M pin ids, then S pin ids: int64 each, or for strings the uint32 length of each, then the UTF-8 of all of them

The fixed part comes first: vectors of many users are decoded at once, and lists only when they are read.
"""

import struct
from dataclasses import dataclass, field
from datetime import date, timedelta
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.embeddings.vectors import matrix_of
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import combined
from pf_core.layouts import LAYOUTS, refuse_other_layout

HEADER_FORMAT = "<BBHHHi"

HEADER = np.dtype(
    [("layout", "u1"), ("flags", "u1"), ("dim", "<u2"), ("memory", "<u2"), ("seen", "<u2"), ("day", "<i4")]
)

IS_COMPLETE, IS_STRING = 1, 2

MAX_LIST = 2**16 - 1

EPOCH = date(1970, 1, 1)

RECORD_COLUMNS = (
    "user_id",
    "embedding",
    "computed_ds",
    "memory_pin_id",
    "memory_increment",
    "seen_pin_id",
    "seen_is_complete",
)
"""Columns of the snapshot that a store keeps."""


def fixed_bytes(embedding_dim: int) -> int:
    """Return the length of the part of a value that every user has."""
    return HEADER.itemsize + 2 * embedding_dim


# Encoding


class Values:
    """The encoded values of a bucket's rows. They are encoded as they are taken, so that a vector is copied once."""

    def __init__(self, rows: pa.Table) -> None:
        vectors_ND = matrix_of(rows["embedding"]).astype("<f2", copy=False)
        memory, seen = (combined(rows[name]) for name in ("memory_pin_id", "seen_pin_id"))
        num_memory, num_seen = (pc.list_value_length(lists).to_numpy() for lists in (memory, seen))
        if max(num_memory.max(initial=0), num_seen.max(initial=0)) > MAX_LIST:
            raise PipelineError(f"a list of pins has more than {MAX_LIST:,} elements")
        is_string = not pa.types.is_integer(memory.type.value_type)
        self._header = np.empty(len(rows), HEADER)
        self._header["layout"] = LAYOUTS["store"]
        self._header["flags"] = IS_COMPLETE * rows["seen_is_complete"].to_numpy() + IS_STRING * is_string
        self._header["dim"] = vectors_ND.shape[1]
        self._header["memory"], self._header["seen"] = num_memory, num_seen
        self._header["day"] = rows["computed_ds"].cast(pa.int32()).to_numpy()
        self._vectors = vectors_ND
        increments = combined(rows["memory_increment"]).flatten().to_numpy().astype("<f4", copy=False)
        columns = [_Column.of_numbers(increments, num_memory), *_id_columns(memory), *_id_columns(seen)]
        self._columns = [column for column in columns if column.data]
        lists = [np.diff(column.offsets) for column in self._columns]
        self.sizes = np.full(len(rows), fixed_bytes(vectors_ND.shape[1])) + sum(lists, np.zeros(len(rows), np.int64))
        """Length of each value."""

    def take(self, rows: np.ndarray) -> list[bytes]:
        width = fixed_bytes(self._vectors.shape[1])
        fixed_NW = np.empty((len(rows), width), np.uint8)
        fixed_NW[:, : HEADER.itemsize] = self._header[rows].view(np.uint8).reshape(len(rows), HEADER.itemsize)
        fixed_NW[:, HEADER.itemsize :] = self._vectors[rows].view(np.uint8)
        fixed: list[bytes] = fixed_NW.view(f"V{width}")[:, 0].tolist()
        if not self._columns:
            return fixed
        return list(map(b"".join, zip(fixed, *(column.take(rows) for column in self._columns), strict=True)))


class _Column(NamedTuple):
    """Bytes of a list column, and where those of each row begin and end."""

    data: bytes
    offsets: np.ndarray

    @classmethod
    def of_numbers(cls, values: np.ndarray, lengths: np.ndarray) -> "_Column":
        return cls(values.tobytes(), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * values.itemsize)

    def take(self, rows: np.ndarray) -> list[bytes]:
        data, starts, ends = self.data, self.offsets[rows].tolist(), self.offsets[rows + 1].tolist()
        return [data[start:end] for start, end in zip(starts, ends, strict=True)]


def _id_columns(lists: pa.ListArray) -> list[_Column]:
    """Return the ids of lists as bytes: integers, or the lengths of strings and their text."""
    ids, lengths = lists.flatten(), pc.list_value_length(lists).to_numpy()
    if pa.types.is_integer(ids.type):
        return [_Column.of_numbers(ids.to_numpy().astype("<i8", copy=False), lengths)]
    if not len(ids):
        return []
    _, offsets_buffer, text = ids.buffers()
    text_offsets = np.frombuffer(offsets_buffer, np.int32)[ids.offset : ids.offset + len(ids) + 1].astype(np.int64)
    id_offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return [
        _Column.of_numbers(np.diff(text_offsets).astype("<u4"), lengths),
        _Column(text.to_pybytes() if text is not None else b"", text_offsets[id_offsets]),
    ]


# Decoding


class PinLists(NamedTuple):
    """Memory and seen pins of one user."""

    memory_pin_ids: pa.Array
    """Best first."""
    memory_increments: np.ndarray
    """What is added to the cosine of each pin of memory, float32."""
    seen_pin_ids: pa.Array
    """Newest first."""
    seen_is_complete: bool
    """Whether the seen pins are all pins of the user's timeline."""


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """The values of N users, in the order of the ids that were looked up."""

    vectors_ND: np.ndarray
    """Embeddings, float32; NaN for a user who is not in the store."""
    days_N: np.ndarray
    """Days on which the records were computed, in days since 1970; 0 for a user who is not in the store."""
    found_N: np.ndarray
    """Whether each user is in the store."""
    values: list[bytes | None] = field(repr=False)
    """Values as they are in the store; None for a user who is not there."""

    def computed_ds(self) -> list[str | None]:
        return [
            (EPOCH + timedelta(days=int(day))).isoformat() if is_found else None
            for day, is_found in zip(self.days_N, self.found_N, strict=True)
        ]

    def lists(self, row: int) -> PinLists:
        """Decode the lists of a user who was found."""
        value = self.values[row]
        assert value is not None
        return _decode_lists(value, self.vectors_ND.shape[1])


def decode_values(values: list[bytes | None], embedding_dim: int) -> Lookup:
    """Decode the fixed parts of values; of users who are not in the store, the value is None."""
    width = fixed_bytes(embedding_dim)
    missing = bytes(width)
    joined = b"".join(missing if value is None else value[:width] for value in values)
    found_N = np.array([value is not None for value in values], bool)
    if len(joined) != len(values) * width:
        raise _damaged(f"a value is shorter than the {width} bytes of {embedding_dim} dimensions")
    fixed_NW = np.frombuffer(joined, np.uint8).reshape(len(values), width)
    header_N = np.ascontiguousarray(fixed_NW[:, : HEADER.itemsize]).view(HEADER)[:, 0]
    layout_N = header_N["layout"][found_N]
    if (layout_N != LAYOUTS["store"]).any():
        found = {"layout": layout_N[layout_N != LAYOUTS["store"]][0]}
        command = materialize_command("release", "DAY")
        refuse_other_layout("store", found, what="the store of users", command=command)
    if (header_N["dim"][found_N] != embedding_dim).any():
        raise _damaged(f"a vector does not have {embedding_dim} dimensions")
    vectors_ND = np.ascontiguousarray(fixed_NW[:, HEADER.itemsize :]).view("<f2").astype(np.float32)
    vectors_ND[~found_N] = np.nan
    return Lookup(vectors_ND=vectors_ND, days_N=header_N["day"].astype(np.int32), found_N=found_N, values=values)


def _decode_lists(value: bytes, embedding_dim: int) -> PinLists:
    _, flags, _, num_memory, num_seen, _ = struct.unpack_from(HEADER_FORMAT, value)
    at = fixed_bytes(embedding_dim)
    num_pins = num_memory + num_seen
    try:
        increments = np.frombuffer(value, "<f4", num_memory, at)
        at += increments.nbytes
        if flags & IS_STRING:
            memory, at = _read_strings(value, num_memory, at)
            seen, at = _read_strings(value, num_seen, at)
        else:
            ids = pa.array(np.frombuffer(value, "<i8", num_pins, at))
            memory, seen = ids[:num_memory], ids[num_memory:]
            at += 8 * num_pins
    except ValueError:
        at = -1
    if at != len(value):
        raise _damaged(f"a value of {len(value):,} bytes does not have {num_memory} and {num_seen} pins")
    return PinLists(memory, increments.astype(np.float32), seen, bool(flags & IS_COMPLETE))


def _read_strings(value: bytes, num: int, at: int) -> tuple[pa.Array, int]:
    """Return the strings that begin at byte `at`, and the byte after them."""
    lengths = np.frombuffer(value, "<u4", num, at)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    start = at + lengths.nbytes
    end = start + int(offsets[-1])
    return pa.StringArray.from_buffers(num, pa.py_buffer(offsets), pa.py_buffer(value[start:end])), end


def _damaged(reason: str) -> PipelineError:
    return PipelineError(f"the store is damaged: {reason}")
