"""What must be built anew after a bad day was mended upstream (paper, section 3.6).

Files that arrived on a bad day hold rows of the days before it (late rows), so these are ingested again, too. From the
first of them on, timelines, embeddings and snapshots are built again day after day, each from the day before it, so
that the result is that of a world in which the day was never bad. Users whose input did not change keep their vectors:
user_embeddings looks at that row by row.
"""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import ds_range, parse_ds, shift_ds
from pf_core.embeddings.tables import embedding_state
from pf_core.errors import PipelineError
from pf_core.logs.partition import bucket_files, ingested_days
from pf_core.pins.features import pin_state
from pf_core.storage.files import read_parquet
from pf_core.timelines.build import timeline_state


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """Days by what is done with them; ascending and without gaps."""

    raw_days: list[str]
    pin_days: list[str]
    timeline_days: list[str]
    rebuild_timelines: bool
    """The day before the first one is no longer there: it is made from the logs of its whole window."""
    embedding_days: list[str]
    """Of user_embeddings and of the snapshot."""
    users: int
    """Who have actions on the raw days, as they are now."""
    embeddings: int
    """Of these users on the embedding days: what may change."""
    notes: tuple[str, ...] = ()
    """Where the result is not that of a world in which the days were never bad."""

    @property
    def partitions(self) -> dict[str, list[str]]:
        newest = self.embedding_days[-1:]
        return {
            "raw_actions": self.raw_days,
            "pin_features": self.pin_days,
            "user_timelines": self.timeline_days,
            "user_embeddings": self.embedding_days,
            "user_embedding_snapshot": self.embedding_days,
            "pin_embeddings": newest,
            "pin_index": newest,
            "release": newest,
        }


def plan_repair(site: Site, *, since: str, until: str | None = None) -> RepairPlan:
    """The partitions that follow from the logs that arrived from `since` to `until` (both included).

    What was never built, but would be by now, is built along: a repair ends with a release of the newest day.
    """
    ingested = ingested_days(site)
    if not ingested:
        raise PipelineError("raw_actions has no day yet: nothing to repair")
    until = until or max(since, ingested[-1])
    if parse_ds(until) < parse_ds(since):
        raise PipelineError(f"--until {until} is before --since {since}")
    if since > shift_ds(ingested[-1], 1) or until < ingested[0]:
        raise PipelineError(
            f"raw_actions has {ingested[0]} to {ingested[-1]}: nothing from {since} to {until} to repair"
        )
    source = site.source.actions
    early, late = (source.early_days, source.late_days) if source.is_dated else (0, 0)
    newest = max(until, ingested[-1])
    raw_days = ds_range(max(ingested[0], shift_ds(since, -late)), min(newest, shift_ds(until, early)))
    timelines, embeddings, pins = (state(site).days() for state in (timeline_state, embedding_state, pin_state))
    timeline_days = _from(timelines, raw_days[0], newest)
    embedding_days = [ds for ds in _from(embeddings, raw_days[0], newest) if ds >= min(timeline_days, default=ds)]
    pin_days = _from(pins, raw_days[0], newest)
    notes = []
    first = embedding_state(site).manifest(embedding_days[0]) if embedding_days else None
    if first is not None and first["mode"] == "active" and _lost_day_before(embeddings, embedding_days):
        notes.append(
            f"the day before {embedding_days[0]} is no longer kept: everybody is embedded on {embedding_days[0]}"
        )
    is_first = pin_days[:1] == [site.start_ds]
    if site.source.pins.is_incremental and not is_first and _lost_day_before(pins, pin_days):
        notes.append(f"pin_features {pin_days[0]} stays as it is: the day before it is no longer kept")
        pin_days = pin_days[1:]
    users, num_embeddings = _count_affected(
        site, [ds for ds in raw_days if ds in ingested], [ds for ds in embedding_days if ds in embeddings]
    )
    return RepairPlan(
        raw_days=raw_days,
        pin_days=pin_days,
        timeline_days=timeline_days,
        rebuild_timelines=timeline_days[:1] != [site.start_ds] and _lost_day_before(timelines, timeline_days),
        embedding_days=embedding_days,
        users=users,
        embeddings=num_embeddings,
        notes=tuple(notes),
    )


def _from(built: list[str], first: str, newest: str) -> list[str]:
    """The days to build again, from the first that is there, and those that are missing after it; none without any."""
    if not built:
        return []
    begin = max(first, built[0]) if first <= built[-1] else shift_ds(built[-1], 1)
    return ds_range(begin, newest)


def _lost_day_before(built: list[str], days: list[str]) -> bool:
    """The retention has dropped the day that the first of the days was built on."""
    return bool(days) and shift_ds(days[0], -1) not in built


def _count_affected(site: Site, raw_days: list[str], embedding_days: list[str]) -> tuple[int, int]:
    """Users with actions on the raw days, and their embeddings on the embedding days; a bucket at a time."""
    state = embedding_state(site)
    files = [bucket_files(site, ds) for ds in raw_days]
    num_users = num_embeddings = 0
    for bucket in range(site.timelines.num_buckets):
        ids = [read_parquet(paths[bucket], columns=["user_id"])["user_id"] for paths in files if bucket in paths]
        if not ids:
            continue
        users = pa.chunked_array([chunk for column in ids for chunk in column.chunks]).unique()
        num_users += len(users)
        for ds in embedding_days:
            embedded = state.open_bucket(ds, bucket).to_table(columns=["user_id"])["user_id"]
            num_embeddings += pc.sum(pc.is_in(embedded, users)).as_py() or 0
    return num_users, num_embeddings
