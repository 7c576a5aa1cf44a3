"""user_timelines: one row a user, every action of the trailing window in ascending order, as of each day.

A partition is a pure function of raw_actions over the window up to its day. The previous partition is only a
cache of it: building a day touches the users who were active on it, and gives what a rebuild from the logs
gives, value for value. For that, an idle user's row is left alone and the window is cut when it is read.
Of a user with more than `max_actions` the newest are kept.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.assembly import Bounds, assemble, find_fault, flatten
from pf_core.contracts import (
    TIMELINE_LISTS,
    PipelineError,
    ds_range,
    ds_start_us,
    raw_actions_schema,
    shift_ds,
)
from pf_core.engine import Engine
from pf_core.raw_actions import bucket_files, raw_digest, read_manifest
from pf_core.shuffle import bucket_of
from pf_core.site import Site
from pf_core.state import DailyState, Manifest, advance_bucket, create_bucket, open_dataset, take_rows
from pf_core.storage import read_parquet

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
    engine: Engine,
    forgotten: pa.Array,
    rebuild: bool,
    progress: Callable[[str], None],
) -> Iterator[Manifest]:
    """Build the partitions of ascending days, each from the one before it; yields each published manifest.

    With `rebuild`, the first of the days is made from the logs of its whole window instead.
    """
    state = timeline_state(site)
    bucket_of_forgotten = bucket_of(forgotten, state.num_buckets)
    state.refuse_if_dropped(days, site.timelines.retention_days)
    with state.writing():
        for ds in days:
            from_logs = ds == site.start_ds or (rebuild and ds == days[0])
            base = None if from_logs else _previous(site, state, ds)
            if base is not None and ds == days[0]:
                _refuse_if_stale(site, base, ds)
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
                    "settings": _settings(site),
                    "raw_digests": {
                        **({} if base is None else base["raw_digests"]),
                        **{log_ds: raw_digest(site, log_ds) for log_ds in log_days},
                    },
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


def read_bucket(
    site: Site,
    ds: str,
    bucket: int,
    columns: Sequence[str] = TIMELINE_LISTS,
    *,
    user_ids: pa.Array | None = None,
) -> pa.Table:
    """A bucket's timelines as of ds, window cut, users without an action left out; row order is not fixed.

    With `user_ids`, only those of these users.
    """
    state = timeline_state(site)
    settings = state.require(ds)["settings"]
    dataset, stored = state.open_bucket(ds, bucket), ["user_id", *dict.fromkeys((*columns, "ts"))]
    if user_ids is None:
        table = dataset.to_table(columns=stored)
    else:
        known = dataset.to_table(columns=["user_id"])["user_id"].combine_chunks()
        table = _rows_of(dataset, known, user_ids, stored)
    since_us = ds_start_us(shift_ds(ds, 1 - settings["window_days"]))
    timelines = assemble(flatten(table), Bounds(since_us, settings["max_actions"]))
    return timelines.select(["user_id", *columns])


def content_digest(manifest: Manifest) -> str:
    """Of what a partition is made of: the same for the same logs and settings, whenever it was built."""
    since = shift_ds(manifest["ds"], 1 - manifest["settings"]["window_days"])
    logs = {log_ds: digest for log_ds, digest in manifest["raw_digests"].items() if log_ds >= since}
    content = json.dumps([manifest["ds"], manifest["settings"], logs], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _settings(site: Site) -> dict[str, Any]:
    """What a day must share with the day that it builds on."""
    timelines = site.timelines
    return {
        "start_ds": site.start_ds,
        "window_days": timelines.window_days,
        "max_actions": timelines.max_actions,
    }


def _previous(site: Site, state: DailyState, ds: str) -> Manifest:
    previous_ds = shift_ds(ds, -1)
    if state.manifest(previous_ds) is None:
        built = [day for day in state.days() if day < ds]
        command = (
            _command(f"--partition-range {shift_ds(built[-1], 1)}...{ds}") if built else _command(ds, rebuild=True)
        )
        raise PipelineError(
            f"user_timelines {ds} builds on {previous_ds}, which is missing. Build the gap with: {command}"
        )
    base = state.require(previous_ds)
    if base["settings"] != _settings(site):
        raise PipelineError(
            f"user_timelines {previous_ds} was built with {base['settings']}, the site file says {_settings(site)}. "
            f"Build {ds} from the logs: {_command(ds, rebuild=True)}"
        )
    return base


def _refuse_if_stale(site: Site, base: Manifest, ds: str) -> None:
    """If raw_actions changed since they went into the base, then what was built on them is no longer true."""
    for log_ds, digest in sorted(base["raw_digests"].items()):
        if log_ds < window_start(site, ds) or read_manifest(site, log_ds) is None:
            continue
        if raw_digest(site, log_ds) != digest:
            raise PipelineError(
                f"raw_actions {log_ds} changed after user_timelines {base['ds']} was built. Repair what follows from "
                f"it with: {_command(f'--partition-range {log_ds}...{ds}')}"
            )


def _command(days: str, *, rebuild: bool = False) -> str:
    which = days if days.startswith("--") else f"--partition {days}"
    config = """ --config-json '{"ops": {"user_timelines": {"config": {"rebuild": true}}}}'""" if rebuild else ""
    return f"dagster asset materialize --select user_timelines {which}{config} -m pf_assets.definitions"


def _bounds(site: Site, ds: str) -> Bounds:
    return Bounds(ds_start_us(window_start(site, ds)), site.timelines.max_actions)


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
    actions, num_active_forgotten = _read_actions(task)
    if task.base_version is None:
        new = _sound(assemble(actions, bounds), task)
        dataset = create_bucket(task.path, new)
        old = removed = new.slice(0, 0)
    else:
        base = open_dataset(task.path, version=task.base_version)
        known = base.to_table(columns=["user_id"])["user_id"].combine_chunks()
        old = _rows_of(base, known, actions["user_id"].unique())
        removed = _rows_of(base, known, task.forgotten)
        together = pa.concat_tables([flatten(old), actions.select(["user_id", *TIMELINE_LISTS])])
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
    return stats | _statistics(task, old, removed, new) | {"active_users_forgotten": num_active_forgotten}


def _sound(timelines: pa.Table, task: _BucketTask) -> pa.Table:
    fault = find_fault(timelines, task.site, task.ds)
    if fault is not None:
        raise PipelineError(f"user_timelines {task.ds}, bucket {task.bucket}: {fault}; nothing was published")
    return timelines


def _rows_of(
    dataset: lance.LanceDataset,
    known: pa.Array,
    user_ids: pa.Array,
    columns: Sequence[str] = ("user_id", *TIMELINE_LISTS),
) -> pa.Table:
    """The stored rows of those of the users who have one."""
    is_wanted = (
        pc.is_in(known, user_ids).to_numpy(zero_copy_only=False) if len(user_ids) else np.zeros(len(known), bool)
    )
    position = np.flatnonzero(is_wanted)
    if len(position) > len(known) * SCAN_ABOVE_SHARE:
        return dataset.to_table(columns=list(columns)).take(pa.array(position))
    return take_rows(dataset, position, columns)


def _read_actions(task: _BucketTask) -> tuple[pa.Table, int]:
    """The logs' rows without forgotten users, and how many of these were active on the day."""
    source = task.site.source.actions
    schema = raw_actions_schema(source.user_id.type, source.pin_id.type)
    tables = [read_parquet(path).cast(schema) for path in task.files]
    actions = pa.concat_tables(tables or [schema.empty_table()]).unify_dictionaries()
    if not len(task.forgotten):
        return actions, 0
    is_forgotten = pc.is_in(actions["user_id"], task.forgotten)
    is_today = pc.greater_equal(actions["ts"].cast(pa.int64()), ds_start_us(task.ds))
    num_active = len(actions["user_id"].filter(pc.and_(is_forgotten, is_today)).unique())
    return actions.filter(pc.invert(is_forgotten)), num_active


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
    names = (
        *("users", "actions", "active_users", "active_users_forgotten"),
        *("new_users", "forgotten_users", "fragments"),
    )
    return {name: sum(result[name] for result in results) for name in names}
