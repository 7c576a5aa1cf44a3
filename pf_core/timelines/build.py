"""user_timelines: one row per user, every action of the trailing window in ascending order, as of each day.

A partition is a pure function of raw_actions over the window up to its day. Building a day on the day before gives what
a rebuild from the logs gives, value for value, and touches only the users who were active: a timeline is stored in
segments (`segments.py`), of which only the newest is rewritten. Idle users are not touched, so actions that have left
the window are cut when a timeline is read. Of a user with more than `max_actions` actions, the newest are kept.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NotRequired, TypedDict, get_args

import pyarrow as pa

from pf_core.config.site import Site
from pf_core.days import ds_range, ds_start_us, shift_ds
from pf_core.engine.base import Engine
from pf_core.engine.daily_state import DailyState, StateDay, StateManifest, open_dataset
from pf_core.errors import PipelineError, materialize_command
from pf_core.hashing import bucket_of
from pf_core.logs.checks import judge_quarantine
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.log_day import LogDay, open_log_day, refuse_if_changed, relying_on_log_day
from pf_core.logs.partition import RawManifest, raw_digest, read_manifest
from pf_core.progress import Progress
from pf_core.schemas import TIMELINE_LISTS, raw_actions_schema
from pf_core.timelines.assembly import Bounds, assemble, flatten
from pf_core.timelines.bucket import BucketStats, BucketTask, build_bucket, window_start
from pf_core.timelines.segments import is_outdated, read_rows, read_segments

STORED_AS = "pieces"
"""Name of the storage format in manifests; segments were called pieces once, and stored data keeps the name."""

Count = Literal[
    "users", "actions", "active_users", "active_users_forgotten", "new_users", "forgotten_users", "fragments"
]

COUNTS: tuple[Count, ...] = get_args(Count)


class TimelineSettings(TypedDict):
    """Settings that a day must share with the day that it builds on."""

    start_ds: str
    window_days: int
    max_actions: int
    stored_as: NotRequired[str]
    """Missing in timelines of layout 1."""


class TimelineContent(TypedDict):
    """What this module writes into a manifest."""

    built_from: Literal["logs", "previous day"]
    settings: TimelineSettings
    raw_digests: dict[str, str]
    """Digest of raw_actions of each day that the timelines were built from."""
    buckets: list[BucketStats]
    counts: dict[Count, int]
    """Totals over the buckets."""


class TimelineManifest(StateManifest, TimelineContent):
    """Manifest of a partition of user_timelines."""


TimelineState = DailyState[TimelineManifest]


def timeline_state(site: Site) -> TimelineState:
    return DailyState(
        root=site.directory / "user_timelines",
        asset="user_timelines",
        num_buckets=site.timelines.num_buckets,
        rebuilt_with={"rebuild": True},
    )


def build_timelines(
    site: Site, days: Sequence[str], *, engine: Engine, rebuild: bool, progress: Progress
) -> Iterator[TimelineManifest]:
    """Build the partitions of ascending days, each from the day before; yield each published manifest.

    With `rebuild`, the first of the days is built from the logs of its whole window instead. Nothing is built if a day
    that would be read has too many quarantined rows: its check blocks only the run that ingested it.
    """
    state = timeline_state(site)
    state.refuse_if_dropped(days, site.timelines.retention_days)
    log_days = sorted({*days, *(_window_days(site, days[0]) if rebuild else ())})
    manifests = (read_manifest(site, log_ds) for log_ds in log_days)
    _refuse_if_quarantined(site, (manifest for manifest in manifests if manifest is not None))
    with state.writing():
        forgotten = read_deletion_list(site)  # here: a request that comes now waits for this run (`pf forget`)
        for ds in days:
            from_logs = ds == site.start_ds or (rebuild and ds == days[0])
            base = None if from_logs else _previous(site, state, ds)
            if base is not None and ds == days[0]:
                _refuse_if_stale(site, base, ds)
            older = [] if base is not None else [open_log_day(site, log_ds) for log_ds in _window_days(site, ds)[:-1]]
            with relying_on_log_day(site, ds) as today:
                manifest = _build_day(site, state, base, [*older, today], engine, forgotten)
            counts = manifest["counts"]
            progress(
                f"user_timelines {ds}: {counts['users']:,} users, {counts['actions']:,} actions; "
                f"{counts['active_users']:,} active, {counts['new_users']:,} new"
            )
            yield manifest
        state.retain(site.timelines.retention_days, engine, progress)


def _build_day(
    site: Site,
    state: TimelineState,
    base: TimelineManifest | None,
    log_days: Sequence[LogDay],
    engine: Engine,
    forgotten: pa.Array,
) -> TimelineManifest:
    """Build and publish the last of the log days, on the manifest `base` of the day before, or from all of them."""
    ds = log_days[-1].ds
    _refuse_if_quarantined(site, (day.manifest for day in log_days))
    bucket_of_forgotten = bucket_of(forgotten, state.num_buckets)
    source = site.source.actions
    tasks = [
        BucketTask(
            ds=ds,
            bucket=bucket,
            path=state.bucket_path(bucket),
            base_version=None if base is None else base["versions"][bucket],
            base_stats=None if base is None else base["buckets"][bucket],
            files=[day.files[bucket] for day in log_days if bucket in day.files],
            actions_schema=raw_actions_schema(source.user_id.type, source.pin_id.type),
            forgotten=forgotten.filter(pa.array(bucket_of_forgotten == bucket)),
            config=site.timelines,
        )
        for bucket in range(state.num_buckets)
    ]
    results = sorted(engine.map_buckets(build_bucket, tasks), key=lambda stats: stats["bucket"])
    content: TimelineContent = {
        "built_from": "logs" if base is None else "previous day",
        "settings": _settings(site),
        "raw_digests": {
            **({} if base is None else base["raw_digests"]),
            **{day.ds: day.digest for day in log_days},
        },
        "buckets": results,
        "counts": {name: sum(stats[name] for stats in results) for name in COUNTS},
    }
    command = materialize_command("user_timelines", ds) if base is not None else _rebuild_command(ds)
    refuse_if_changed(site, log_days, what=f"user_timelines {ds}", command=command)
    return state.publish(ds, [stats["version"] for stats in results], content)


@dataclass(frozen=True, kw_only=True)
class StoredTimelines:
    """The timelines of one bucket of a day, by version; it can be pickled into a task."""

    path: Path
    """Lance dataset of the bucket."""
    version: int
    bounds: Bounds

    def read(
        self, columns: Sequence[str] = TIMELINE_LISTS, *, user_ids: pa.Array | None = None, newest: int | None = None
    ) -> pa.Table:
        """Read the timelines, one row per user, sorted by user_id.

        Actions that have left the window are cut, and users without any other action left out. With `user_ids`, only
        these users are read; with `newest`, at most that many of each user's newest actions.
        """
        bounds = (
            self.bounds if newest is None else replace(self.bounds, max_actions=min(newest, self.bounds.max_actions))
        )
        dataset = open_dataset(self.path, version=self.version)
        segments = read_segments(dataset, of=user_ids)
        segments = segments.where(~is_outdated(segments, bounds))
        rows = read_rows(dataset, segments, ["user_id", *dict.fromkeys((*columns, "ts"))])
        return assemble(flatten(rows), bounds).select(["user_id", *columns])


def stored_timelines(day: StateDay[TimelineManifest], bucket: int) -> StoredTimelines:
    """Return where the timelines of a bucket of an opened day are."""
    settings = day.manifest["settings"]
    since_us = ds_start_us(window_start(day.manifest["ds"], settings["window_days"]))
    bounds = Bounds(since_us, settings["max_actions"])
    return StoredTimelines(path=day.state.bucket_path(bucket), version=day.manifest["versions"][bucket], bounds=bounds)


def read_bucket(
    state: TimelineState,
    ds: str,
    bucket: int,
    columns: Sequence[str] = TIMELINE_LISTS,
    *,
    user_ids: pa.Array | None = None,
    newest: int | None = None,
) -> pa.Table:
    """Read a bucket's timelines as of ds (`StoredTimelines.read`)."""
    with state.held(ds) as day:
        return stored_timelines(day, bucket).read(columns, user_ids=user_ids, newest=newest)


