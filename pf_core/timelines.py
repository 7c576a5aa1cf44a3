"""user_timelines: one row a user, every action of the trailing window in ascending order, as of each day.

A partition is a pure function of raw_actions over the window up to its day. The previous partition is only a
cache of it: building a day touches the users who were active on it, and gives what a rebuild from the logs
gives, value for value. For that, an idle user's row is left alone and the window is cut when it is read.
Of a user with more than `max_actions` the newest are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.contracts import (
    TIMELINE_LISTS,
    PipelineError,
    ds_range,
    ds_start_us,
    raw_actions_schema,
    shift_ds,
)
from pf_core.engine import LocalEngine, bucket_of, rank_ids
from pf_core.raw_actions import bucket_files, read_manifest
from pf_core.site import Site
from pf_core.state import DailyState, Manifest, advance_bucket, create_bucket

SCAN_ABOVE_SHARE = 0.3
"""Of a bucket's users: from here on, reading all rows is faster than picking the active users' ones."""

LENGTH_BINS = tuple(2**power for power in range(18))
"""Lower bounds of the histogram of actions per user: 1, 2, 4, … 131072."""


def timeline_state(site: Site) -> DailyState:
    return DailyState(
        root=site.directory / "user_timelines", asset="user_timelines", num_buckets=site.timelines.num_buckets
    )


def window_start(site: Site, ds: str) -> str:
    """The first day of the window that ends with ds."""
    return shift_ds(ds, 1 - site.timelines.window_days)


def build_timelines(
    site: Site,
    days: Sequence[str],
    *,
    engine: LocalEngine,
    forgotten: pa.Array,
    rebuild: bool,
    progress: Callable[[str], None],
) -> Iterator[Manifest]:
    """Build the partitions of ascending days, each from the one before it; yields each published manifest.

    With `rebuild`, the first of the days is made from the logs of its whole window instead.
    """
    state = timeline_state(site)
    bucket_of_forgotten = bucket_of(forgotten, state.num_buckets)
    with state.writing():
        for ds in days:
            from_logs = ds == site.start_ds or (rebuild and ds == days[0])
            base = None if from_logs else _previous(state, ds)
            log_days = ds_range(max(site.start_ds, window_start(site, ds)), ds) if from_logs else [ds]
            files = [bucket_files(site, log_ds) for log_ds in log_days]
            tasks = [
                _BucketTask(
                    bucket=bucket,
                    path=state.bucket_path(bucket),
                    base_version=None if base is None else base["versions"][bucket],
                    base_stats=None if base is None else base["buckets"][bucket],
                    files=[paths[bucket] for paths in files if bucket in paths],
                    forgotten=forgotten.filter(pa.array(bucket_of_forgotten == bucket)),
                    site=site,
                    ds=ds,
                )
                for bucket in range(state.num_buckets)
            ]
            results = sorted(engine.map_buckets(_build_bucket, tasks), key=lambda result: int(result["bucket"]))
            manifest = state.publish(
                ds,
                [result["version"] for result in results],
                {
                    "built_from": "logs" if from_logs else "previous day",
                    "window_days": site.timelines.window_days,
                    "max_actions": site.timelines.max_actions,
                    "buckets": results,
                    "counts": _total(results),
                },
            )
            counts = manifest["counts"]
            progress(
                f"user_timelines {ds}: {counts['users']:,} users, {counts['actions']:,} actions; "
                f"{counts['active_users']:,} active, {counts['new_users']:,} new"
            )
            yield manifest
        state.retain(site.timelines.retention_days, engine, progress)


def read_bucket(site: Site, ds: str, bucket: int, columns: Sequence[str] = TIMELINE_LISTS) -> pa.Table:
    """A bucket's timelines as of ds, window cut, users without an action left out; row order is not fixed."""
    dataset = timeline_state(site).open_bucket(ds, bucket)
    table = dataset.to_table(columns=["user_id", *dict.fromkeys((*columns, "ts"))])
    timelines = assemble(_flatten(table), _bounds(site, ds))
    return timelines.select(["user_id", *columns])


def find_fault(timelines: pa.Table, site: Site, ds: str) -> str | None:
    """What is wrong with these rows of partition ds, in a sentence; None if nothing is."""
    if len(timelines["user_id"].unique()) != timelines.num_rows or timelines["user_id"].null_count:
        return "a user has two rows, or a row has no user"
    lengths = pc.list_value_length(timelines["ts"]).to_numpy()
    for name in TIMELINE_LISTS:
        if not np.array_equal(pc.list_value_length(timelines[name]).to_numpy(), lengths):
            return f"the lists of {name} and ts differ in length"
    if timelines.num_rows == 0:
        return None
    if lengths.min() < 1 or lengths.max() > site.timelines.max_actions:
        return f"a timeline has {lengths.min()} or {lengths.max()} actions, allowed are 1 to max_actions"
    ts_us = pc.list_flatten(timelines["ts"]).cast(pa.int64()).to_numpy()
    if ts_us.max() >= ds_start_us(shift_ds(ds, 1)):
        return f"an action is later than {ds}"
    descends = ts_us[1:] < ts_us[:-1]
    descends[np.cumsum(lengths)[:-1] - 1] = False  # from one user to the next
    if descends.any():
        return "a user's actions are not in ascending order"
    return None


