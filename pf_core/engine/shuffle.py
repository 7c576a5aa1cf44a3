"""The first verb, shuffle: a stream of actions by group (a day's user bucket, mostly), each sorted and without repeats.

A user belongs to one bucket for ever: bucket = hash(user_id) mod num_buckets. Memory is bounded: beyond its budget, a
shuffle spills to Arrow files, which others can read, too.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.hashing import combined
from pf_core.schemas import ACTION_COLUMNS
from pf_core.storage.files import open_arrow

COPIES_HELD = 3
"""Of a shuffle's rows, at worst: as they came, taken apart, sorted."""

GROUPS = b"groups"
"""In a flushed file's schema: the group of each of its record batches."""

FINISHED = -1


def sort_actions(actions: pa.Table) -> tuple[pa.Table, int]:
    """Sort by ACTION_COLUMNS and drop exact duplicates; returns how many were dropped.

    One pass sorts by (user, time), which is nearly always decisive; only rows that tie are compared further.
    """
    if actions.num_rows == 0:
        return actions, 0
    user_rank = rank_ids(actions["user_id"])
    ts_us = actions["ts"].to_numpy().astype(np.int64)
    order = _argsort_pairs(user_rank, ts_us - ts_us.min())
    actions = actions.take(pa.array(order))
    user_rank, ts_us = user_rank[order], ts_us[order]
    ties = np.flatnonzero((user_rank[1:] == user_rank[:-1]) & (ts_us[1:] == ts_us[:-1]))
    if len(ties) == 0:
        return actions, 0
    return _settle_ties(actions, np.union1d(ties, ties + 1))


def _settle_ties(actions: pa.Table, tied: np.ndarray) -> tuple[pa.Table, int]:
    """Order the tied rows by all columns, in the places that they hold together; drop repeats."""
    rows = actions.take(pa.array(tied))
    plain = rows
    for name in ("action_type", "surface"):  # sort by text, not by code
        index = plain.schema.get_field_index(name)
        plain = plain.set_column(index, name, plain[name].cast(pa.string()))
    local = pc.sort_indices(plain, sort_keys=[(name, "ascending") for name in ACTION_COLUMNS])
    plain = plain.take(local)
    repeated = np.ones(plain.num_rows - 1, bool)
    for name in ACTION_COLUMNS:
        column = plain[name].combine_chunks()
        repeated &= pc.equal(column[1:], column[:-1]).to_numpy(zero_copy_only=False)
    is_kept = np.concatenate([[True], ~repeated])
    order = np.arange(actions.num_rows)
    order[tied] = tied[local.to_numpy()]
    keep = np.ones(actions.num_rows, bool)
    keep[tied] = is_kept
    return actions.take(pa.array(order[keep])), int((~is_kept).sum())


def rank_ids(ids: pa.ChunkedArray | pa.Array) -> np.ndarray:
    """Dense ranks of ids in ascending order, int64."""
    if pa.types.is_integer(ids.type):
        values = ids.to_numpy()
        low, high = int(values.min()), int(values.max())
        if high - low < 4 * len(values):  # nearly dense already
            present = np.zeros(high - low + 1, bool)
            present[values - low] = True
            return (np.cumsum(present) - 1)[values - low]
    encoded = combined(ids).dictionary_encode()
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return rank[encoded.indices.to_numpy()]


def _argsort_pairs(major: np.ndarray, minor: np.ndarray) -> np.ndarray:
    """Stable argsort by (major, minor), both non-negative: as one 64-bit key where it fits."""
    minor_bits = int(minor.max()).bit_length()
    if int(major.max()).bit_length() + minor_bits < 64:
        return np.argsort((major.astype(np.uint64) << np.uint64(minor_bits)) | minor.astype(np.uint64))
    return np.lexsort((minor, major))


