"""Counts of pins: on how many user-days a pin had a positive action, in the windows that end with a day.

A user-day of a pin is a user with at least one positive action on it on that day. Only users who may be learned from
count (logs/training_users.py), so that neither the evaluated users nor forgotten ones nor those whom `training.users`
leaves out can leak into what is shown or learned. Serving counts the same users as training, so that a count means the
same in both. Nothing later than the day is read.

    pin_counts/2026-01-03.arrow     pin_id (ascending) and user_days of the pins with any on that day; its metadata
                                    say what they were counted from (CountLabel)
    pin_counts/2026-01-03.json      whether a deletion list concerns the day (DayManifest)

A day is counted once, when it is first needed, and again if its raw_actions or the definition of its counts changed,
if other users are selected, or if rows of forgotten users were deleted from it. If the deletion list changed, or the
answers in a column of the log that decides who is selected, the users of the day are read, and the day is counted again
only if it concerns them. `counts_as_of` adds up the files of at most 364 days, and of no more days than timelines have;
a training set has the counts of each of its days. Both count all actions of a day: a timeline may have no room for some
of them.
"""

import bisect
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pf_core.config.site import Site
from pf_core.days import COUNT_WINDOWS_DAYS, ds_range, shift_ds
from pf_core.hashing import digest_of
from pf_core.layouts import LAYOUTS, is_current
from pf_core.logs.deletion_list import read_deletion_list
from pf_core.logs.log_day import LogDay, open_log_day
from pf_core.logs.partition import ingested_days, require_manifest
from pf_core.logs.positives import positive_mask
from pf_core.logs.routing import day_number
from pf_core.logs.training_users import Selection, TrainingUsers, read_training_users
from pf_core.schemas import id_arrow_type
from pf_core.storage.arrays import read_arrow
from pf_core.storage.cache import fetched
from pf_core.storage.files import find_json, read_json, read_parquet, write_file, write_json

WINDOWS_DAYS = COUNT_WINDOWS_DAYS

LABEL = "label"
"""Key of a file's metadata with its CountLabel, as JSON."""

NO_DAY = -1
"""`first_day_N` of a pin without any user-day."""

ROWS_AT_ONCE = 1 << 20
"""Rows of days that are collected before they are added up."""

READ_COLUMNS = ("user_id", "pin_id", "action_type", "surface", "duration_s")


class CountSettings(TypedDict):
    """What decides the counts of a day, besides the deletion list."""

    raw_digest: str
    positive: dict[str, Any]
    """source.positive in the site file."""
    held_out_share: float
    users: NotRequired[Selection]
    """Who may be learned from, if the site file selects users; where a column of the log does, among those of the
    day."""
    users_deleted: NotRequired[int]
    """Number of users whose rows were deleted from the day after it was ingested, if there are any."""


class CountLabel(TypedDict):
    """What the counts of a day are made from; it is in the file with them, so that they always belong together."""

    layout: NotRequired[int]
    """Not in manifests of earlier versions, which are of layout 1."""
    settings: CountSettings
    forgotten: str
    """Digest of the users on the deletion list who have an action on the day."""


