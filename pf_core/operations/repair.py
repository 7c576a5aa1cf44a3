"""Plans what to rebuild after the bad logs of a day were fixed upstream (paper, section 3.6).

Files that arrived on a bad day contain rows of the days before it (late rows), so those days are ingested again, too.
From the first of them on, timelines, embeddings and snapshots are rebuilt day after day, each from the day before it,
so that the result equals that of a site whose logs were never bad. Users whose input did not change keep their vectors:
user_embeddings compares every user's input.
"""

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import ds_range, parse_ds, shift_ds
from pf_core.embeddings.tables import embedding_state
from pf_core.errors import PipelineError
from pf_core.logs.log_day import open_log_day
from pf_core.logs.partition import ingested_days
from pf_core.pins.features import pin_state
from pf_core.storage.files import read_parquet
from pf_core.storage.locks import holding
from pf_core.timelines.build import timeline_state


@dataclass(frozen=True, kw_only=True)
class RepairPlan:
    """Days to rebuild of each asset, ascending and without gaps."""

    raw_days: list[str]
    pin_days: list[str]
    timeline_days: list[str]
    rebuild_timelines: bool
    """Build the first day from the logs of its whole window, because the day before it is no longer kept."""
    embedding_days: list[str]
    """Days of user_embeddings and of user_embedding_snapshot."""
    users: int
    """Number of users with actions on the raw days, before the repair."""
    embeddings: int
    """Number of embeddings of these users on the embedding days, which may change."""
    notes: tuple[str, ...] = ()
    """Where the result differs from that of a site whose logs were never bad."""

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
    """Return the partitions that depend on the logs that arrived from `since` to `until` (both included).

    Days that are missing after them are built too: a repair ends with a release of the newest day.
    """
    ingested = ingested_days(site)
    if not ingested:
        raise PipelineError("raw_actions has no day yet: there is nothing to repair")
    until = until or max(since, ingested[-1])
    if parse_ds(until) < parse_ds(since):
        raise PipelineError(f"--until {until} is before --since {since}")
    if since > shift_ds(ingested[-1], 1) or until < ingested[0]:
        raise PipelineError(
            f"raw_actions has {ingested[0]} to {ingested[-1]}: there is nothing to repair from {since} to {until}"
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
            f"the day before {embedding_days[0]} is no longer kept: all users are embedded on {embedding_days[0]}"
        )
    is_first = pin_days[:1] == [site.start_ds]
    if site.source.pins.is_incremental and not is_first and _lost_day_before(pins, pin_days):
        notes.append(f"pin_features {pin_days[0]} is not rebuilt: the day before it is no longer kept")
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
    """Return the days from `first`, or from the first one built, to the newest; none if no day was ever built."""
    if not built:
        return []
    begin = max(first, built[0]) if first <= built[-1] else shift_ds(built[-1], 1)
    return ds_range(begin, newest)


def _lost_day_before(built: list[str], days: list[str]) -> bool:
    """Whether retention has dropped the day that the first of these days was built on."""
    return bool(days) and shift_ds(days[0], -1) not in built


def _count_affected(site: Site, raw_days: list[str], embedding_days: list[str]) -> tuple[int, int]:
    """Count the users with actions on the raw days, and their embeddings on the embedding days, bucket by bucket."""
    state = embedding_state(site)
    files = [open_log_day(site, ds).files for ds in raw_days]
    num_users = num_embeddings = 0
    with holding(state.root, state.asset):
        days = [state.open_day(ds) for ds in embedding_days]
        for bucket in range(site.timelines.num_buckets):
            ids = [read_parquet(paths[bucket], columns=["user_id"])["user_id"] for paths in files if bucket in paths]
            if not ids:
                continue
            users = pa.chunked_array([chunk for column in ids for chunk in column.chunks]).unique()
            num_users += len(users)
            for day in days:
                embedded = day.open_bucket(bucket).to_table(columns=["user_id"])["user_id"]
                num_embeddings += pc.sum(pc.is_in(embedded, users)).as_py() or 0
    return num_users, num_embeddings