def audit_day(site: Site, ds: str) -> str | None:
    """A fault in the partition, or None: every active user is there, and one bucket, another each day, is sound."""
    manifest, logged = timeline_state(site).require(ds), read_manifest(site, ds)
    if logged is not None and manifest["counts"]["active_users"] != logged["counts"]["users"]:
        return (
            f"{manifest['counts']['active_users']:,} users are active in the timelines and "
            f"{logged['counts']['users']:,} in raw_actions: one of the two was re-run without the other"
        )
    bucket = ds_start_us(ds) // 86_400_000_000 % manifest["num_buckets"]
    return find_fault(read_bucket(site, ds, bucket), site, ds)


def _previous(state: DailyState, ds: str) -> Manifest:
    previous_ds = shift_ds(ds, -1)
    if state.manifest(previous_ds) is None:
        built = [day for day in state.days() if day < ds]
        first = shift_ds(built[-1], 1) if built else None
        build = f"--partition-range {first}...{ds}" if first else f"--partition {ds}"
        config = "" if first else """ --config-json '{"ops": {"user_timelines": {"config": {"rebuild": true}}}}'"""
        raise PipelineError(
            f"user_timelines {ds} builds on {previous_ds}, which is missing. Build the gap with: "
            f"dagster asset materialize --select user_timelines {build}{config} -m pf_assets.definitions"
        )
    return state.require(previous_ds)


@dataclass(frozen=True)
class _Bounds:
    """Of a user's actions, those from `since_us` on are kept, and of these the newest `max_actions`."""

    since_us: int
    max_actions: int


def _bounds(site: Site, ds: str) -> _Bounds:
    return _Bounds(ds_start_us(window_start(site, ds)), site.timelines.max_actions)


def assemble(actions: pa.Table, bounds: _Bounds) -> pa.Table:
    """Flat actions, each user's in ascending order, to one row a user, by user_id.

    Sorting is by user alone; the lists are cut where the user changes, over the sorted columns, without a copy.
    """
    lists = [name for name in TIMELINE_LISTS if name in actions.column_names]
    if actions.num_rows:
        rank = rank_ids(actions["user_id"])
        if (rank[1:] < rank[:-1]).any():
            position = np.arange(len(rank), dtype=np.uint64)
            order = np.sort((rank.astype(np.uint64) << np.uint64(32)) | position) & np.uint64(0xFFFFFFFF)
            actions, rank = actions.take(pa.array(order.astype(np.int64))), rank[order]
        keep = _kept(rank, actions["ts"].to_numpy().astype(np.int64), bounds)
        if not keep.all():
            actions, rank = actions.filter(pa.array(keep)), rank[keep]
    if actions.num_rows == 0:
        starts = np.empty(0, np.int64)
    else:
        starts = np.flatnonzero(np.concatenate([[True], rank[1:] != rank[:-1]]))
    offsets = pa.array(np.append(starts, actions.num_rows).astype(np.int32))
    columns: dict[str, Any] = {"user_id": actions["user_id"].take(pa.array(starts))}
    for name in lists:
        columns[name] = pa.ListArray.from_arrays(offsets, actions[name].unify_dictionaries().combine_chunks())
    return pa.table(columns)


def _kept(rank: np.ndarray, ts_us: np.ndarray, bounds: _Bounds) -> np.ndarray:
    num_actions = np.bincount(rank)
    num_old = np.bincount(rank, weights=ts_us < bounds.since_us).astype(np.int64)
    num_dropped = np.maximum(num_old, num_actions - bounds.max_actions)
    first = np.concatenate([[0], np.cumsum(num_actions)[:-1]])
    return np.arange(len(rank)) >= (first + num_dropped)[rank]


def _flatten(timelines: pa.Table) -> pa.Table:
    """One row a user back to one row an action."""
    lengths = pc.list_value_length(timelines["ts"]).to_numpy()
    users = timelines["user_id"].take(pa.array(np.repeat(np.arange(timelines.num_rows), lengths)))
    columns: dict[str, Any] = {"user_id": users}
    for name in timelines.column_names[1:]:
        chunks = [chunk.flatten() for chunk in timelines[name].chunks]
        columns[name] = pa.chunked_array(chunks, timelines.schema.field(name).type.value_type)
    return pa.table(columns)


