"""user_timelines: one row a user, every action of the trailing window in ascending order, as of each day.

A partition is a pure function of raw_actions over the window up to its day. The previous partition is only a
cache of it: building a day touches the newest piece of each user who was active on it, and gives what a rebuild
from the logs gives, value for value. For that, idle users and full pieces are left alone and the window is cut when
they are read. Of a user with more than `max_actions` the newest are kept.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import DailyState, Manifest, create_bucket, open_dataset, replace_rows
from pf_core.errors import PipelineError
from pf_core.hashing import bucket_of
from pf_core.logs.partition import bucket_files, raw_digest, read_manifest
from pf_core.schemas import TIMELINE_LISTS, raw_actions_schema
from pf_core.storage.files import read_parquet
from pf_core.timelines.assembly import Bounds, assemble, find_fault, flatten
from pf_core.timelines.segments import cut_pieces, is_outdated, read_pieces, read_rows

STORED_AS = "pieces"

MAX_DEAD_SHARE = 1.0
"""Of a bucket's living rows: with more dead ones, it is written anew."""

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
    site: Site | DailyState,
    ds: str,
    bucket: int,
    columns: Sequence[str] = TIMELINE_LISTS,
    *,
    user_ids: pa.Array | None = None,
    newest: int | None = None,
) -> pa.Table:
    """A bucket's timelines as of ds, one row a user, by user_id; window cut, users without an action left out.

    With `user_ids`, only those of these users; with `newest`, no more than so many of a user's actions.
    """
    state = site if isinstance(site, DailyState) else timeline_state(site)
    settings = state.require(ds)["settings"]
    if settings.get("stored_as") != STORED_AS:
        raise PipelineError(
            f"user_timelines {ds} was stored by an older version. Build it from the logs: {_command(ds, rebuild=True)}"
        )
    since_us = ds_start_us(shift_ds(ds, 1 - settings["window_days"]))
    kept = settings["max_actions"] if newest is None else min(newest, settings["max_actions"])
    bounds = Bounds(since_us, kept)
    dataset = state.open_bucket(ds, bucket)
    pieces = read_pieces(dataset, of=user_ids)
    pieces = pieces.where(~is_outdated(pieces, bounds))
    rows = read_rows(dataset, pieces, ["user_id", *dict.fromkeys((*columns, "ts"))])
    return assemble(flatten(rows), bounds).select(["user_id", *columns])


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
        "stored_as": STORED_AS,
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
    """One bucket of one day. Its totals follow from those of the day before and from the users who changed."""
    timelines = task.site.timelines
    bounds = Bounds(ds_start_us(window_start(task.site, task.ds)), timelines.max_actions)
    actions, num_active_forgotten = _read_actions(task)
    if task.base_version is None:
        new = _sound(assemble(actions, bounds), task)
        nothing_before = np.zeros(new.num_rows, np.int64)
        rows = cut_pieces(new, first_piece=nothing_before, piece_actions=timelines.piece_actions)
        dataset, change = create_bucket(task.path, rows), _Change(new=new, num_kept=nothing_before)
    else:
        dataset, change = _advance_bucket(task, actions, bounds)
    stats: dict[str, Any] = {
        "bucket": task.bucket,
        "version": dataset.version,
        "fragments": len(dataset.get_fragments()),
    }
    return stats | _statistics(task, change) | {"active_users_forgotten": num_active_forgotten}


@dataclass(frozen=True, kw_only=True, eq=False)
class _Change:
    """What a day changes in a bucket: lengths of the timelines that go, and the day's users."""

    old_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    removed_lengths: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    new: pa.Table
    """Of each of them the actions that are written."""
    num_kept: np.ndarray
    """Beside these: the actions that stay where they are."""


