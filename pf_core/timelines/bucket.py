"""Build one bucket of one day of user_timelines: the pure per-bucket function of `build.py`.

The bucket's totals follow from those of the day before and from the users who changed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import TimelineConfig
from pf_core.days import ds_start_us, shift_ds
from pf_core.engine.daily_state import create_bucket, open_dataset, replace_rows
from pf_core.engine.shuffle import join_actions
from pf_core.errors import PipelineError
from pf_core.schemas import TIMELINE_LISTS
from pf_core.storage.files import read_parquet
from pf_core.timelines.assembly import Bounds, assemble, flatten, timeline_fault
from pf_core.timelines.segments import cut_segments, is_outdated, read_rows, read_segments

MAX_DEAD_SHARE = 1.0
"""Compact a bucket when it has more deleted rows than this share of its remaining ones."""

LENGTH_BINS = tuple(2**power for power in range(18))
"""Lower bounds of the histogram of actions per user: 1, 2, 4, … 131072."""


def window_start(ds: str, window_days: int) -> str:
    """Return the first day of the window that ends with ds."""
    return shift_ds(ds, 1 - window_days)


@dataclass(frozen=True, kw_only=True)
class BucketTask:
    """What building a bucket needs; it carries no Site, so that no secret of the site file reaches a Spark task."""

    ds: str
    bucket: int
    path: Path
    """Lance dataset of the bucket."""
    base_version: int | None
    """Lance version of the day before; None to build from the logs alone."""
    base_stats: "BucketStats | None"
    files: list[Path]
    """Files of raw_actions that are added."""
    actions_schema: pa.Schema
    forgotten: pa.Array
    config: TimelineConfig

    @property
    def bounds(self) -> Bounds:
        return Bounds(ds_start_us(window_start(self.ds, self.config.window_days)), self.config.max_actions)


class BucketStats(TypedDict):
    """Entry of a bucket in the manifest.

    The expired actions of an idle user, and of a segment at the edge of the window, count until a later day touches it.
    """

    bucket: int
    version: int
    fragments: int
    users: int
    actions: int
    active_users: int
    new_users: int
    forgotten_users: int
    lengths: list[int]
    """Number of users for each of LENGTH_BINS."""
    active_users_forgotten: int
    """Users of the deletion list who were active on the day."""


def build_bucket(task: BucketTask) -> BucketStats:
    actions, num_active_forgotten = _read_actions(task)
    if task.base_version is None:
        new = _checked(assemble(actions, task.bounds), task)
        nothing_before = np.zeros(new.num_rows, np.int64)
        rows = cut_segments(new, first_number=nothing_before, segment_actions=task.config.segment_actions)
        dataset, change = create_bucket(task.path, rows), _Change(new=new, num_kept=nothing_before)
    else:
        dataset, change = _advance_bucket(task, actions, open_dataset(task.path, version=task.base_version))
    return _statistics(task, dataset, change, num_active_forgotten)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """What a day changes in a bucket."""

    old_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Lengths of the active users' timelines on the day before."""
    removed_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Lengths of the timelines of forgotten users, which are removed."""
    new: pa.Table
    """Actions that are written, one row per active user."""
    num_kept: np.ndarray
    """Number of actions in the segments of each active user that stay as they are."""


def _advance_bucket(
    task: BucketTask, actions: pa.Table, base: lance.LanceDataset
) -> tuple[lance.LanceDataset, _Change]:
    """Add the day's actions to the newest segments of their users, on top of the day before."""
    config, bounds = task.config, task.bounds
    active_ids = actions["user_id"].unique()
    stored = read_segments(base, of=pa.chunked_array([active_ids, task.forgotten]))
    active, removed = stored.of(active_ids), stored.of(task.forgotten)
    is_growing = active.is_newest & (active.num_actions < config.segment_actions)
    growing, full = active.where(is_growing), active.where(~is_growing)
    old = read_rows(base, growing, ["user_id", *TIMELINE_LISTS])
    together = join_actions([flatten(old), actions.select(["user_id", *TIMELINE_LISTS])])
    new = _checked(assemble(together, bounds), task)

    def row_in_new(user_id: pa.Array) -> np.ndarray:
        return pc.index_in(user_id, new["user_id"].combine_chunks()).to_numpy()

    first_number = np.zeros(new.num_rows, np.int64)
    np.maximum.at(first_number, row_in_new(full.user_id), full.number + 1)
    first_number[row_in_new(growing.user_id)] = growing.number
    num_added = pc.list_value_length(new["ts"]).to_numpy()[row_in_new(full.user_id)]
    outdated = is_outdated(full, bounds, num_added=num_added)
    num_kept = np.zeros(new.num_rows, np.int64)
    np.add.at(num_kept, row_in_new(full.user_id)[~outdated], full.num_actions[~outdated])
    dataset = replace_rows(
        base,
        gone=pa.chunked_array([growing.address, full.address[outdated], removed.address]),
        rows=cut_segments(new, first_number=first_number, segment_actions=config.segment_actions),
        compact_after=config.compact_after_fragments,
        max_dead_share=0 if len(removed) else MAX_DEAD_SHARE,  # deleted rows of forgotten users leave the files, too
    )
    change = _Change(old_lengths=active.lengths(), removed_lengths=removed.lengths(), new=new, num_kept=num_kept)
    return dataset, change


