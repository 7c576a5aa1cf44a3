"""What must be built anew after a bad day was mended upstream (paper, section 3.6).

Files that arrived on a bad day hold rows of the days before it (late rows), so these are ingested again, too. From the
first of them on, timelines, embeddings and snapshots are built again day after day, each from the day before it, so
that the result is that of a world in which the day was never bad. Users whose input did not change keep their vectors:
user_embeddings looks at that row by row.
"""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pf_core.contracts import PipelineError, ds_range, parse_ds, shift_ds
from pf_core.embeddings import embedding_state
from pf_core.pin_features import pin_state
from pf_core.raw_actions import bucket_files, ingested_days
from pf_core.site import Site
from pf_core.state import DailyState
from pf_core.timelines import timeline_state


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
    """The partitions that follow from the logs that arrived from `since` to `until` (both included)."""
    ingested = ingested_days(site)
    until = until or max([since, *ingested])
    if parse_ds(until) < parse_ds(since):
        raise PipelineError(f"--until {until} is before --since {since}")
    source = site.source.actions
    early, late = (source.early_days, source.late_days) if source.is_dated else (0, 0)
    raw_days = [ds for ds in ds_range(shift_ds(since, -late), shift_ds(until, early)) if ds in set(ingested)]
    if not any(since <= ds <= until for ds in raw_days):
        built = f"{ingested[0]} to {ingested[-1]}" if ingested else "no day"
        raise PipelineError(
            f"nothing was ingested from {since} to {until} (raw_actions has {built}): nothing to repair"
        )
    timelines, embeddings, pins = timeline_state(site).days(), embedding_state(site).days(), pin_state(site)
    timeline_days = [ds for ds in timelines if ds >= raw_days[0]]
    embedding_days = [ds for ds in embeddings if ds >= raw_days[0]]
    is_first = not timeline_days or timeline_days[0] == site.start_ds
    users, num_embeddings = _count_affected(site, raw_days, embedding_days)
    return RepairPlan(
        raw_days=raw_days,
        pin_days=_pin_days(site, pins, since),
        timeline_days=timeline_days,
        rebuild_timelines=not is_first and not _has_day_before(timelines, timeline_days),
        embedding_days=embedding_days,
        users=users,
        embeddings=num_embeddings,
    )


def _has_day_before(built: list[str], days: list[str]) -> bool:
    return shift_ds(days[0], -1) in built


def _pin_days(site: Site, pins: DailyState, since: str) -> list[str]:
    """A dated catalogue's first day can only be built again if it is the site's first, or the day before is there."""
    built = pins.days()
    days = [ds for ds in built if ds >= since]
    if days and site.source.pins.is_incremental and days[0] != site.start_ds and not _has_day_before(built, days):
        return days[1:]
    return days


def _count_affected(site: Site, raw_days: list[str], embedding_days: list[str]) -> tuple[int, int]:
    """Users with actions on the raw days, and their embeddings on the embedding days; a bucket at a time."""
    state = embedding_state(site)
    files = [bucket_files(site, ds) for ds in raw_days]
    num_users = num_embeddings = 0
    for bucket in range(site.timelines.num_buckets):
        ids = [pq.read_table(paths[bucket], columns=["user_id"])["user_id"] for paths in files if bucket in paths]
        if not ids:
            continue
        users = pa.chunked_array([chunk for column in ids for chunk in column.chunks]).unique()
        num_users += len(users)
        for ds in embedding_days:
            embedded = state.open_bucket(ds, bucket).to_table(columns=["user_id"])["user_id"]
            num_embeddings += pc.sum(pc.is_in(embedded, users)).as_py() or 0
    return num_users, num_embeddings