def _advance_bucket(task: _BucketTask, actions: pa.Table, bounds: Bounds) -> tuple[lance.LanceDataset, _Change]:
    """The day before, with the day's actions added to the newest pieces of their users."""
    assert task.base_version is not None
    timelines, base = task.site.timelines, open_dataset(task.path, version=task.base_version)
    active_ids = actions["user_id"].unique()
    stored = read_pieces(base, of=pa.chunked_array([active_ids, task.forgotten]))
    active, removed = stored.of(active_ids), stored.of(task.forgotten)
    is_growing = active.is_newest & (active.num_actions < timelines.piece_actions)
    growing, full = active.where(is_growing), active.where(~is_growing)
    old = read_rows(base, growing, ["user_id", *TIMELINE_LISTS])
    together = pa.concat_tables([flatten(old), actions.select(["user_id", *TIMELINE_LISTS])])
    new = _sound(assemble(together, bounds), task)

    def row_in_new(user_id: pa.Array) -> np.ndarray:
        return pc.index_in(user_id, new["user_id"].combine_chunks()).to_numpy()

    first_piece = np.zeros(new.num_rows, np.int64)
    np.maximum.at(first_piece, row_in_new(full.user_id), full.piece + 1)
    first_piece[row_in_new(growing.user_id)] = growing.piece
    num_added = pc.list_value_length(new["ts"]).to_numpy()[row_in_new(full.user_id)]
    outdated = is_outdated(full, bounds, num_added=num_added)
    num_kept = np.zeros(new.num_rows, np.int64)
    np.add.at(num_kept, row_in_new(full.user_id)[~outdated], full.num_actions[~outdated])
    dataset = replace_rows(
        base,
        gone=pa.chunked_array([growing.address, full.address[outdated], removed.address]),
        rows=cut_pieces(new, first_piece=first_piece, piece_actions=timelines.piece_actions),
        compact_after=timelines.compact_after_fragments,
        max_dead_share=MAX_DEAD_SHARE,
    )
    change = _Change(old_lengths=active.lengths(), removed_lengths=removed.lengths(), new=new, num_kept=num_kept)
    return dataset, change


def _sound(timelines: pa.Table, task: _BucketTask) -> pa.Table:
    fault = find_fault(timelines, task.site, task.ds)
    if fault is not None:
        raise PipelineError(f"user_timelines {task.ds}, bucket {task.bucket}: {fault}; nothing was published")
    return timelines


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


def _statistics(task: _BucketTask, change: _Change) -> dict[str, Any]:
    """Of an idle user, and of the piece at the window's edge, actions count until a later day touches them."""
    base = task.base_stats or {"users": 0, "actions": 0, "lengths": [0] * len(LENGTH_BINS)}
    today_us, max_actions = ds_start_us(task.ds), task.site.timelines.max_actions
    first, last = (_element(change.new["ts"], end) for end in ("first", "last"))
    new_lengths = change.num_kept + pc.list_value_length(change.new["ts"]).to_numpy()
    gone = np.minimum(np.concatenate([change.old_lengths, change.removed_lengths]), max_actions)
    come = np.minimum(new_lengths, max_actions)
    return {
        "users": base["users"] - len(gone) + len(come),
        "actions": base["actions"] - int(gone.sum()) + int(come.sum()),
        "active_users": int((last >= today_us).sum()),
        "new_users": int(((first >= today_us) & (change.num_kept == 0)).sum()),
        "forgotten_users": len(change.removed_lengths),
        "lengths": (np.array(base["lengths"]) - _length_counts(gone) + _length_counts(come)).tolist(),
    }


def _element(lists: pa.ChunkedArray, end: str) -> np.ndarray:
    """The first or last time of every (never empty) list, in microseconds."""
    array = lists.combine_chunks()
    offsets = array.offsets.to_numpy()
    values = array.values.cast(pa.int64()).to_numpy()
    return values[offsets[:-1] if end == "first" else offsets[1:] - 1]


def _length_counts(lengths: np.ndarray) -> np.ndarray:
    return np.bincount(np.searchsorted(LENGTH_BINS, lengths, side="right") - 1, minlength=len(LENGTH_BINS))


def _total(results: Sequence[dict[str, Any]]) -> dict[str, int]:
    names = (
        *("users", "actions", "active_users", "active_users_forgotten"),
        *("new_users", "forgotten_users", "fragments"),
    )
    return {name: sum(result[name] for result in results) for name in names}