@dataclass(frozen=True, kw_only=True)
class _BucketTask:
    bucket: int
    path: Path
    base_version: int | None
    base_stats: dict[str, Any] | None
    files: list[Path]
    forgotten: pa.Array
    site: Site
    ds: str


def _build_bucket(task: _BucketTask) -> dict[str, Any]:
    """One bucket of one day. Its totals follow from those of the day before and from the rows that changed."""
    bounds = _bounds(task.site, task.ds)
    actions = _read_actions(task)
    if task.base_version is None:
        new = _sound(assemble(actions, bounds), task)
        dataset = create_bucket(task.path, new)
        old = removed = new.slice(0, 0)
    else:
        base = lance.dataset(task.path, version=task.base_version)
        known = base.to_table(columns=["user_id"])["user_id"].combine_chunks()
        old = _rows_of(base, known, actions["user_id"].unique())
        removed = _rows_of(base, known, task.forgotten)
        together = pa.concat_tables([_flatten(old), actions.select(["user_id", *TIMELINE_LISTS])])
        new = _sound(assemble(together, bounds), task)
        dataset = advance_bucket(
            task.path,
            base_version=task.base_version,
            upserts=new,
            deleted_ids=removed["user_id"].combine_chunks(),
            key="user_id",
            compact_after=task.site.timelines.compact_after_fragments,
        )
    stats: dict[str, Any] = {
        "bucket": task.bucket,
        "version": dataset.version,
        "fragments": len(dataset.get_fragments()),
    }
    return stats | _statistics(task, old, removed, new)


def _sound(timelines: pa.Table, task: _BucketTask) -> pa.Table:
    fault = find_fault(timelines, task.site, task.ds)
    if fault is not None:
        raise PipelineError(f"user_timelines {task.ds}, bucket {task.bucket}: {fault}; nothing was published")
    return timelines


def _rows_of(dataset: lance.LanceDataset, known: pa.Array, user_ids: pa.Array) -> pa.Table:
    """The stored rows of those of the users who have one."""
    columns = ["user_id", *TIMELINE_LISTS]
    is_wanted = (
        pc.is_in(known, user_ids).to_numpy(zero_copy_only=False) if len(user_ids) else np.zeros(len(known), bool)
    )
    position = np.flatnonzero(is_wanted)
    if len(position) > len(known) * SCAN_ABOVE_SHARE:
        return dataset.to_table(columns=columns).take(pa.array(position))
    return dataset.take(position, columns=columns)


def _read_actions(task: _BucketTask) -> pa.Table:
    source = task.site.source.actions
    schema = raw_actions_schema(source.user_id.type, source.pin_id.type)
    tables = [pq.read_table(path).cast(schema) for path in task.files]
    actions = pa.concat_tables(tables or [schema.empty_table()]).unify_dictionaries()
    if len(task.forgotten):
        actions = actions.filter(pc.invert(pc.is_in(actions["user_id"], task.forgotten)))
    return actions


def _statistics(task: _BucketTask, old: pa.Table, removed: pa.Table, new: pa.Table) -> dict[str, Any]:
    base = task.base_stats or {"users": 0, "actions": 0, "lengths": [0] * len(LENGTH_BINS)}
    today_us = ds_start_us(task.ds)
    first, last = (_element(new["ts"], end) for end in ("first", "last"))
    lengths = np.array(base["lengths"]) - _length_counts(old) - _length_counts(removed) + _length_counts(new)
    return {
        "users": base["users"] - old.num_rows - removed.num_rows + new.num_rows,
        "actions": base["actions"] - _num_actions(old) - _num_actions(removed) + _num_actions(new),
        "active_users": int((last >= today_us).sum()),
        "new_users": int((first >= today_us).sum()),
        "forgotten_users": removed.num_rows,
        "lengths": lengths.tolist(),
    }


def _element(lists: pa.ChunkedArray, end: str) -> np.ndarray:
    """The first or last time of every (never empty) list, in microseconds."""
    array = lists.combine_chunks()
    offsets = array.offsets.to_numpy()
    values = array.values.cast(pa.int64()).to_numpy()
    return values[offsets[:-1] if end == "first" else offsets[1:] - 1]


def _num_actions(timelines: pa.Table) -> int:
    return int(pc.sum(pc.list_value_length(timelines["ts"])).as_py() or 0)


def _length_counts(timelines: pa.Table) -> np.ndarray:
    lengths = pc.list_value_length(timelines["ts"]).to_numpy()
    return np.bincount(np.searchsorted(LENGTH_BINS, lengths, side="right") - 1, minlength=len(LENGTH_BINS))


def _total(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    names = ("users", "actions", "active_users", "new_users", "forgotten_users", "fragments")
    return {name: sum(result[name] for result in results) for name in names}