class Shuffle:
    """Rows by group: in memory up to a budget, beyond it in Arrow files, one a flush.

    Groups are numbered in the order in which they become complete, so that a stream longer than memory can be
    finished as it goes: `finish(below=g)` gives the groups before g, for which no more rows will come. Or many fill a
    folder each and `flush` it, and others bring the parts of each group together with `merge_parts`.
    """

    def __init__(self, *, memory_bytes: int, spill_dir: Path) -> None:
        self._max_bytes, self._spill_dir = memory_bytes // COPIES_HELD, spill_dir
        self._held: list[tuple[pa.Table, np.ndarray]] = []
        self._held_bytes = 0
        self._spilled: dict[Path, list[int]] = {}  # the group of each record batch of each file
        self._num_flushes = 0

    def add(self, rows: pa.Table, group: np.ndarray) -> None:
        if rows.num_rows == 0:
            return
        self._held.append((rows, group))
        self._held_bytes += rows.nbytes
        if self._held_bytes > self._max_bytes:
            self.flush()

    def finish(self, below: int) -> Iterator[tuple[int, pa.Table, int]]:
        """(group, its rows sorted and distinct, number of duplicates dropped) for every group before `below`."""
        in_memory: dict[int, pa.Table] = {}
        for group, rows in self._take_held():
            if group < below:
                in_memory[group] = rows
            else:
                self.add(rows, np.full(rows.num_rows, group))
        spilled = {group for groups in self._spilled.values() for group in groups if FINISHED < group < below}
        for group in sorted(in_memory.keys() | spilled):
            parts = [in_memory.pop(group)] if group in in_memory else []
            for path, groups in self._spilled.items():
                parts += _read_group(pa.ipc.open_file(path), groups, group)
            yield group, *sort_actions(pa.concat_tables(parts).unify_dictionaries())
        for path, groups in list(self._spilled.items()):
            self._spilled[path] = [group if group >= below else FINISHED for group in groups]
            if max(groups) < below:
                del self._spilled[path]
                path.unlink()

    def flush(self) -> None:
        """Everything to a file, a record batch (or several) a group: thousands of groups are no thousand files."""
        batches = [(group, batch) for group, rows in self._take_held() for batch in rows.to_batches()]
        if batches:
            path, groups = self._spill_dir / f"{self._num_flushes:06d}.arrow", [group for group, _ in batches]
            schema = batches[0][1].schema.with_metadata({GROUPS: json.dumps(groups)})
            with pa.ipc.new_file(path, schema) as writer:
                for _, batch in batches:
                    writer.write_batch(batch)
            self._spilled[path] = groups
            self._num_flushes += 1

    @property
    def spilled(self) -> list[Path]:
        """The files that hold what is not held in memory."""
        return list(self._spilled)

    def _take_held(self) -> Iterator[tuple[int, pa.Table]]:
        if not self._held:
            return
        rows = pa.concat_tables([rows for rows, _ in self._held]).unify_dictionaries()
        group = np.concatenate([group for _, group in self._held])
        self._held, self._held_bytes = [], 0
        order = np.argsort(group, kind="stable")
        rows, group = rows.take(pa.array(order)), group[order]
        starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
        for start, end in zip(starts, [*starts[1:], len(group)], strict=True):
            yield int(group[start]), rows.slice(start, end - start)


def merge_parts(paths: Sequence[Path], groups: Sequence[int]) -> Iterator[tuple[int, pa.Table, int]]:
    """As `Shuffle.finish`, from files that were flushed; each is opened once for all of these groups."""
    parts: dict[int, list[pa.Table]] = {group: [] for group in groups}
    for path in paths:
        with open_arrow(path) as file:
            known = json.loads(file.schema.metadata[GROUPS])
            for group, found in parts.items():
                found += _read_group(file, known, group)
    for group in [group for group, found in parts.items() if found]:
        yield group, *sort_actions(pa.concat_tables(parts.pop(group)).unify_dictionaries())


def _read_group(file: pa.ipc.RecordBatchFileReader, groups: Sequence[int], group: int) -> list[pa.Table]:
    batches = [file.get_batch(number) for number, other in enumerate(groups) if other == group]
    return [pa.Table.from_batches(batches).replace_schema_metadata(None)] if batches else []