class DayManifest(CountLabel):
    """What was found for a deletion list, so that its users are not searched for again."""

    ds: str
    deletion_list: str
    """Digest of the deletion list."""
    answers: NotRequired[str]
    """Digest of all who agreed in a column of the log, so that those of the day are not searched for again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PinCounts:
    """User-days of pins as of a day; pins without any in the longest window are left out."""

    ids: pa.Array
    """Pin ids, ascending."""
    user_days_NW: np.ndarray
    """User-days of each pin in each of WINDOWS_DAYS, int64; windows end with the day, which is included."""
    first_day_N: np.ndarray
    """First day with a user-day in the longest window, as days since 1970, int32."""
    max_days: int = WINDOWS_DAYS[-1]
    """Number of days of the longest window; shorter than WINDOWS_DAYS if timelines reach back less far."""

    def of(self, pin_ids: pa.Array) -> "PinCounts":
        """Return the counts of these pins, in their order; 0 and NO_DAY for a pin without any."""
        first, end = self._range_of(pin_ids)  # index_in hashes the whole set at every call
        row = pc.index_in(pin_ids, value_set=self.ids[first:end]).fill_null(-1).to_numpy(zero_copy_only=False)
        is_counted, row = row >= 0, row + first
        user_days_NW = np.zeros((len(row), len(WINDOWS_DAYS)), np.int64)
        first_day_N = np.full(len(row), NO_DAY, np.int32)
        user_days_NW[is_counted] = self.user_days_NW[row[is_counted]]
        first_day_N[is_counted] = self.first_day_N[row[is_counted]]
        return PinCounts(ids=pin_ids, user_days_NW=user_days_NW, first_day_N=first_day_N, max_days=self.max_days)

    def _range_of(self, pin_ids: pa.Array) -> tuple[int, int]:
        """Return the rows between which these pins are: few if they are some of the pins in ascending order."""
        if not len(pin_ids):
            return 0, 0
        smallest, largest = (bound.as_py() for bound in pc.min_max(pin_ids).values())
        rows = range(len(self.ids))
        first = bisect.bisect_left(rows, smallest, key=lambda row: self.ids[row].as_py())
        return first, bisect.bisect_right(rows, largest, key=lambda row: self.ids[row].as_py())


# A day


def day_counts(site: Site, day: LogDay) -> pa.Table:
    """Return pin_id (ascending) and user_days (int32) of a day; count them if that was not done as the site is now."""
    [counts] = counts_of_days(site, [day])
    return counts


def counts_of_days(site: Site, days: Iterable[LogDay], users: TrainingUsers | None = None) -> Iterator[pa.Table]:
    """Yield the `day_counts` of each of the days; `users` are those of the site file now unless they are given."""
    forgotten = read_deletion_list(site)
    users = read_training_users(site) if users is None else users
    deletion_list = digest_of({"users": forgotten.to_pylist()})  # once for all days: the list may be long
    for day in days:
        yield _counts_of_day(site, day, users, forgotten, deletion_list)


def _counts_of_day(site: Site, day: LogDay, users: TrainingUsers, forgotten: pa.Array, deletion_list: str) -> pa.Table:
    """Return the counts of a day, from its file if that is labelled with what is wanted."""
    folder = site.directory / "pin_counts"
    path, manifest_path = folder / f"{day.ds}.arrow", folder / f"{day.ds}.json"
    settings: CountSettings = {
        "raw_digest": day.digest,
        "positive": site.source.positive.model_dump(mode="json"),
        "held_out_share": users.held_out_share,
    }
    if users_deleted := day.manifest.get("users_deleted"):
        settings["users_deleted"] = users_deleted
    before: DayManifest | None = find_json(manifest_path)
    if before is not None and not is_current("pin_counts", before):
        before = None
    files = list(day.files.values())
    answers = users.selection["digest"] if users.column is not None and users.selection is not None else None
    has_same_answers = before is not None and before.get("answers") == answers
    if before is not None and has_same_answers and answers and before["settings"]["raw_digest"] == day.digest:
        settings["users"] = before["settings"]["users"]
    elif (selection := _selection_of_day(files, users)) is not None:
        settings["users"] = selection
    is_searched = before is not None and before["settings"] == settings and before["deletion_list"] == deletion_list
    active = before["forgotten"] if before is not None and is_searched else _digest_of_forgotten(files, forgotten)
    label: CountLabel = {"layout": LAYOUTS["pin_counts"], "settings": settings, "forgotten": active}
    counts = None if before is None else _read_day(path, label)
    if counts is None:
        counts = _count(site, files, forgotten, users)
        counts = counts.replace_schema_metadata({LABEL: json.dumps(label, sort_keys=True)})
        with write_file(path) as temporary, pa.ipc.new_file(temporary, counts.schema) as writer:
            writer.write_table(counts)
    if not (is_searched and has_same_answers):
        found = {} if answers is None else {"answers": answers}
        write_json(manifest_path, {"ds": day.ds, "deletion_list": deletion_list, **label, **found})
    return counts


def _digest_of_forgotten(files: list[Path], forgotten: pa.Array) -> str:
    """Return a digest of the users on the deletion list who have an action in these files."""
    found: set[Any] = set()
    for path in files if len(forgotten) else ():
        user_ids = read_parquet(path, columns=["user_id"])["user_id"].unique()
        found |= set(user_ids.filter(pc.is_in(user_ids, forgotten)).to_pylist())
    return digest_of({"users": sorted(found)})


def _selection_of_day(files: list[Path], users: TrainingUsers) -> Selection | None:
    """Return what selects users of these files; where a column of the log does, who of them is selected."""
    if users.column is None or users.listed is None:
        return users.selection
    ids = [read_parquet(path, columns=["user_id"])["user_id"].unique() for path in files]
    return users.selection_among(pa.concat_arrays([users.listed[:0], *ids]))


def _count(site: Site, files: list[Path], forgotten: pa.Array, users: TrainingUsers) -> pa.Table:
    """Count the distinct users of each pin. A user is in one bucket, so the counts of buckets add up."""
    parts = [_empty(site)]
    for path in files:
        actions = read_parquet(path, columns=list(READ_COLUMNS))
        actions = actions.filter(pa.array(positive_mask(actions, site.source.positive)))
        actions = actions.filter(pc.invert(pc.is_in(actions["user_id"], forgotten)))
        actions = actions.filter(pa.array(users.may_train(actions["user_id"])))
        pairs = actions.select(["user_id", "pin_id"]).group_by(["user_id", "pin_id"])
        counted = pairs.aggregate([]).group_by("pin_id").aggregate([("user_id", "count")])
        parts.append(counted.rename_columns({"user_id_count": "user_days"}).select(["pin_id", "user_days"]))
    summed = pa.concat_tables([part.cast(parts[0].schema) for part in parts]).group_by("pin_id")
    counts = summed.aggregate([("user_days", "sum")]).rename_columns({"user_days_sum": "user_days"})
    return counts.select(["pin_id", "user_days"]).cast(parts[0].schema).sort_by("pin_id").combine_chunks()


def _empty(site: Site) -> pa.Table:
    pin_id = id_arrow_type(site.source.actions.pin_id.type)
    return pa.schema([("pin_id", pin_id), ("user_days", pa.int32())]).empty_table()


def _read_day(path: Path, label: CountLabel) -> pa.Table | None:
    """Return the counts in a file; None if there is none, or if they were made from something else."""
    try:
        counts = read_arrow(fetched(path))
    except FileNotFoundError:
        return None
    found = (counts.schema.metadata or {}).get(LABEL.encode())
    return counts if found is not None and json.loads(found) == label else None


def counted_days(site: Site) -> list[str]:
    """Return the ingested days that are counted."""
    return [ds for ds in ingested_days(site) if (site.directory / "pin_counts" / f"{ds}.json").exists()]


def counts_forgotten(site: Site, ds: str) -> bool:
    """Whether the counts of a day are with users whose rows were deleted from it since."""
    counted: DayManifest = read_json(site.directory / "pin_counts" / f"{ds}.json")
    return counted["settings"].get("users_deleted", 0) != require_manifest(site, ds).get("users_deleted", 0)


def forget_counts(site: Site, ds: str) -> None:
    """Remove the counts of a day; they are counted again when they are needed."""
    for name in (f"{ds}.arrow", f"{ds}.json"):
        (site.directory / "pin_counts" / name).unlink(missing_ok=True)


# Windows


def counts_as_of(site: Site, ds: str) -> PinCounts:
    """Return the counts of the windows that end with ds, which is included; days before the site's start have none.

    A window is no longer than that of the timelines, whose days training counts. Every day of the longest one must be
    in raw_actions. Memory holds the counted pins, and ROWS_AT_ONCE rows or as many as there are pins.
    """
    windows, last = [f"window_{days}" for days in WINDOWS_DAYS], day_number(ds)
    aggregations = [*((name, "sum") for name in windows), ("day", "min")]
    parts: list[pa.Table] = []
    num_pending = 0
    days = ds_range(max(site.start_ds, shift_ds(ds, 1 - _longest_window(site))), ds)
    opened = (open_log_day(site, day) for day in days)
    users = read_training_users(site, as_of=ds)
    for day, counts in zip(map(day_number, days), counts_of_days(site, opened, users), strict=True):
        user_days = counts["user_days"].cast(pa.int64())
        none = pa.repeat(pa.scalar(0, pa.int64()), len(counts))
        columns = {
            name: user_days if last - day < days else none for name, days in zip(windows, WINDOWS_DAYS, strict=True)
        }
        first = pa.repeat(pa.scalar(day, pa.int32()), len(counts))
        parts.append(pa.table({"pin_id": counts["pin_id"], **columns, "day": first}))
        num_pending += len(counts)
        if num_pending > max(ROWS_AT_ONCE, len(parts[0])):
            parts, num_pending = [_summed(parts, aggregations)], 0
    total = _summed(parts, aggregations).sort_by("pin_id")
    return PinCounts(
        ids=total["pin_id"].combine_chunks(),
        user_days_NW=np.stack([total[name].to_numpy() for name in windows], axis=1),
        first_day_N=total["day"].to_numpy().astype(np.int32),
        max_days=_longest_window(site),
    )


def _longest_window(site: Site) -> int:
    """Return the number of days that are counted: training counts no days before those of the timelines."""
    return min(WINDOWS_DAYS[-1], site.timelines.window_days)


def _summed(parts: list[pa.Table], aggregations: list[tuple[str, str]]) -> pa.Table:
    """Return one row for each pin: sums of the windows, and the first day."""
    total = pa.concat_tables(parts).group_by("pin_id").aggregate(aggregations)
    return total.rename_columns({f"{name}_{how}": name for name, how in aggregations})