def content_digest(manifest: TimelineManifest) -> str:
    """Return a digest of the logs and settings of a partition; rebuilding it from the same ones does not change it."""
    since = window_start(manifest["ds"], manifest["settings"]["window_days"])
    logs = {log_ds: digest for log_ds, digest in manifest["raw_digests"].items() if log_ds >= since}
    content = json.dumps([manifest["ds"], manifest["settings"], logs], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _window_days(site: Site, ds: str) -> list[str]:
    """Return the days of the site in the window up to `ds`."""
    return ds_range(max(site.start_ds, window_start(ds, site.timelines.window_days)), ds)


def _refuse_if_quarantined(site: Site, log_days: Iterable[RawManifest]) -> None:
    """Refuse days of raw_actions that fail the check of their quarantined share."""
    for manifest in log_days:
        if not (result := judge_quarantine(manifest, site.quality)).passed:
            raise PipelineError(
                f"user_timelines cannot be built from raw_actions {manifest['ds']}: {result.reason}",
                "repair the logs, or their mapping in the site file, and ingest the day again with: "
                f"{materialize_command('raw_actions', manifest['ds'])}; or raise quality.max_quarantined_share there",
            )


def _settings(site: Site) -> TimelineSettings:
    timelines = site.timelines
    return {
        "start_ds": site.start_ds,
        "window_days": timelines.window_days,
        "max_actions": timelines.max_actions,
        "stored_as": STORED_AS,
    }


def _previous(site: Site, state: TimelineState, ds: str) -> TimelineManifest:
    """Return the manifest of the day before ds; refuse if it is missing or was built with other settings."""
    previous_ds = shift_ds(ds, -1)
    if state.manifest(previous_ds) is None:
        built = [day for day in state.days() if day < ds]
        needed = ds_range(shift_ds(built[-1], 1), ds) if built else _window_days(site, ds)
        is_ingested = all(read_manifest(site, log_ds) is not None for log_ds in needed)
        if is_ingested and not built:
            command = _rebuild_command(ds)
        else:
            assets = state.asset if is_ingested else f"raw_actions,{state.asset}"
            command = materialize_command(assets, needed[0] if built else site.start_ds, until=ds)
        raise PipelineError(
            f"user_timelines {ds} builds on {previous_ds}, which is missing", f"build the gap with: {command}"
        )
    base = state.require(previous_ds)
    if base["settings"] != _settings(site):
        raise PipelineError(
            f"user_timelines {previous_ds} was built with {base['settings']}, the site file says {_settings(site)}",
            f"rebuild {ds} from the logs: {_rebuild_command(ds)}",
        )
    return base


def _refuse_if_stale(site: Site, base: TimelineManifest, ds: str) -> None:
    """Refuse to build on timelines whose raw_actions changed after they were built."""
    for log_ds, digest in sorted(base["raw_digests"].items()):
        if log_ds < window_start(ds, site.timelines.window_days) or read_manifest(site, log_ds) is None:
            continue
        if raw_digest(site, log_ds) != digest:
            raise PipelineError(
                f"raw_actions {log_ds} changed after user_timelines {base['ds']} was built",
                f"rebuild the days from there with: {materialize_command('user_timelines', log_ds, until=ds)}",
            )


def _rebuild_command(ds: str) -> str:
    return materialize_command("user_timelines", ds, config={"rebuild": True})
