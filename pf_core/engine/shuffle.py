"""The first verb, shuffle: group a stream of actions (mostly by day and user bucket), sort each group, drop duplicates.

A user's bucket never changes: bucket = hash(user_id) mod num_buckets. Memory is bounded: beyond its budget, a shuffle
spills to Arrow files, which other tasks can read too.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.errors import PipelineError
from pf_core.hashing import combined
from pf_core.schemas import ACTION_COLUMNS, ANSWER
from pf_core.storage.files import open_arrow

COPIES_HELD = 3
"""Copies of a shuffle's rows in memory, at worst: as they were added, split by group, sorted."""

GROUPS = b"groups"
"""Key in the metadata of a flushed file's schema: the group of each of its record batches."""

FINISHED = -1
"""Stands for the group of a record batch that has been returned already."""


def sort_actions(actions: pa.Table) -> tuple[pa.Table, int]:
    """Sort by ACTION_COLUMNS and drop exact duplicates; return the rows and the number of dropped ones.

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
    """Sort the rows at the positions `tied`, which agree in user and time, by all columns; drop exact duplicates.

    Of duplicates with different answers, one that does not agree is kept: false comes before true.
    """
    rows = actions.take(pa.array(tied))
    plain = rows
    for name in ("action_type", "surface"):  # sort by text, not by code
        index = plain.schema.get_field_index(name)
        plain = plain.set_column(index, name, plain[name].cast(pa.string()))
    names = [*ACTION_COLUMNS, *([ANSWER] if ANSWER in plain.column_names else [])]
    local = pc.sort_indices(plain, sort_keys=[(name, "ascending") for name in names])
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
    """Rows by group: in memory up to a budget, beyond it in Arrow files, one for each flush.

    There are two ways to get the groups back. One task that has seen all rows of the groups before g calls
    `finish(below=g)`; groups are numbered in the order in which they become complete, so that a stream longer than
    memory can be finished while it is read. Or many tasks fill a folder each, ending with `flush`, and other tasks
    merge the parts of each group with `merge_parts`.
    """

    def __init__(self, *, memory_bytes: int, spill_dir: Path) -> None:
        self._max_bytes, self._spill_dir = memory_bytes // COPIES_HELD, spill_dir
        self._held: list[tuple[pa.Table, np.ndarray]] = []
        self._held_bytes = 0
        self._spilled: dict[Path, list[int]] = {}  # the group of each record batch of each file
        self._num_flushes = 0

    def add(self, rows: pa.Table, group: np.ndarray) -> None:
        """Add rows, each with the number of its group."""
        if rows.num_rows == 0:
            return
        self._held.append((rows, group))
        self._held_bytes += rows.nbytes
        if self._held_bytes > self._max_bytes:
            self.flush()

    def finish(self, below: int) -> Iterator[tuple[int, pa.Table, int]]:
        """Yield (group, its rows sorted and distinct, number of duplicates dropped) for every group before `below`."""
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
            yield group, *sort_actions(join_actions(parts))
        for path, groups in list(self._spilled.items()):
            self._spilled[path] = [group if group >= below else FINISHED for group in groups]
            if max(groups) < below:
                del self._spilled[path]
                path.unlink()

    def flush(self) -> None:
        """Write all rows in memory to one file, with one or more record batches for each group.

        Thousands of groups do not make thousands of files.
        """
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
        """Paths of the files that hold the rows that are not in memory."""
        return list(self._spilled)

    def _take_held(self) -> Iterator[tuple[int, pa.Table]]:
        """Yield the rows in memory by group, in ascending order, and forget them."""
        if not self._held:
            return
        rows = join_actions([rows for rows, _ in self._held])
        group = np.concatenate([group for _, group in self._held])
        self._held, self._held_bytes = [], 0
        order = np.argsort(group, kind="stable")
        rows, group = rows.take(pa.array(order)), group[order]
        starts = np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))
        for start, end in zip(starts, [*starts[1:], len(group)], strict=True):
            yield int(group[start]), rows.slice(start, end - start)


@dataclass(frozen=True, kw_only=True)
class ShuffleShare:
    """What one of several tasks that shuffle together may use; it is small and travels with the task."""

    memory_bytes: int
    temp_dir: Path | None = None
    """Folder for spilled rows; None is the worker's own temporary folder."""

    @contextlib.contextmanager
    def open(self, temp_dir: Path | None = None) -> Iterator[Shuffle]:
        """Yield a shuffle that spills to a new folder in `temp_dir`, by default the share's; it is removed at the end.

        Use `finish` to get the groups.
        """
        parent = temp_dir or self.temp_dir
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        spill_dir = Path(tempfile.mkdtemp(prefix="shuffle-", dir=parent))
        try:
            yield self.fill(spill_dir)
        finally:
            shutil.rmtree(spill_dir, ignore_errors=True)

    def fill(self, folder: Path) -> Shuffle:
        """Return a shuffle whose files stay in `folder`. Use `flush`, then `merge_parts` to get the groups."""
        return Shuffle(memory_bytes=self.memory_bytes, spill_dir=folder)


def merge_parts(paths: Sequence[Path], groups: Sequence[int]) -> Iterator[tuple[int, pa.Table, int]]:
    """Yield what `Shuffle.finish` yields, from flushed files; each file is opened once for all of these groups."""
    parts: dict[int, list[pa.Table]] = {group: [] for group in groups}
    for path in paths:
        with open_arrow(path) as file:
            known = json.loads(file.schema.metadata[GROUPS])
            for group, found in parts.items():
                found += _read_group(file, known, group)
    for group in [group for group, found in parts.items() if found]:
        yield group, *sort_actions(join_actions(parts.pop(group)))


def join_actions(parts: Sequence[pa.Table]) -> pa.Table:
    """Concatenate tables; each dictionary column gets one dictionary, which may have 2^15 values."""
    rows = pa.concat_tables(parts)
    try:
        return rows.unify_dictionaries()
    except pa.ArrowInvalid as error:
        columns = [name for name in rows.column_names if pa.types.is_dictionary(rows[name].type)]
        counts = {name: len(set().union(*(c.dictionary.to_pylist() for c in rows[name].chunks))) for name in columns}
        name = max(columns, key=lambda column: counts[column])
        raise PipelineError(
            f"{name} has {counts[name]:,} different values, more than the {2**15:,} that are possible",
            f"check which column `source.actions.{name}` names in the site file",
        ) from error


def _read_group(file: pa.ipc.RecordBatchFileReader, groups: Sequence[int], group: int) -> list[pa.Table]:
    batches = [file.get_batch(number) for number, other in enumerate(groups) if other == group]
    return [pa.Table.from_batches(batches).replace_schema_metadata(None)] if batches else []