def _checked(timelines: pa.Table, task: BucketTask) -> pa.Table:
    fault = timeline_fault(timelines, ds=task.ds, max_actions=task.config.max_actions)
    if fault is not None:
        raise PipelineError(f"user_timelines {task.ds}, bucket {task.bucket}: {fault}; nothing was published")
    return timelines


def _read_actions(task: BucketTask) -> tuple[pa.Table, int]:
    """Read the logs without forgotten users; also return how many of these were active on the day."""
    tables = [read_parquet(path).cast(task.actions_schema) for path in task.files]
    actions = join_actions(tables or [task.actions_schema.empty_table()])
    if not len(task.forgotten):
        return actions, 0
    is_forgotten = pc.is_in(actions["user_id"], task.forgotten)
    is_today = pc.greater_equal(actions["ts"].cast(pa.int64()), ds_start_us(task.ds))
    num_active = len(actions["user_id"].filter(pc.and_(is_forgotten, is_today)).unique())
    return actions.filter(pc.invert(is_forgotten)), num_active


def _statistics(
    task: BucketTask, dataset: lance.LanceDataset, change: _Change, num_active_forgotten: int
) -> BucketStats:
    base = task.base_stats
    today_us, max_actions = ds_start_us(task.ds), task.config.max_actions
    first, last = _ends(change.new["ts"])
    new_lengths = change.num_kept + pc.list_value_length(change.new["ts"]).to_numpy()
    gone = np.minimum(np.concatenate([change.old_lengths, change.removed_lengths]), max_actions)
    come = np.minimum(new_lengths, max_actions)
    histogram = np.zeros(len(LENGTH_BINS), np.int64) if base is None else np.array(base["lengths"])
    return {
        "bucket": task.bucket,
        "version": dataset.version,
        "fragments": len(dataset.get_fragments()),
        "users": (0 if base is None else base["users"]) - len(gone) + len(come),
        "actions": (0 if base is None else base["actions"]) - int(gone.sum()) + int(come.sum()),
        "active_users": int((last >= today_us).sum()),
        "new_users": int(((first >= today_us) & (change.num_kept == 0)).sum()),
        "forgotten_users": len(change.removed_lengths),
        "lengths": (histogram - _length_counts(gone) + _length_counts(come)).tolist(),
        "active_users_forgotten": num_active_forgotten,
    }


def _ends(lists: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and the last time of every (never empty) list, in microseconds."""
    array = lists.combine_chunks()
    offsets = array.offsets.to_numpy()
    values = array.values.cast(pa.int64()).to_numpy()
    return values[offsets[:-1]], values[offsets[1:] - 1]


def _length_counts(lengths: np.ndarray) -> np.ndarray:
    return np.bincount(np.searchsorted(LENGTH_BINS, lengths, side="right") - 1, minlength=len(LENGTH_BINS))
