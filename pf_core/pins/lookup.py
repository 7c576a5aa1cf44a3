"""Lookup of pins by id: binary search in the memory-mapped file of all ids, pin_id.arrow.

The ids ascend (integers as numbers, strings by the bytes of their UTF-8). The wanted ids are sorted too and searched in
blocks: every step of the search reads one id for each of the remaining ranges. The cost grows with the number of wanted
ids and the logarithm of the catalogue, not with its size. The ids themselves are compared, so the result is exact. No
index file is needed, so packs of earlier versions can be searched as well.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

WANTED_AT_ONCE = 1 << 14
"""Ids in a block; bounds the memory of the search."""

HASHED_ROWS = 2
"""Up to this number of catalogue rows for each wanted id, hashing the whole catalogue is faster than searching it."""


def find_pins(path: Path, pin_ids: pa.Array) -> np.ndarray:
    """Return the row of each id in a file of ascending ids, -1 if the id is not there."""
    encoded = pin_ids.dictionary_encode()
    wanted, ids = encoded.dictionary, _OrderedIds(path)
    if len(ids) <= HASHED_ROWS * len(wanted):
        row_of_wanted = pc.index_in(wanted, value_set=ids.read_all()).fill_null(-1).to_numpy()
    else:
        row_of_wanted = _search(ids, wanted)
    return np.asarray(row_of_wanted[encoded.indices.to_numpy()], np.int64)


def _search(ids: "_OrderedIds", wanted: pa.Array) -> np.ndarray:
    """Return the row of each of the distinct wanted ids, -1 if it is not there; `ids` is longer than `wanted`."""
    order = pc.sort_indices(wanted)
    ascending = wanted.take(order)
    if not pa.types.is_integer(ascending.type):
        ascending = ascending.cast(pa.large_binary())
    row_of_wanted = np.empty(len(wanted), np.int64)
    start = 0
    for first in range(0, len(wanted), WANTED_AT_ONCE):
        block = slice(first, first + WANTED_AT_ONCE)
        last_up_to, is_same = _search_block(ids, ascending[block], start)
        row_of_wanted[order[block].to_numpy()] = np.where(is_same, last_up_to, -1)
        start = int(last_up_to[-1])  # the next block's ids are greater
    return row_of_wanted


def _search_block(ids: "_OrderedIds", wanted: pa.Array, start: int) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each of the ascending wanted ids, the last row whose id is not greater, and whether it is equal.

    The search begins at row `start`, which is the result if all ids from there on are greater. A range is the rows from
    low to low + width, or to the end of the ids.
    """
    low = np.full(len(wanted), start)
    width = 1 << (len(ids) - 1 - start).bit_length()
    while width > 1:
        width //= 2
        is_reached = low + width < len(ids)
        middle = ids.read((low + width)[is_reached])
        is_upper = pc.less_equal(middle, wanted[: len(middle)])  # low ascends, so the reached ones come first
        low[: len(middle)] += width * is_upper.to_numpy(zero_copy_only=False)
    return low, pc.equal(ids.read(low), wanted).to_numpy(zero_copy_only=False)


class _OrderedIds:
    """A memory-mapped Arrow file of one column; all record batches but the last have the same number of rows.

    A batch is opened when one of its ids is read for the first time: opening all batches of a billion ids takes a
    second.
    """

    def __init__(self, path: Path) -> None:
        with pa.memory_map(str(path)) as source:
            self._file = source.read_buffer()
        self._reader = pa.ipc.open_file(self._file)
        self._is_integer = pa.types.is_integer(self._reader.schema[0].type)
        num_batches = self._reader.num_record_batches
        first, last = (self._reader.get_batch(number).num_rows if num_batches else 0 for number in (0, num_batches - 1))
        self._batch_rows, self._num_rows = first, (num_batches - 1) * first + last
        self._numbers_at, self._bytes_at = np.full((2, num_batches), -1)
        """Start of each batch's integers or string offsets in the file, in units of their size, and of its string bytes
        (-1: not opened yet)."""

    def __len__(self) -> int:
        return self._num_rows

    def read_all(self) -> pa.ChunkedArray:
        return self._reader.read_all().column(0)

    def read(self, rows: np.ndarray) -> pa.Array:
        """Return the ids of ascending rows, which may repeat; strings as bytes."""
        is_first = np.ones(len(rows), bool)
        is_first[1:] = rows[1:] != rows[:-1]
        return self._gather(rows[is_first]).take(pa.array(np.cumsum(is_first) - 1))

    def _gather(self, rows: np.ndarray) -> pa.Array:
        batch, row = np.divmod(rows, self._batch_rows)
        for number in np.unique(batch[self._numbers_at[batch] < 0]).tolist():
            self._open(number)
        at = self._numbers_at[batch] + row
        if self._is_integer:
            return pa.array(self._view(np.int64)[at])
        offsets = self._view(np.int32)
        begin = offsets[at]
        length = offsets[at + 1] - begin
        ends = np.concatenate([[0], np.cumsum(length, dtype=np.int64)])
        shift = np.repeat(self._bytes_at[batch] + begin - ends[:-1], length)
        data = self._view(np.uint8)[np.arange(len(shift)) + shift]
        return pa.Array.from_buffers(pa.large_binary(), len(rows), [None, pa.py_buffer(ends), pa.py_buffer(data)])

    def _open(self, number: int) -> None:
        ids = self._reader.get_batch(number).column(0)
        assert len(ids) == self._batch_rows or number == len(self._numbers_at) - 1
        numbers, *strings = (buffer.address - self._file.address for buffer in ids.buffers()[1:])
        self._numbers_at[number] = numbers // (8 if self._is_integer else 4)
        self._bytes_at[number] = strings[0] if strings else -1

    def _view(self, dtype: type[np.generic]) -> np.ndarray:
        return np.frombuffer(self._file, dtype, count=self._file.size // np.dtype(dtype).itemsize)
